"""``themis``: finish-time fairness by auctions over leases (Themis, NSDI 2020).

The paper: an app is treated fairly if it ends no later in the shared cluster than it would in a cluster of its own of
one N-th the size. The ratio of the two times is rho (section 3); the scheduler minimises the worst rho. GPUs are
leased. Whenever leases end, the fraction ``1 - f`` of apps with the worst rho bid for the GPUs in a truthful auction,
with rho for subsets of GPUs as bids; the rest of the GPUs goes to other apps at random (section 4).

This policy decides, at each arrival, job end or lease end, which jobs get free slots. Leased slots are not taken away.
Of all jobs without a lease, the fraction ``1 - f`` with the worst rho chooses first, worst first; the rest goes to
running jobs, then to waiting ones in order of arrival.

Differences from the paper, and reasons: the auction is reduced to that order. Bids in the paper are truthful by its
mechanism, and a job here wants one gang of the requested size or nothing, so the allocation that maximises the product
of valuations gives the worst rho its gang first. Left-over GPUs are not assigned at random, to stay deterministic. A
job's rho is computed as if it ran from now on; without slots it would be infinite for every waiting job. Leases end
together, on a common clock (after half to one and a half lease lengths), because gangs need many slots at once and
leases that end one by one would starve them. Renewing a lease costs nothing; every other change costs the same as for
all policies (the ElasticFlow artifact runs Themis with zero overhead).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView

_LEASE_STARTS = 20.0
"""A lease lasts at least this many start-ups."""
_LEASED_UNTIL = "leased_until_s"


class Themis(GangPolicy):
    """Themis: leases by finish-time fairness.

    ``lease_s`` and ``filter_f`` default to the paper's values (section 8).
    """

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        lease_s: float = 1200.0,
        filter_f: float = 0.8,
    ) -> None:
        super().__init__(config, nodes)
        self._lease_s = lease_s
        self._filter_f = filter_f

    def wanted(self, scene: Scene) -> Wanted:
        """Return the jobs with running leases, then assign the remaining slots."""
        leased = [job for job in scene.jobs if job.size and _leased_until(job) > scene.now + TOLERANCE_S]
        bound = {job.job_id for job in leased}
        others = [job for job in scene.jobs if job.job_id not in bound]
        slots = self.usable(scene.now).bit_count()
        claims = []
        waiting = False
        for job in [*leased, *self._auction(others, slots, len(scene.jobs))]:
            if not scene.room.fits(job.requested):
                waiting = True
                continue
            scene.room.take(job.requested)
            claims.append(Claim(job.job_id, (job.requested,), f"rho is {self._rho(job, slots, len(scene.jobs)):.2f}"))
            if not job.size or _leased_until(job) <= scene.now + TOLERANCE_S:
                job.job.memory[_LEASED_UNTIL] = self._lease_end(job)
        views = {job.job_id: job for job in scene.jobs}
        ends = [_leased_until(views[claim.job_id]) for claim in claims]
        return Wanted(claims, min(ends, default=None) if waiting else None)

    def _auction(self, jobs: Sequence[JobView], slots: int, contenders: int) -> list[JobView]:
        """Return the bidders, worst rho first, then the jobs that share the remaining slots."""
        by_rho = sorted(jobs, key=lambda job: (-self._rho(job, slots, contenders), job.job.number))
        count = math.ceil((1.0 - self._filter_f) * len(by_rho) - TOLERANCE_S)
        return [*by_rho[:count], *sorted(by_rho[count:], key=lambda job: (job.size == 0, job.job.number))]

    def _rho(self, job: JobView, slots: int, contenders: int) -> float:
        spec = job.job.job
        total = spec.total_steps if spec.total_steps is not None else job.left
        alone = alone_s(job, total, slots, contenders)
        if not 0.0 < alone < INFINITY:
            return 1.0  # its length is not known
        return (job.end_s(job.requested) - spec.submitted_s) / alone

    def _lease_end(self, job: JobView) -> float:
        """Return the tick of the common clock that gives half to one and a half lease lengths."""
        lease = max(self._lease_s, _LEASE_STARTS * job.startup_s)
        return (math.floor(job.now / lease + 0.5) + 1.0) * lease


def alone_s(job: JobView, total_steps: float, slots: int, contenders: int) -> float:
    """Return the seconds from start to end in a cluster of its own, one N-th of this one (Themis, section 3).

    If that cluster is smaller than the gang, the gang's speed is scaled down accordingly (time sharing).
    """
    speed = job.speeds[job.requested]
    part = min(1.0, slots / max(1, contenders) / job.requested)
    return job.startup_s + total_steps / (speed * part) if speed > 0.0 and part > 0.0 else INFINITY


def _leased_until(job: JobView) -> float:
    return job.job.memory.get(_LEASED_UNTIL, -INFINITY)
