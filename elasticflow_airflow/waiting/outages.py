"""Decides whether to keep waiting for a service that does not answer, and logs it to the task's log.

Waiting tasks, sensor pokes and triggers all use this module. Before that, the client retries a single request for some
seconds. Knows nothing about jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from airflow.sdk.exceptions import AirflowException

from elasticflow_airflow.client import PASSING, EmbeddedStartError, ServiceUnavailable
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.waiting.progress_lines import Logger

MAY_PASS = (*PASSING, AirflowException)
"""Errors that an outage may cause. AirflowException: the connection cannot be read at present."""


class AwaySince(Protocol):
    """An object that stores since when the service has been unavailable; None while it answers."""

    away_since: float | None


class Outage:
    """Measures how long the service has been unavailable, and stops waiting after ``limit_s`` seconds.

    ``kept`` stores the start of the outage; it is the task's memory if each poll may run in a process of its own.
    ``clock`` is the clock of that time.
    """

    def __init__(self, kept: AwaySince, limit_s: float, log: Logger, clock: Callable[[], float] = now_s) -> None:
        self._kept, self._limit_s, self._log, self._clock = kept, limit_s, log, clock

    @property
    def length_s(self) -> float:
        """For how long the service has been unavailable, in seconds."""
        return 0.0 if self._kept.away_since is None else self._clock() - self._kept.away_since

    def is_waited_out(self, error: Exception, then: str = "waiting for it to come back") -> bool:
        """Return whether to keep waiting after this error; if so, log the error and what happens next (``then``).

        False for an error that is not temporary, and once the service has been unavailable for too long.
        """
        self._kept.away_since = self._kept.away_since or self._clock()
        if not isinstance(error, MAY_PASS) or self.length_s > self._limit_s:
            return False
        self._log.warning("%s; %s", error, then)
        return True

    def is_waited_out_at_start(
        self, error: Exception, *, is_dag_test: bool, then: str = "waiting for it to come back"
    ) -> bool:
        """Like ``is_waited_out``, for an attempt that has had no response from the service yet.

        The setup itself may be wrong, so this does not wait for a service that cannot be started on this machine, for
        one that refuses this client, or for any under ``dag.test()``, where the user is watching.
        """
        is_away = isinstance(error, ServiceUnavailable) and not isinstance(error, EmbeddedStartError)
        return is_away and not is_dag_test and self.is_waited_out(error, then)

    def ended(self) -> None:
        """Note that the service has answered."""
        self._kept.away_since = None
