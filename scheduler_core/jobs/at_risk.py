"""Detects which promised jobs can no longer meet their deadlines, and which can again. Pure; plans nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, overdue
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import AtRisk, OnTrack
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S


def who_is_at_risk(jobs: Iterable[LiveJob], config: SchedulerConfig, now: float) -> Iterator[AtRisk | OnTrack]:
    """Update the at-risk mark of every promised job from its plan, and yield a decision for each change."""
    for job in jobs:
        deadline = job.job.deadline_s
        if job.best_effort or not job.promised or deadline is None:
            continue
        projected = _projected_end(job, config, now)
        fits = projected <= deadline + TOLERANCE_S
        if fits and job.at_risk:
            job.at_risk = False
            yield OnTrack(job.job_id, deadline, projected)
        elif not fits and not job.at_risk:
            job.at_risk = True
            if projected < INFINITY:
                what = "projected {projected:moment}, {late:duration} after the deadline"
            else:
                what = "no slots can be had for it; the deadline is {deadline:moment}"
            reason = Reason(
                f"no longer fits: {what}; it is finished as soon as possible",
                projected=projected,
                late=projected - deadline,
                deadline=deadline,
            )
            yield AtRisk(job.job_id, deadline, projected, reason)


def _projected_end(job: LiveJob, config: SchedulerConfig, now: float) -> float:
    """Return when a job ends by its plan; infinite if it has no plan that gives it slots."""
    course = job.course
    if course is None or not (course.holdings or overdue(job, now)):
        return INFINITY
    # A job that should have ended long ago and has not cannot end before now.
    return now if course.promised_s <= now - config.overdue_s else course.promised_s
