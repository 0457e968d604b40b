"""``optimus``: every interval, slots go where the next ones shorten a job most (Optimus, EuroSys 2018).

The paper: a speed model and a convergence model predict each job's time to its end; every scheduling interval each job
gets one worker and one parameter server, then the next worker always goes to the job whose remaining time falls most
for it (section 4.1); tasks are spread evenly over the fewest servers (section 4.2). It minimises mean completion time
and knows no deadlines.

Decided here: how many slots each job has, anew every ``interval_s``. Between two intervals whoever arrives or waits
starts with its smallest gang where slots are idle, and nothing that runs is touched.

Where it differs, and why:

- Gangs double instead of growing by one, since blocks and measured curves are powers of two; the gain counts by slot.
- There are no parameter servers: workers exchange gradients among themselves, so only their number is chosen.
- Curves and lengths are told, so nothing is fitted, and the paper's discount on young, badly known jobs has no cause.
- A change is weighed with the pause that it costs. The paper ignores it and changes rarely; it would only lose by it.
- When there are more jobs than slots the first gang goes to the job that ends soonest with it: the paper's own goal,
  which section 4.1 leaves open there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.rounds import keep_and_start, next_round
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room

INTERVAL_S = 600.0
"""The paper's scheduling interval (section 6.1)."""


class Optimus(GangPolicy):
    """Marginal gain in completion time."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__(config, nodes)
        if interval_s <= 0.0:
            raise ValueError(f"interval_s is {interval_s!r}; it must be above 0")
        self._interval_s = interval_s
        self._round_s = float("-inf")

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of an interval the gangs of greatest gain; else what is held, and starts on idle slots."""
        jobs, now = scene.jobs, scene.now
        if not jobs:
            return Wanted([])
        again = next_round(self._round_s, now, self._interval_s)
        if now < again:
            return Wanted(keep_and_start(jobs), again)
        self._round_s = now
        sizes = by_marginal_gain(jobs, scene.room)
        claims = [Claim(job.job_id, (sizes[job.job_id],), "greatest gain") for job in jobs if job.job_id in sizes]
        return Wanted(claims, now + self._interval_s)


def by_marginal_gain(jobs: Sequence[JobView], room: Room) -> dict[str, int]:
    """Sizes by the greedy rule of section 4.1; a job without room for its smallest gang is not named.

    The gain of a step is the fall of the job's end, pauses included, by slot that it takes. Steps that gain nothing are
    not made; one that gains only together with the next (a curve with a dent, a pause that a single doubling does not
    repay) is looked at with it.
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
    """The best step up from ``size`` to a size under ``below``: at most one, as an entry of the heap."""
    end, best = job.end_s(size), None
    for larger in job.rising:
        if size < larger < below:
            gain = (end - job.end_s(larger)) / (larger - size)
            if gain > 0.0 and (best is None or gain > best[0]):
                best = (gain, larger)
    return [] if best is None else [(-best[0], number, job.job_id, best[1])]
