"""Builds the scheduler's ``Job`` from a submission, what is known of the task, and what the training has shown.

The only place that does: a new job, one that is only asked about, and one that is over differ in their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticflow_airflow.api import JobSubmission, largest_share
from elasticflow_airflow.runtime.logical_workers import DEFAULT_LOGICAL_WORKERS
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Job, OnReject, RescaleCosts, ScalingCurve
from elasticflow_airflow.service.decisions.task_history import Past, sigmas_of
from elasticflow_airflow.service.store.tables import IncarnationRow


def scheduler_job(
    submission: JobSubmission,
    past: Past,
    config: SchedulerConfig,
    *,
    job_id: str,
    submitted_at: float,
    deadline_at: float | None,
    value: float,
    steps: int | None,
    speeds: Mapping[int, float] | None,
    costs: RescaleCosts,
    shares: int | None,
    task: str = "",
) -> Job:
    """Return the job as the scheduler knows it; times in UTC seconds.

    ``steps`` are those that are left, None if unknown; ``speeds`` are steps/s by workers; ``shares`` is the number of
    logical workers. Deadline and value are not those of the submission once they have been amended.
    """
    sigma, sigmas = sigmas_of(past, submission.scaling_curve, config)
    return Job(
        job_id=job_id,
        submitted_s=submitted_at,
        deadline_s=deadline_at,
        total_steps=None if steps is None else float(steps),
        curve=ScalingCurve(speeds) if speeds else None,
        costs=costs,
        min_workers=submission.min_workers,
        max_workers=most_workers(submission, shares),
        value=value,
        on_reject=OnReject(submission.on_reject),
        latest_deadline_s=submission.latest_deadline_at,
        explore=not submission.scaling_curve,
        partial=not submission.scaling_curve,
        speed_sigma=sigma,
        speed_sigmas=sigmas,
        task=task,
    )


def job_of_row(
    row: IncarnationRow,
    past: Past,
    config: SchedulerConfig,
    *,
    steps: int | None,
    speeds: Mapping[int, float] | None,
    costs: RescaleCosts,
) -> Job:
    """Return the job of a stored incarnation, with the deadline and the value that it has now."""
    return scheduler_job(
        row.submission,
        past,
        config,
        job_id=row.job_id,
        submitted_at=row.submitted_at,
        deadline_at=row.deadline_at,
        value=row.value,
        steps=steps,
        speeds=speeds,
        costs=costs,
        shares=row.logical_workers,
    )


def logical_workers(submission: JobSubmission) -> int | None:
    """Return the number of shares each step is cut into for the whole life of an incarnation; None in fast mode.

    It depends on the submission alone, so that it is the same without the service and on any other cluster.
    """
    if submission.consistency == "fast":
        return None
    if submission.logical_workers is not None:
        return submission.logical_workers
    batch, least = submission.global_batch_size, submission.min_workers
    return largest_share(batch, max(DEFAULT_LOGICAL_WORKERS, least, submission.max_workers or 1))


def most_workers(submission: JobSubmission, shares: int | None) -> int:
    """Return the most workers that the scheduler may give: one for each share, or for each sample."""
    batch = submission.global_batch_size
    most = shares if shares is not None else 1 << (batch.bit_length() - 1)
    return min(most, submission.max_workers or most)
