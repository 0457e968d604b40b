"""The scheduler as a pure state machine: events in, decisions out. Knows no clock, disk, network or thread.

Two shells run the same object: the service (real clock and engine) and the simulator (virtual clock, modelled engine).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticflow_airflow.scheduler_core import events as ev
from elasticflow_airflow.scheduler_core.admission import Admission, Verdict
from elasticflow_airflow.scheduler_core.board import Board
from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.decisions import (
    Admit,
    Amended,
    AmendRejected,
    Decision,
    Reject,
    Suspend,
    Terms,
    Wait,
)
from elasticflow_airflow.scheduler_core.draft import Draft, mask_at
from elasticflow_airflow.scheduler_core.explain import duration, moment
from elasticflow_airflow.scheduler_core.jobs import LiveJob, ProfilingRun
from elasticflow_airflow.scheduler_core.planner import Planner
from elasticflow_airflow.scheduler_core.profiling import candidate_sizes, enough, wait_limit
from elasticflow_airflow.scheduler_core.values import (
    Job,
    JobState,
    Node,
    OnReject,
    Phase,
    Placement,
    Plan,
    ScalingCurve,
)
from elasticflow_airflow.scheduler_core.work import INFINITY, TOLERANCE_S, Course, Holding
from elasticflow_airflow.scheduler_core.work import plan_of as public_plan


class Scheduler:
    """Admits jobs with deadlines only with a plan that proves them, and sizes all jobs while they run.

    Deterministic: the same events at the same times give the same decisions.
    """

    def __init__(self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        self.config = config or SchedulerConfig()
        self._board = Board(self.config, nodes)
        self._numbers = 0
        self._promises = 0

    # -- looking ---------------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        """The nodes as last told."""
        return tuple(self._board.nodes.values())

    def states(self) -> tuple[JobState, ...]:
        """Everything remembered of every live job, in order of arrival; input of :meth:`restore`."""
        return tuple(job.state(self._board.layout) for job in self._board.jobs.values())

    def plan_of(self, job_id: str) -> Plan | None:
        """The stored plan of a live job from its last change on; None while it has none.

        Raises:
            KeyError: there is no such live job.
        """
        job = self._job(job_id)
        if job.course is None:
            return None
        work, course = job.work(self._board.layout, self.config), job.course
        if not course.holdings:
            return Plan(job_id, (), course.finish_s, course.promised_s)
        first = course.holdings[0]
        if first.mask == job.mask:  # the gang that makes steps since as_of_s goes on
            going_on = Holding(min(first.start_s, job.as_of_s), first.end_s, first.mask)
            course = Course((going_on, *course.holdings[1:]), course.finish_s, course.promised_s)
        return public_plan(work, course, max(job.as_of_s, course.holdings[0].start_s))

    def projected_finish_s(self, job_id: str) -> float | None:
        """When the last step of a live job is expected, by its plan; None when that is not known."""
        course = self._job(job_id).course
        return None if course is None or course.finish_s == INFINITY else course.finish_s

    def _job(self, job_id: str) -> LiveJob:
        job = self._board.jobs.get(job_id)
        if job is None:
            raise KeyError(f"no live job {job_id!r}; known are {sorted(self._board.jobs)}")
        return job

    # -- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Take in one event and say what follows from it. Events of jobs that are gone are ignored.

        Raises:
            ValueError: a job is submitted whose id is live already, or whose fields contradict each other.
        """
        match event:
            case ev.JobSubmitted():
                return self._submitted(event.job, now)
            case ev.WakeUp():
                return self._replan(now, "the plan of the cluster says so", retry=True)
            case ev.NodeJoined() | ev.NodeLost() | ev.NodeDraining():
                return self._nodes_changed(event, now)
            case _:
                job = self._board.jobs.get(event.job_id)
                if job is None:
                    return self._board.wake(now)
        match event:
            case ev.JobFinished() | ev.JobFailed() | ev.JobCancelled():
                del self._board.jobs[job.job_id]
                return self._replan(now, f"{job.job_id} has left", retry=True)
            case ev.JobProgressed():
                return self._progressed(job, event, now)
            case ev.JobMeasured():
                return self._measured(job, event, now)
            case ev.JobAmended():
                return self._amended(job, event, now)
            case ev.JobParked():
                return self._parked(job, now)
            case ev.JobUnparked():
                return self._unparked(job, now)
            case ev.GangStarted():
                return self._gang_started(job, event.placement, now)
            case ev.GangLost():
                self._lose_gang(job, now)
                return self._replan(now, f"the gang of {job.job_id} was lost", retry=False)
        raise TypeError(f"unknown event {event!r}")

    def restore(self, states: Iterable[JobState], now: float) -> list[Decision]:
        """Take over live jobs after a crash: promised ones stay promised. Only on a scheduler without jobs.

        Raises:
            ValueError: there are live jobs already.
        """
        if self._board.jobs:
            raise ValueError("restore() needs a scheduler that has no jobs yet")
        layout = self._board.layout
        for state in states:
            job = _job_of(state, layout.mask_of(state.placement))
            if job.mask.bit_count() != state.placement.workers:
                job.placement, job.mask = Placement(), 0
            if state.reserved and all(
                layout.mask_of(r.placement).bit_count() == r.placement.workers for r in state.reserved
            ):
                holdings = tuple(Holding(r.start_s, r.end_s, layout.mask_of(r.placement)) for r in state.reserved)
                job.course = Course(holdings, INFINITY, INFINITY)
                self._board.late.add(job.job_id)
            elif job.promised:
                self._board.broken = True
            self._board.jobs[job.job_id] = job
            self._numbers = max(self._numbers, job.number + 1)
            self._promises = max(self._promises, job.promise + 1)
        spanning = any(len({slot.node_id for slot in job.placement.slots}) > 1 for job in self._board.jobs.values())
        if spanning:
            self._board.change_nodes(list(self._board.nodes.values()))
        return self._replan(now, "the scheduler was restarted", retry=True)

    # -- submission ------------------------------------------------------------------------------------------------

    def _submitted(self, job: Job, now: float) -> list[Decision]:
        if job.job_id in self._board.jobs:
            raise ValueError(f"job {job.job_id!r} is live already; a new incarnation needs the old one to end first")
        if job.curve is None and not job.profile and job.deadline_s is not None:
            reason = "its speed is not known and cannot be measured (a script that reports nothing)"
            return self._take_best_effort(
                self._new(job, now), now, f"{reason}: runs as best effort; no deadline is kept"
            )
        live = self._new(job, now)
        if job.deadline_s is None:
            return self._take_best_effort(live, now, "best effort: runs on slots that no promise needs")
        if job.curve is None:
            return self._begin_profiling(live, now)
        return self._decide(live, now)

    def _new(self, job: Job, now: float) -> LiveJob:
        return LiveJob(
            job=job,
            phase=Phase.ADMITTED,
            best_effort=job.deadline_s is None,
            number=self._numbers,
            remaining=job.total_steps,
            as_of_s=now,
            waiting_since_s=now,
        )

    def _register(self, live: LiveJob) -> None:
        if live.job_id not in self._board.jobs:
            self._board.jobs[live.job_id] = live
            self._numbers += 1

    def _take_best_effort(self, live: LiveJob, now: float, reason: str) -> list[Decision]:
        live.phase, live.best_effort, live.at_risk = Phase.ADMITTED, True, False
        live.profiling = None
        live.course = None
        live.changed()
        self._register(live)
        rest = self._replan(now, "slots are free", retry=False)
        plan = self._plan_now(live, now)
        return [Admit(live.job_id, Terms.BEST_EFFORT, None, plan, reason), *rest]

    def _plan_now(self, live: LiveJob, now: float) -> Plan | None:
        """The plan of a job just decided on; None without a known end."""
        if live.course is None or live.course.finish_s == INFINITY:
            return None
        return self.plan_of(live.job_id)

    def _begin_profiling(self, live: LiveJob, now: float) -> list[Decision]:
        deadline = live.job.deadline_s
        if deadline is not None and deadline <= now:
            return [
                Reject(live.job_id, f"the deadline {moment(deadline)} is past: it is {moment(now)} now", None),
                *self._board.wake(now),
            ]
        if not candidate_sizes(live, 1 << (self._board.layout.levels - 1)) or not self._board.nodes:
            reason = f"no block of at least {live.job.min_workers} slots exists in this cluster"
            return [Reject(live.job_id, reason, None), *self._board.wake(now)]
        live.phase = Phase.PROFILING
        self._register(live)
        return self._replan(now, "a job has to be measured", retry=False)

    def _decide(self, live: LiveJob, now: float) -> list[Decision]:
        """Admission of a job with a known speed; with the consequences its submitter asked for."""
        known = live.job_id in self._board.jobs
        if not known:
            board = self._board
            # a rejected arrival must leave no trace: time passes in the stored courses only when it stays
            stale = board.broken or bool(board.late) or self._behind(now)
            if stale:
                before = self._refresh_and_plan(now)
            else:
                before = []
        else:
            before = []
        verdict, planner = self._ask(live, now)
        if verdict.draft is not None:
            return before + self._admit(live, verdict, planner, Terms.DEADLINE, now)
        return before + self._refuse(live, verdict, now)

    def _behind(self, now: float) -> bool:
        for job in self._board.jobs.values():
            course = job.course
            if course is not None and course.holdings:
                first = course.holdings[0]
                if first.end_s > now and first.start_s < now - TOLERANCE_S and first.mask != job.mask:
                    return True
        return False

    def _refresh_and_plan(self, now: float) -> list[Decision]:
        return [d for d in self._replan(now, "the plan of the cluster says so", retry=False, wake=False)]

    def _ask(self, live: LiveJob, now: float) -> tuple[Verdict, Planner]:
        planner = Planner(self.config, self._board.layout, [j for j in self._board.jobs.values() if j is not live], now)
        return Admission(planner, live).decide(), planner

    def _admit(self, live: LiveJob, verdict: Verdict, planner: Planner, terms: Terms, now: float) -> list[Decision]:
        assert verdict.draft is not None
        live.phase, live.best_effort, live.at_risk = Phase.ADMITTED, False, False
        live.profiling = None
        live.promise = self._promises
        self._promises += 1
        live.course = verdict.draft.courses[live.job_id]
        live.changed()
        self._register(live)
        out: list[Decision] = []
        self._finish(self._board.planner(now), verdict.draft, now, out, f"{live.job_id} was admitted")
        plan = self.plan_of(live.job_id)
        return [Admit(live.job_id, terms, live.job.deadline_s, plan, verdict.reason), *out, *self._board.wake(now)]

    def _refuse(self, live: LiveJob, verdict: Verdict, now: float) -> list[Decision]:
        job, offer = live.job, verdict.earliest_deadline_s
        known = live.job_id in self._board.jobs
        choice = job.on_reject
        if choice is OnReject.BEST_EFFORT:
            return self._take_best_effort(live, now, f"cannot be promised: {verdict.reason}; runs as best effort")
        if choice is OnReject.RENEGOTIATE and offer is not None and offer <= (job.latest_deadline_s or -INFINITY):
            live.job = replace(job, deadline_s=offer)
            live.changed()
            again, planner = self._ask(live, now)
            if again.draft is not None:
                again.reason = f"the deadline {moment(job.deadline_s or 0.0)} cannot be promised ({verdict.reason}); accepted {moment(offer)} instead: {again.reason}"
                return self._admit(live, again, planner, Terms.RENEGOTIATED, now)
            live.job = job
            live.changed()
        if choice is OnReject.WAIT and job.deadline_s is not None:
            least = live.work(self._board.layout, self.config).least_time_s()
            until = job.deadline_s - least
            if until > now:
                live.phase = Phase.WAITING
                live.course = None
                self._register(live)
                rest = self._replan(now, f"{live.job_id} waits", retry=False) if known else self._board.wake(now)
                if live.said_waiting == "wait":
                    return rest
                live.said_waiting = "wait"
                reason = f"waits for capacity until {moment(until)}: {verdict.reason}"
                return [Wait(live.job_id, reason, until), *rest]
        decision = Reject(live.job_id, self._advice(verdict, job), offer)
        if not known:
            return [decision, *self._board.wake(now)]
        del self._board.jobs[live.job_id]
        return [decision, *self._replan(now, f"{live.job_id} was rejected", retry=False)]

    def _advice(self, verdict: Verdict, job: Job) -> str:
        offer = verdict.earliest_deadline_s
        if offer is None:
            return f"{verdict.reason}; it could run as best effort, or on more capacity"
        return f"{verdict.reason}; the earliest deadline that can be promised now is {moment(offer)}; or submit it as best effort, or add capacity"

    # -- planning --------------------------------------------------------------------------------------------------

    def _replan(self, now: float, why: str, *, retry: bool, wake: bool = True) -> list[Decision]:
        """Make the stored courses true, mend what is broken, use what is free; ``retry``: ask again for who waits."""
        board, out = self._board, list[Decision]()
        board.refresh(now)
        self._expire_profiling(now, out)
        planner = board.planner(now)
        if board.broken:
            draft = planner.fresh(rescue=self.config.rescue_orders) or planner.salvage()
            board.broken = False
        else:
            draft = planner.stored()
        self._finish(planner, draft, now, out, why)
        if retry:
            for job in [j for j in board.jobs.values() if j.phase is Phase.WAITING]:
                out += [d for d in self._decide(job, now) if not _is_wake(d)]
        self._say_waiting(out)
        return out + (board.wake(now) if wake else [])

    def _finish(self, planner: Planner, draft: Draft, now: float, out: list[Decision], why: str) -> None:
        """Complete a draft of promises, prefer a fresh plan if that feeds more jobs, and adopt."""
        draft = planner.complete(draft)
        starved = planner.starved(draft)
        if starved and planner.luxury(draft):
            other = planner.fresh()
            if other is not None:
                other = planner.complete(other)
                if planner.starved(other) < starved:
                    draft = other
        self._board.adopt(draft, now, out, why)

    # -- single events ---------------------------------------------------------------------------------------------

    def _progressed(self, job: LiveJob, event: ev.JobProgressed, now: float) -> list[Decision]:
        board = self._board
        if event.remaining_steps is not None and event.remaining_steps <= 0.0 and job.mask:
            if job.work(board.layout, self.config).left_at(now) <= 0.0:
                return board.wake(now)  # its last step was expected before; the tail has been counted since then
        job.settle(board.layout, self.config, now)
        if event.total_steps is not None:
            job.job = replace(job.job, total_steps=event.total_steps)
            if event.remaining_steps is None and job.remaining is None:
                job.remaining = event.total_steps
        if event.remaining_steps is not None:
            job.remaining = max(0.0, event.remaining_steps)
            job.ever_started = job.ever_started or bool(job.mask)
        if event.steps_per_s is not None and event.steps_per_s > 0.0 and job.mask:
            self._learn_speed(job, event.steps_per_s)
        job.changed()
        if job.course is not None:
            board.late.add(job.job_id)
        if job.phase is Phase.PROFILING:
            if job.measured and enough(job, 1 << (board.layout.levels - 1), now, self.config):
                return self._decide_measured(job, now)
            return board.wake(now)
        return self._replan(now, f"{job.job_id} reported its progress", retry=False)

    def _learn_speed(self, job: LiveJob, steps_per_s: float) -> None:
        """Scale the curve towards the speed seen at the present size."""
        size, curve = job.mask.bit_count(), job.job.curve
        known = curve.steps_per_s.get(size) if curve is not None else None
        if curve is not None and known is not None:
            factor = 1.0 + self.config.speed_smoothing * (steps_per_s / known - 1.0)
            scaled = ScalingCurve({n: speed * factor for n, speed in curve.steps_per_s.items()})
            job.job = replace(job.job, curve=scaled)
        elif job.phase is not Phase.PROFILING and size & (size - 1) == 0:
            job.job = replace(job.job, curve=ScalingCurve({**(curve.steps_per_s if curve else {}), size: steps_per_s}))

    def _measured(self, job: LiveJob, event: ev.JobMeasured, now: float) -> list[Decision]:
        board = self._board
        job.settle(board.layout, self.config, now)
        if event.costs is not None:
            job.job = replace(job.job, costs=event.costs)
        usable = not event.failed and event.steps_per_s is not None and event.steps_per_s > 0.0
        if job.phase is not Phase.PROFILING:
            if usable and event.steps_per_s is not None:
                known = dict(job.job.curve.steps_per_s) if job.job.curve is not None else {}
                job.job = replace(job.job, curve=ScalingCurve({**known, event.workers: event.steps_per_s}))
            job.changed()
            board.late.add(job.job_id)
            return self._replan(now, f"{job.job_id} was measured with {event.workers}", retry=False)
        if usable and event.steps_per_s is not None:
            job.measured[event.workers] = event.steps_per_s
        else:
            job.failed_sizes.add(event.workers)
        job.changed()
        return self._after_measuring(job, now)

    def _after_measuring(self, job: LiveJob, now: float) -> list[Decision]:
        board = self._board
        job.profiling = None
        largest = 1 << (board.layout.levels - 1)
        over = enough(job, largest, now, self.config)
        if over is None:
            job.course = None
            out = self._replan(now, "the next size is measured", retry=False)
            if (
                job.profiling is not None
                or not job.measured
                or job.job_id not in board.jobs
                or job.phase is not Phase.PROFILING
            ):
                return out
            return [d for d in out if not _is_wake(d)] + self._decide_measured(job, now)
        return self._decide_measured(job, now)

    def _decide_measured(self, job: LiveJob, now: float) -> list[Decision]:
        """Profiling is over: admission on what was measured."""
        if not job.measured:
            reason = "no number of workers could be measured; give scaling_curve= (steps/s by number of workers)"
            if job.job.on_reject is OnReject.BEST_EFFORT:
                return self._take_best_effort(job, now, f"{reason}; runs as best effort")
            del self._board.jobs[job.job_id]
            return [Reject(job.job_id, reason, None), *self._replan(now, f"{job.job_id} was rejected", retry=False)]
        if job.remaining is None:
            return self._board.wake(now)
        job.job = replace(job.job, curve=ScalingCurve(job.measured))
        job.settle(self._board.layout, self.config, now)
        job.course = None
        job.changed()
        return self._decide(job, now)

    def _expire_profiling(self, now: float, out: list[Decision]) -> None:
        """Give up sizes that take too long, and jobs that waited too long for slots to be measured on."""
        for job in list(self._board.jobs.values()):
            if job.phase is not Phase.PROFILING:
                continue
            if job.profiling is not None and now >= job.profiling.until_s - TOLERANCE_S:
                job.failed_sizes.add(job.profiling.size)
                out += [d for d in self._after_measuring(job, now) if not _is_wake(d)]
            elif job.profiling is None and not job.measured:
                limit = wait_limit(job, self.config)
                if limit is not None and now >= limit - TOLERANCE_S:
                    reason = (
                        f"waited {duration(now - job.waiting_since_s)} for slots on which to measure its speed, and the "
                        f"deadline {moment(job.job.deadline_s or 0.0)} comes too near; give scaling_curve= (steps/s by "
                        "number of workers) so that it can be decided on at once, a later deadline, or best effort"
                    )
                    if job.job.on_reject is OnReject.BEST_EFFORT:
                        out += [d for d in self._take_best_effort(job, now, reason) if not _is_wake(d)]
                    else:
                        del self._board.jobs[job.job_id]
                        out.append(Reject(job.job_id, reason, None))

    def _say_waiting(self, out: list[Decision]) -> None:
        for job in self._board.jobs.values():
            if job.phase is Phase.PROFILING and not job.mask:
                if job.said_waiting != "profile":
                    job.said_waiting = "profile"
                    until = wait_limit(job, self.config)
                    out.append(
                        Wait(job.job_id, "waits for slots that no promise needs, to measure its speed on them", until)
                    )
            elif job.phase is Phase.PROFILING:
                job.said_waiting = ""

    def _amended(self, job: LiveJob, event: ev.JobAmended, now: float) -> list[Decision]:
        board, before = self._board, job.job
        value = before.value if event.value is None else event.value
        if event.best_effort:
            job.job = replace(before, value=value, deadline_s=None)
            job.best_effort, job.at_risk = True, False
            if job.phase in (Phase.WAITING, Phase.PROFILING):
                job.phase, job.profiling = Phase.ADMITTED, None
            job.changed()
            return [
                Amended(job.job_id, None, value, None),
                *self._replan(now, f"{job.job_id} gave its deadline up", retry=True),
            ]
        deadline = before.deadline_s if event.deadline_s is None else event.deadline_s
        job.job = replace(before, value=value, deadline_s=deadline)
        job.changed()
        if deadline is None or deadline == before.deadline_s or job.phase is not Phase.ADMITTED:
            out: list[Decision] = [Amended(job.job_id, deadline, value, None)]
            return out + (
                self._replan(now, f"{job.job_id} was amended", retry=True)
                if job.phase is not Phase.ADMITTED
                else board.wake(now)
            )
        board.refresh(now)
        kept = (
            job.course is not None
            and job.promised
            and job.course.promised_s <= deadline - self.config.deadline_margin_s + TOLERANCE_S
        )
        later = job.promised and before.deadline_s is not None and deadline >= before.deadline_s
        if kept or later:
            rest = self._replan(now, f"{job.job_id} has another deadline", retry=True)
            return [Amended(job.job_id, deadline, value, self._plan_now(job, now)), *rest]
        was_best_effort, job.best_effort = job.best_effort, False
        job.changed()
        verdict, planner = self._ask(job, now)
        if verdict.draft is not None:
            admitted = self._admit(job, verdict, planner, Terms.DEADLINE, now)
            return [Amended(job.job_id, deadline, value, self._plan_now(job, now)), *admitted[1:]]
        job.job, job.best_effort = before, was_best_effort
        job.changed()
        return [AmendRejected(job.job_id, self._advice(verdict, before), verdict.earliest_deadline_s), *board.wake(now)]

    def _parked(self, job: LiveJob, now: float) -> list[Decision]:
        board = self._board
        if job.phase is Phase.PARKED:
            return board.wake(now)
        out: list[Decision] = []
        if job.mask:
            job.hold(board.layout, self.config, 0, now)
            out.append(Suspend(job.job_id, "parked: its owner is away, so it holds nothing until one is back"))
        job.parked_from, job.phase = job.phase, Phase.PARKED
        job.course, job.profiling = None, None
        return out + self._replan(now, f"{job.job_id} is parked", retry=True)

    def _unparked(self, job: LiveJob, now: float) -> list[Decision]:
        board = self._board
        if job.phase is not Phase.PARKED:
            return board.wake(now)
        job.phase, job.parked_from = job.parked_from or Phase.ADMITTED, None
        job.waiting_since_s = now
        if job.promised and not job.at_risk and job.job.deadline_s is not None:
            verdict, planner = self._ask(job, now)
            if verdict.draft is not None:
                out: list[Decision] = []
                self._finish(board.planner(now), verdict.draft, now, out, f"the owner of {job.job_id} is back")
                return out + board.wake(now)
        return self._replan(now, f"the owner of {job.job_id} is back", retry=True)

    def _gang_started(self, job: LiveJob, placement: Placement, now: float) -> list[Decision]:
        board = self._board
        if set(placement.slots) != set(job.placement.slots) or job.started or not job.mask:
            return board.wake(now)
        job.started = job.ever_started = True
        if job.profiling is not None:
            job.profiling = ProfilingRun(job.profiling.size, now + self.config.profile_budget_s)
        if now > job.ready_s and job.as_of_s > job.ready_s:  # a report came in between: it knows better
            return board.wake(now)
        moved = abs(now - job.ready_s) > TOLERANCE_S
        job.ready_s = now
        job.starting = False
        job.changed()
        if job.course is None or not moved:
            return board.wake(now)
        board.late.add(job.job_id)
        return self._replan(now, f"{job.job_id} has started", retry=False)

    def _lose_gang(self, job: LiveJob, now: float) -> None:
        board = self._board
        job.settle(board.layout, self.config, now)
        job.placement, job.mask, job.ready_s, job.starting = Placement(), 0, now, False
        job.profiling = None
        job.waiting_since_s = now
        job.changed()
        if job.course is not None:
            board.late.add(job.job_id)

    def _nodes_changed(self, event: ev.NodeJoined | ev.NodeLost | ev.NodeDraining, now: float) -> list[Decision]:
        board = self._board
        nodes = dict(board.nodes)
        match event:
            case ev.NodeJoined(node):
                nodes[node.node_id] = node
                why = f"node {node.node_id} is there with {node.slots - len(node.busy)} free slots"
            case ev.NodeLost(node_id):
                nodes.pop(node_id, None)
                why = f"node {node_id} is lost"
                for job in board.jobs.values():
                    if any(slot.node_id == node_id for slot in job.placement.slots):
                        self._lose_gang(job, now)
            case ev.NodeDraining(node_id, until_s):
                if node_id in nodes:
                    nodes[node_id] = replace(nodes[node_id], draining_until_s=until_s)
                why = f"node {node_id} goes away at {moment(until_s)}"
        board.change_nodes(nodes.values())
        return self._replan(now, why, retry=True)


def _is_wake(decision: Decision) -> bool:
    from elasticflow_airflow.scheduler_core.decisions import WakeMeAt

    return isinstance(decision, WakeMeAt)


def _job_of(state: JobState, mask: int) -> LiveJob:
    """A live job out of what was stored of it."""
    return LiveJob(
        job=state.job,
        phase=state.phase,
        best_effort=state.best_effort,
        number=state.number,
        remaining=state.remaining_steps,
        as_of_s=state.as_of_s,
        waiting_since_s=state.waiting_since_s or state.as_of_s,
        placement=state.placement,
        mask=mask,
        ready_s=state.no_progress_until_s,
        starting=state.starting or (not state.ever_started and state.no_progress_until_s > state.as_of_s),
        ever_started=state.ever_started,
        at_risk=state.at_risk,
        measured=dict(state.measured),
        failed_sizes=set(state.failed_sizes),
        promise=state.promise,
        parked_from=state.parked_from,
        profiling=(
            ProfilingRun(state.placement.workers, state.profile_until_s)
            if state.profile_until_s is not None and state.placement.workers
            else None
        ),
    )
