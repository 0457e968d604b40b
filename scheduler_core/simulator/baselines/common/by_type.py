"""One scheduler per GPU type behind one policy interface, for policies that plan with a single curve per job.

A new job is offered to the types one after another, each with the job's curve on that type, and stays with the first
that accepts it. For a job with a deadline the slowest type comes first: a job that can meet its deadline there leaves
the fast slots to jobs that cannot. A best-effort job goes where it would end first on an empty cluster. No job ever
moves between types, so each promise rests on the proof of a single scheduler. Decides nothing else; with one type it
behaves like that scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Decision, Reject, Wait, WakeMeAt
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Node, OnReject
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S
from elasticflow_airflow.scheduler_core.scheduler import Scheduler
from elasticflow_airflow.scheduler_core.simulator.policies import InspectablePolicy

Make = Callable[[SchedulerConfig, Iterable[Node]], InspectablePolicy]


class ByType:
    """Routes events by GPU type. Deterministic if its schedulers are."""

    def __init__(self, make: Make, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        self.config = config or SchedulerConfig()
        self._make = make
        self._inner: dict[str, InspectablePolicy] = {}
        self._type_of_node: dict[str, str] = {}
        self._type_of_job: dict[str, str] = {}
        self._wakes: dict[str, float] = {}
        by_type: dict[str, list[Node]] = {}
        for node in nodes:
            by_type.setdefault(node.gpu_type, []).append(node)
            self._type_of_node[node.node_id] = node.gpu_type
        for name in sorted(by_type):
            self._inner[name] = make(self.config, by_type[name])

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes as last reported."""
        return tuple(node for inner in self._inner.values() for node in inner.nodes())

    def states(self) -> tuple[JobState, ...]:
        """Return the state of every live job, type by type."""
        return tuple(state for inner in self._inner.values() for state in inner.states())

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event and return the decisions that follow."""
        match event:
            case ev.JobSubmitted(job):
                out = self._submitted(job, now)
            case ev.WakeUp():
                due = [name for name, at_s in self._wakes.items() if at_s <= now + TOLERANCE_S]
                out = [d for name in due or list(self._inner) for d in self._tell(name, event, now)]
            case ev.NodeJoined(node):
                self._type_of_node[node.node_id] = node.gpu_type
                if node.gpu_type not in self._inner:
                    self._inner[node.gpu_type] = self._make(self.config, ())
                out = self._tell(node.gpu_type, event, now)
            case ev.NodeLost(node_id) | ev.NodeDraining(node_id):
                name = self._type_of_node.get(node_id)
                out = [] if name is None else self._tell(name, event, now)
            case _:
                job_id = getattr(event, "job_id", "")
                name = self._type_of_job.get(job_id)
                out = [] if name is None else self._tell(name, event, now)
                if isinstance(event, (ev.JobFinished, ev.JobFailed, ev.JobCancelled)):
                    self._type_of_job.pop(job_id, None)
        for decision in out:
            if isinstance(decision, Reject):
                self._type_of_job.pop(decision.job_id, None)
        return [*out, WakeMeAt(min(self._wakes.values()))] if self._wakes else out

    # -- one newcomer ----------------------------------------------------------------------------------------------

    def _submitted(self, job: Job, now: float) -> list[Decision]:
        if job.job_id in self._type_of_job:
            raise ValueError(f"job {job.job_id!r} is live already; a new incarnation needs the old one to end first")
        names = self._order(job)
        if not names:
            reason = Reason(f"runs on none of the types of GPU that there are: {sorted(self._inner)}")
            return [Reject(job.job_id, reason, None)]
        out: list[Decision] = []
        offers: list[float] = []
        for number, name in enumerate(names):
            last = number == len(names) - 1
            told = replace(
                job, curve=job.curves.get(name, job.curve), on_reject=job.on_reject if last else OnReject.FAIL
            )
            for decision in self._tell(name, ev.JobSubmitted(told), now):
                if isinstance(decision, Reject) and decision.job_id == job.job_id:
                    if decision.earliest_deadline_s is not None:
                        offers.append(decision.earliest_deadline_s)
                    if last:
                        out.append(replace(decision, earliest_deadline_s=min(offers, default=None)))
                    continue
                out.append(decision)
                if isinstance(decision, (Admit, Wait)) and decision.job_id == job.job_id:
                    self._type_of_job[job.job_id] = name
            if job.job_id in self._type_of_job:
                break
        return out

    def _order(self, job: Job) -> list[str]:
        """Return the types to offer a job to: slowest first, or fastest first for best effort."""
        names = [name for name in self._inner if not job.curves or name in job.curves]

        def fastest(name: str) -> float:
            curve = job.curves.get(name, job.curve)
            if curve is None:
                return 0.0
            largest = Layout(self._inner[name].nodes()).largest_block
            return max(curve.usable(job.min_workers, min(job.max_workers or largest, largest)).values(), default=0.0)

        return sorted(names, key=lambda name: (fastest(name) * (1 if job.deadline_s is not None else -1), name))

    # -- routing ---------------------------------------------------------------------------------------------------

    def _tell(self, name: str, event: ev.Event, now: float) -> list[Decision]:
        """Hand an event to one scheduler; store its wake-up time and return its other decisions."""
        decided = self._inner[name].handle(event, now)
        self._wakes.pop(name, None)
        for decision in decided:
            if isinstance(decision, WakeMeAt):
                self._wakes[name] = decision.at_s
        return [decision for decision in decided if not isinstance(decision, WakeMeAt)]


def schedulers_by_type(config: SchedulerConfig, nodes: Iterable[Node]) -> ByType:
    """Create our own scheduler for each GPU type."""
    return ByType(Scheduler, config, nodes)
