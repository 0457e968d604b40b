"""The lines in a task's log about its running job: periodic progress, and every decision with its reason.

Pure: values in, lines out. Used by the worker, the pokes of ``dag.test()`` and the triggerer. The caller keeps track of
what was logged (``ProgressMark``), so that no line is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import tzinfo

from elasticflow_airflow.api import Event, JobStatus, State
from elasticflow_airflow.deadlines.parse import show_at
from elasticflow_airflow.times import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMark:
    """What was already logged: the last event, and the step and time (UTC seconds) of the last progress line."""

    event_id: int = 0
    step: int = -1
    at: float = 0.0


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
