"""All calls of the service, and what both clients have in common: everything except sending.

Does no I/O except restarting the embedded service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from tenacity import RetryCallState, stop_after_delay

from elasticflow_airflow.client.calls.call import Call, UnsentCaller
from elasticflow_airflow.client.calls.exchange import RETRIED, pause_between
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
    """Each method returns its call as a value, for callers that send it without one of the clients."""

    @staticmethod
    def _method_of(build: F) -> F:
        return build


calls: Final = UnsentCalls()


class ServiceClient(ServiceCalls):
    """Base class of both clients; the arguments are those of ``ElasticFlowClient``."""

    def __init__(
        self, endpoint: Endpoint, *, retry_for_s: float, timeout_s: float, on_away: Callable[[str], None] | None
    ) -> None:
        self.endpoint = endpoint
        self.retry_for_s = retry_for_s
        self._timeout_s = timeout_s
        self._on_away = on_away

    def _options_of(self, call: Call[Any]) -> dict[str, Any]:
        """Return the arguments of the HTTP client's ``request()`` for a call, besides method and path."""
        return {
            "params": dict(call.params),
            "content": call.body,
            "headers": dict(call.headers) | ({} if call.body is None else {"Content-Type": call.content_type}),
            "timeout": self.endpoint.timeout(max(self._timeout_s, call.timeout_s or 0.0)),
        }

    def _retry_rules(self) -> dict[str, Any]:
        """Return tenacity's arguments: retry only while the service is unavailable, for ``retry_for_s`` seconds."""
        return {
            "retry": RETRIED,
            "stop": stop_after_delay(self.retry_for_s),
            "wait": pause_between(),
            "reraise": True,
        }

    def _report_outage(self, state: RetryCallState) -> None:
        """Log, once per outage, that the service does not answer, and call ``on_away``."""
        if state.attempt_number == 1:
            reason = str(state.outcome.exception()) if state.outcome is not None else ""
            log.warning("%s; trying again for %.0f s", reason, self.retry_for_s)
            if self._on_away is not None:
                self._on_away(reason)

    def _start_again(self, state_dir: Path) -> None:
        """Restart the embedded service, which is gone; only logs a failure."""
        try:
            ensure_service(state_dir, limit_s=min(EMBEDDED_START_LIMIT_S, self.retry_for_s))
        except ServiceUnavailable as error:
            log.warning("the embedded service could not be started again: %s", error)
