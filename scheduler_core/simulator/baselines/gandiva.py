"""``gandiva``: time slicing with rotation, packing, and grow-shrink (Gandiva, OSDI 2018).

The paper: no job queues for long. Jobs get the GPUs they request. If not all fit, they take turns by suspend and resume
(section 3.1, time slices of about a minute). Jobs that can use more GPUs grow into idle ones within their server, and
shrink back when another job arrives (section 3.1, *grow-shrink*). Migration defragments; packing puts two jobs on one
GPU (section 3.1). Deadlines are ignored; the scheduler reacts and never plans ahead (section 4).

This policy decides which jobs have a turn now, which share a slot, and which grow. At the end of a slice the gang that
has waited longest since its last turn comes first; running jobs that still fit continue without a break. Jobs grow only
when none waits: one doubling per job and round, only if the job then ends sooner with the pause counted, and never
beyond the knee or one node.

Differences from the paper, and reasons: slices are longer than a minute if a start costs more than 3 s (20 starts per
slice), since suspend and resume is stop and restart here, and a minute would be half overhead. A job that started in
the second half of a slice keeps its turn through the next one, after the longest waiting job. The paper packs by trial
and undoes what did not help; here a table of pairs gives the speed that both keep (``packed``, see
``inputs/colocation.py``). One-slot jobs that would have to wait share a slot if both together make more progress than
one alone, with the best partner. Only simulations have such a table, for K80, P100 and V100, not for the A100 and T4 of
the public traces with deadlines; in the service a slot has one worker. Without a table no jobs are packed. The
ElasticFlow artifact, which includes Gandiva for comparison, does not rotate: the job that came first kept its turn
forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Decision, Resize
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView, SharingJob
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room

Packed = Callable[[str, str], float]
"""From two workloads: the fraction of its speed that the first keeps on a slot shared with the second."""

SLICE_S = 60.0
"""Minimum length of a turn."""
SLICE_STARTS = 20.0
"""The same as a number of start-up times."""
_HAD_UNTIL, _SLICE_ENDS = "had_a_turn_until_s", "slice_ends_s"


class Gandiva(GangPolicy):
    """Time slicing, packing and grow-shrink. ``packed`` None: no slot is shared."""

    job_type = SharingJob

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        packed: Packed | None = None,
    ) -> None:
        super().__init__(config, nodes)
        self._packed = packed
        self._pairs: dict[str, str] = {}
        """Guest to host, for the jobs placed now that share a slot."""
        self._beside: set[str] = set()
        """Of two jobs on a slot, the one that joined while the other held it."""

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event; mark a gang that joins a slot kept by another job as running beside it."""
        decided = super().handle(event, now)
        if self._packed is None:
            return decided
        moved = {decision.job_id for decision in decided if isinstance(decision, Resize)}
        self._beside = {job_id for job_id in self._beside - moved if job_id in self.jobs and self.jobs[job_id].mask}
        out: list[Decision] = []
        for decision in decided:
            if isinstance(decision, Resize):
                moved.discard(decision.job_id)  # jobs still in ``moved`` are placed later than this one
                mask = self.jobs[decision.job_id].mask
                others = [o for o in self.jobs.values() if o.mask & mask and o.job_id != decision.job_id]
                if any(other.job_id not in self._beside and other.job_id not in moved for other in others):
                    self._beside.add(decision.job_id)
                    out.append(replace(decision, beside=True))
                    continue
            out.append(decision)
        return out

    def wanted(self, scene: Scene) -> Wanted:
        """Return the jobs whose turn it is, at their requested size; let them grow if none waits."""
        now, room = scene.now, scene.room
        for job in scene.jobs:
            if job.size:
                job.job.memory[_HAD_UNTIL] = now
        self._pairs, leaving = {}, self._leaving(scene)
        jobs = [job for job in scene.jobs if not job.job.mask & leaving]  # a leaving job's partner stays
        guests = _guests(jobs)
        running = sorted((job for job in jobs if job.size), key=lambda job: job.job_id in guests)
        waiting = sorted((job for job in jobs if not job.size), key=_waited_since)
        longest = max((self.slice_of(job) for job in scene.jobs), default=SLICE_S)
        slice_ends = max((job.job.memory.get(_SLICE_ENDS, -INFINITY) for job in scene.jobs), default=-INFINITY)
        if now >= slice_ends - TOLERANCE_S:
            if waiting:
                young = [job for job in running if now - job.job.running_since_s < longest / 2]
                fresh = [job for job in young if job.job_id not in guests]
                old = [job for job in running if job not in fresh]
                order = [*waiting[:1], *fresh, *waiting[1:], *old]
            else:
                order = running
            slice_ends = now + longest
        else:
            order = [*running, *waiting]
        sizes: dict[str, int] = {}
        for job in order:
            size = job.requested
            if room.fits(size):
                room.take(size)
                sizes[job.job_id] = size
        for job in scene.jobs:  # stored with the jobs, so that it survives a restart
            job.job.memory[_SLICE_ENDS] = slice_ends
        if len(sizes) == len(jobs):
            self._grow(jobs, sizes, room)
        elif self._packed is not None:
            self._pairs = self._pack(self._packed, [job for job in order if job.job_id not in sizes], jobs, sizes)
        left_out = len(sizes) + len(self._pairs) < len(jobs)
        claims = [Claim(job_id, (size,), "its turn") for job_id, size in sizes.items()]
        return Wanted(claims, slice_ends if left_out else None)

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Place jobs with slots of their own and hosts first, then the guests that share those slots."""
        seats, reasons = super().seats(wanted, free)
        if self._packed is None:
            return seats, reasons
        for guest, host in self._pairs.items():
            seats[guest] = seats[host]
            reasons[guest] = f"shares a slot with {host}: together they do more than in turns"
        self._rate(self._packed, seats, free)
        return seats, reasons

    def slice_of(self, job: JobView) -> float:
        """Return how many seconds a turn of this job should last, so that its start does not use it up."""
        return max(SLICE_S, SLICE_STARTS * job.startup_s)

    def _leaving(self, scene: Scene) -> int:
        """Return the slots (mask) of jobs whose last step is made and which are about to leave."""
        here = {job.job_id for job in scene.jobs}
        leaving = 0
        for job in self.jobs.values():
            if job.job_id not in here and job.phase is Phase.ADMITTED:
                leaving |= job.mask
        return leaving

    def _pack(
        self, packed: Packed, waiting: Sequence[JobView], jobs: Sequence[JobView], sizes: dict[str, int]
    ) -> dict[str, str]:
        """Map waiting jobs to hosts to share a slot with: the present one, or that with the best joint progress."""
        open_hosts = {job.job_id: job for job in jobs if sizes.get(job.job_id) == 1}
        pairs: dict[str, str] = {}
        for guest in waiting:
            if guest.requested != 1:
                continue
            gains: dict[str, float] = {}
            for host in open_hosts.values():
                mine, other = guest.job.job.workload, host.job.job.workload
                parts = packed(mine, other), packed(other, mine)
                if min(parts) > 0.0 and sum(parts) > 1.0:
                    gains[host.job_id] = sum(parts)
            stays = [job_id for job_id in gains if guest.size and open_hosts[job_id].job.mask == guest.job.mask]
            best = max(stays or gains, key=lambda job_id: (gains[job_id], -open_hosts[job_id].job.number), default=None)
            if best is not None:
                pairs[guest.job_id] = best
                del open_hosts[best]
        return pairs

    def _rate(self, packed: Packed, seats: dict[str, int], free: int) -> None:
        """Set each job's fraction of its speed to what it keeps on its slot; earlier steps are already settled.

        A job without a seat leaves the ``free`` slots, on which all other jobs were placed.
        """
        by_mask: dict[int, list[SharingJob]] = {}
        for job in self.jobs.values():
            if isinstance(job, SharingJob):
                by_mask.setdefault(seats.get(job.job_id, job.mask & ~free), []).append(job)
        for mask, sharing in by_mask.items():
            for job in sharing:
                others = [other.job.workload for other in sharing if other is not job and mask]
                part = min((packed(job.job.workload, other) for other in others), default=1.0)
                if part != job.part:
                    job.part = part
                    job.changed()

    def _grow(self, jobs: Iterable[JobView], sizes: dict[str, int], room: Room) -> None:
        """Let each job keep the size it has grown to, then double sizes, smallest first, while a job ends sooner."""
        by_size = sorted(jobs, key=lambda job: (job.requested, job.job.number))
        most = max((node.slots for node in self.nodes()), default=1)
        for job in by_size:
            if job.size > sizes[job.job_id]:
                self._resize(job, sizes, job.size, room)
        grown = True
        while grown:
            grown = False
            for job in sorted(by_size, key=lambda job: (sizes[job.job_id], job.job.number)):
                size = sizes[job.job_id]
                larger = next((s for s in job.rising if s > size), 0)
                if larger and larger <= most and job.end_s(larger) < job.end_s(size) - job.pause_s / 2:
                    grown = self._resize(job, sizes, larger, room) or grown

    def _resize(self, job: JobView, sizes: dict[str, int], size: int, room: Room) -> bool:
        room.give_back(sizes[job.job_id])
        fits = room.fits(size)
        if fits:
            sizes[job.job_id] = size
        room.take(sizes[job.job_id])
        return fits


def _guests(jobs: Iterable[JobView]) -> set[str]:
    """Return the jobs that share a slot with an earlier one."""
    seen, found = 0, set()
    for job in jobs:
        if job.job.mask & seen:
            found.add(job.job_id)
        seen |= job.job.mask
    return found


def _waited_since(job: JobView) -> tuple[float, int]:
    return job.job.memory.get(_HAD_UNTIL, job.job.job.submitted_s), job.job.number
