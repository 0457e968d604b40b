"""``pollux``: slots and batch sizes by goodput (Pollux, OSDI 2021).

The paper: goodput is throughput times statistical efficiency (section 3). Efficiency falls as the batch size ``M``
exceeds the submitter's, ``M0``, depending on the gradient noise scale ``phi``: ``(phi + M0) / (phi + M)`` (section
3.1). Each job chooses the batch size for its number of slots and scales its learning rate by AdaScale. Every 60 s a
genetic algorithm searches for the sizes of all jobs that maximise the power mean (``p = -1``) of their speed-ups over a
fair share of the cluster, each damped by ``(T - R d) / (T + d)`` for its age ``T``, restarts so far ``R`` and restart
delay ``d`` (section 4.2). It minimises completion times with some fairness and does not consider deadlines.

This policy decides the number of slots of each job, and with it the batch size.

Differences from the paper, and reasons:

- The fitness is a sum over jobs of a cost per size, so a dynamic program over slots finds its optimum; a randomised
  search would only be worse. Blocks are placed afterwards.
- A job without slots has no speed-up, so its cost is infinite in the paper's mean. Here it is a large finite number, so
  that allocations can be compared when there are more jobs than slots.
- Throughput is measured, not fitted from a few sizes, so the paper's limit of doubling the sizes seen so far is not
  needed. Only measured batch sizes of at least ``M0`` are chosen.
- The noise scale grows during training, and no trace has it. It is assumed when the jobs are prepared
  (``Job.batches``) and constant for a job's lifetime. Without one the batch size stays the submitter's, and goodput is
  throughput.
- The interval grows while no job arrives or leaves: then only the damping changes, and slowly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Decision, Resize
from elasticflow_airflow.scheduler_core.model.values import Job, Node
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.goodput import best_batch, goodput_curve
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.rounds import keep_and_start

INTERVAL_S = 60.0
"""Scheduling interval of the paper (section 5.1)."""
_LONGEST_S = 3840.0
_NOTHING = 1e3
"""Cost of a job without slots, on the scale of 1 / speed-up."""
_RESTARTS = "restarts"


class Pollux(GangPolicy):
    """Pollux: power mean of damped goodput speed-ups. Deterministic."""

    def __init__(self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        super().__init__(config, nodes)
        self._gap_s = INTERVAL_S
        self._round_s = float("-inf")
        self._seen: tuple[str, ...] = ()

    def live_job(self, job: Job, now: float) -> GangJob:
        """Create a live job whose curve is its goodput: in steps of its own batch size, at each size's best batch."""
        if job.batches is not None:
            job = replace(job, curve=goodput_curve(job.batches))
        return super().live_job(job, now)

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event; add the batch size to resizes of jobs that allow it to be chosen."""
        return [self._with_batch(decision) for decision in super().handle(event, now)]

    def _with_batch(self, decision: Decision) -> Decision:
        job = self.jobs.get(decision.job_id) if isinstance(decision, Resize) else None
        if not isinstance(decision, Resize) or job is None or job.job.batches is None:
            return decision
        return replace(decision, batch_size=best_batch(job.job.batches, decision.placement.workers)[0])

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of an interval, return the fittest sizes; else keep running gangs and fill idle slots."""
        jobs, now = scene.jobs, scene.now
        if not jobs:
            return Wanted([])
        names = tuple(job.job_id for job in jobs)
        if names != self._seen:
            self._seen, self._gap_s = names, INTERVAL_S
        due = self._round_s + self._gap_s
        if now < due - TOLERANCE_S:
            return Wanted(keep_and_start(jobs), due)
        self._round_s = now
        sizes = fittest(jobs, scene.room.slots)
        changed = False
        claims = []
        for job, size in zip(jobs, sizes, strict=True):
            if size:
                smaller = tuple(n for n in reversed(job.rising) if n < size)
                claims.append(Claim(job.job_id, (size, *smaller), "greatest goodput for all"))
            if size != job.size:
                changed = True
                if size and job.job.ran_s > 0.0:
                    job.job.memory[_RESTARTS] = job.job.memory.get(_RESTARTS, 0.0) + 1.0
        self._gap_s = INTERVAL_S if changed else min(2.0 * self._gap_s, _LONGEST_S)
        claims.sort(key=lambda claim: -claim.sizes[0])
        return Wanted(claims, now + self._gap_s)


def damping(age_s: float, restarts: float, delay_s: float) -> float:
    """Return the factor on a speed-up that needs a restart (section 4.2, REALLOC_FACTOR); at least 0.01."""
    return max(0.01, (age_s - restarts * delay_s) / (age_s + delay_s)) if age_s + delay_s > 0.0 else 1.0


def speed_ups(job: JobView, fair: float) -> dict[int, float]:
    """Return, by size, goodput relative to a fair share; a share below the smallest gang counts as time share."""
    rising = job.rising
    share = max((n for n in rising if n <= fair), default=rising[0])
    at_share = job.speeds[share] * min(1.0, fair / share)
    if at_share <= 0.0:
        return {rising[0]: 1.0}  # its speed has not been measured yet
    return {size: job.speeds[size] / at_share for size in rising}


def fittest(jobs: Sequence[JobView], slots: int) -> list[int]:
    """Return the sizes (0: none) that maximise the power mean with p = -1, i.e. minimise the sum of 1 / speed-up."""
    fair = slots / len(jobs)
    least = np.zeros(slots + 1)
    picks: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for job in jobs:
        best = least + _NOTHING
        pick = np.zeros(slots + 1, dtype=np.int32)
        age = job.now - job.job.job.submitted_s
        damped = damping(age, job.job.memory.get(_RESTARTS, 0.0), job.pause_s)
        for size, speed_up in speed_ups(job, fair).items():
            if size > slots:
                break
            factor = 1.0 if size == job.size or job.job.ran_s <= 0.0 else damped
            cost = 1.0 / (speed_up * factor)
            with_it = least[:-size] + cost
            better = with_it < best[size:]
            best[size:][better] = with_it[better]
            pick[size:][better] = size
        least = best
        picks.append(pick)
    left = slots
    sizes = []
    for pick in reversed(picks):
        sizes.append(int(pick[left]))
        left -= sizes[-1]
    return sizes[::-1]
