"""``pollux``: slots and batch sizes by goodput (Pollux, OSDI 2021).

The paper: goodput = throughput times statistical efficiency (section 3). Efficiency falls with the batch size ``M``
from that of the submitter, ``M0``, by the gradient noise scale ``phi``: ``(phi + M0) / (phi + M)`` (section 3.1). Each
job chooses its batch for the size it has and scales its learning rate by AdaScale; every 60 s a genetic algorithm
searches the sizes of all jobs that maximise the power mean (``p = -1``) of their speed-ups over a fair share of the
cluster, each damped by ``(T - R d) / (T + d)`` for its age ``T``, restarts so far ``R`` and delay of a restart ``d``
(section 4.2). It minimises completion times with some fairness and knows no deadlines.

Decided here: how many slots each job has, and with them its batch size.

Where it differs, and why:

- The fitness is a sum over jobs of a cost by size, so a dynamic program over slots finds its optimum: no search by
  chance, which would only be worse. Blocks are seated afterwards.
- A job without slots has no speed-up, so its cost is infinite in the paper's mean; here it is a large number, so that
  with more jobs than slots there is still something to compare.
- Throughput is measured, not fitted from a few sizes, so the paper's limit of doubling the sizes seen so far has no
  cause. Only measured batch sizes from ``M0`` on are chosen from.
- The noise scale grows during training; no trace carries it. It is an assumption of whoever prepares the jobs
  (``Job.batches``), constant for life. Without one the batch stays the submitter's, and goodput is throughput.
- The interval grows while nothing comes or goes: the damping alone changes then, and slowly.
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
"""The paper's scheduling interval (section 5.1)."""
_LONGEST_S = 3840.0
_NOTHING = 1e3
"""Cost of a job without slots, on the scale of 1 / speed-up."""
_RESTARTS = "restarts"


class Pollux(GangPolicy):
    """Power mean of damped goodput speed-ups. Deterministic."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__(config, nodes)
        if interval_s <= 0.0:
            raise ValueError(f"interval_s is {interval_s!r}; it must be above 0")
        self._interval_s = interval_s
        self._gap_s = interval_s
        self._round_s = float("-inf")
        self._seen: tuple[str, ...] = ()

    def live_job(self, job: Job, now: float) -> GangJob:
        """A newcomer whose curve is its goodput: in steps of its own batch size, at the best batch of each size."""
        if job.batches is not None:
            job = replace(job, curve=goodput_curve(job.batches))
        return super().live_job(job, now)

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Take in one event; gangs of jobs that may are told their batch size, too."""
        return [self._with_batch(decision) for decision in super().handle(event, now)]

    def _with_batch(self, decision: Decision) -> Decision:
        job = self.jobs.get(decision.job_id) if isinstance(decision, Resize) else None
        if not isinstance(decision, Resize) or job is None or job.job.batches is None:
            return decision
        return replace(decision, batch_size=best_batch(job.job.batches, decision.placement.workers)[0])

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of an interval the fittest sizes; else what is held, and starts on idle slots."""
        jobs, now = scene.jobs, scene.now
        if not jobs:
            return Wanted([])
        names = tuple(job.job_id for job in jobs)
        if names != self._seen:
            self._seen, self._gap_s = names, self._interval_s
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
        self._gap_s = self._interval_s if changed else min(2.0 * self._gap_s, _LONGEST_S)
        claims.sort(key=lambda claim: -claim.sizes[0])
        return Wanted(claims, now + self._gap_s)


def damping(age_s: float, restarts: float, delay_s: float) -> float:
    """What a speed-up counts for if the job has to restart for it (section 4.2, REALLOC_FACTOR); at least a little."""
    return max(0.01, (age_s - restarts * delay_s) / (age_s + delay_s)) if age_s + delay_s > 0.0 else 1.0


def speed_ups(job: JobView, fair: float) -> dict[int, float]:
    """By size: goodput over that at a fair share of the slots; less than the smallest gang is a part of the time."""
    rising = job.rising
    share = max((n for n in rising if n <= fair), default=rising[0])
    at_share = job.speeds[share] * min(1.0, fair / share)
    if at_share <= 0.0:
        return {rising[0]: 1.0}  # nobody has seen it run yet
    return {size: job.speeds[size] / at_share for size in rising}


def fittest(jobs: Sequence[JobView], slots: int) -> list[int]:
    """Sizes that maximise the power mean with p = -1, that is, minimise the sum of 1 / speed-up (0: none)."""
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
