"""``aonline``: admit new jobs in batches, each with the time window and gang of the best pay-off (AOnline, TCC 2022).

The paper ("Online scheduling algorithm for heterogeneous distributed machine learning jobs", IEEE Transactions on Cloud
Computing; first as MobiHoc 2020): submitted jobs are collected into batches over iterations of growing length. For each
batch a primal-dual algorithm chooses the jobs of greatest total weight that end within the iteration's horizon, and for
each of them a time window and a constant number (and type) of workers. Prices rise exponentially with utilisation. It
bounds the total weighted completion time and does not consider deadlines.

This policy decides whether to admit a job, and makes one booking of constant size on fixed slots.

Differences from the paper, and reasons:

- A job with a deadline has its weight (``Job.value``) as the utility of any end by the deadline, and 0 after it: the
  criterion by which all policies are compared. Without a deadline the utility falls slowly with the end of the job, so
  that it is taken early.
- With iterations of doubling length over absolute time, a job submitted in the second half of a month would wait for
  weeks. Here the length is reset to ``ITERATION_S`` when no job is left over, and doubles only while one is; an idle
  cluster decides immediately. A job that is not chosen is considered again at the next iteration, until its deadline is
  out of reach.
- ``U`` and ``L`` of the prices are learned from the jobs so far (:mod:`prices`).
- There are no parameter servers; the type of worker is that of the block that is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Decision, Reject, Wait
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Work
from elasticflow_airflow.scheduler_core.simulator.baselines.common.booking import constant_gangs
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.priced import PricedPolicy
from elasticflow_airflow.scheduler_core.simulator.baselines.common.prices import Stretch
from elasticflow_airflow.times import moment

ITERATION_S = 60.0
LONGEST_S = 1920.0


class AOnline(PricedPolicy):
    """AOnline: batches of jobs per iteration, gangs of constant size. Deterministic."""

    def __init__(self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        super().__init__(config, nodes)
        self._length_s = ITERATION_S
        self._open_until_s = -INFINITY
        """New jobs are collected until this time."""

    def choices(self, work: Work, book: Bookings, over: list[Stretch]) -> Iterator[Course]:  # noqa: ARG002
        """Return bookings of constant size that begin now or when existing bookings change."""
        return constant_gangs(work, book, self.layout)

    def judge(self, newcomer: JobView) -> Admit | Reject | Wait:
        """Defer the job to the end of the iteration; decide now if none is open or the job cannot wait until then."""
        now = newcomer.now
        deadline = newcomer.job.job.deadline_s
        latest = INFINITY if deadline is None else deadline - newcomer.least_time_s
        if now < self._open_until_s - TOLERANCE_S and latest > self._open_until_s:
            until = self._open_until_s
            return Wait(newcomer.job_id, Reason(f"is decided with the other newcomers at {moment(until)}"), until)
        verdict = super().judge(newcomer)
        if now >= self._open_until_s - TOLERANCE_S:
            self._begin(now, left_over=isinstance(verdict, Wait))
        return verdict

    def wanted(self, scene: Scene) -> Wanted:
        """Return what is booked, to be asked again at the end of the iteration if a job waits for it."""
        found = super().wanted(scene)
        again = self._open_until_s
        if again <= scene.now or all(job.phase is not Phase.WAITING for job in self.jobs.values()):
            return found
        return Wanted(found.claims, again if found.look_again_s is None else min(again, found.look_again_s))

    def _begin(self, now: float, *, left_over: bool) -> None:
        self._length_s = min(2.0 * self._length_s, LONGEST_S) if left_over else ITERATION_S
        self._open_until_s = now + self._length_s

    def _retry(self, now: float) -> list[Decision]:
        """At the end of an iteration decide its batch, best pay-off per value first; before, only jobs out of time."""
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
