"""The state that a policy without promises keeps of one live job. Makes no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticflow_airflow.scheduler_core.cluster.placement import Layout, level_of
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Work


@dataclass(slots=True)
class GangJob(LiveJob):
    """A live job with its attained service. Its sizes are all measured ones, also beyond the knee of its curve.

    ``memory`` holds a policy's own notes on the job (numbers by name).
    """

    attained_slot_s: float = 0.0
    """Slot-seconds held, pauses included (attained service in Tiresias, NSDI 2019, section 3.2)."""
    ran_s: float = 0.0
    """Seconds during which it held slots."""
    memory: dict[str, float] = field(default_factory=dict)
    gpu_type: str = ""
    """GPU type of the slots that it holds, if its speed depends on the type."""

    @property
    def size(self) -> int:
        """Number of slots that it holds now."""
        return self.mask.bit_count()

    def work(self, layout: Layout, config: SchedulerConfig) -> Work:
        """Return the planner's view, at the speeds of the GPU type that it runs on."""
        if self._work is None and self.job.curves:
            self.gpu_type = layout.type_of(self.mask)
        return LiveJob.work(self, layout, config)

    def sizes(self, largest: int, config: SchedulerConfig) -> dict[int, float]:  # noqa: ARG002  (no margin: no promise)
        """Return all measured sizes within the limits of cluster and job; without a curve one size of speed 0."""
        job = self.job
        most = min(job.max_workers or largest, largest)
        curve = job.curves.get(self.gpu_type, job.curve)
        if curve is not None:
            return {n: v for n, v in curve.steps_per_s.items() if job.min_workers <= n <= most}
        smallest = self.least_workers
        asked = max(smallest, _power_below(job.requested_workers or 1))
        return {size: 0.0 for size in (min(asked, _power_below(most)),) if smallest <= size <= most}

    def settle(self, layout: Layout, config: SchedulerConfig, now: float) -> None:
        """Update the remaining work and attained service to ``now``."""
        if self.mask and now > self.as_of_s:
            self.ran_s += now - self.as_of_s
            self.attained_slot_s += self.mask.bit_count() * (now - self.as_of_s)
        LiveJob.settle(self, layout, config, now)  # super() does not work in a dataclass with slots


@dataclass(slots=True)
class SharingJob(GangJob):
    """A live job that may share slots with others, at a fraction of its speed (``part``)."""

    part: float = 1.0

    def sizes(self, largest: int, config: SchedulerConfig) -> dict[int, float]:
        """Return the measured sizes with their speeds scaled by ``part``."""
        return {size: speed * self.part for size, speed in GangJob.sizes(self, largest, config).items()}


class JobView:
    """One live job at one moment, as a policy sees it: sizes, speeds, remaining steps. Times are in seconds."""

    __slots__ = ("job", "left", "now", "pause_s", "speeds", "startup_s", "tail_s")

    def __init__(self, job: GangJob, layout: Layout, config: SchedulerConfig, now: float) -> None:
        work = job.work(layout, config)
        self.job = job
        self.now = now
        self.speeds: Mapping[int, float] = work.speeds
        """Steps/s at each measured size (0: unknown)."""
        self.left = work.left_at(now)
        """Steps left now; infinite while unknown."""
        self.startup_s = work.startup_s
        self.pause_s = work.longest_pause_s
        self.tail_s = work.tail_s

    @property
    def job_id(self) -> str:
        """Id of the job."""
        return self.job.job_id

    @property
    def size(self) -> int:
        """Number of slots that it holds now."""
        return self.job.mask.bit_count()

    @property
    def known(self) -> bool:
        """Whether its remaining time can be computed."""
        return self.left < INFINITY and any(speed > 0.0 for speed in self.speeds.values())

    @property
    def has_trained(self) -> bool:
        """Whether its last step is made, as far as is known; its slots are then held for its tail."""
        return bool(self.job.mask) and self.left <= TOLERANCE_S * max(1.0, self.speeds.get(self.size, 0.0))

    @property
    def rising(self) -> tuple[int, ...]:
        """The sizes that are faster than all smaller ones, i.e. up to the knee."""
        best, sizes = -1.0, []
        for size, speed in self.speeds.items():
            if speed > best:
                sizes.append(size)
                best = speed
        return tuple(sizes)

    @property
    def requested(self) -> int:
        """The requested fixed size, or the nearest measured one, preferring smaller sizes."""
        asked = self.job.job.requested_workers or self.job.job.min_workers
        fitting = [size for size in self.speeds if size <= asked]
        return max(fitting) if fitting else min(self.speeds)

    @property
    def requested_within_knee(self) -> int:
        """The requested size, at most the knee; while no block holds it, the smallest usable size."""
        rising = self.rising
        least = rising[0] if rising else self.job.job.min_workers
        return max((size for size in rising if size <= self.requested), default=least)

    def run_s(self, size: int) -> float:
        """Return the seconds of training left at a size, without any start or pause."""
        speed = self.speeds.get(size, 0.0)
        return self.left / speed if speed > 0.0 else INFINITY

    def cost_s(self, size: int) -> float:
        """Return the seconds without progress if it holds ``size`` slots from now on."""
        job = self.job
        waiting = max(0.0, job.ready_s - self.now) if job.mask else 0.0
        if size == self.size:
            return waiting
        return self.startup_s if not job.mask or (job.starting and waiting > TOLERANCE_S) else self.pause_s

    @property
    def least_time_s(self) -> float:
        """Seconds from start to result on an empty cluster at its fastest size; infinite if it cannot run."""
        return self.startup_s + min((self.run_s(size) for size in self.speeds), default=INFINITY) + self.tail_s

    def end_s(self, size: int) -> float:
        """Return when its last step is made if it holds ``size`` slots from now on."""
        return self.now + self.cost_s(size) + self.run_s(size)


def _power_below(number: int) -> int:
    return 1 << level_of(number) if number > 0 else 0
