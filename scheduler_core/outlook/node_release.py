"""Which nodes can be removed without a loss for any job: tried with the actual events that drain and remove them.

Works on copies of a scheduler. Wants for more capacity are found elsewhere (:mod:`capacity`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY
from elasticflow_airflow.scheduler_core.outlook.forecast import Outcome, fewest, keeps_runs, missed_runs, outlook_of
from elasticflow_airflow.scheduler_core.planning.plan_draft import mask_at
from elasticflow_airflow.scheduler_core.scheduler import Scheduler

_LATER_S = 1.0
"""A job that is late already may not become later by more than this when nodes are released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnneededNode:
    """A node that is not needed. ``idle``: no gang holds slots on it; else those gangs migrate when it is drained."""

    node_id: str
    slots: int
    idle: bool
    reason: Reason


def stands(job: LiveJob, now: float) -> bool:
    """Return whether it has slots, or gets them as soon as their overdue holder leaves."""
    return bool(job.mask or mask_at(job.course, now))


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a live job has now and must not lose."""

    kept: bool
    """Promised and on course."""
    late_s: float | None
    """Its planned end, if it is promised and late."""
    stands: bool
    least: int
    """Slots of its smallest gang."""


class Releasing:
    """The search for removable nodes, on copies of ``scheduler``."""

    def __init__(self, scheduler: Scheduler, now: float, until_s: float) -> None:
        self.now, self.until_s = now, until_s
        for state in scheduler.states():
            if state.phase is Phase.PARKED:  # its owner may return at any time
                scheduler.handle(ev.JobUnparked(state.job.job_id), now)
        missed = {run.run_id for run in missed_runs(scheduler, now, until_s)}
        self.runs = {run.run_id for run in scheduler.expected_runs() if run.due_s <= until_s} - missed
        self.busy = bool(missed or self.runs or scheduler.states())
        self.before, self.largest = self._standings(scheduler)
        self.good, self.gone = scheduler, 0
        """The smallest cluster proven to be sufficient, and how many nodes have been removed from it."""

    def search(self, standing: Mapping[str, int]) -> list[UnneededNode]:
        """Return the removable nodes, in order; ``standing`` is the number of held slots of each node.

        Idle nodes come first, then those with the fewest held slots. If a node cannot be removed, neither can later
        nodes of its shape, because their gangs would have to migrate in addition.
        """
        rest = [node for node in self.good.nodes() if node.draining_until_s is None and not node.busy]
        rest.sort(key=lambda node: (standing.get(node.node_id, 0), node.node_id))
        most = len(rest) - 1 if self.busy else len(rest)
        found: list[Node] = []
        while rest and len(found) < most:
            room = min(len(rest), most - len(found))
            order = [*found, *rest]
            first_bad = self._first_bad(order, len(found), room)
            if first_bad is None:
                found += rest[:room]
                break
            bad = rest[first_bad - 1]
            found += rest[: first_bad - 1]
            rest = [node for node in rest[first_bad:] if _shape(node) != _shape(bad)]
        return [self._tell(node, standing.get(node.node_id, 0)) for node in found]

    def _first_bad(self, order: Sequence[Node], gone: int, room: int) -> int | None:
        """Return the least number of nodes after the first ``gone`` of ``order`` that is too many; None: none is."""
        return fewest(lambda count: not self._can_go(order[: gone + count]), room)

    def _tell(self, node: Node, held: int) -> UnneededNode:
        if not self.busy:
            kind = "no job is live, and no run is expected by {until:moment}"
        elif held:
            kind = "the jobs on {held} of its {slots} slots can move, and every promise until {until:moment} is kept"
        else:
            kind = "it is empty, and without it every promise and expected run until {until:moment} is kept"
        reason = Reason(kind, until=self.until_s, held=held, slots=node.slots)
        return UnneededNode(node_id=node.node_id, slots=node.slots, idle=not held, reason=reason)

    def _can_go(self, nodes: Sequence[Node]) -> bool:
        """Return whether all ``nodes`` can be drained and removed in turn. They begin with those removed already."""
        twin = self.good.twin()
        for node in nodes[self.gone :]:
            twin.handle(ev.NodeDraining(node.node_id, self.now), self.now)
            if any(slot.node_id == node.node_id for state in twin.states() for slot in state.placement.slots):
                return False
            if not self._still(twin):  # the next event may repair it, but a job was stopped and people alarmed
                return False
            twin.handle(ev.NodeLost(node.node_id), self.now)
        if not self._still(twin) or not keeps_runs(twin, self.now, self.runs):
            return False
        self.good, self.gone = twin, len(nodes)
        return True

    def _still(self, twin: Scheduler) -> bool:
        """Return whether every live job still has what it had."""
        after, largest = self._standings(twin)
        for job_id, was in self.before.items():
            now = after.get(job_id)
            if now is None or (was.kept and not now.kept) or (was.stands and not now.stands):
                return False
            if was.late_s is not None and (now.late_s or 0.0) > was.late_s + _LATER_S:
                return False
            if was.least <= self.largest and now.least > largest:
                return False
        return True

    def _standings(self, scheduler: Scheduler) -> tuple[dict[str, _Standing], int]:
        """Return the standing of every live job, and the size of the cluster's largest block of slots."""
        planner, jobs, _ = scheduler.open_books(self.now)
        found = {}
        for job in jobs:
            outlook = outlook_of(job) if job.promised else None
            kept = outlook is not None and outlook.outcome is Outcome.KEPT
            late_s = None if outlook is None or kept else outlook.projected_s or INFINITY
            unpromised = not job.promised and job.phase is not Phase.WAITING
            found[job.job_id] = _Standing(kept, late_s, unpromised and stands(job, self.now), job.least_workers)
        return found, planner.layout.largest(planner.layout.availability.at(self.now))


def _shape(node: Node) -> tuple[int, str, bool]:
    return (node.slots, node.gpu_type, bool(node.avoided))
