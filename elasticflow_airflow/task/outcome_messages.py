"""Converts an ended job to its task's outcome: the result to return, or the message to fail with. Pure.

Every message states what happened, with the numbers, and how to fix it.
"""

from __future__ import annotations

from datetime import tzinfo
from typing import Any

import pendulum

from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.deadlines.parse import show_at
from elasticflow_airflow.times import duration

_WHEN_TOO_EARLY = (
    "  what you can do: give a later deadline; train less (steps, epochs); on_reject='best_effort' to train"
    " without a promise, 'wait' to wait for capacity, 'renegotiate' or 'late' with latest_deadline=; or add slots"
)
_WHEN_PASSED = (
    "  what you can do: give a later deadline; on_past_deadline='best_effort' to train without one, as backfills,"
    " cleared tasks and runs that began too late do by default; or on_reject='late' or 'renegotiate' with"
    " latest_deadline="
)


def result_of(status: JobStatus, timezone: tzinfo) -> dict[str, Any]:
    """Return the task's small JSON result: times as ISO 8601 in the DAG's zone, durations in seconds."""
    result = status.result
    deadline_at = status.deadline_at
    finished_at = None if result is None else result.finished_at
    return {
        "job_id": status.job_id,
        "verdict": status.verdict.decision,
        "deadline": None if deadline_at is None else _iso(deadline_at, timezone),
        "finished_at": None if finished_at is None else _iso(finished_at, timezone),
        "slack_s": None if result is None else _rounded(result.slack_s),
        "met": None if result is None else result.met,
        "steps": status.step if result is None else result.steps,
        "final_loss": None if result is None else result.final_loss,
        "checkpoint_path": None if result is None else result.checkpoint_path,
        "checkpoint_digest": None if result is None else result.checkpoint_digest,
        "gpu_seconds": 0.0 if result is None else round(result.gpu_seconds, 3),
        "rescales": 0 if result is None else result.rescales,
        "seed": status.seed,
        "logical_workers": status.logical_workers,
        "metrics": {} if result is None else result.metrics,
    }


def success_line(status: JobStatus, timezone: tzinfo) -> str:
    """Return one line on a success and its margin to the deadline."""
    result = status.result
    if result is None:
        return f"job {status.job_id} succeeded at step {status.step}"
    loss = "" if result.final_loss is None else f", loss {result.final_loss:.4g}"
    line = f"job {status.job_id} succeeded: {result.steps} steps{loss}, {result.rescales} rescales"
    if status.deadline_at is None or result.slack_s is None:
        return line
    side = "before" if result.slack_s >= 0 else "AFTER"
    return f"{line}, {duration(abs(result.slack_s))} {side} its deadline {show_at(status.deadline_at, timezone)}"


def rejection_message(status: JobStatus, timezone: tzinfo, now: float) -> str:
    """Return why a job was rejected, the earliest deadline that could be promised, and the alternatives."""
    verdict = status.verdict
    lines = [f"ElasticFlow rejected the job {status.job_id}: {verdict.reason or status.state_reason}"]
    asked = verdict.deadline_at if verdict.deadline_at is not None else status.deadline_at
    passed = asked is not None and asked <= status.submitted_at
    if asked is not None:
        lines.append(f"  deadline asked for:         {show_at(asked, timezone)} ({_from_now(asked - now)})")
    earliest = verdict.earliest_deadline_at
    if earliest is not None:
        lines.append(f"  earliest feasible deadline: {show_at(earliest, timezone)} ({_from_now(earliest - now)})")
    else:
        lines.append("  no feasible deadline is known: the job's speed has not been measured, or it never fits")
    lines.append(_WHEN_PASSED if passed else _WHEN_TOO_EARLY)
    if verdict.event_id is not None:
        lines.append(f"  decided in event {verdict.event_id}")
    return "\n".join(lines)


def failure_message(status: JobStatus) -> str:
    """Return how a job failed, with the last lines of the failing rank's log as the service quotes them."""
    said = status.failure or status.state_reason or "the service gave no reason"
    where = f"; the logs of its workers: {', '.join(status.log_names[-4:])}" if status.log_names else ""
    return f"job {status.job_id} failed at step {status.step}{where}\n{said}"


def cancel_message(status: JobStatus) -> str:
    """Return that a job was cancelled, and why."""
    said = status.state_reason or "no reason was given"
    return f"job {status.job_id} was cancelled at step {status.step}: {said}. Clear the task to train again."


def _iso(at_s: float, timezone: tzinfo) -> str:
    return pendulum.from_timestamp(at_s).astimezone(timezone).isoformat(timespec="seconds")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _from_now(seconds: float) -> str:
    return f"in {duration(seconds)}" if seconds >= 0 else f"{duration(-seconds)} ago"
