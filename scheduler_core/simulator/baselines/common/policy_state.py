"""State of a policy that decides for the present: live jobs, their progress and the nodes. Makes no decisions.

Progress is counted with the costs that the simulator charges: every start, resize and migration stops a job
(:mod:`work`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Self

from elasticflow_airflow.scheduler_core.cluster.nodes import neighbours, nodes_avoiding
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    JobState,
    Node,
    Phase,
    Placement,
    ScalingCurve,
)
from elasticflow_airflow.scheduler_core.model.work import INFINITY
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView, SharingJob

LEAVE_S = 60.0
"""Gangs leave a draining node this long before it leaves."""


class PolicyState:
    """The complete state of such a policy."""

    job_type: ClassVar[type[GangJob]] = GangJob

    def __init__(self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        self.config = config or SchedulerConfig()
        self.jobs: dict[str, GangJob] = {}
        """Live jobs in order of arrival, including parked and waiting ones."""
        self._nodes = {node.node_id: node for node in nodes}
        self.layout = Layout(self._nodes.values())
        self._numbers = 0
        self._wake_s: float | None = None

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes as last reported."""
        return tuple(self._nodes.values())

    def states(self) -> tuple[JobState, ...]:
        """Return the state of every live job, in order of arrival."""
        return tuple(job.state(self.layout) for job in self.jobs.values())

    def projected_finish_s(self, job_id: str) -> float | None:
        """Return when the last step is made if the job keeps its present slots; None if unknown.

        Raises:
            KeyError: there is no such live job.
        """
        job = self.jobs[job_id]
        work = job.work(self.layout, self.config)
        speed = work.speed(work.size) if work.size else 0.0
        left = min(work.remaining, work.expected)
        return work.since_s + left / speed if speed > 0.0 and left < INFINITY else None

    def usable(self, now: float) -> int:
        """Return the slots (mask) that may be held now: not busy and not about to leave."""
        return self.layout.availability.at(now) & self.layout.availability.at(now + LEAVE_S)

    def view(self, job: GangJob, now: float) -> JobView:
        """Return one job as :meth:`wanted` sees it."""
        return JobView(job, self.layout, self.config, now)

    def twin(self) -> Self:
        """Return an independent copy, for rolling the policy forward."""
        twin = copy.copy(self)
        twin.jobs = {}
        for job_id, job in self.jobs.items():
            twin.jobs[job_id] = other = copy.copy(job)
            other.memory = dict(job.memory)
        return twin

    def live_job(self, job: Job, now: float) -> GangJob:
        """Create the live job of a new job, without adding it to ``jobs``."""
        return self.job_type.newcomer(job, self._numbers, now, best_effort=True)

    def _progressed(self, job: GangJob, event: ev.JobProgressed, now: float) -> None:
        job.settle(self.layout, self.config, now)
        job.hear(event)
        if event.steps_per_s is not None and event.steps_per_s > 0.0 and job.mask:
            self._know(job, job.size, event.steps_per_s)
        job.changed()

    def _know(self, job: GangJob, size: int, steps_per_s: float) -> None:
        """Add a speed observed at one size to the curve; undo the slowdown of a job that shares its slot."""
        if size < 1 or size & (size - 1):
            return
        if isinstance(job, SharingJob):
            steps_per_s /= job.part
        speeds = dict(job.job.curve.steps_per_s) if job.job.curve is not None else {}
        speeds[size] = steps_per_s
        job.job = replace(job.job, curve=ScalingCurve(speeds))

    def _gang_started(self, job: GangJob, placement: Placement, now: float) -> None:
        if set(placement.slots) != set(job.placement.slots) or job.started or not job.mask:
            return
        job.started = True
        if now > job.ready_s and job.as_of_s > job.ready_s:
            return  # a report came in between and is more accurate
        job.settle(self.layout, self.config, min(now, job.ready_s))
        job.ready_s, job.starting = now, False
        job.changed()

    def _gang_reformed(self, job: GangJob, placement: Placement, now: float) -> None:
        mask, taken = self.layout.mask_of(placement), 0
        for other in self.jobs.values():
            taken |= other.mask if other is not job else 0
        if not mask or mask.bit_count() != placement.workers or mask & taken or job.phase is Phase.PARKED:
            return
        job.settle(self.layout, self.config, now)
        job.placement, job.mask, job.ready_s, job.starting = placement, mask, now, False
        job.started = True
        job.changed()

    def _lose_gang(self, job: GangJob, now: float) -> None:
        job.settle(self.layout, self.config, now)
        job.placement, job.mask, job.ready_s, job.starting = Placement(), 0, now, False
        job.waiting_since_s = now
        job.changed()

    def _mark_slow(self, job: GangJob, event: ev.SlotSlow, now: float) -> None:
        """Avoid a slot, and expect the job to be faster elsewhere by the reported gain."""
        job.settle(self.layout, self.config, now)
        if job.job.curve is not None:
            faster = {size: speed * event.gain for size, speed in job.job.curve.steps_per_s.items()}
            job.job = replace(job.job, curve=ScalingCurve(faster))
            job.changed()
        if event.slot.node_id in self._nodes:
            self._change_nodes(nodes_avoiding(self._nodes, event).values(), now)

    def _change_nodes(self, nodes: Iterable[Node], now: float) -> None:
        """Apply a new set of nodes: nodes of gangs that span several stay neighbours, gangs on lost slots are lost."""
        self._nodes = {node.node_id: node for node in nodes}
        for job in self.jobs.values():
            job.settle(self.layout, self.config, now)
        self.layout = Layout(self._nodes.values(), neighbours(job.placement for job in self.jobs.values()))
        for job in self.jobs.values():
            job.mask = self.layout.mask_of(job.placement)
            job.changed()
            if job.mask.bit_count() != job.placement.workers:
                self._lose_gang(job, now)
