"""Mend a plan in which some promises no longer hold, and leave all the others as they are.

Stored courses share no slot, so those that still hold go on proving their promises when one job turns out to be slower,
or has lost its slots. Whoever has to be planned again gets what is free beside them, and may push away whoever has no
promise to lose. Where that is not enough, all promises are planned anew.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.allocation import share_later, share_now
from elasticflow_airflow.scheduler_core.draft import Draft
from elasticflow_airflow.scheduler_core.jobs import LiveJob, overdue
from elasticflow_airflow.scheduler_core.planner import Planner
from elasticflow_airflow.scheduler_core.work import TOLERANCE_S, Course, Holding, Work


def mend(planner: Planner, rescue: int) -> Draft:
    """A plan with as many promises as can be kept; of several, the one with the fewest changes.

    ``rescue``: how many other orders of filling are tried before a promise is given up.
    """
    mended, lost = _beside_the_others(planner)
    if lost == 0:
        return mended
    if planner.held_at_risk() and (draft := planner.fresh(guarded=True)) is not None:
        return planner.unguarded(draft)
    draft = planner.fresh(rescue=rescue)
    if draft is not None:
        return draft
    draft = planner.salvage()
    kept = sum(job.promised and not job.at_risk for job in planner.jobs) - lost
    return draft if len(draft.courses) > kept else mended


def _beside_the_others(planner: Planner) -> tuple[Draft, int]:
    """Change only what has to change; and how many promises are not kept so.

    Older promises come first. Who cannot be helped goes on as before, if nobody needs its slots.
    """
    stored = {job.job_id: job.course for job in planner.jobs if job.course is not None}
    ailing: list[tuple[LiveJob, Work]] = []
    healthy: dict[str, Course] = {}
    for job in planner.jobs:
        if job.promised and not job.at_risk:
            work, course = planner.bound(job, planner.work(job)), stored.get(job.job_id)
            kept = course is not None and course.holdings and course.promised_s <= work.limit_s + TOLERANCE_S
            if course is not None and (kept or overdue(job, planner.now)):
                healthy[job.job_id] = course
            else:
                ailing.append((job, work))
    ailing.sort(key=lambda pair: pair[0].promise)
    draft = Draft(planner.layout, planner.now, healthy)
    placed: list[Holding] = []
    lost = 0
    for job, work in ailing:
        found = _keeping(draft, work)
        if found is None:
            lost += 1
        else:
            draft.put(job.job_id, found)
            placed += found.holdings
    for job_id, course in stored.items():  # stored courses share no slot; only what was placed now may be in the way
        if job_id not in draft.courses and not any(_meet(held, new) for held in course.holdings for new in placed):
            draft.courses[job_id] = course
    return Draft(planner.layout, planner.now, draft.courses), lost


def _keeping(draft: Draft, work: Work) -> Course | None:
    if not work.sizes or work.speeds[work.sizes[-1]] <= 0.0:
        return None
    return share_now(draft, work, work.limit_s) or share_later(draft, work, work.limit_s)


def _meet(one: Holding, other: Holding) -> bool:
    """Whether two holdings share a slot at some time."""
    together = one.start_s < other.end_s - TOLERANCE_S and other.start_s < one.end_s - TOLERANCE_S
    return together and bool(one.mask & other.mask)
