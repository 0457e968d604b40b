"""Decides whether a job meets a sensor's condition, for workers and for the triggerer.

Read-only: takes no claim and renews no lease, so that a sensor can neither keep a job alive nor end it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticflow_airflow.api import Event, EventKind, JobStatus, State

SUCCEEDED: Final = "succeeded"
ENDED: Final = "ended"
CHECKPOINT: Final = "checkpoint"
AT_RISK: Final = "at_risk"
UNTIL: Final = (SUCCEEDED, ENDED, CHECKPOINT, AT_RISK)

LATEST: Final = "latest"
"""Value of ``external_run_id`` that selects the run that submitted last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The outcome of a poll: ``waiting``, ``there``, ``failed`` (an end other than the awaited one) or ``over``.

    ``over`` means that the condition can no longer be met although nothing went wrong: for example, the job ended
    without ever being at risk. ``why`` is the reason for the log.
    """

    outcome: str
    why: str
    checkpoint: dict[str, Any] | None = None


def asks_for_events(until: str) -> bool:
    """Whether the condition also depends on the job's events."""
    return until == CHECKPOINT


def judge(until: str, status: JobStatus | None, events: Sequence[Event] = ()) -> Seen:
    """Return the outcome for a job's status and events. ``status`` is None as long as the job does not exist."""
    if status is None:
        return Seen(outcome="waiting", why="the job is not there yet")
    said = f"job {status.job_id} is {status.state.value}"
    if until == AT_RISK and status.at_risk:
        return Seen(outcome="there", why=f"job {status.job_id} may miss its deadline")
    if until == CHECKPOINT:
        last = next((event for event in reversed(events) if event.kind == EventKind.CHECKPOINT), None)
        if last is not None:
            return Seen(outcome="there", why=last.reason, checkpoint=_checkpoint_of(last))
        if status.state is State.SUCCEEDED and status.result is not None and status.result.checkpoint_path is not None:
            found = {"checkpoint_path": status.result.checkpoint_path, "step": status.result.steps}
            return Seen(outcome="there", why=said, checkpoint=found)
    if not status.state.terminal:
        return Seen(outcome="waiting", why=said)
    if until == ENDED or (until == SUCCEEDED and status.state is State.SUCCEEDED):
        return Seen(outcome="there", why=said)
    if until == AT_RISK:
        return Seen(outcome="over", why=f"{said}, without being at risk")
    if until == CHECKPOINT and status.state is State.SUCCEEDED:
        return Seen(outcome="over", why=f"{said}, without a checkpoint")
    reason = status.failure or status.state_reason or status.verdict.reason
    return Seen(outcome="failed", why=f"{said}{': ' if reason else ''}{reason}")


def _checkpoint_of(event: Event) -> dict[str, Any]:
    data = event.data
    return {
        "checkpoint_path": data.get("checkpoint_path"),
        "checkpoint_digest": data.get("digest"),
        "step": data.get("step"),
    }
