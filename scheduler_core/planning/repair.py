"""Mend a plan in which some promises no longer hold, and leave all the others as they are.

Stored courses share no slot, so those that still hold go on proving their promises when one job turns out to be slower,
or has lost its slots. Whoever has to be planned again gets what is free beside them, and may push away whoever has no
promise to lose. Where that is not enough, all promises are planned anew.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, overdue
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Course, Work
from elasticflow_airflow.scheduler_core.planning.allocation import share_later, share_now
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner

_RESCUE_EFFORT = 800
"""Other orders of filling times the jobs that each has to place: what is tried at most before a promise is given up."""


def mend(planner: Planner, rescue: int) -> Draft:
    """A plan with as many promises as can be kept; of several, the one with the fewest changes.

    ``rescue``: how many other orders of filling are tried before a promise is given up.
    """
    mended, lost = _beside_the_others(planner)
    if lost == 0:
        return mended
    if planner.kept_at_risk() and (draft := planner.fresh(guarded=True)) is not None:
        return planner.unguarded(draft)
    draft = planner.fresh(rescue=min(rescue, _RESCUE_EFFORT // len(planner.jobs)))
    if draft is not None:
        return draft
    if lost == 1:
        return mended  # to keep more is to keep all, and that was tried
    draft = planner.salvage()
    _help(draft, [(job, work) for job, work in _promised(planner) if job.job_id not in draft.courses])
    kept = sum(job.promised and not job.at_risk for job in planner.jobs) - lost
    return draft if len(draft.courses) > kept else mended


def _beside_the_others(planner: Planner) -> tuple[Draft, int]:
    """Change only what has to change; and how many promises are not kept so.

    Older promises come first. Who cannot be helped goes on as before, if nobody needs its slots.
    """
    stored = {job.job_id: job.course for job in planner.jobs if job.course is not None}
    ailing: list[tuple[LiveJob, Work]] = []
    healthy: dict[str, Course] = {}
    for job, work in _promised(planner):
        course = stored.get(job.job_id)
        kept = course is not None and course.holdings and course.promised_s <= work.limit_s + TOLERANCE_S
        if course is not None and (kept or overdue(job, planner.now)):
            healthy[job.job_id] = course
        else:
            ailing.append((job, work))
    draft = Draft(planner.layout, planner.now, healthy)
    lost = _help(draft, ailing)
    if len(draft.courses) > len(healthy):  # only what was placed now may be in the way
        stored = {job_id: course for job_id, course in stored.items() if draft.is_free(course)}
    return Draft(planner.layout, planner.now, stored | draft.courses), lost


def _promised(planner: Planner) -> list[tuple[LiveJob, Work]]:
    """Jobs whose promise is to be kept, the oldest promise first."""
    jobs = sorted((job for job in planner.jobs if job.promised and not job.at_risk), key=lambda job: job.promise)
    return [(job, planner.bound(job, planner.work(job))) for job in jobs]


def _help(draft: Draft, ailing: list[tuple[LiveJob, Work]]) -> int:
    """Put into the draft whoever is in time beside the others; how many are not."""
    lost = 0
    for job, work in ailing:
        found = _keeping(draft, work)
        if found is None:
            lost += 1
        else:
            draft.put(job.job_id, found)
    return lost


def _keeping(draft: Draft, work: Work) -> Course | None:
    if not work.sizes or work.speeds[work.sizes[-1]] <= 0.0:
        return None
    return share_now(draft, work, work.limit_s) or share_later(draft, work, work.limit_s)
