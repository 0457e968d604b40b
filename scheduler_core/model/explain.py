"""Sentences for users: times, durations, and why a job gets what it gets. Decides nothing."""

from __future__ import annotations

from elasticflow_airflow.bounds import utc
from elasticflow_airflow.scheduler_core.model.work import INFINITY


def moment(when_s: float) -> str:
    """A time as ISO-8601 in UTC, to the second."""
    if not -6e10 < when_s < 2.5e11:
        return "never" if when_s > 0 else f"{when_s} s"
    return utc(when_s + 0.5).strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: float) -> str:
    """A duration with the precision that matters."""
    if seconds == INFINITY:
        return "for ever"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 600:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h"


def workers(count: int) -> str:
    """A number of workers."""
    return f"{count} worker" if count == 1 else f"{count} workers"


def change(before: int, after: int, *, cost_s: float, saved_s: float | None, end_s: float, why: str) -> str:
    """Say what a change of slots does and why."""
    until = f"; projected end {moment(end_s)}" if end_s < INFINITY else ""
    if before == 0:
        return f"starts with {workers(after)}: {why}{until}"
    if before == after:
        return f"moves its {workers(after)} to other slots (pause of {duration(cost_s)}): {why}{until}"
    if after > before:
        gain = f"saves {duration(saved_s)} beyond the pause of {duration(cost_s)}; " if saved_s and saved_s > 0 else ""
        return f"grows from {before} to {workers(after)}: {gain}{why}{until}"
    return f"shrinks from {before} to {workers(after)} (pause of {duration(cost_s)}): {why}{until}"
