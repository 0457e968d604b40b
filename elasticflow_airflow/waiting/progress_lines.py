"""Progress and events of a job in its task's log, in the same way in a worker, in ``dag.test()`` and in the triggerer.

The callers (``worker_wait.py``, ``triggers.py``) keep what was written (:class:`ProgressMark`): no line is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo
from typing import Any, Protocol

from elasticflow_airflow.api import Event, JobStatus, State
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.deadlines.parse import show_at
from elasticflow_airflow.times import duration

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
class ProgressMark:
    """What was already logged: the last event, and the step and time (UTC seconds) of the last progress line."""

    event_id: int = 0
    step: int = -1
    at: float = 0.0


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


def report(
    status: JobStatus,
    events: Iterable[Event],
    mark: ProgressMark,
    *,
    timezone: tzinfo,
    now: float,
    every_s: float,
) -> tuple[list[str], ProgressMark]:
    """Return the lines to log now, and the new mark.

    Each event after the mark is logged. The progress line is logged at most every ``every_s`` seconds or at the end,
    and only if the step has changed.
    """
    lines: list[str] = []
    for event in sorted(events, key=lambda e: e.event_id):
        if event.event_id > mark.event_id:
            lines.append(f"event {event.event_id} · {event.kind}: {event.reason}")
            mark = replace(mark, event_id=event.event_id)
    moved = status.step != mark.step and status.step > 0
    if moved and (now - mark.at >= every_s or status.state.terminal):
        lines.append(progress_line(status, timezone))
        mark = replace(mark, step=status.step, at=now)
    return lines, mark


def progress_line(status: JobStatus, timezone: tzinfo) -> str:
    """Format one line: step, loss, workers, speed, projected finish in ``timezone``, and slack."""
    total = f"/{status.total_steps}" if status.total_steps is not None else ""
    parts = [f"step {status.step}{total}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.expected_steps is not None and not status.state.terminal:
        parts.append(f"loss {status.target_loss:g} expected at step {status.expected_steps}")
    parts.append(f"{status.workers} worker{'s' * (status.workers != 1)}")
    if status.steps_per_s is not None:
        parts.append(f"{status.steps_per_s:.3g} steps/s")
    if status.projected_finish_at is not None and not status.state.terminal:
        parts.append(f"done about {show_at(status.projected_finish_at, timezone)}")
    if status.slack_s is not None and status.deadline_at is not None:
        side = "before" if status.slack_s >= 0 else "AFTER"
        parts.append(f"{duration(abs(status.slack_s))} {side} the deadline")
    if status.state is not State.RUNNING:
        parts.append(status.state.value)
    if status.at_risk:
        parts.append("AT RISK")
    return " · ".join(parts)
