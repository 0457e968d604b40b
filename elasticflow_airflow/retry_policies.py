"""A ready-made policy for ``retry_policy=`` that decides when retrying an elastic task makes sense.

It decides by the task's exception alone and does not call the service. Rejections, cancellations, wrong arguments, a
wrong token, a missing connection and a service of another version never reach it: Airflow fails the task for these
without consulting any policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import RetryDecision, RetryPolicy

from elasticflow_airflow.exceptions import JobFailed, ServiceAway

_KEY = "elasticflow_last_failure"


class ElasticFlowRetryPolicy(RetryPolicy):
    """Retries where that can help.

    - The service is unavailable: retry after ``service_away_delay``. The job keeps training, and the retry attaches to
      it.
    - The training failed: retry after ``failed_delay`` (default: the task's ``retry_delay``), resuming from the last
      valid checkpoint. If the training fails at the same step with the same last line as in the try before, fail the
      task, because that is no coincidence.
    - Anything else: use the task's ``retries`` and ``retry_delay``.

    The number of tries is limited by the task's ``retries`` in every case. A lost node needs no retry: the service
    restarts the workers elsewhere, and the task does not notice.
    """

    def __init__(
        self,
        *,
        service_away_delay: timedelta = timedelta(seconds=30),
        failed_delay: timedelta | None = None,
        stop_on_same_failure: bool = True,
    ) -> None:
        for name, delay in (("service_away_delay", service_away_delay), ("failed_delay", failed_delay)):
            if delay is not None and (not isinstance(delay, timedelta) or delay < timedelta(0)):
                raise ValueError(f"{name}={delay!r} must be a timedelta of 0 or more")
        self.service_away_delay = service_away_delay
        self.failed_delay = failed_delay
        self.stop_on_same_failure = stop_on_same_failure

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Mapping[str, Any] | None = None
    ) -> RetryDecision:
        """Decide on one failure. ``context`` is Airflow's, with the task state store; without it nothing is stored."""
        del try_number, max_tries  # Airflow counts
        if isinstance(exception, ServiceAway):
            return RetryDecision.retry(self.service_away_delay, "the service is away, and the job may train on")
        if isinstance(exception, JobFailed):
            if self.stop_on_same_failure and self._is_same_again(exception, context):
                return RetryDecision.fail("the training failed at the same step in the same way as the try before")
            return RetryDecision.retry(self.failed_delay, "the training resumes from its last valid checkpoint")
        return RetryDecision.default()

    def serialize(self) -> dict[str, Any]:
        """Return the policy as JSON-compatible values."""
        return {
            "service_away_delay": self.service_away_delay.total_seconds(),
            "failed_delay": None if self.failed_delay is None else self.failed_delay.total_seconds(),
            "stop_on_same_failure": self.stop_on_same_failure,
        }

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> ElasticFlowRetryPolicy:
        """Rebuild a policy from the output of ``serialize``."""
        failed_s = data["failed_delay"]
        return cls(
            service_away_delay=timedelta(seconds=data["service_away_delay"]),
            failed_delay=None if failed_s is None else timedelta(seconds=failed_s),
            stop_on_same_failure=data["stop_on_same_failure"],
        )

    def _is_same_again(self, exception: JobFailed, context: Mapping[str, Any] | None) -> bool:
        store = None if context is None else context.get("task_state_store")
        if store is None:
            return False
        lines = str(exception).strip().splitlines() or [""]
        now = [exception.step, lines[-1][-500:]]
        before = store.get(_KEY)
        store.set(_KEY, now)
        return bool(before == now)
