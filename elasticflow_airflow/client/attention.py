"""Which jobs need somebody's attention, and why: the same list on the page and in ``elasticflow status``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from elasticflow_airflow.api import JobStatus, State, Wire
from elasticflow_airflow.api.owners import UnownedJob
from elasticflow_airflow.times import duration

RECENT_S = 86400.0
"""Jobs that ended badly are listed for so long after their submission, in seconds."""

Trouble = Literal["late", "at_risk", "set_aside", "unowned", "rejected", "failed"]
_ORDER: tuple[Trouble, ...] = ("late", "at_risk", "set_aside", "unowned", "rejected", "failed")
_Task = tuple[str, str, str, int]


class Attention(Wire):
    """A job that needs attention, with one sentence. ``job`` holds the details: verdict, failure, deadline, claim."""

    trouble: Trouble
    job: JobStatus
    sentence: str


def needing_attention(
    live: Iterable[JobStatus], unowned: Iterable[UnownedJob], ended: Sequence[JobStatus], now: float
) -> list[Attention]:
    """Return the jobs that need attention, the most urgent kind first, each once.

    ``live`` are the jobs that have not ended, ``unowned`` those of them without an owner, ``ended`` the recent others,
    in any order. A rejected or failed job is left out if a later run of its task is live or has succeeded, or if it was
    submitted more than a day before ``now`` (UTC seconds).
    """
    known = list(live)
    live, ended = [job for job in known if not _is_rejected(job)], [*ended, *filter(_is_rejected, known)]
    found = {one.job.job_id: one for one in map(_of_live, live) if one is not None}
    for lost in unowned:
        since = duration(max(0.0, now - lost.since_at))
        why = lost.why if lost.owner_gone else "nobody has asked for it"
        sentence = f"has had no owner for {since}: {why}"
        found.setdefault(lost.job.job_id, Attention(trouble="unowned", job=lost.job, sentence=sentence))
    newest_good = _newest_good(live, ended)
    for job in ended:
        superseded = newest_good.get(_task(job), 0.0) > job.submitted_at
        if superseded or now - job.submitted_at > RECENT_S:
            continue
        if _is_rejected(job):
            found[job.job_id] = Attention(trouble="rejected", job=job, sentence="was rejected")
        elif job.state is State.FAILED:
            found[job.job_id] = Attention(trouble="failed", job=job, sentence="failed")
    return sorted(found.values(), key=lambda one: (_ORDER.index(one.trouble), _due(one.job), -one.job.submitted_at))


def doubt_of(job: JobStatus) -> Literal["late", "at_risk"] | None:
    """Return whether a live job is projected to miss its deadline, or may; None if neither, or if it has ended."""
    if job.state.terminal:
        return None
    if job.slack_s is not None and job.slack_s < 0:
        return "late"
    return "at_risk" if job.at_risk else None


def _is_rejected(job: JobStatus) -> bool:
    """Return whether a job was rejected; after its verdict, it is live for a moment until its end is written down."""
    return job.state is State.REJECTED or (job.verdict.decision == "rejected" and not job.state.terminal)


def _of_live(job: JobStatus) -> Attention | None:
    slack = "" if job.slack_s is None else duration(abs(job.slack_s))
    match doubt_of(job):
        case "late":
            sentence = f"is projected to finish {slack} after its deadline"
            return Attention(trouble="late", job=job, sentence=sentence)
        case "at_risk":
            left = f": {slack} of slack left" if slack else ""
            return Attention(trouble="at_risk", job=job, sentence=f"is at risk of missing its deadline{left}")
    if job.set_aside is not None and not job.state.terminal:
        return Attention(trouble="set_aside", job=job, sentence="is set aside, because the service failed on it")
    return None


def _newest_good(live: Iterable[JobStatus], ended: Iterable[JobStatus]) -> dict[_Task, float]:
    """Return by task when its newest run that is live or has succeeded was submitted."""
    newest: dict[_Task, float] = {}
    for job in (*live, *(job for job in ended if job.state is State.SUCCEEDED)):
        newest[_task(job)] = max(newest.get(_task(job), 0.0), job.submitted_at)
    return newest


def _task(job: JobStatus) -> _Task:
    identity = job.identity
    return identity.namespace, identity.dag_id, identity.task_id, identity.map_index


def _due(job: JobStatus) -> float:
    return float("inf") if job.deadline_at is None else job.deadline_at
