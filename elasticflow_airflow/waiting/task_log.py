"""Writes what happens to a job to its task's log: the same whether a worker or the triggerer waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, Protocol

from elasticflow_airflow.api import Event, JobStatus
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.waiting.progress import ProgressMark, report

WORKER_LINE_EVERY_S, TRIGGER_LINE_EVERY_S = 15.0, 60.0
"""How often a line of progress is written: a triggerer waits for many jobs at once."""


class Logger(Protocol):
    """The part of a task's logger that is used (Airflow's is no logging.Logger)."""

    def info(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Say what happens."""
        ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Say what somebody should look at."""
        ...

    def exception(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Say what went wrong, with its traceback."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLog:
    """Writes each event of a job once, and a line of progress at most every ``every_s`` seconds.

    What was written is in a ``ProgressMark``, which the caller keeps from one look to the next.
    """

    log: Logger
    timezone: tzinfo
    every_s: float

    @staticmethod
    def has_new_events(status: JobStatus, mark: ProgressMark) -> bool:
        """Whether the job's events after the mark should be asked for."""
        return status.last_event_id > mark.event_id

    def write(self, status: JobStatus, events: Sequence[Event], mark: ProgressMark) -> ProgressMark:
        """Write what is new since the mark; return the new mark."""
        lines, mark = report(status, events, mark, timezone=self.timezone, now=now_s(), every_s=self.every_s)
        for line in lines:
            self.log.info("%s", line)
        return mark
