"""``gandiva``: time slicing with rotation, and grow-shrink (Gandiva, OSDI 2018).

What the paper does: nobody queues for long. Jobs get the GPUs that they ask for; when not all fit, they take turns by
suspend and resume (section 3.1, time slices of about a minute); jobs that can use more grow into GPUs that would idle,
within their server, and shrink back when somebody comes (section 3.1, *grow-shrink*); migration defragments; packing
puts two jobs on one GPU (section 3.1). Deadlines play no part; the scheduler reacts and never plans ahead (section 4).

What it decides here: who has a turn now, and who grows. Turns go round: at the end of a slice whoever has waited
longest since its last turn comes first, as a gang; who still fits besides goes on without a break. Growth is what is
left when nobody waits, one doubling a job and round, only where the job then ends sooner, the pause counted, and never
beyond the knee or one node.

Where ours differs: slices are longer than a minute where a start costs more than 3 s (20 starts a slice), since our
suspend and resume is stop and restart, and a minute would be half overhead. Who began in the second half of a slice
keeps its turn through the next one, after the longest waiting. No packing: here a slot has one worker. The paper's
artifact of ElasticFlow, which compares itself with Gandiva, does not rotate: whoever came first kept its turn for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.policies.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.policies.live import JobView
from elasticflow_airflow.scheduler_core.policies.seating import Room
from elasticflow_airflow.scheduler_core.values import Node
from elasticflow_airflow.scheduler_core.work import INFINITY, TOLERANCE_S

_HAD_UNTIL, _SLICE_ENDS = "had_a_turn_until_s", "slice_ends_s"


class Gandiva(GangPolicy):
    """Time slicing and grow-shrink. ``slice_s``: least length of a turn; ``slice_starts``: and in start-ups."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        slice_s: float = 60.0,
        slice_starts: float = 20.0,
    ) -> None:
        super().__init__(config, nodes)
        self._slice_s = slice_s
        self._slice_starts = slice_starts

    def wanted(self, scene: Scene) -> Wanted:
        """Whose turn it is, at the size asked for; then growth if nobody waits."""
        now, room = scene.now, scene.room
        for job in scene.jobs:
            if job.size:
                job.job.memory[_HAD_UNTIL] = now
        running = [job for job in scene.jobs if job.size]
        waiting = sorted((job for job in scene.jobs if not job.size), key=_waited_since)
        longest = max((self.slice_of(job) for job in scene.jobs), default=self._slice_s)
        slice_ends = max((job.job.memory.get(_SLICE_ENDS, -INFINITY) for job in scene.jobs), default=-INFINITY)
        if now >= slice_ends - TOLERANCE_S:
            if waiting:
                fresh = [job for job in running if now - job.job.running_since_s < longest / 2]
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
        for job in scene.jobs:  # remembered by the jobs, to be found again after a restart
            job.job.memory[_SLICE_ENDS] = slice_ends
        left_out = len(sizes) < len(scene.jobs)
        if not left_out:
            self._grow(scene.jobs, sizes, room)
        claims = [Claim(job_id, (size,), "its turn") for job_id, size in sizes.items()]
        return Wanted(claims, slice_ends if left_out else None)

    def slice_of(self, job: JobView) -> float:
        """How long a turn of this job should be, so that its start does not eat it."""
        return max(self._slice_s, self._slice_starts * job.startup_s)

    def _grow(self, jobs: Iterable[JobView], sizes: dict[str, int], room: Room) -> None:
        """First let everyone keep what it has grown to; then double, smallest first, while that ends a job sooner."""
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


def _waited_since(job: JobView) -> tuple[float, int]:
    return job.job.memory.get(_HAD_UNTIL, job.job.job.submitted_s), job.job.number
