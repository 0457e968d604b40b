"""``antman``: guaranteed jobs at their requested size, opportunistic jobs on the rest (AntMan, OSDI 2020).

The paper: *resource-guarantee* jobs get the GPUs they request, within their tenants' quotas, as if they were alone.
*Opportunistic* jobs run on the rest: idle GPUs, and idle moments of GPUs that guaranteed jobs hold. Memory and
computation scale within the framework (section 4), so a guaranteed job is never slowed by its guest: the guest is
throttled or leaves. A guaranteed job that has to wait may start as an opportunistic one (section 5). The paper does not
consider deadlines.

This policy decides which jobs run guaranteed, which run opportunistically, and where guests are placed.

Differences from the paper, and reasons:

- Traces have no classes and no quotas: jobs with a deadline are guaranteed, best-effort jobs are opportunistic, and the
  quota is the whole cluster. Guaranteed jobs are taken in order of arrival. The first that does not fit blocks the
  later ones of its class; until their turn, all of them may run opportunistically, on fewer slots if necessary.
- Guests on held slots need a table of the capacity that pairs leave each other (``leftover``); no public trace of jobs
  with deadlines has one. Without it, opportunistic jobs use idle slots only, and release them immediately.
- The speed of a guest beside a host that loses nothing is derived from pairs measured without throttling, see
  :mod:`~elasticflow_airflow.scheduler_core.simulator.inputs.colocation`.
- Gangs are capped at the knee of their curve by default; ``antman+plain`` uses the requested size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from elasticflow_airflow.scheduler_core.cluster.placement import Layout, level_of
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Decision, Resize
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView, SharingJob
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room, seat

Leftover = Callable[[str, str], float]
"""From a host's and a guest's workload: the fraction of its speed the guest keeps if the host loses nothing."""

LEAST_PART = 0.1
"""A guest that would keep a smaller fraction of its speed than this is not placed."""
_GUARANTEED = "guaranteed"


class AntMan(GangPolicy):
    """AntMan: guaranteed and opportunistic jobs. Deterministic."""

    job_type = SharingJob

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        leftover: Leftover | None = None,
        at_knee: bool = True,
    ) -> None:
        super().__init__(config, nodes)
        self._leftover = leftover
        self._at_knee = at_knee
        self._guaranteed: set[str] = set()

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event; mark opportunistic gangs as running beside the holders of their slots."""
        decided = super().handle(event, now)
        return [
            replace(decision, beside=True)
            if isinstance(decision, Resize) and self._may_be_guest(self.jobs[decision.job_id])
            else decision
            for decision in decided
        ]

    def _may_be_guest(self, job: GangJob) -> bool:
        return self._leftover is not None and job.job.deadline_s is None

    # -- which jobs run --------------------------------------------------------------------------------------------

    def wanted(self, scene: Scene) -> Wanted:
        """Return guaranteed jobs in order of arrival up to the first that does not fit; the rest are opportunistic."""
        usable = self.usable(scene.now)
        free = self._open(scene)
        rest: list[JobView] = []
        started = [job for job in scene.jobs if job.size and job.job.memory.get(_GUARANTEED)]
        stays = [job for job in started if not job.job.mask & ~usable]
        guaranteed = [Claim(job.job_id, (job.size,), "guaranteed") for job in stays]
        goes_on = {claim.job_id for claim in guaranteed}
        blocked = False
        for job in scene.jobs:
            if job.job_id in goes_on:
                continue
            size, block = self._size(job), 0
            if job.job.job.deadline_s is not None and not blocked:
                block = self.layout.find(free, size)  # no guaranteed job is moved for it
                blocked = not block
            if block:
                free &= ~block
                job.job.memory[_GUARANTEED] = 1.0
                guaranteed.append(Claim(job.job_id, (size,), "guaranteed"))
            else:
                job.job.memory.pop(_GUARANTEED, None)
                rest.append(job)
        self._guaranteed = {claim.job_id for claim in guaranteed}
        rest.sort(key=lambda job: (job.job.job.deadline_s is None, not job.size, job.job.number))
        others = [
            Claim(
                job.job_id,
                tuple(n for n in reversed(job.rising) if n <= (job.size or self._size(job))),
                "opportunistic, on what others leave",
            )
            for job in rest
        ]
        return Wanted([*guaranteed, *others])

    def _open(self, scene: Scene) -> int:
        """Return the slots (mask) that no guaranteed job holds."""
        here = {job.job_id for job in scene.jobs}
        free = self.usable(scene.now)
        for job in self.jobs.values():
            if job.memory.get(_GUARANTEED) or job.job_id not in here:
                free &= ~job.mask
        return free

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Place guaranteed gangs first, as if alone; then the others on idle slots or, as guests, on held ones."""
        claims = {claim.job_id: claim for claim in wanted.claims}
        first = [claim for claim in wanted.claims if claim.job_id in self._guaranteed]
        for claim in first:  # a guest that is about to leave does not make its host's slots unavailable
            free |= self.jobs[claim.job_id].mask
        grants, reasons = self._grant(Wanted(first), Room(self.layout, free))
        seats = seat(self.layout, free, grants, {job_id: self.jobs[job_id].mask for job_id, _ in grants})
        held = dict(seats)
        idle = free
        for mask in seats.values():
            idle &= ~mask
        for job_id, claim in claims.items():
            if job_id in self._guaranteed:
                continue
            job = self.jobs[job_id]
            mask = self._idle_block(job, claim.sizes, idle)
            if not mask and self._may_be_guest(job):
                mask = self._shared_block(job, claim.sizes, free, idle, held, seats)
            if mask:
                seats[job_id] = mask
                reasons[job_id] = claim.why
                idle &= ~mask
        self._rate_guests(held, seats)
        return seats, reasons

    def _idle_block(self, job: GangJob, sizes: Sequence[int], idle: int) -> int:
        if job.mask and not job.mask & ~idle:
            return job.mask
        for size in sizes:
            own = self.layout.find(job.mask & idle, size) if job.mask else 0
            block = own or self.layout.find(idle, size)
            if block:
                return block
        return 0

    def _shared_block(
        self, job: GangJob, sizes: Sequence[int], free: int, idle: int, held: dict[str, int], seats: dict[str, int]
    ) -> int:
        """Return the block where a guest is fastest; its present block if it keeps enough of its speed there."""
        open_slots = free
        for job_id, mask in seats.items():
            if job_id not in held:
                open_slots &= ~mask  # one guest per slot
        open_slots |= idle
        if job.mask and not job.mask & ~open_slots and self._part(job, job.mask, held) >= LEAST_PART:
            return job.mask
        best, most = 0, 0.0
        speeds = GangJob.sizes(job, self.layout.largest_block, self.config)
        for size in sizes:
            for block in _blocks(self.layout, open_slots, size):
                speed = self._part(job, block, held) * speeds.get(size, 0.0)
                if self._part(job, block, held) >= LEAST_PART and speed > most:
                    best, most = block, speed
        return best

    def _part(self, guest: GangJob, mask: int, held: dict[str, int]) -> float:
        assert self._leftover is not None
        hosts = [self.jobs[job_id].job.workload for job_id, other in held.items() if other & mask]
        return min((self._leftover(host, guest.job.workload) for host in hosts), default=1.0)

    def _rate_guests(self, held: dict[str, int], seats: dict[str, int]) -> None:
        """Set each guest's fraction of its speed to what its new hosts leave; earlier steps are already settled."""
        for job in self.jobs.values():
            if isinstance(job, SharingJob) and self._may_be_guest(job):
                mask = seats.get(job.job_id, 0)
                part = self._part(job, mask, held) if mask else 1.0
                if part != job.part:
                    job.part = part
                    job.changed()

    def _size(self, job: JobView) -> int:
        return job.requested_within_knee if self._at_knee else job.requested


def _blocks(layout: Layout, free: int, size: int) -> Iterable[int]:
    starts = layout.blocks(free, level_of(size))
    shape = (1 << size) - 1
    while starts:
        low = starts & -starts
        yield shape * low
        starts ^= low
