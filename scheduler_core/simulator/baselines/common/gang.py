"""Base class of the comparison policies: events in, gangs out; a subclass only decides each job's present size.

It tracks live jobs and their progress between events with the costs that the simulator charges (every start, resize and
migration stops a job), places gangs on buddy blocks and moves running gangs only if there is no block otherwise. It
decides for the present and books nothing ahead, so by itself it promises nothing: every job is admitted as best effort.
Nothing is profiled: a job without a curve runs at its requested size, and its speed is learned there.

Knows no clock, disk, network or thread, and nothing of the future: a subclass sees only the jobs submitted so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from elasticflow_airflow.scheduler_core.cluster.nodes import nodes_after, slots_cut_off
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import (
    Admit,
    Amended,
    AmendRejected,
    AtRisk,
    Decision,
    OnTrack,
    Purpose,
    Reject,
    Resize,
    Suspend,
    Terms,
    Wait,
    WakeMeAt,
)
from elasticflow_airflow.scheduler_core.model.explain import change
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    OnReject,
    Phase,
)
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.policy_state import LEAVE_S, PolicyState
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room, seat
from elasticflow_airflow.times import duration, moment


@dataclass(frozen=True, slots=True)
class Claim:
    """What one job should hold now: the first of ``sizes`` for which the claims before it leave room.

    Sizes are powers of two at which the job was measured. ``why`` is a part of a sentence for the user.
    """

    job_id: str
    sizes: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Claims in order of priority; a job without a claim holds no slots.

    ``look_again_s``: when to ask again if no event comes before; None: only at events.
    """

    claims: Sequence[Claim]
    look_again_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """The input of a policy: the competing jobs in order of arrival, the room that they share, and the time.

    Jobs whose last step is made keep their slots until they leave; neither they nor their slots are included. The
    policy may use up ``room``.
    """

    jobs: Sequence[JobView]
    room: Room
    now: float


