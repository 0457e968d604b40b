"""Which sizes a job of unknown speed is measured at, for how long, and when enough is known. Bounded, never in the way.

A profiling gang trains: its steps count. Sizes are powers of two, smallest first, as in the paper's evaluation
(ElasticFlow, section 5: throughputs are profiled before the first run), but measured here within the job's own run.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.jobs import LiveJob


def candidate_sizes(job: LiveJob, largest: int) -> list[int]:
    """Powers of two between the job's limits that could ever be placed."""
    most = min(job.job.max_workers or largest, largest)
    size = 1 << max(0, job.job.min_workers - 1).bit_length()
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= 2
    return sizes


def next_size(job: LiveJob, largest: int) -> int | None:
    """The size to measure next; None when all are measured or have failed."""
    for size in candidate_sizes(job, largest):
        if size not in job.measured and size not in job.failed_sizes:
            return size
    return None


def window_s(job: LiveJob, config: SchedulerConfig) -> float:
    """How long measuring one size may take, start-up included."""
    return max(job.job.costs.startup_s, config.profile_startup_s) + config.profile_budget_s


def enough(job: LiveJob, largest: int, now: float, config: SchedulerConfig) -> str | None:
    """Say why profiling is over (None: it goes on). Call after a size was measured or has failed."""
    sizes = candidate_sizes(job, largest)
    tried = [s for s in sizes if s in job.measured or s in job.failed_sizes]
    if len(tried) == len(sizes):
        return "all sizes are tried"
    measured = [s for s in tried if s in job.measured]
    if not measured:
        return None
    if tried[-1] in job.failed_sizes:
        return f"{tried[-1]} workers could not be measured"
    if len(measured) > 1 and job.measured[measured[-1]] < job.measured[measured[-2]] * (1 + config.profile_min_gain):
        return f"{measured[-1]} workers are not faster than {measured[-2]}"
    deadline = job.job.last_deadline_s
    if deadline is not None and not job.best_effort and job.remaining is not None:
        best = max(job.measured.values())
        rest = job.remaining / best + job.job.costs.tail_s
        if now + window_s(job, config) + rest > deadline:
            return "measuring another size could cost the deadline"
    return None


def wait_limit(job: LiveJob, config: SchedulerConfig) -> float | None:
    """Until when a job may wait for slots to be profiled on; None without a deadline."""
    deadline = job.job.last_deadline_s
    if deadline is None or job.best_effort:
        return None
    since = job.waiting_since_s
    return since + config.profile_wait_fraction * max(0.0, deadline - since)
