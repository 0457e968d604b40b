"""The scheduler as a pure state machine: events in, decisions out. Knows no clock, disk, network or thread.

Two shells run the same class: the service (real clock and engine) and the simulator (virtual clock, modelled engine).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Self

from elasticflow_airflow.scheduler_core.cluster.nodes import nodes_after, nodes_avoiding, slots_cut_off
from elasticflow_airflow.scheduler_core.decider import Decider, among, is_wake
from elasticflow_airflow.scheduler_core.jobs.learned_speed import Evidence
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, ProfilingRun
from elasticflow_airflow.scheduler_core.jobs.profiling import in_a_hurry, known_speeds, missing_sizes
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import (
    Amended,
    AmendRejected,
    Decision,
    Suspend,
    Terms,
)
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, stand_in_id
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    JobState,
    Node,
    Phase,
    Placement,
    Plan,
    Reservation,
)
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding, likely_end
from elasticflow_airflow.scheduler_core.planning.admission import AdmissionVerdict
from elasticflow_airflow.scheduler_core.planning.planner import Planner
from elasticflow_airflow.scheduler_core.scheduler_state import SchedulerState


class Scheduler:
    """Admits jobs with deadlines only with a plan that proves their promises, and resizes all jobs while they run.

    Deterministic: the same events at the same times give the same decisions.
    """

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        calendar: CalendarPolicy | None = None,
    ) -> None:
        self.config = config or SchedulerConfig()
        self._state = SchedulerState(self.config, nodes, calendar)
        self._decider = Decider(self.config, self._state)

    def twin(self) -> Self:
        """Return an independent copy for trials, which decides as this one would. Immutable values are shared.

        All what-if questions are answered this way. It costs some 27 microseconds per job, a third of a full copy, and
        less than restoring a scheduler from the states of the jobs, which must plan anew.
        """
        return copy.deepcopy(self, self._state.constants())

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes as last reported."""
        return tuple(self._state.nodes.values())

    def states(self) -> tuple[JobState, ...]:
        """Return the states of all live jobs, in order of arrival; input of :meth:`restore`."""
        return tuple(job.state(self._state.layout) for job in self._state.jobs.values())

    def state(self, job_id: str) -> JobState | None:
        """Return the state of one job; None if it is not live."""
        job = self._state.jobs.get(job_id)
        return None if job is None else job.state(self._state.layout)

    def expected_runs(self) -> tuple[ExpectedRun, ...]:
        """Return the runs that the calendar expects, without those that were submitted or are assumed not to come."""
        return tuple(self._state.calendar.runs.values())

    def kept_free(self) -> tuple[tuple[ExpectedRun, tuple[Reservation, ...]], ...]:
        """Return the expected runs with reservations in the stored plan, and their slots; soonest first."""
        state, found = self._state, []
        for run in state.calendar.runs.values():
            course = state.reservations.get(stand_in_id(run.run_id))
            if course is not None:
                slots = tuple(
                    Reservation(h.start_s, h.end_s, state.layout.placement_of(h.mask, Placement()))
                    for h in course.holdings
                )
                found.append((run, slots))
        return tuple(sorted(found, key=lambda pair: (pair[0].due_s, pair[0].run_id)))

    def open_books(self, now: float) -> tuple[Planner, tuple[LiveJob, ...], CalendarPolicy]:
        """Return the input of a forecast: a planner over the current jobs, the jobs, and the calendar policy."""
        return self._state.planner(now), tuple(self._state.jobs.values()), self._state.calendar.policy

    def set_waiting_aside(self) -> list[LiveJob]:
        """Remove the jobs that wait for capacity, and return them. For copies that decide nothing any more."""
        waiting = [job for job in self._state.jobs.values() if job.phase is Phase.WAITING]
        for job in waiting:
            del self._state.jobs[job.job_id]
        return waiting

    def knows_curve(self, job_id: str) -> bool:
        """Return whether the speed of a live job is known at every size that is worth measuring."""
        job = self._state.jobs.get(job_id)
        return job is not None and not missing_sizes(job, self._state.layout, self.config)

    def plan_of(self, job_id: str) -> Plan | None:
        """Return the stored plan of a live job from its last change on; None while it has none.

        Raises:
            KeyError: there is no such live job.
        """
        return self._decider.plan_of(job_id)

    def projected_finish_s(self, job_id: str) -> float | None:
        """Return when the last step of a live job is expected, by its plan; None if unknown.

        If the length of the job is predicted, this uses the prediction and is earlier than the end of its bookings.
        """
        job = self._decider.job(job_id)
        if job.course is None or job.course.finish_s == INFINITY:
            return None
        return likely_end(job.work(self._state.layout, self.config), job.course, job.as_of_s)

    def handle(self, event: ev.Event | ev.CalendarEvent, now: float) -> list[Decision]:
        """Process one event and return the resulting decisions. Events of jobs that are gone are ignored.

        Raises:
            ValueError: a job is submitted whose id is live already, or whose fields contradict each other.
        """
        self._state.calendar.expire(now)
        match event:
            case ev.JobSubmitted():
                return self._submitted(event.job, now)
            case ev.WakeUp():
                return self._decider.replan(now, Reason("the plan of the cluster says so"), retry=True)
            case ev.NodeJoined() | ev.NodeLost() | ev.NodeDraining():
                return self.nodes_changed([event], now)
            case ev.RunExpected():
                self._state.calendar.expect(event.run)
                return self._state.wake(now)
            case ev.RunForgotten():
                if not self._state.calendar.forget(event.run_id):
                    return self._state.wake(now)
                return self._decider.replan(now, Reason("a run that was expected does not come"), retry=True)
            case _:
                job = self._state.jobs.get(event.job_id)
                if job is None:
                    return self._state.wake(now)
        match event:
            case ev.JobFinished() | ev.JobFailed() | ev.JobCancelled():
                return self.ended([event], now)
            case ev.JobProgressed() | ev.GangStarted():
                return self.reported([event], now)
            case ev.JobMeasured():
                return self._measured(job, event, now)
            case ev.JobAmended():
                return self._amended(job, event, now)
            case ev.JobParked() | ev.JobUnparked():
                return self.owners_changed([event], now)
            case ev.GangLost():
                self._lose_gang(job, now)
                return self._decider.replan(now, Reason("the gang of {job:job} was lost", job=job.job_id), retry=False)
            case ev.GangReformed():
                return self._gang_reformed(job, event.placement, now)
            case ev.SlotSlow():
                return self._slot_slow(job, event, now)
        raise TypeError(f"unknown event {event!r}")

    def submitted(self, jobs: Iterable[Job], now: float) -> list[Decision]:
        """Decide on jobs submitted at the same time, one by one in order, and plan once for all: see :meth:`handle`.

        The next job is taken from ``jobs`` only after the previous one is decided on.

        Raises:
            ValueError: one of them is live already.
        """
        self._state.calendar.expire(now)
        coming = iter(jobs)
        few = list(islice(coming, 2))
        if len(few) == 1:
            return self._submitted(few[0], now)
        return self._decider.decide_together(chain(few, coming), lambda job: self._submitted(job, now), now)

    def reported(self, reports: Sequence[ev.Reported], now: float) -> list[Decision]:
        """Process simultaneous reports of several jobs, and plan once for all of them: see :meth:`handle`.

        What was measured is only of jobs that are not being profiled: those are decided on one by one.
        """
        self._state.calendar.expire(now)
        measured: list[LiveJob] = []
        news = [why for event in reports if (why := self._news(event, now, measured))]
        out: list[Decision] = []
        for job in measured:
            if self._state.jobs.get(job.job_id) is job and job.phase is Phase.PROFILING:  # not decided on meanwhile
                out += [d for d in self._decider.decide_measured(job, now) if not is_wake(d)]
        if news:
            return out + self._decider.replan(now, among(news), retry=False)
        if self._state.is_due(now):
            return out + self._decider.replan(now, Reason("the plan of the cluster says so"), retry=False)
        return out + self._state.wake(now)

    def ended(self, ends: Sequence[ev.JobEnd], now: float) -> list[Decision]:
        """Process simultaneous ends of several jobs, and plan once for what they leave: see :meth:`handle`."""
        self._state.calendar.expire(now)
        left = [end.job_id for end in ends if self._state.jobs.pop(end.job_id, None) is not None]
        if not left:
            return self._state.wake(now)
        return self._decider.replan(now, among([Reason("{job:job} has left", job=job) for job in left]), retry=True)

    def owners_changed(self, changes: Sequence[ev.OwnerChange], now: float) -> list[Decision]:
        """Process simultaneous changes of whether jobs have an owner, and plan once for all: see :meth:`handle`.

        When Airflow is away, all jobs lose their owners at once, and have them back at once.
        """
        self._state.calendar.expire(now)
        known = {change.job_id: change for change in changes if change.job_id in self._state.jobs}

        def change(job: LiveJob) -> list[Decision]:
            is_parked = isinstance(known[job.job_id], ev.JobParked)
            return self._parked(job, now) if is_parked else self._unparked(job, now)

        return self._decider.change_together([self._state.jobs[job_id] for job_id in known], change, now)

    def _news(self, event: ev.Reported, now: float, measured: list[LiveJob]) -> Reason | None:
        """Process a report; return why to plan again, None if there is no need. See :meth:`_hear` for ``measured``."""
        job = self._state.jobs.get(event.job_id)
        if job is None:
            return None
        if isinstance(event, ev.GangStarted):
            return Reason("{job:job} has started", job=job.job_id) if self._gang_started(job, event, now) else None
        if isinstance(event, ev.JobMeasured):
            return self._take_measured(job, event, now)
        return Reason("{job:job} reported progress", job=job.job_id) if self._hear(job, event, now, measured) else None

    def restore(self, states: Iterable[JobState], now: float) -> list[Decision]:
        """Restore live jobs after a crash; promised ones stay promised. Only for a scheduler without jobs.

        Raises:
            ValueError: there are live jobs already.
        """
        if self._state.jobs:
            raise ValueError("restore() needs a scheduler that has no jobs yet")
        layout, out = self._state.layout, list[Decision]()
        for state in states:
            job = _job_of(state, layout.mask_of(state.placement))
            if reason := slots_cut_off(state.placement, self._state.nodes):
                out.append(Suspend(job.job_id, reason))
            if job.mask.bit_count() != state.placement.workers:
                job.placement, job.mask = Placement(), 0
            job.renew_trial(now, self.config)
            if state.reserved and all(
                layout.mask_of(r.placement).bit_count() == r.placement.workers for r in state.reserved
            ):
                holdings = tuple(Holding(r.start_s, r.end_s, layout.mask_of(r.placement)) for r in state.reserved)
                job.course = Course(holdings, INFINITY, INFINITY)
                self._state.late.add(job.job_id)
            elif job.promised:
                self._state.broken = True
            self._state.jobs[job.job_id] = job
            self._decider.count_from(job)
            self._decider.note_arrival(job, job.job.submitted_s)
            if job.phase is Phase.WAITING or job.best_effort:
                self._decider.note_refusal(job, job.job.submitted_s)
        spanning = any(len({slot.node_id for slot in job.placement.slots}) > 1 for job in self._state.jobs.values())
        if spanning:
            self._state.change_nodes(list(self._state.nodes.values()))
        return out + self._decider.replan(now, Reason("the scheduler was restarted"), retry=True)

    def recall(self, jobs: Iterable[tuple[Job, bool]]) -> None:
        """Learn from jobs with deadlines that were submitted and ended before a restart; in order of submission.

        Each is given with whether its deadline was refused. With ``objective="value"`` or ``"auto"``, the capacity kept
        free for cheaper arrivals is learned from all submissions; live jobs are included by :meth:`restore`.
        """
        for job, was_refused in jobs:
            live = self._decider.newcomer(job, job.submitted_s)
            self._decider.note_arrival(live, job.submitted_s)
            if was_refused:
                self._decider.note_refusal(live, job.submitted_s)

    def _submitted(self, job: Job, now: float) -> list[Decision]:
        if job.job_id in self._state.jobs:
            raise ValueError(f"job {job.job_id!r} is live already; a new incarnation needs the old one to end first")
        if job.curve is None and not job.profile and job.deadline_s is not None:
            reason = Reason(
                "its speed is not known and cannot be measured (a script that reports nothing): runs as best effort; "
                "no deadline is kept"
            )
            return self._decider.take_best_effort(self._decider.newcomer(job, now), now, reason)
        live = self._decider.newcomer(job, now)
        run = self._state.calendar.take(job.task, now)
        if run is not None:
            live.foreseen = True
            live.reservation = self._state.reservations.pop(stand_in_id(run.run_id), None)
        if job.deadline_s is None:
            return self._decider.take_best_effort(live, now, Reason("best effort: runs on slots that no promise needs"))
        if job.curve is None:
            return self._decider.begin_profiling(live, now)
        return self._decider.decide(live, now)

    def _hear(self, job: LiveJob, event: ev.JobProgressed, now: float, measured: list[LiveJob]) -> bool:
        """Process a progress report; return whether to plan again.

        ``measured`` collects the jobs to decide on after all reports are processed; this job may be added to it.
        """
        state = self._state
        at_s = now
        if event.at_s is not None and event.remaining_steps is not None and job.mask and job.started:
            at_s = min(now, max(event.at_s, job.ready_s))
        if self._as_expected(job, event, at_s):
            return False
        done = event.remaining_steps is not None and event.remaining_steps <= 0.0
        if done and job.mask and job.work(state.layout, self.config).left_at(now) <= 0.0:
            return False  # its last step was expected earlier; its tail counts from then on
        job.settle(state.layout, self.config, at_s)
        job.hear(event)
        if event.steps_per_s is not None and event.steps_per_s > 0.0 and job.mask:
            self._learn_speed(job, event.steps_per_s, event.measured_s, now)
        job.changed()
        if job.course is not None:
            state.late.add(job.job_id)
        if job.phase is not Phase.PROFILING:
            return True
        known = known_speeds(job)
        decide = job.trial > 0 and job.is_certain(job.trial, self.config)
        if job.judged != len(known):  # its length is known only now, or its time runs short
            over = not missing_sizes(job, state.layout, self.config)
            decide = over or job.profiling is None or in_a_hurry(job, now, self.config)
        if decide and all(one is not job for one in measured):
            measured.append(job)
        return False

    def _as_expected(self, job: LiveJob, event: ev.JobProgressed, at_s: float) -> bool:
        """Return whether a report contains only what is known already; then nothing is replanned."""
        left, seen = event.remaining_steps, job.measured.get(job.mask.bit_count())
        if left is None or seen is None or event.total_steps is not None or not job.started:
            return False
        if job.course is None or job.job_id in self._state.late or event.expected_steps != job.expected:
            return False
        certain = job.is_certain(job.mask.bit_count(), self.config)
        same_speed = event.steps_per_s is None or (certain and abs(event.steps_per_s - seen) <= 1e-9 * seen)
        ahead = abs(left - job.work(self._state.layout, self.config).left_at(at_s))
        return job.competes and same_speed and ahead <= TOLERANCE_S * seen

    def _learn_speed(self, job: LiveJob, steps_per_s: float, measured_s: float | None, now: float) -> None:
        """Update the speed estimates from a measurement at the current size."""
        size = job.mask.bit_count()
        known = job.job.curve is not None and size in job.job.curve.steps_per_s
        if known or (job.phase is not Phase.PROFILING and size & (size - 1) == 0):
            job.hear_speed(size, steps_per_s, self.config, now, measured_s)

    def _measured(self, job: LiveJob, event: ev.JobMeasured, now: float) -> list[Decision]:
        if job.phase is not Phase.PROFILING:
            return self._decider.replan(now, self._take_measured(job, event, now), retry=False)
        self._take_costs(job, event, now)
        if event.speed is not None:
            job.measured[event.workers] = event.speed
            job.take_measured(self.config)
        else:
            job.failed_sizes.add(event.workers)
        job.changed()
        return self._decider.after_measuring(job, now)

    def _take_costs(self, job: LiveJob, event: ev.JobMeasured, now: float) -> None:
        job.settle(self._state.layout, self.config, now)
        if event.costs is not None:
            job.job = replace(job.job, costs=event.costs)

    def _take_measured(self, job: LiveJob, event: ev.JobMeasured, now: float) -> Reason:
        """Take in what was measured of a job that is not being profiled; return why to plan again."""
        self._take_costs(job, event, now)
        if event.speed is not None:
            job.learn(event.workers, event.speed, self.config)
        job.changed()
        self._state.late.add(job.job_id)
        return Reason("{job:job} was measured with {workers}", job=job.job_id, workers=event.workers)

    def _amended(self, job: LiveJob, event: ev.JobAmended, now: float) -> list[Decision]:
        if event.max_workers is not None:
            job.settle(self._state.layout, self.config, now)
            job.job, job.course = replace(job.job, max_workers=event.max_workers), None
            self._state.broken = self._state.broken or job.promised
            job.changed()
            return self._decider.replan(
                now,
                Reason(
                    "at most {max_workers} workers can train {job:job}", max_workers=event.max_workers, job=job.job_id
                ),
                retry=True,
            )
        state, before = self._state, job.job
        value = before.value if event.value is None else event.value
        if event.best_effort:
            job.job = replace(before, value=value, deadline_s=None, asked_deadline_s=None)
            job.best_effort, job.at_risk, job.trial = True, False, 0
            if job.phase in (Phase.WAITING, Phase.PROFILING):
                job.phase, job.profiling = Phase.ADMITTED, None
            elif job.parked_from is not None:
                job.parked_from = Phase.ADMITTED
            job.changed()
            return [
                Amended(job.job_id, None, value, None),
                *self._decider.replan(now, Reason("{job:job} dropped its deadline", job=job.job_id), retry=True),
            ]
        deadline = before.deadline_s if event.deadline_s is None else event.deadline_s
        asked = before.asked_deadline_s if event.deadline_s is None else None
        job.job = replace(before, value=value, deadline_s=deadline, asked_deadline_s=asked)
        job.judged, job.said_waiting = 0, "" if job.phase is Phase.PROFILING else job.said_waiting
        job.changed()
        if job.phase is Phase.WAITING and deadline is not None and deadline != before.deadline_s:
            if job.latest_start_s(state.layout, self.config) <= now:
                return self._refuse_amendment(job, before, self._decider.ask(job, now), now)
            job.thorough_s, job.said_waiting = now, ""  # a new request, which gets its own answer
        if deadline is None or deadline == before.deadline_s or job.phase is not Phase.ADMITTED:
            out: list[Decision] = [Amended(job.job_id, deadline, value, None)]
            return out + (
                self._decider.replan(now, Reason("{job:job} was amended", job=job.job_id), retry=True)
                if job.phase is not Phase.ADMITTED
                else state.wake(now)
            )
        state.refresh(now)
        kept = (
            job.course is not None
            and job.promised
            and job.course.promised_s <= deadline - self.config.deadline_margin_s + TOLERANCE_S
        )
        later = job.promised and before.deadline_s is not None and deadline >= before.deadline_s
        if kept or later:
            rest = self._decider.replan(now, Reason("{job:job} has another deadline", job=job.job_id), retry=True)
            return [Amended(job.job_id, deadline, value, self._decider.plan_now(job)), *rest]
        was_best_effort, job.best_effort = job.best_effort, False
        job.changed()
        verdict = self._decider.ask(job, now)
        if verdict.draft is not None:
            admitted = self._decider.admit(job, verdict, Terms.DEADLINE, now)
            return [Amended(job.job_id, deadline, value, self._decider.plan_now(job)), *admitted[1:]]
        job.best_effort = was_best_effort
        return self._refuse_amendment(job, before, verdict, now)

    def _refuse_amendment(self, job: LiveJob, before: Job, verdict: AdmissionVerdict, now: float) -> list[Decision]:
        """Restore the job as it was before the amendment, and reject the amendment."""
        job.job = before
        job.changed()
        rejected = AmendRejected(job.job_id, self._decider.advice(verdict), verdict.earliest_deadline_s)
        return [rejected, *self._state.wake(now)]

    def _parked(self, job: LiveJob, now: float) -> list[Decision]:
        state, out = self._state, list[Decision]()
        if job.phase is Phase.PARKED:
            return out
        if job.mask:
            job.hold(state.layout, self.config, 0, now)
            reason = Reason("parked: its owner is away, so it holds no slots until one is back")
            out.append(Suspend(job.job_id, reason))
        job.parked_from, job.phase = job.phase, Phase.PARKED
        job.course, job.profiling = None, None
        return out + self._decider.replan(now, Reason("{job:job} is parked", job=job.job_id), retry=True)

    def _unparked(self, job: LiveJob, now: float) -> list[Decision]:
        if job.phase is not Phase.PARKED:
            return []
        job.phase, job.parked_from = job.parked_from or Phase.ADMITTED, None
        job.renew_trial(now, self.config)
        job.waiting_since_s = now
        why = Reason("the owner of {job:job} is back", job=job.job_id)
        if job.promised and not job.at_risk and job.job.deadline_s is not None:
            verdict = self._decider.ask(job, now)
            if verdict.draft is not None:
                return self._decider.adopt_proof(verdict.draft, now, why)
        return self._decider.replan(now, why, retry=True)

    def _gang_started(self, job: LiveJob, event: ev.GangStarted, now: float) -> bool:
        """Record since when a gang makes steps; return whether to plan again because that was not expected then."""
        if set(event.placement.slots) != set(job.placement.slots) or job.started or not job.mask:
            return False
        job.started, job.starting = True, False
        job.joined_s = -INFINITY
        job.changed()
        if job.profiling is not None:
            job.profiling = ProfilingRun(job.profiling.size, now + self.config.profile_budget_s)
        began_s = now if event.at_s is None else min(now, max(event.at_s, job.as_of_s))
        if began_s > job.ready_s and job.as_of_s > job.ready_s:  # a report came in between and is more accurate
            return job.grows_again(now, self.config)
        moved = abs(began_s - job.ready_s) > TOLERANCE_S
        job.ready_s = began_s
        job.changed()
        if job.course is None or not moved:
            return job.grows_again(now, self.config)
        self._state.late.add(job.job_id)
        return True

    def _gang_reformed(self, job: LiveJob, placement: Placement, now: float) -> list[Decision]:
        state = self._state
        mask = state.layout.mask_of(placement)
        taken = 0
        for other in state.jobs.values():
            taken |= other.mask if other is not job else 0
        if not mask or mask.bit_count() != placement.workers or mask & taken or job.phase is Phase.PARKED:
            return state.wake(now)
        job.settle(state.layout, self.config, now)
        job.placement, job.mask, job.ready_s, job.starting = placement, mask, min(job.ready_s, now), False
        job.started = True
        job.joined_s = -INFINITY
        if job.profiling is not None:
            job.profiling, job.course = None, None
        job.changed()
        if job.course is not None:  # it stays where it is, and grows if that repays its pause
            state.stay(job, job.course, now)
        return self._decider.replan(
            now,
            Reason("{job:job} goes on with {workers:#worker}", job=job.job_id, workers=placement.workers),
            retry=False,
        )

    def _lose_gang(self, job: LiveJob, now: float) -> None:
        state = self._state
        job.stop(state.layout, self.config, now)
        job.placement, job.mask, job.ready_s, job.starting = Placement(), 0, now, False
        job.profiling = None
        job.waiting_since_s = now
        job.renew_trial(now, self.config)
        job.changed()
        if job.course is not None:
            state.late.add(job.job_id)

    def _slot_slow(self, job: LiveJob, event: ev.SlotSlow, now: float) -> list[Decision]:
        state, (node_id, index) = self._state, event.slot
        if node_id not in state.nodes:
            return state.wake(now)
        job.settle(state.layout, self.config, now)
        size, curve = job.mask.bit_count(), job.job.curve
        if curve is not None and size in curve.steps_per_s:
            job.learn(size, curve.steps_per_s[size] * event.gain, self.config)
        job.changed()
        state.change_nodes(nodes_avoiding(state.nodes, event).values())
        if job.course is not None:
            state.late.add(job.job_id)
        return self._decider.replan(
            now,
            Reason("a worker of {job:job} is slow on {node_id}:{index}", job=job.job_id, node_id=node_id, index=index),
            retry=False,
        )

    def nodes_changed(self, changes: Sequence[ev.NodeChange], now: float) -> list[Decision]:
        """Process simultaneous changes of nodes, and plan once for all of them: see :meth:`handle`."""
        state = self._state
        state.calendar.expire(now)
        lost = {change.node_id for change in changes if isinstance(change, ev.NodeLost)}
        for job in state.jobs.values():
            if any(slot.node_id in lost for slot in job.placement.slots):
                self._lose_gang(job, now)
        nodes, why = dict(state.nodes), list[Reason]()
        for change in changes:
            nodes, said = nodes_after(nodes, change)
            why.append(said)
        out: list[Decision] = []
        for job in state.jobs.values():
            if reason := slots_cut_off(job.placement, nodes):
                self._lose_gang(job, now)
                out.append(Suspend(job.job_id, reason))
        state.change_nodes(nodes.values())
        return out + self._decider.replan(now, among(why), retry=True)


def _job_of(state: JobState, mask: int) -> LiveJob:
    """Return a live job from its stored state."""
    return LiveJob(
        job=state.job,
        phase=state.phase,
        best_effort=state.best_effort,
        number=state.number,
        remaining=state.remaining_steps,
        expected=state.expected_steps,
        foreseen=state.foreseen,
        trial=state.trial,
        as_of_s=state.as_of_s,
        waiting_since_s=state.waiting_since_s or state.as_of_s,
        placement=state.placement,
        mask=mask,
        ready_s=state.no_progress_until_s,
        starting=state.starting,
        started=state.started,
        joined_s=state.joined_s,
        at_risk=state.at_risk,
        measured=dict(state.measured),
        evidence={size: Evidence(tuple(windows)) for size, windows in state.evidence.items()},
        told=state.told,
        failed_sizes=set(state.failed_sizes),
        promise=state.promise,
        parked_from=state.parked_from,
        profiling=(
            ProfilingRun(state.placement.workers, state.profile_until_s)
            if state.profile_until_s is not None and state.placement.workers
            else None
        ),
    )
