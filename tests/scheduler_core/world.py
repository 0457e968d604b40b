"""A virtual world for the scheduler: exact curves, exact costs, a clock that jumps from one happening to the next.

Plays both shell and engine; written apart from the scheduler and keeps its own books of slots and progress.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, Placement, Slot

EPS_S = 1e-3


@dataclass
class Run:
    """One job as it really is."""

    job: Job
    truth: dict[int, float]
    left: float
    slots: tuple[Slot, ...] = ()
    ready_s: float = 0.0
    starting: bool = False
    as_of_s: float = 0.0
    deadline_s: float | None = None
    """The promise that holds; None: none."""
    ended_s: float | None = None
    outcome: str = "undecided"
    version: int = 0
    changes: int = 0
    joins_s: float = 0.0
    """Until when it goes on at the speed before, ``old_speed``, from ``old_ready_s`` on: others start meanwhile."""
    base: tuple[Slot, ...] = ()
    old_speed: float = 0.0
    old_ready_s: float = 0.0
    measured: set[int] = field(default_factory=set)
    profiling: bool = False

    def speed(self) -> float:
        known = [v for n, v in self.truth.items() if n <= len(self.slots)]
        smallest = min(self.truth)
        return max(known) if known else self.truth[smallest] * len(self.slots) / smallest

    def advance(self, now: float) -> None:
        if self.slots:
            self.left -= self.old_speed * max(0.0, min(now, self.joins_s) - max(self.as_of_s, self.old_ready_s))
            self.left -= self.speed() * max(0.0, now - max(self.as_of_s, self.ready_s))
            self.left = max(0.0, self.left)
        self.as_of_s = now

    def ends_s(self) -> float | None:
        if not self.slots or self.speed() <= 0:
            return None
        left, began_s = self.left, max(self.as_of_s, self.old_ready_s)
        if self.old_speed > 0.0 and self.joins_s > began_s:
            if left <= self.old_speed * (self.joins_s - began_s):
                return began_s + left / self.old_speed + self.job.costs.tail_s
            left -= self.old_speed * (self.joins_s - began_s)
        return max(self.as_of_s, self.ready_s) + left / self.speed() + self.job.costs.tail_s


class World:
    """Drives a real Scheduler and checks every decision as it is made."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        reports: bool = False,
        gang_started: bool = False,
        lag_s: float = 0.0,
        joint: bool = False,
        outlier: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.scheduler = scheduler
        self.nodes: dict[str, Node] = {node.node_id: node for node in scheduler.nodes()}
        self.runs: dict[str, Run] = {}
        self.now = 0.0
        self.queue: list[tuple[float, int, int, object]] = []
        self.count = 0
        self.wake_s: float | None = None
        self.log: list[tuple[float, de.Decision]] = []
        self.gang_started = gang_started
        self.reports = reports
        self.lag_s = lag_s
        self.joint = joint
        self.outlier = outlier
        """For each job in turn, which of its reports of speed is wrong, and by how much; none: no speeds are told."""
        self.spoken: dict[str, int] = {}
        self.reported: list[ev.GangStarted | ev.JobProgressed] = []

    # -- what happens ----------------------------------------------------------------------------------------------

    def at(self, when: float, event: object, order: int = 1) -> None:
        self.count += 1
        heapq.heappush(self.queue, (when, order, self.count, event))

    def submit(self, when: float, job: Job, truth: dict[int, float] | None = None) -> None:
        curve = truth or (dict(job.curve.steps_per_s) if job.curve else {1: 1.0})
        self.at(when, ("submit", job, curve))

    def submit_together(self, when: float, jobs: Sequence[Job]) -> None:
        self.at(when, ("crowd", jobs))

    def run(self, until: float = 1e9, steps: int = 20_000) -> None:
        while self.queue and steps:
            steps -= 1
            when, _, _, event = self.queue[0]
            if when > until:
                break
            heapq.heappop(self.queue)
            self.now = max(self.now, when)
            self._happen(event)
            self._tell_reports()
        assert steps, "the world does not come to rest"

    def _happen(self, event: object) -> None:
        match event:
            case ("submit", job, truth):
                self.runs[job.job_id] = Run(job, truth, job.total_steps or 0.0, as_of_s=self.now)
                self.tell(ev.JobSubmitted(job))
            case ("crowd", jobs):
                for job in jobs:
                    self.runs[job.job_id] = Run(job, dict(job.curve.steps_per_s), job.total_steps, as_of_s=self.now)
                self.obey(self.scheduler.submitted(jobs, self.now))
            case ("end", job_id, version):
                run = self.runs[job_id]
                if run.version == version and run.ended_s is None:
                    run.advance(self.now)
                    run.slots, run.ended_s, run.outcome = (), self.now, "finished"
                    self.tell(ev.JobFinished(job_id))
            case ("started", job_id, version):
                run = self.runs[job_id]
                if run.version == version and run.ended_s is None:
                    self._report(ev.GangStarted(job_id, Placement(run.slots)))
            case ("report", job_id, version):
                run = self.runs[job_id]
                if run.version == version and run.ended_s is None:
                    run.advance(self.now)
                    self._report(ev.JobProgressed(job_id, run.left, steps_per_s=self._told_speed(run)))
            case ("measured", job_id, version):
                run = self.runs[job_id]
                if run.version == version and run.ended_s is None:
                    run.advance(self.now)
                    self.tell(ev.JobProgressed(job_id, run.left))
                    if run.version == version:
                        self.tell(ev.JobMeasured(job_id, len(run.slots), run.speed(), run.job.costs))
            case ("wake", when):
                if self.wake_s == when:
                    self.wake_s = None
                    self.tell(ev.WakeUp())
            case ev.JobCancelled(job_id) | ev.JobFailed(job_id):
                if job_id in self.runs and self.runs[job_id].ended_s is None:
                    run = self.runs[job_id]
                    run.slots, run.ended_s, run.outcome = (), self.now, "cancelled"
                    run.version += 1
                    self.tell(event)
            case ev.GangLost(job_id):
                run = self.runs.get(job_id)
                if run and run.ended_s is None and run.slots:
                    run.advance(self.now)
                    run.slots = ()
                    run.version += 1
                    self.tell(event)
            case ev.GangReformed(job_id, placement):
                run = self.runs.get(job_id)
                living = () if run is None else tuple(slot for slot in run.slots if slot not in placement.slots)
                if run and run.ended_s is None and 0 < len(living) < len(run.slots) and run.ready_s <= self.now:
                    self._lose_workers(run, living[: 1 << (len(living).bit_length() - 1)])
            case ev.JobAmended(job_id):
                if job_id in self.runs and self.runs[job_id].ended_s is None:
                    self.tell(event)
            case ev.NodeLost(node_id):
                if self.nodes.pop(node_id, None) is not None:
                    for run in self.runs.values():
                        if any(slot.node_id == node_id for slot in run.slots):
                            run.advance(self.now)
                            run.slots = ()
                            run.version += 1
                    self.tell(event)
            case ev.NodeJoined(node):
                self.nodes[node.node_id] = node
                self.tell(event)
            case _:
                self.tell(event)

    def _report(self, event: ev.GangStarted | ev.JobProgressed) -> None:
        """Tell it at once, or with all others that are reported at this moment."""
        if self.joint:
            self.reported.append(event)
        else:
            self.tell(event)

    def _tell_reports(self) -> None:
        following = self.queue[0] if self.queue else (math.inf, 0, 0, None)
        if self.reported and following[0] > self.now:
            reports, self.reported = self.reported, []
            self.obey(self.scheduler.reported(reports, self.now))

    def tell(self, event: object) -> list[de.Decision]:
        decisions = self.scheduler.handle(event, self.now)  # type: ignore[arg-type]  # made of real events
        self.obey(decisions)
        return decisions

    # -- what the scheduler wants ----------------------------------------------------------------------------------

    def obey(self, decisions: list[de.Decision]) -> None:
        assert sum(isinstance(d, de.WakeMeAt) for d in decisions) <= 1
        self.wake_s = None
        resized: list[Run] = []
        for decision in decisions:
            self.log.append((self.now, decision))
            match decision:
                case de.Admit(job_id, terms, deadline):
                    self.runs[job_id].deadline_s = deadline
                    self.runs[job_id].outcome = str(terms)
                    self.runs[job_id].profiling = False
                case de.Reject(job_id):
                    run = self.runs[job_id]
                    run.slots, run.ended_s, run.outcome = (), self.now, "rejected"
                    run.version += 1
                case de.Amended(job_id, deadline):
                    if self.runs[job_id].outcome != "undecided":
                        self.runs[job_id].deadline_s = deadline
                case de.Suspend(job_id):
                    self._change(self.runs[job_id], ())
                case de.Resize(job_id, placement, purpose):
                    run = self.runs[job_id]
                    run.profiling = purpose is de.Purpose.PROFILE
                    self._change(run, placement.slots)
                    resized.append(run)
                case de.WakeMeAt(at):
                    assert at > self.now
                    self.wake_s = at
                    self.at(at + self.lag_s, ("wake", at), 3)
        self.check_slots()

    def _change(self, run: Run, slots: tuple[Slot, ...]) -> None:
        assert run.ended_s is None, f"{run.job.job_id} has ended"
        run.advance(self.now)
        costs = run.job.costs
        if slots:
            most = run.job.max_workers or 1 << 30
            assert len(slots) & (len(slots) - 1) == 0
            assert run.job.min_workers <= len(slots) <= most
            fresh = not run.slots or (run.starting and run.ready_s > self.now + EPS_S)
            run.starting = fresh
            if fresh:
                run.old_speed, run.base = 0.0, ()
            elif run.joins_s <= self.now:  # else the workers that were to join are given up, and others start
                run.old_speed, run.old_ready_s, run.base = run.speed(), run.ready_s, run.slots
            run.joins_s = self.now if fresh or set(slots) <= set(run.base) else self.now + costs.join_s
            run.ready_s = run.joins_s + (costs.startup_s if fresh else costs.pause_s)
        run.slots = slots
        run.version += 1
        run.changes += 1
        if not slots:
            return
        if self.gang_started:
            self.at(run.ready_s, ("started", run.job.job_id, run.version), 2)
        if run.profiling:
            self.at(run.ready_s + 20.0, ("measured", run.job.job_id, run.version))
        if (end := run.ends_s()) is not None:
            self.at(end, ("end", run.job.job_id, run.version), 0)
            parts = 8 if self.outlier else 2
            for part in range(1, parts if self.reports else 0):
                self.at(run.ready_s + (end - run.ready_s) * part / parts, ("report", run.job.job_id, run.version))

    def _told_speed(self, run: Run) -> float | None:
        """What a report says of the speed: as it is, but for one of each job."""
        if not self.outlier:
            return None
        number = self.spoken[run.job.job_id] = self.spoken.get(run.job.job_id, -1) + 1
        wrong, factor = self.outlier[list(self.runs).index(run.job.job_id) % len(self.outlier)]
        return run.speed() * (factor if number == wrong else 1.0)

    def _lose_workers(self, run: Run, living: tuple[Slot, ...]) -> None:
        """Some of its workers are gone, and the others make steps from now on."""
        run.advance(self.now)
        run.slots, run.ready_s, run.starting = living, self.now, False
        run.version += 1
        if run.profiling:
            self.at(self.now + 20.0, ("measured", run.job.job_id, run.version))
        if (end := run.ends_s()) is not None:
            self.at(end, ("end", run.job.job_id, run.version), 0)
        self.tell(ev.GangReformed(run.job.job_id, Placement(living)))

    def check_slots(self) -> None:
        """No slot twice, none that is busy or gone."""
        seen: dict[Slot, str] = {}
        for run in self.runs.values():
            for slot in run.slots:
                assert slot not in seen, f"{slot} is given to {seen[slot]} and {run.job.job_id} at {self.now}"
                seen[slot] = run.job.job_id
                node = self.nodes.get(slot.node_id)
                assert node is not None
                assert slot.index < node.slots
                assert slot.index not in node.busy

    # -- what came of it -------------------------------------------------------------------------------------------

    def late(self) -> list[str]:
        """Jobs whose promise was not kept."""
        return [
            f"{run.job.job_id}: deadline {run.deadline_s}, ended {run.ended_s} ({run.outcome})"
            for run in self.runs.values()
            if run.deadline_s is not None
            and run.outcome != "cancelled"
            and (run.ended_s is None or run.ended_s > run.deadline_s + EPS_S)
        ]

    def verdict(self, job_id: str) -> de.Admit | de.Reject:
        return next(d for _, d in self.log if isinstance(d, de.Admit | de.Reject) and d.job_id == job_id)

    def deadline_moved(self, job_id: str, deadline: float) -> None:
        self.runs[job_id].job = replace(self.runs[job_id].job, deadline_s=deadline)