class GangPolicy(PolicyState, ABC):
    """A policy that sizes gangs for the present. Deterministic.

    Subclasses implement :meth:`wanted` and may override :meth:`judge`.
    """

    promises: ClassVar[bool] = False
    """Whether any amended deadline may break a promise, so that each amendment must be judged."""

    # -- what a subclass decides -----------------------------------------------------------------------------------

    @abstractmethod
    def wanted(self, scene: Scene) -> Wanted:
        """Return which jobs should hold how many slots now. Called at every event.

        A policy that decides in rounds returns the present holdings of all jobs until the round is over.
        """

    def judge(self, newcomer: JobView) -> Admit | Reject | Wait:
        """Decide whether to admit a job; it is not in ``self.jobs`` yet unless it waits or is amended.

        ``Admit`` with a deadline is a promise: a subclass that makes one must be able to keep it.
        """
        return self.take(newcomer, "runs when it is its turn; no deadline is promised")

    # -- the port --------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event and return the decisions that follow. Events of jobs that have left are ignored.

        Raises:
            ValueError: a job is submitted whose id is live already.
        """
        match event:
            case ev.JobSubmitted():
                return self._submitted(event.job, now)
            case ev.WakeUp():
                return self._replan(now, "it is its turn", retry=True)
            case ev.NodeJoined() | ev.NodeLost() | ev.NodeDraining():
                return self._nodes_changed(event, now)
        job = self.jobs.get(event.job_id)
        if job is None:
            return self._replan(now, "another job has left")
        match event:
            case ev.JobFinished() | ev.JobFailed() | ev.JobCancelled():
                del self.jobs[job.job_id]
                return self._replan(now, f"{job.job_id} has left", retry=True)
            case ev.JobProgressed():
                expected = self.projected_finish_s(job.job_id)
                self._progressed(job, event, now)
                if self._as_expected(job, expected, now):
                    return self._wake(now)
                return self._replan(now, f"{job.job_id} reported its progress")
            case ev.JobMeasured():
                job.settle(self.layout, self.config, now)
                if event.costs is not None:
                    job.job = replace(job.job, costs=event.costs)
                if not event.failed and event.steps_per_s is not None and event.steps_per_s > 0.0:
                    self._know(job, event.workers, event.steps_per_s)
                job.changed()
                return self._replan(now, f"{job.job_id} was measured with {event.workers}")
            case ev.JobAmended():
                return self._amended(job, event, now)
            case ev.JobParked():
                if job.phase is not Phase.PARKED:
                    job.settle(self.layout, self.config, now)
                    job.parked_from, job.phase = job.phase, Phase.PARKED
                return self._replan(now, f"{job.job_id} is parked", retry=True)
            case ev.JobUnparked():
                if job.phase is Phase.PARKED:
                    job.phase, job.parked_from = job.parked_from or Phase.ADMITTED, None
                    job.waiting_since_s = now
                return self._replan(now, f"the owner of {job.job_id} is back")
            case ev.GangStarted():
                expected = self.projected_finish_s(job.job_id)
                self._gang_started(job, event.placement, now)
                if self._as_expected(job, expected, now):
                    return self._wake(now)
                return self._replan(now, f"{job.job_id} has started")
            case ev.GangLost():
                self._lose_gang(job, now)
                return self._replan(now, f"the gang of {job.job_id} was lost")
            case ev.GangReformed():
                self._gang_reformed(job, event.placement, now)
                return self._replan(now, f"{job.job_id} goes on with {job.size}")
            case ev.SlotSlow():
                self._mark_slow(job, event, now)
                return self._replan(now, f"a worker of {job.job_id} is slow on {event.slot.node_id}:{event.slot.index}")
        raise TypeError(f"unknown event {event!r}")

    # -- for subclasses --------------------------------------------------------------------------------------------

    def take(self, job: JobView, reason: str) -> Admit:
        """Admit a job without a promise."""
        return Admit(job.job_id, Terms.BEST_EFFORT, None, None, Reason(reason))

    def refuse(self, job: JobView, reason: str) -> Admit | Reject | Wait:
        """Return the submitter's choice (``on_reject``) for a job whose deadline cannot be promised."""
        spec = job.job.job
        choice, deadline = spec.on_reject, spec.deadline_s
        if choice is OnReject.BEST_EFFORT:
            return self.take(job, f"cannot be promised: {reason}; runs as best effort")
        if choice is OnReject.WAIT and deadline is not None:
            until = deadline - job.least_time_s
            if until > job.now + TOLERANCE_S:
                return Wait(job.job_id, Reason(f"waits for capacity until {moment(until)}: {reason}"), until)
        return Reject(job.job_id, Reason(reason), None)

    def keeps(self, job: GangJob) -> bool:  # noqa: ARG002  (by default the same for every job)
        """Whether a job whose last step is made keeps its slots until it has left, even if another job wants them."""
        return True

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Return slots (masks) out of ``free`` for the claims in ``wanted``, and the reason for each job."""
        grants, reasons = self._grant(wanted, Room(self.layout, free))
        held = {job_id: self.jobs[job_id].mask for job_id, _ in grants}
        return seat(self.layout, free, grants, held), reasons

    # -- admission -------------------------------------------------------------------------------------------------

    def _submitted(self, job: Job, now: float) -> list[Decision]:
        if job.job_id in self.jobs:
            raise ValueError(f"job {job.job_id!r} is live already; a new incarnation needs the old one to end first")
        live = self.live_job(job, now)
        if self._nodes and not live.sizes(self.layout.largest_block, self.config):
            reason = f"no block of at least {job.min_workers} slots exists in this cluster, or none it was measured at"
            return [Reject(job.job_id, Reason(reason), None), *self._wake(now)]
        verdict = self.judge(self.view(live, now))
        if isinstance(verdict, Reject):  # leaves no trace, so a plan that was rolled forward stays exact
            return [verdict, *self._wake(now)]
        self._numbers += 1
        self.jobs[job.job_id] = live
        self._accept(live, verdict)
        return [verdict, *self._replan(now, "slots are free")]

    def _accept(self, job: GangJob, verdict: Admit | Wait) -> None:
        job.phase = Phase.WAITING if isinstance(verdict, Wait) else Phase.ADMITTED
        job.best_effort = isinstance(verdict, Wait) or verdict.terms is Terms.BEST_EFFORT
        if isinstance(verdict, Admit) and verdict.deadline_s is not None:
            job.job = replace(job.job, deadline_s=verdict.deadline_s)
            job.changed()

    def _retry(self, now: float) -> list[Decision]:
        """Judge waiting jobs again."""
        out: list[Decision] = []
        for job in [job for job in self.jobs.values() if job.phase is Phase.WAITING]:
            out += self._conclude(job, self.judge(self.view(job, now)))
        return out

    def _conclude(self, job: GangJob, verdict: Admit | Reject | Wait) -> list[Decision]:
        """Apply a verdict on a waiting job; nothing changes if it keeps waiting."""
        if isinstance(verdict, Wait):
            return []
        if isinstance(verdict, Reject):
            del self.jobs[job.job_id]
        else:
            self._accept(job, verdict)
        return [verdict]

    def _amended(self, job: GangJob, event: ev.JobAmended, now: float) -> list[Decision]:
        if event.max_workers is not None:
            job.job = replace(job.job, max_workers=event.max_workers)
            job.changed()
            return self._replan(now, f"at most {event.max_workers} workers can train {job.job_id}", retry=True)
        before, promised = job.job, job.promised
        value = before.value if event.value is None else event.value
        deadline = before.deadline_s if event.deadline_s is None else event.deadline_s
        if event.best_effort:
            deadline, job.best_effort = None, True
            job.phase = Phase.ADMITTED if job.phase is Phase.WAITING else job.phase
        job.job = replace(before, value=value, deadline_s=deadline)
        job.changed()
        sooner = promised and deadline is not None and deadline < (before.deadline_s or deadline)
        other = self.promises and deadline is not None and deadline != before.deadline_s
        if sooner or (other and job.phase is not Phase.WAITING):
            verdict = self.judge(self.view(job, now))
            if not isinstance(verdict, Admit) or verdict.deadline_s is None:
                job.job = before
                job.changed()
                offer = verdict.earliest_deadline_s if isinstance(verdict, Reject) else None
                answer = AmendRejected(job.job_id, verdict.reason, offer)
                return [answer, *self._wake(now)]
            job.best_effort = False
        return [
            Amended(job.job_id, deadline, value, None),
            *self._replan(now, f"{job.job_id} was amended", retry=True),
        ]

    # -- what becomes known ----------------------------------------------------------------------------------------

    def _nodes_changed(self, event: ev.NodeJoined | ev.NodeLost | ev.NodeDraining, now: float) -> list[Decision]:
        nodes, why = nodes_after(self._nodes, event)
        cut = {job.job_id: slots_cut_off(job.placement, nodes) for job in self.jobs.values()}
        self._change_nodes(nodes.values(), now)
        told: list[Decision] = [Suspend(job_id, reason) for job_id, reason in cut.items() if reason]
        return told + self._replan(now, str(why), retry=True)

    def _as_expected(self, job: GangJob, before_s: float | None, now: float) -> bool:
        """Whether a report moves a job's end so little that no replanning is needed."""
        after_s = self.projected_finish_s(job.job_id)
        if before_s is None or after_s is None or before_s <= now or after_s <= now:
            return False
        moved, config = abs(after_s - before_s), self.config
        return moved <= max(config.deviation_s, config.deviation_fraction * (before_s - now))

    # -- from wishes to slots --------------------------------------------------------------------------------------

    def _replan(self, now: float, why: str, *, retry: bool = False) -> list[Decision]:
        """Ask the subclass what is wanted now, and issue the decisions."""
        out = self._retry(now) if retry else []
        usable, views, kept = self.usable(now), [], 0
        for job in self.jobs.values():
            if job.mask:
                job.settle(self.layout, self.config, now)
            if job.phase is not Phase.ADMITTED:
                continue
            view = self.view(job, now)
            if view.has_trained and self.keeps(job):
                kept |= job.mask  # its last step is made, and its end will be reported soon
            elif view.speeds:
                views.append(view)
        free = usable & ~kept
        wanted = self.wanted(Scene(views, Room(self.layout, free), now))
        seats, reasons = self.seats(wanted, free)
        self._order(seats, kept, reasons, now, out, why)
        self._warn(now, out)
        availability = self.layout.availability
        times = [t - LEAVE_S for t, _ in availability.drains] + [t for t, _ in availability.avoided]
        if wanted.look_again_s is not None:
            times.append(wanted.look_again_s)
        later = [t for t in times if t > now + TOLERANCE_S]
        if any(job.phase is Phase.WAITING for job in self.jobs.values()):
            later += self._hopeless_times(now)
        self._wake_s = min(later, default=None)
        return out + self._wake(now)

    def _warn(self, now: float, out: list[Decision]) -> None:
        """Announce promises that no size can keep any more, and those that can be kept again."""
        for job in self.jobs.values():
            deadline = job.job.deadline_s
            if not job.promised or deadline is None:
                continue
            view = self.view(job, now)
            soonest = min((view.end_s(size) for size in view.speeds), default=INFINITY) + view.tail_s
            lost = soonest > deadline + TOLERANCE_S
            if lost and not job.at_risk and view.left > 0.0:
                reason = f"ends {duration(soonest - deadline)} late even if it runs from now on as fast as it can"
                out.append(AtRisk(job.job_id, deadline, soonest, Reason(reason)))
                job.at_risk = True
            elif job.at_risk and not lost:
                out.append(OnTrack(job.job_id, deadline, soonest))
                job.at_risk = False

    def _wake(self, now: float) -> list[Decision]:
        """Repeat the last requested wake-up."""
        return [] if self._wake_s is None else [WakeMeAt(max(self._wake_s, now))]

    def _hopeless_times(self, now: float) -> list[float]:
        times = [
            job.job.deadline_s - self.view(job, now).least_time_s
            for job in self.jobs.values()
            if job.phase is Phase.WAITING and job.job.deadline_s is not None
        ]
        return [max(t, now + TOLERANCE_S) for t in times]

    def _grant(self, wanted: Wanted, room: Room) -> tuple[list[tuple[str, int]], dict[str, str]]:
        grants: list[tuple[str, int]] = []
        reasons: dict[str, str] = {}
        for claim in wanted.claims:
            size = next((size for size in claim.sizes if room.fits(size)), 0)
            if size:
                room.take(size)
                grants.append((claim.job_id, size))
                reasons[claim.job_id] = claim.why
        return grants, reasons

    def _order(
        self,
        seats: dict[str, int],
        kept: int,
        reasons: dict[str, str],
        now: float,
        out: list[Decision],
        why: str,
    ) -> None:
        """Suspend and resize so that every job holds exactly its assigned slots."""
        growing: list[tuple[GangJob, int]] = []
        for job in self.jobs.values():
            target = seats.get(job.job_id, job.mask & kept)
            if target == job.mask:
                continue
            if target:
                growing.append((job, target))
                continue
            reason = "parked: its owner is away, so it holds no slots until one is back"
            if job.phase is not Phase.PARKED:
                reason = f"gives up its slots: {why}"
            out.append(Suspend(job.job_id, Reason(reason)))
            job.hold(self.layout, self.config, 0, now)
        for job, target in growing:
            before = job.size
            cost = job.work(self.layout, self.config).standstill_s(now)
            job.hold(self.layout, self.config, target, now)
            end = self.projected_finish_s(job.job_id)
            resized = change(
                before,
                job.size,
                cost_s=cost,
                saved_s=None,
                end_s=INFINITY if end is None else end,
                why=Reason(reasons.get(job.job_id) or why),
            )
            out.append(Resize(job.job_id, job.placement, Purpose.TRAIN, resized))
