"""Sentences that explain decisions to users. Decides nothing."""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.work import INFINITY


def workers(count: int) -> str:
    """Return a number of workers as words."""
    return f"{count} worker" if count == 1 else f"{count} workers"


def is_past(deadline_s: float, now: float) -> Reason:
    """Return the reason against a deadline before now (both UTC seconds)."""
    return Reason("the deadline {deadline:moment} is past: it is {now:moment} now", deadline=deadline_s, now=now)


def change(before: int, after: int, *, cost_s: float, saved_s: float | None, end_s: float, why: Reason) -> Reason:
    """Return a sentence on what a change of slots does and why."""
    until = Reason("; projected end {end:moment}", end=end_s) if end_s < INFINITY else ""
    if before == 0:
        return Reason("starts with {after:#worker}: {why}{until}", after=after, why=why, until=until)
    if before == after:
        kind = "moves its {after:#worker} to other slots (pause of {pause:duration}): {why}{until}"
        return Reason(kind, after=after, pause=cost_s, why=why, until=until)
    if after > before:
        saves = Reason(
            "saves {saved:duration} beyond the pause of {pause:duration}; ", saved=saved_s or 0.0, pause=cost_s
        )
        kind = "grows from {before} to {after:#worker}: {saves}{why}{until}"
        gains = saved_s is not None and saved_s > 0
        return Reason(kind, before=before, after=after, saves=saves if gains else "", why=why, until=until)
    kind = "shrinks from {before} to {after:#worker} (pause of {pause:duration}): {why}{until}"
    return Reason(kind, before=before, after=after, pause=cost_s, why=why, until=until)
