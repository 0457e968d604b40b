"""Repairs a plan in which some promises no longer hold, and leaves the other promises as they are.

Stored courses share no slots, so valid ones still prove their promises if another job turns out to be slower or has
lost its slots. A job that must be planned again gets the capacity that is free beside them, and may displace jobs
without a promise. If that is not enough, all promises are planned anew.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, overdue
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Course, Work
from elasticflow_airflow.scheduler_core.planning.allocation import share_later, share_now
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner

_RESCUE_EFFORT = 800
"""Limit of alternative filling orders times jobs per order that are tried before a promise is given up."""


def mend(planner: Planner, rescue: int) -> Draft:
    """Return a plan with as many promises as can be kept; of several, the one with the fewest changes.

    ``rescue`` is the number of alternative filling orders that are tried before a promise is given up.
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
        return mended  # keeping more would be keeping all, and that was tried
    draft = planner.salvage()
    _help(draft, [(job, work) for job, work in _promised(planner) if job.job_id not in draft.courses])
    kept = sum(job.promised and not job.at_risk for job in planner.jobs) - lost
    return draft if len(draft.courses) > kept else mended


def _beside_the_others(planner: Planner) -> tuple[Draft, int]:
    """Return a draft that changes only invalid courses, and how many promises it does not keep.

    Older promises come first. A job that cannot be repaired continues as before if its slots are not needed.
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
    if len(draft.courses) > len(healthy):  # only newly placed courses may be in the way
        stored = {job_id: course for job_id, course in stored.items() if draft.is_free(course)}
    return Draft(planner.layout, planner.now, stored | draft.courses), lost


def _promised(planner: Planner) -> list[tuple[LiveJob, Work]]:
    """Return the jobs whose promise is to be kept, the oldest promise first."""
    jobs = sorted((job for job in planner.jobs if job.promised and not job.at_risk), key=lambda job: job.promise)
    return [(job, planner.bound(job, planner.work(job))) for job in jobs]


def _help(draft: Draft, ailing: list[tuple[LiveJob, Work]]) -> int:
    """Add the jobs to the draft that can be in time beside the others; return how many cannot."""
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
