"""Tries the next larger, not yet measured size of a running job on slots that are not needed.

A job may be promised before its whole scaling curve is known, because no slots were free to measure it on. A trial on
slots that are idle later is worthwhile: its steps count, and its result is known within seconds. A trial never
endangers a promise: the promise must hold even if the job makes no step during the trial, both pauses included.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.work import INFINITY, Course, Holding, Work, course_of, likely_end
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft


def unmeasured(job: LiveJob, size: int) -> bool:
    """Return whether a job with a curve has no measured speed at ``size``."""
    return job.competes and job.job.curve is not None and size not in job.job.curve.steps_per_s


def try_next_size(draft: Draft, job: LiveJob, work: Work, config: SchedulerConfig) -> Course | None:
    """Return a course that holds twice the slots for a while and then goes back; None if it does not pay or fit."""
    target = 2 * work.size
    curve, present = job.job.curve, draft.courses.get(job.job_id)
    if config.explore_gain <= 0.0 or not job.job.explore or not job.started or job.at_risk:
        return None
    if curve is None or present is None or present.finish_s == INFINITY or work.size != max(curve.steps_per_s):
        return None
    most = min(job.job.max_workers or target, draft.layout.largest_block)
    if target > most or target in job.failed_sizes or draft.mask_now(job.job_id) != work.mask:
        return None
    now = draft.now
    away_s = work.join_s + work.pause_s
    if (likely_end(work, present, now) - now) * config.explore_gain <= away_s + work.pause_s:
        return None
    back = now + away_s + config.explore_window_s
    worst = present.promised_s + (back - now) + work.pause_s
    if worst > work.limit_s - config.deadline_margin_s:
        return None
    own = present.holdings
    free = draft.book.free_over(now, back, own)
    block = draft.layout.enclosing(free, work.mask, target)
    if not block or draft.book.free_until(work.mask, now, own) < worst:
        return None
    course = course_of(work, [Holding(now, back, block), Holding(back, worst, work.mask)], now)
    if course.finish_s == INFINITY or len(course.holdings) < 2:
        return None
    # Booked to the worst end, so that the slots are still there if the larger size turns out to be no faster.
    return Course((course.holdings[0], Holding(back, worst, work.mask)), course.finish_s, course.promised_s)
