"""Which sizes a job of unknown speed is measured at, for how long, and when enough is known. Bounded, never in the way.

A profiling gang trains: its steps count. Sizes are powers of two, smallest first, as in the paper's evaluation
(ElasticFlow, section 5: throughputs are profiled before the first run), but measured here within the job's own run.

While sizes are missing, what is known of a job's speed may admit it, but refuses it only when its deadline cannot be
kept any more even if it were as fast with more workers as can be hoped: each as fast as the best that were measured.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.work import INFINITY


def candidate_sizes(job: LiveJob, largest: int) -> list[int]:
    """Powers of two between the job's limits that could ever be placed."""
    most = min(job.job.max_workers or largest, largest)
    size = 1 << max(0, job.job.min_workers - 1).bit_length()
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= 2
    return sizes


def known_speeds(job: LiveJob) -> dict[int, float]:
    """Steps/s by size, as far as they are known: from earlier runs, and measured in this one."""
    return {**(job.job.curve.steps_per_s if job.job.curve is not None else {}), **job.measured}


def is_measured_at(job: LiveJob, size: int) -> bool:
    """Whether a gang of this size, on which a job stands that is profiled, is there to measure its speed."""
    return size > 0 and (size == job.trial or size not in known_speeds(job))


def missing_sizes(job: LiveJob, layout: Layout, config: SchedulerConfig) -> list[int]:
    """Sizes that are worth measuring still; none once the curve is known as far as it can be.

    Larger ones are not when a size could not be measured, or was not faster than the one before.
    """
    known = known_speeds(job)
    sizes = candidate_sizes(job, layout.largest_block)
    missing = [size for size in sizes if size not in known and size not in job.failed_sizes]
    tried = [size for size in sizes if size not in missing]
    measured = [size for size in tried if size in known]
    if not measured:
        return missing
    if tried[-1] not in known:
        return []
    if len(measured) > 1 and known[measured[-1]] < known[measured[-2]] * (1 + config.profile_min_gain):
        return []
    return missing


def sizes_to_measure(job: LiveJob, layout: Layout, now: float, config: SchedulerConfig) -> list[int]:
    """The size to measure next; in a hurry several, the first of which slots are free is the one.

    A job that is in a hurry does not spend its time on sizes that cannot keep its deadline, whatever their speed may
    be, as long as there are slots for one that may.
    """
    if job.trial:
        return [] if job.is_certain(job.trial, config) else [job.trial]
    missing = missing_sizes(job, layout, config)
    best = _best_per_worker(job)
    if not missing or best is None or now + window_s(job, config) <= undecided_until(job, layout, now, config):
        return missing[:1]
    left, latest = job.work(layout, config).left_at(now), _last_start_s(job, layout, now, config)
    hopeful = [size for size in missing if now + left / (best * size) <= latest]
    return hopeful + [size for size in reversed(missing) if size not in hopeful]


def window_s(job: LiveJob, config: SchedulerConfig) -> float:
    """How long measuring one size may take, start-up included."""
    return max(job.job.costs.startup_s, config.profile_startup_s) + config.profile_budget_s


def in_a_hurry(job: LiveJob, now: float, config: SchedulerConfig) -> bool:
    """Whether the speed that is known keeps the deadline now, and no longer when another size was measured first."""
    deadline, known = job.job.last_deadline_s, known_speeds(job)
    if deadline is None or job.best_effort or job.remaining is None or not known:
        return False
    rest = job.remaining / max(known.values()) + job.job.costs.tail_s
    return now + rest <= deadline < now + window_s(job, config) + rest


def undecided_until(
    job: LiveJob, layout: Layout, now: float, config: SchedulerConfig, deadline_s: float | None = None
) -> float:
    """Until when measuring further sizes may still show that the deadline can be kept; minus infinity: it cannot.

    With the speed of each size that is missing at its best: as many times that of the best workers that were measured
    as it has workers. ``deadline_s``: another one than the last that the job takes.
    """
    missing = missing_sizes(job, layout, config)
    if not missing or job.best_effort or job.job.last_deadline_s is None:
        return -INFINITY
    latest, best = _last_start_s(job, layout, now, config, deadline_s), _best_per_worker(job)
    if best is None:
        return latest
    return latest - job.work(layout, config).left_at(now) / (best * missing[-1])


def wait_limit(job: LiveJob, layout: Layout, now: float, config: SchedulerConfig) -> float | None:
    """Until when a job may wait for slots to be measured on, or to say how long it is; None without a deadline."""
    if job.job.last_deadline_s is None or job.best_effort:
        return None
    if job.trial:
        return job.thorough_s
    if job.remaining is None or not known_speeds(job):
        return _last_start_s(job, layout, now, config)
    return undecided_until(job, layout, now, config)


def _best_per_worker(job: LiveJob) -> float | None:
    """Steps/s of a worker in the gang that makes most of each; None while that, or what is left, is not known."""
    known = known_speeds(job)
    return max(speed / size for size, speed in known.items()) if known and job.remaining is not None else None


def _last_start_s(
    job: LiveJob, layout: Layout, now: float, config: SchedulerConfig, deadline_s: float | None = None
) -> float:
    """When a gang of another size must be ordered that makes all steps that are left in no time."""
    deadline = job.job.last_deadline_s if deadline_s is None else deadline_s
    if deadline is None:
        return INFINITY
    work = job.work(layout, config)
    return deadline - config.deadline_margin_s - work.cost_of_change(now, work.size) - work.tail_s
