"""Helpers of policies that decide in rounds: when the next round is, and what happens between two rounds."""

from __future__ import annotations

from collections.abc import Sequence

from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView


def next_round(last_s: float, now: float, interval_s: float) -> float:
    """Return when the round after the one at ``last_s`` is due; ``now`` if it is due now or overdue."""
    due = last_s + interval_s
    return now if due <= now + TOLERANCE_S else due


def keep_and_start(jobs: Sequence[JobView], sizes: dict[str, tuple[int, ...]] | None = None) -> list[Claim]:
    """Return the claims between two rounds: running jobs continue, waiting jobs start on idle slots, first come first.

    ``sizes`` are the sizes a waiting job may start with, best first; by default its smallest.
    """
    running = [Claim(job.job_id, (job.size,), "goes on") for job in jobs if job.size]
    waiting = [
        Claim(job.job_id, (sizes or {}).get(job.job_id, job.rising[:1]), "slots are idle")
        for job in jobs
        if not job.size
    ]
    return [*running, *waiting]
