"""What a task's log says about its job while it runs: a line now and then, and every decision with its reason.

Pure: values in, lines out. The same for the worker, the pokes of ``dag.test()`` and the triggerer; what was said is
remembered by the caller (``ProgressMark``), so that no line comes twice.
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
    """How much was said already: the last event, the last line's step and time (UTC seconds)."""

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
    """Return the lines to log now, and the mark to remember.

    Each event after the mark is said; the progress line at most every ``every_s`` seconds, and only when the job
    moved on or ended.
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
    """Write one line: step, loss, workers, speed, projected finish in local time, and slack."""
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
