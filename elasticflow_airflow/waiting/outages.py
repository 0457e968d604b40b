"""Decides whether a service that does not answer is waited for, and says so in the task's log.

The one place for it: waiting tasks, pokes of sensors and triggers all ask here. One exchange is tried again for some
seconds by the client before that. Knows no job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from airflow.sdk.exceptions import AirflowException

from elasticflow_airflow.client import PASSING, EmbeddedStartError, ServiceUnavailable
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.waiting.task_log import Logger

MAY_PASS = (*PASSING, AirflowException)
"""What an outage may look like. Airflow's own: the connection cannot be read now."""


class AwaySince(Protocol):
    """Whatever keeps the moment since when the service has been away; None while it answers."""

    away_since: float | None


class Outage:
    """Counts how long the service has been away, and gives up after ``limit_s`` seconds.

    ``kept`` keeps the moment: a task's memory, where each look may be a process of its own. ``clock`` is its clock.
    """

    def __init__(self, kept: AwaySince, limit_s: float, log: Logger, clock: Callable[[], float] = now_s) -> None:
        self._kept, self._limit_s, self._log, self._clock = kept, limit_s, log, clock

    @property
    def length_s(self) -> float:
        """For how long the service has been away, in seconds."""
        return 0.0 if self._kept.away_since is None else self._clock() - self._kept.away_since

    def is_waited_out(self, error: Exception, then: str = "waiting for it to come back") -> bool:
        """Whether to wait on after this error; the log then says the error and what happens next.

        Not after an error that does not pass by itself, nor once the service has been away for too long.
        """
        self._kept.away_since = self._kept.away_since or self._clock()
        if not isinstance(error, MAY_PASS) or self.length_s > self._limit_s:
            return False
        self._log.warning("%s; %s", error, then)
        return True

    def is_waited_out_at_start(
        self, error: Exception, *, is_dag_test: bool, then: str = "waiting for it to come back"
    ) -> bool:
        """As ``is_waited_out``, where this attempt of a task has had no answer yet.

        Something may be set up wrongly, which nobody should wait for: a service that cannot be started on this
        machine, one that refuses us, and any under ``dag.test()``, whose user looks on.
        """
        is_away = isinstance(error, ServiceUnavailable) and not isinstance(error, EmbeddedStartError)
        return is_away and not is_dag_test and self.is_waited_out(error, then)

    def ended(self) -> None:
        """Note that the service has answered."""
        self._kept.away_since = None
