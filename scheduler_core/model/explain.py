"""Sentences that explain decisions to users. Decides nothing."""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.model.work import INFINITY
from elasticflow_airflow.times import duration, moment


def workers(count: int) -> str:
    """Return a number of workers as words."""
    return f"{count} worker" if count == 1 else f"{count} workers"


def change(before: int, after: int, *, cost_s: float, saved_s: float | None, end_s: float, why: str) -> str:
    """Return a sentence on what a change of slots does and why."""
    until = f"; projected end {moment(end_s)}" if end_s < INFINITY else ""
    if before == 0:
        return f"starts with {workers(after)}: {why}{until}"
    if before == after:
        return f"moves its {workers(after)} to other slots (pause of {duration(cost_s)}): {why}{until}"
    if after > before:
        gain = f"saves {duration(saved_s)} beyond the pause of {duration(cost_s)}; " if saved_s and saved_s > 0 else ""
        return f"grows from {before} to {workers(after)}: {gain}{why}{until}"
    return f"shrinks from {before} to {workers(after)} (pause of {duration(cost_s)}): {why}{until}"
