"""``optimus``: every interval, slots go to the jobs that they shorten most (Optimus, EuroSys 2018).

The paper: a speed model and a convergence model predict each job's remaining time. Every scheduling interval, each job
gets one worker and one parameter server; then each further worker goes to the job whose remaining time it reduces most
(section 4.1). Tasks are spread evenly over the fewest servers (section 4.2). It minimises mean completion time and does
not consider deadlines.

This policy decides the number of slots of each job every ``interval_s``. Between two intervals, new and waiting jobs
start with their smallest gang on idle slots, and running jobs are not changed.

Differences from the paper, and reasons:

- Gangs double instead of growing by one, since blocks and measured curves are powers of two; the gain is per slot.
- There are no parameter servers: workers exchange gradients among themselves, so only their number is chosen.
- Curves and lengths are given, so nothing is fitted, and the paper's discount on young, poorly known jobs is not
  needed.
- The gain of a change includes the pause that it costs. The paper ignores the pause and changes rarely; ignoring it
  here would only make the policy worse.
- When there are more jobs than slots, the first gang goes to the job that ends soonest with it. That is the paper's own
  goal; section 4.1 leaves this case open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.rounds import keep_and_start
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room

INTERVAL_S = 600.0
"""Scheduling interval of the paper (section 6.1)."""


class Optimus(GangPolicy):
    """Optimus: marginal gain in completion time."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__(config, nodes)
        if interval_s <= 0.0:
            raise ValueError(f"interval_s is {interval_s!r}; it must be above 0")
        self._interval_s = interval_s
        self._round_s = float("-inf")

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of an interval, return the gangs of greatest gain; else keep running gangs and fill idle slots."""
        jobs, now = scene.jobs, scene.now
        if not jobs:
            return Wanted([])
        due = self._round_s + self._interval_s
        if now + TOLERANCE_S < due:
            return Wanted(keep_and_start(jobs), due)
        self._round_s = now
        sizes = by_marginal_gain(jobs, scene.room)
        claims = [Claim(job.job_id, (sizes[job.job_id],), "greatest gain") for job in jobs if job.job_id in sizes]
        return Wanted(claims, now + self._interval_s)


def by_marginal_gain(jobs: Sequence[JobView], room: Room) -> dict[str, int]:
    """Return sizes by the greedy rule of section 4.1; a job without room for its smallest gang is left out.

    The gain of a step is the reduction of the job's end time, pauses included, per slot that it takes. Steps without
    gain are not made. A step that gains only together with the next (a dent in the curve, a pause that a single
    doubling does not repay) is evaluated together with it.
    """
    sizes: dict[str, int] = {}
    heap: list[tuple[float, int, str, int]] = []
    views = {job.job_id: job for job in jobs}
    numbers = {job.job_id: number for number, job in enumerate(jobs)}
    for job in sorted(jobs, key=lambda job: (job.end_s(job.rising[0]), numbers[job.job_id])):
        first = job.rising[0]
        if room.fits(first):
            room.take(first)
            sizes[job.job_id] = first
            heap.extend(_steps(job, first, numbers[job.job_id]))
    heapify(heap)
    while heap:
        _, number, job_id, size = heappop(heap)
        before = sizes[job_id]
        room.give_back(before)
        if room.fits(size):
            room.take(size)
            sizes[job_id] = size
            for step in _steps(views[job_id], size, number):
                heappush(heap, step)
            continue
        room.take(before)
        for step in _steps(views[job_id], before, number, below=size):
            heappush(heap, step)
    return sizes


def _steps(job: JobView, size: int, number: int, below: int = 1 << 62) -> list[tuple[float, int, str, int]]:
    """Return the best step up from ``size`` to a size under ``below`` as a heap entry: at most one."""
    end, best = job.end_s(size), None
    for larger in job.rising:
        if size < larger < below:
            gain = (end - job.end_s(larger)) / (larger - size)
            if gain > 0.0 and (best is None or gain > best[0]):
                best = (gain, larger)
    return [] if best is None else [(-best[0], number, job.job_id, best[1])]
