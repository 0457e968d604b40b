"""``aonline``: batches of newcomers, each with the window and constant gang of the best pay-off (AOnline, TCC 2022).

The paper ("Online scheduling algorithm for heterogeneous distributed machine learning jobs", IEEE Transactions on Cloud
Computing; first as MobiHoc 2020): jobs that have come are gathered into batches over iterations of growing length; for
each batch a primal-dual algorithm chooses the jobs of greatest total weight that end within the iteration's horizon,
and for each of them a time window and a number (and type) of workers that stays the same throughout. Prices rise
exponentially with what is taken. It bounds the total weighted completion time and knows no deadlines.

Decided here: whether to admit, and one booking of constant size on fixed slots.

Where it differs, and why:

- A job with a deadline has its weight (``Job.value``) as the utility of any end by then, and none after: the criterion
  that all policies are compared by. A job without one loses its weight slowly with its end, so that it is taken early.
- Iterations of doubling length over absolute time would let whoever comes in the second half of a month wait for weeks.
  Ours begin again at ``iteration_s`` whenever nobody is left over, and double only while somebody is; an idle cluster
  decides at once. Who is not chosen is weighed again at the next iteration, until its deadline is out of reach.
- ``U`` and ``L`` of the prices are learned from the jobs so far (:mod:`prices`).
- No parameter servers; the type of worker is that of the block that is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Decision, Reject, Wait
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Work
from elasticflow_airflow.scheduler_core.simulator.baselines.common.booking import constant_gangs
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.priced import PricedPolicy
from elasticflow_airflow.scheduler_core.simulator.baselines.common.prices import PriceRange, Stretch
from elasticflow_airflow.times import moment

ITERATION_S = 60.0
LONGEST_S = 1920.0


class AOnline(PricedPolicy):
    """Iterations of batches, constant gangs. Deterministic."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        iteration_s: float = ITERATION_S,
        longest_s: float = LONGEST_S,
        prices: PriceRange | None = None,
    ) -> None:
        super().__init__(config, nodes, prices=prices)
        if not 0.0 < iteration_s <= longest_s:
            raise ValueError(f"iterations of {iteration_s!r} to {longest_s!r} s; they must be above 0 and in order")
        self._first_s = iteration_s
        self._longest_s = longest_s
        self._length_s = iteration_s
        self._open_until_s = -INFINITY
        """Newcomers are gathered until then."""

    def choices(self, work: Work, book: Bookings, over: list[Stretch]) -> Iterator[Course]:  # noqa: ARG002
        """Windows of one size that begin now or when something that is booked ends."""
        return constant_gangs(work, book, self.layout)

    def judge(self, newcomer: JobView) -> Admit | Reject | Wait:
        """Wait for the end of the iteration; decided now if there is none, or if the job cannot wait so long."""
        now = newcomer.now
        deadline = newcomer.job.job.deadline_s
        latest = INFINITY if deadline is None else deadline - newcomer.least_time_s
        if now < self._open_until_s - TOLERANCE_S and latest > self._open_until_s:
            until = self._open_until_s
            return Wait(newcomer.job_id, f"is decided with the other newcomers at {moment(until)}", until)
        verdict = super().judge(newcomer)
        if now >= self._open_until_s - TOLERANCE_S:
            self._begin(now, left_over=isinstance(verdict, Wait))
        return verdict

    def wanted(self, scene: Scene) -> Wanted:
        """What is booked; and the end of the iteration, if somebody waits for it."""
        found = super().wanted(scene)
        again = self._open_until_s
        if again <= scene.now or all(job.phase is not Phase.WAITING for job in self.jobs.values()):
            return found
        return Wanted(found.claims, again if found.look_again_s is None else min(again, found.look_again_s))

    def _begin(self, now: float, *, left_over: bool) -> None:
        self._length_s = min(2.0 * self._length_s, self._longest_s) if left_over else self._first_s
        self._open_until_s = now + self._length_s

    def _retry(self, now: float) -> list[Decision]:
        """At the end of an iteration the batch, best pay-off by value first; before it only those who cannot wait."""
        waiting = [job for job in self.jobs.values() if job.phase is Phase.WAITING]
        due = now >= self._open_until_s - TOLERANCE_S
        if not waiting or not due:
            return super()._retry(now)
        ranked: list[tuple[float, int, GangJob]] = []
        for job in waiting:
            found = self.best(
                self.view(job, now), self._work(job, now, promised=True), self._book(now, without=job.job_id)
            )
            ranked.append((0.0 if isinstance(found, str) else -found[0] / job.job.value, job.number, job))
        out: list[Decision] = []
        for _, _, job in sorted(ranked, key=lambda item: item[:2]):
            out += self._conclude(job, super().judge(self.view(job, now)))
        self._begin(now, left_over=any(job.phase is Phase.WAITING for job in waiting))
        return out
