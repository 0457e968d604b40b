"""``tiresias``: discretised two-dimensional least attained service (Tiresias, NSDI 2019, section 3.2).

The paper: job lengths are unknown, so the job with the least attained service comes first. Service is two-dimensional,
GPUs times time. It is discretised into a few queues, so that similar jobs do not preempt one another forever: a job
enters the first queue and sinks to the next when its attained service passes a threshold. Queues are served in order,
each first come first served. Each job gets the GPUs it requests, as a gang, or none; jobs that no longer fit are
preempted. To prevent starvation, a job that has waited longer than a multiple (*promote knob*) of the time it has run
returns to the first queue with its service reset.

This policy decides exactly that. The thresholds of 3,250, 7,200 and 18,000 slot-seconds and the knob of 8 are those of
the simulator that the authors published. Service includes start-ups and pauses, since slots are held then, too.

Differences from the paper, and reasons: consolidation is not learned from a profile of the model (section 3.3), since
every gang gets a consolidated block here. The Gittins index, for known distributions of lengths, is left out. A
preempted job pays for its start again, as with all policies here (the published simulators charge little or nothing).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.model.work import INFINITY
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView

THRESHOLDS_SLOT_S = (3250.0, 7200.0, 18000.0)
PROMOTE_KNOB = 8.0
_QUEUE, _ENTERED, _SERVICE_BASE, _RAN_BASE = "queue", "entered_s", "service_base_slot_s", "ran_base_s"
_HAIR = 1e-6
"""Relative delay of a wake-up, so that the threshold has certainly been passed by then."""


class Tiresias(GangPolicy):
    """Tiresias: queues by attained service; jobs that wait too long are promoted."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        thresholds_slot_s: Sequence[float] = THRESHOLDS_SLOT_S,
        promote_knob: float = PROMOTE_KNOB,
    ) -> None:
        super().__init__(config, nodes)
        self._thresholds = tuple(thresholds_slot_s)
        self._knob = promote_knob

    def wanted(self, scene: Scene) -> Wanted:
        """Return jobs queue by queue, each in order of entry."""
        for job in scene.jobs:
            self._sink_or_rise(job)
        ordered = sorted(scene.jobs, key=_rank)
        claims = [Claim(job.job_id, (job.requested,), f"queue {self.queue_of(job) + 1}") for job in ordered]
        served, waiting = [], []
        for job in ordered:
            if scene.room.fits(job.requested):
                scene.room.take(job.requested)
                served.append(job)
            else:
                waiting.append(job)
        times = [self._sinks_s(job) for job in served] + [self._rises_s(job) for job in waiting] if waiting else []
        return Wanted(claims, min((t for t in times if t < INFINITY), default=None))

    def queue_of(self, job: JobView) -> int:
        """Return the queue of a job; queue 0 is served first."""
        return int(job.job.memory.get(_QUEUE, 0.0))

    def service_of(self, job: JobView) -> float:
        """Return the slot-seconds since a job entered the first queue or was promoted to it."""
        return job.job.attained_slot_s - job.job.memory.get(_SERVICE_BASE, 0.0)

    def _sink_or_rise(self, job: JobView) -> None:
        memory = job.job.memory
        memory.setdefault(_ENTERED, job.now)
        if not job.size and self.queue_of(job) > 0 and job.now >= self._rises_s(job) - _HAIR:
            memory[_SERVICE_BASE], memory[_RAN_BASE] = job.job.attained_slot_s, job.job.ran_s
        queue = bisect_right(self._thresholds, self.service_of(job))
        if queue != self.queue_of(job):
            memory[_QUEUE], memory[_ENTERED] = float(queue), job.now

    def _sinks_s(self, job: JobView) -> float:
        """Return when a job that is served from now on passes its next threshold."""
        service = self.service_of(job)
        following = next((t for t in self._thresholds if t > service), INFINITY)
        return job.now + (following - service) / job.requested * (1.0 + _HAIR) + _HAIR

    def _rises_s(self, job: JobView) -> float:
        """Return when a job that keeps waiting is promoted; infinite in the first queue."""
        ran = job.job.ran_s - job.job.memory.get(_RAN_BASE, 0.0)
        if self.queue_of(job) == 0:
            return INFINITY
        since = job.now if job.size else job.job.waiting_since_s
        return since + self._knob * ran


def _rank(job: JobView) -> tuple[float, float, int]:
    memory = job.job.memory
    return memory.get(_QUEUE, 0.0), memory[_ENTERED], job.job.number
