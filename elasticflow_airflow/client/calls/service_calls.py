"""All calls of the service together, and what both clients have in common: everything but the sending.

No I/O here but to start the embedded service again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from tenacity import RetryCallState

from elasticflow_airflow.client.calls.call import Call, UnsentCaller
from elasticflow_airflow.client.calls.exchange import RETRIED, give_up_after, pause_between
from elasticflow_airflow.client.calls.insight_calls import InsightCalls
from elasticflow_airflow.client.calls.job_calls import JobCalls
from elasticflow_airflow.client.calls.owner_calls import OwnerCalls
from elasticflow_airflow.client.embedded import EMBEDDED_START_LIMIT_S, ensure_service
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import ServiceUnavailable

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)


class ServiceCalls(JobCalls, InsightCalls, OwnerCalls):
    """Every call of the service."""


class UnsentCalls(ServiceCalls, UnsentCaller):
    """Each method returns its call as a value, for who sends it otherwise than the clients do."""

    @staticmethod
    def _method_of(build: F) -> F:
        return build


calls: Final = UnsentCalls()


class ServiceClient(ServiceCalls):
    """What both clients have in common; the arguments as of ``ElasticFlowClient``."""

    def __init__(
        self, endpoint: Endpoint, *, retry_for_s: float, timeout_s: float, on_away: Callable[[str], None] | None
    ) -> None:
        self.endpoint = endpoint
        self.retry_for_s = retry_for_s
        self._timeout_s = timeout_s
        self._on_away = on_away

    def _options_of(self, call: Call[Any]) -> dict[str, Any]:
        """What the HTTP client's ``request()`` is given for a call, besides method and path."""
        return {
            "params": dict(call.params),
            "content": call.body,
            "headers": {} if call.body is None else {"Content-Type": call.content_type},
            "timeout": max(self._timeout_s, call.timeout_s or 0.0),
        }

    def _retry_rules(self) -> dict[str, Any]:
        """What tenacity is given: only a service that is away is tried again, for ``retry_for_s``."""
        return {
            "retry": RETRIED,
            "stop": give_up_after(self.retry_for_s),
            "wait": pause_between(),
            "reraise": True,
        }

    def _report_outage(self, state: RetryCallState) -> None:
        """Say once per outage that the service does not answer."""
        if state.attempt_number == 1:
            reason = str(state.outcome.exception()) if state.outcome is not None else ""
            log.warning("%s; trying again for %.0f s", reason, self.retry_for_s)
            if self._on_away is not None:
                self._on_away(reason)

    def _start_again(self, state_dir: Path) -> None:
        """Start the embedded service, which is gone."""
        try:
            ensure_service(state_dir, limit_s=min(EMBEDDED_START_LIMIT_S, self.retry_for_s))
        except ServiceUnavailable as error:
            log.warning("the embedded service could not be started again: %s", error)
