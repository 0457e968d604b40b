"""``gang-fifo``: what Airflow users have today. Each job gets the workers it requests, in order of arrival.

The head of the queue blocks: while its gang does not fit, no job behind it starts. Running jobs are never stopped or
resized; they are moved only if the free slots suffice for the head of the queue but are fragmented. Deadlines, curves
and elasticity are ignored. A job whose requested size was never measured runs at the nearest smaller measured size.
``gang-fifo+knee`` is the same with gangs capped at the knee of their curve, so that no job holds slots that make it
slower.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView


class GangFifo(GangPolicy):
    """First in, first out, at the requested size."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, at_knee: bool = False
    ) -> None:
        super().__init__(config, nodes)
        self._at_knee = at_knee

    def wanted(self, scene: Scene) -> Wanted:
        """Return the running jobs, then the queue as far as it fits."""
        claims = []
        for job in sorted(scene.jobs, key=lambda job: job.size == 0):
            size = self._size(job)
            if scene.room.fits(size):
                scene.room.take(size)
                claims.append(Claim(job.job_id, (size,), "first in line"))
            elif not job.size:
                break  # the head of the queue blocks the rest
        return Wanted(claims)

    def _size(self, job: JobView) -> int:
        return job.requested_within_knee if self._at_knee else job.requested
