"""What policies that decide in rounds do between two rounds."""

from __future__ import annotations

from collections.abc import Sequence

from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView


def keep_and_start(jobs: Sequence[JobView]) -> list[Claim]:
    """Return the claims: running jobs continue, waiting jobs start with their smallest size, first come first."""
    running = [Claim(job.job_id, (job.size,), "goes on") for job in jobs if job.size]
    waiting = [Claim(job.job_id, job.rising[:1], "slots are idle") for job in jobs if not job.size]
    return [*running, *waiting]
