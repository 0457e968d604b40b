"""Mend a plan in which some promises no longer hold, and leave all the others as they are.

Stored courses share no slot, so those that still hold go on proving their promises when one job turns out to be slower,
or has lost its slots. Whoever has to be planned again gets what is free beside them, and may push away whoever has no
promise to lose. Where that is not enough, all promises are planned anew.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.allocation import share_later, share_now
from elasticflow_airflow.scheduler_core.draft import Draft
from elasticflow_airflow.scheduler_core.jobs import LiveJob
from elasticflow_airflow.scheduler_core.planner import Planner
from elasticflow_airflow.scheduler_core.work import TOLERANCE_S, Course, Work


def mend(planner: Planner, rescue: int) -> Draft:
    """A plan with as many promises as can be kept; of several, the one with the fewest changes.

    ``rescue``: how many other orders of filling are tried before a promise is given up.
    """
    mended, lost = _beside_the_others(planner)
    if lost == 0:
        return mended
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
    draft = planner.stored()
    ailing: list[tuple[LiveJob, Work]] = []
    for job in planner.jobs:
        if job.promised and not job.at_risk:
            work = planner.bound(job, planner.work(job))
            course = draft.courses.get(job.job_id)
            if course is None or not course.holdings or course.promised_s > work.limit_s + TOLERANCE_S:
                ailing.append((job, work))
    weak = [job for job in planner.jobs if not job.promised or job.at_risk]
    ailing.sort(key=lambda pair: pair[0].promise)
    weak.sort(key=lambda job: (job.best_effort, job.promise, job.number))
    aside = {job.job_id: draft.drop(job.job_id) for job in [job for job, _ in ailing] + weak}
    lost: list[LiveJob] = []
    for job, work in ailing:
        found = _keeping(draft, work)
        if found is None:
            lost.append(job)
        else:
            draft.put(job.job_id, found)
    for job in lost + weak:
        before = aside[job.job_id]
        if before is not None and _free(draft, before):
            draft.put(job.job_id, before)
    return draft, len(lost)


def _keeping(draft: Draft, work: Work) -> Course | None:
    if not work.sizes or work.speeds[work.sizes[-1]] <= 0.0:
        return None
    return share_now(draft, work, work.limit_s) or share_later(draft, work, work.limit_s)


def _free(draft: Draft, course: Course) -> bool:
    return all(not mask & ~draft.book.free_over(start, end) for start, end, mask in course.holdings)
