"""Writes a job's events and progress to its task's log, in the same way in a worker and in the triggerer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, Protocol

from elasticflow_airflow.api import Event, JobStatus
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.waiting.log_lines import ProgressMark, report

WORKER_LINE_EVERY_S, TRIGGER_LINE_EVERY_S = 15.0, 60.0
"""Interval of progress lines, in seconds; longer in the triggerer, which waits for many jobs at once."""


class Logger(Protocol):
    """The methods of a task's logger that are used (Airflow's logger is not a logging.Logger)."""

    def info(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Log an event."""
        ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Log a warning."""
        ...

    def exception(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Log an error with its traceback."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLog:
    """Writes each event of a job once, and a line of progress at most every ``every_s`` seconds.

    A ``ProgressMark``, which the caller keeps between polls, records what was written.
    """

    log: Logger
    timezone: tzinfo
    every_s: float

    @staticmethod
    def has_new_events(status: JobStatus, mark: ProgressMark) -> bool:
        """Whether the job has events after the mark, which the caller should then request."""
        return status.last_event_id > mark.event_id

    def write(self, status: JobStatus, events: Sequence[Event], mark: ProgressMark) -> ProgressMark:
        """Write what is new since the mark; return the new mark."""
        lines, mark = report(status, events, mark, timezone=self.timezone, now=now_s(), every_s=self.every_s)
        for line in lines:
            self.log.info("%s", line)
        return mark
