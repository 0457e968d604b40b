"""Decides at which sizes a job of unknown speed is measured, for how long, and when enough is known.

Profiling is bounded and never gets in the way of other jobs. A profiling gang trains: its steps count. Sizes are powers
of two, smallest first, as in the paper's evaluation (ElasticFlow, section 5: throughputs are profiled before the first
run), but measured here within the job's own run.

While sizes are missing, the known speeds of a job may suffice to admit it. It is refused only when its deadline cannot
be kept even at the best possible speeds of the missing sizes: every worker as fast as in the best measured gang.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.work import INFINITY


def candidate_sizes(job: LiveJob, largest: int) -> list[int]:
    """Return the powers of two between the job's limits that could be placed at all."""
    most = min(job.job.max_workers or largest, largest)
    size = job.least_workers
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= 2
    return sizes


def known_speeds(job: LiveJob) -> dict[int, float]:
    """Return the known speeds by size, in steps/s: from earlier runs, and measured in this one."""
    return {**(job.job.curve.steps_per_s if job.job.curve is not None else {}), **job.measured}


def is_measured_at(job: LiveJob, size: int) -> bool:
    """Return whether a profiled job holds a gang of this size in order to measure its speed."""
    return size > 0 and (size == job.trial or size not in known_speeds(job))


def missing_sizes(job: LiveJob, layout: Layout, config: SchedulerConfig) -> list[int]:
    """Return the sizes that are still worth measuring; none once the curve is as complete as it can be.

    Larger sizes are not worth it after a size that could not be measured, or that was not faster than the previous one.
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
    """Return the size to measure next; for a job in a hurry several, to be tried until slots are free for one.

    A job in a hurry does not spend time on sizes that cannot keep its deadline at any speed, as long as there are slots
    for a size that may.
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
    """Return how many seconds measuring one size may take, start-up included."""
    return max(job.job.costs.startup_s, config.profile_startup_s) + config.profile_budget_s


def in_a_hurry(job: LiveJob, now: float, config: SchedulerConfig) -> bool:
    """Return whether the known speed keeps the deadline now, but not after another size was measured first."""
    deadline, known = job.job.last_deadline_s, known_speeds(job)
    if deadline is None or job.best_effort or job.remaining is None or not known:
        return False
    rest = job.remaining / max(known.values()) + job.job.costs.tail_s
    return now + rest <= deadline < now + window_s(job, config) + rest


def undecided_until(
    job: LiveJob, layout: Layout, now: float, config: SchedulerConfig, deadline_s: float | None = None
) -> float:
    """Return until when measuring more sizes may still show that the deadline can be kept; minus infinity: it cannot.

    Each missing size is assumed to have its best possible speed: its number of workers times the best measured speed
    per worker. ``deadline_s`` is the deadline to check (None: the last one that the job accepts).
    """
    missing = missing_sizes(job, layout, config)
    if not missing or job.best_effort or job.job.last_deadline_s is None:
        return -INFINITY
    latest, best = _last_start_s(job, layout, now, config, deadline_s), _best_per_worker(job)
    if best is None:
        return latest
    return latest - job.work(layout, config).left_at(now) / (best * missing[-1])


def wait_limit(job: LiveJob, layout: Layout, now: float, config: SchedulerConfig) -> float | None:
    """Return until when a job may wait for slots to be measured on, or to report its length; None: no limit."""
    if job.job.last_deadline_s is None or job.best_effort:
        return None
    if job.trial:
        return job.thorough_s
    if job.remaining is None or not known_speeds(job):
        return _last_start_s(job, layout, now, config)
    return undecided_until(job, layout, now, config)


def _best_per_worker(job: LiveJob) -> float | None:
    """Return the best measured steps/s per worker; None while no speed is known, or the remaining steps are not."""
    known = known_speeds(job)
    return max(speed / size for size, speed in known.items()) if known and job.remaining is not None else None


def _last_start_s(
    job: LiveJob, layout: Layout, now: float, config: SchedulerConfig, deadline_s: float | None = None
) -> float:
    """Return the latest time to order a gang of another size, if all remaining steps took no time."""
    deadline = job.job.last_deadline_s if deadline_s is None else deadline_s
    if deadline is None:
        return INFINITY
    work = job.work(layout, config)
    return deadline - config.deadline_margin_s - work.cost_of_change(now, work.size) - work.tail_s
