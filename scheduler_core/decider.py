"""Turns verdicts into decisions: what follows when a job is admitted, refused, measured, or has to wait.

This part of the scheduler calls admission control and adopts plans. It is called by the event handlers in
:mod:`~elasticflow_airflow.scheduler_core.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from elasticflow_airflow.scheduler_core.cluster.placement import level_of
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.jobs.profiling import (
    candidate_sizes,
    in_a_hurry,
    known_speeds,
    missing_sizes,
    sizes_to_measure,
    undecided_until,
    wait_limit,
)
from elasticflow_airflow.scheduler_core.model.config import Objective, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import (
    Admit,
    Decision,
    Reject,
    Terms,
    Wait,
    WakeMeAt,
)
from elasticflow_airflow.scheduler_core.model.explain import is_past, workers
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.recurring_work import ExpectedRun, stand_in_id
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    OnReject,
    Phase,
    Plan,
)
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding
from elasticflow_airflow.scheduler_core.model.work import plan_of as public_plan
from elasticflow_airflow.scheduler_core.planning.admission import AdmissionControl, AdmissionVerdict, no_block
from elasticflow_airflow.scheduler_core.planning.lookahead import Expected, Lookahead
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner
from elasticflow_airflow.scheduler_core.planning.protection_price import Arrival, Protection, footprint_of, key_of
from elasticflow_airflow.scheduler_core.planning.repair import mend
from elasticflow_airflow.scheduler_core.planning.reservations import keepable, reserved, stand_ins
from elasticflow_airflow.scheduler_core.scheduler_state import SchedulerState

_LOOKS = 30
"""How often within ``waiting_retry_s`` a fresh plan is tried for jobs at risk."""
_WORTH_OF_LATENESS = 0.05
"""Minimum reduction of the total lateness, as a fraction; less is not worth the pauses of the other jobs."""


class Decider:
    """Live jobs, their plans, and the decisions about them."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState) -> None:
        self.config, self.state = config, state
        self._numbers = 0
        self._promises = 0
        self._put_off: list[Reason] | None = None
        """While decisions are made together: the reasons to plan once after all of them. None: plan at once."""
        self._lookahead = Lookahead()
        self._expiring = False
        """Whether the loop over jobs whose measuring takes too long is running."""
        self._protection: Protection | None = None
        if self.config.objective is not Objective.FIRST_COME:
            self._protection = Protection(
                self.config.protection_half_lives_s, self.config.protection_reach, self.config.protection_weight
            )

    def plan_of(self, job_id: str) -> Plan | None:
        """Return the stored plan of a live job from its last change on; None while it has none.

        Raises:
            KeyError: there is no such live job.
        """
        job = self.job(job_id)
        if job.course is None:
            return None
        work, course = job.work(self.state.layout, self.config), job.course
        if not course.holdings:
            return Plan(job_id, (), course.finish_s, course.promised_s)
        first = course.holdings[0]
        holdings = course.holdings
        if first.mask == job.mask:  # the gang that has made steps since as_of_s continues
            holdings = (Holding(min(first.start_s, job.as_of_s), first.end_s, first.mask), *holdings[1:])
        elif job.mask and job.as_of_s < first.start_s:  # it waits for slots whose holder is about to leave
            holdings = (Holding(job.as_of_s, first.start_s, job.mask), *holdings)
        course = Course(holdings, course.finish_s, course.promised_s)
        return public_plan(work, course, max(job.as_of_s, course.holdings[0].start_s))

    def job(self, job_id: str) -> LiveJob:
        """Return a live job. Raises KeyError if it is not live."""
        job = self.state.jobs.get(job_id)
        if job is None:
            raise KeyError(f"no live job {job_id!r}; known are {sorted(self.state.jobs)}")
        return job

    def newcomer(self, job: Job, now: float) -> LiveJob:
        """Return a newly submitted job with the next number; it becomes live once it is decided on."""
        return LiveJob.newcomer(job, self._numbers, now, best_effort=job.deadline_s is None)

    def _register(self, live: LiveJob) -> None:
        if live.job_id not in self.state.jobs:
            self.state.jobs[live.job_id] = live
            self._numbers += 1

    def count_from(self, restored: LiveJob) -> None:
        """Number future jobs and promises after this one."""
        self._numbers = max(self._numbers, restored.number + 1)
        self._promises = max(self._promises, restored.promise + 1)

    def take_best_effort(self, live: LiveJob, now: float, reason: Reason) -> list[Decision]:
        """Admit a job as best effort, on slots that no promise needs."""
        live.phase, live.best_effort, live.at_risk = Phase.ADMITTED, True, False
        live.profiling, live.trial = None, 0
        live.course = None
        live.changed()
        self._register(live)
        rest = self.replan(now, Reason("slots are free"), retry=False)
        plan = self.plan_now(live)
        return [Admit(live.job_id, Terms.BEST_EFFORT, None, plan, reason), *rest]

    def plan_now(self, live: LiveJob) -> Plan | None:
        """Return the plan of a job just decided on; None if its end is not known."""
        if live.course is None or live.course.finish_s == INFINITY:
            return None
        return self.plan_of(live.job_id)

    def begin_profiling(self, live: LiveJob, now: float) -> list[Decision]:
        """Measure a job without any known speed before it is decided on."""
        deadline = live.job.last_deadline_s
        if deadline is not None and deadline <= now:
            return [
                Reject(live.job_id, is_past(deadline, now), None),
                *self._wake(now),
            ]
        if not candidate_sizes(live, self.state.layout.largest_block) or not self.state.nodes:
            reason = Reason(
                "no block of at least {min_workers} slots exists in this cluster", min_workers=live.job.min_workers
            )
            return [Reject(live.job_id, reason, None), *self._wake(now)]
        live.phase = Phase.PROFILING
        self._register(live)
        return self.replan(now, Reason("a job has to be measured"), retry=False)

    def decide(self, live: LiveJob, now: float) -> list[Decision]:
        """Decide on admission of a job with a known speed; if refused, apply the job's ``on_reject``.

        If only a part of its curve is known, it is not refused while the other sizes may still allow admission.
        """
        before = [] if live.job_id in self.state.jobs or self._put_off is not None else self._catch_up(now)
        self.note_arrival(live, now)
        live.trial = 0
        verdict = self.ask(live, now)
        if verdict.draft is not None:
            return before + self.admit(live, verdict, Terms.DEADLINE, now)
        if self._may_still_be_kept(live, now):
            late = not self._may_still_be_kept(live, now, live.job.deadline_s)
            taken = self._take_later(live, verdict, now) if late else None
            return before + (self._measure_more(live, now) if taken is None else taken)
        if size := self._worth_a_trial(live, now):
            return before + self._try_out(live, size, now)
        if live.job.partial and (missing := missing_sizes(live, self.state.layout, self.config)):
            verdict.reason = Reason(
                "{reason}; its speed with {sizes} could not be measured in time",
                reason=verdict.reason,
                sizes=_among_sizes(missing),
            )
        if not verdict.priced_out:
            self.note_refusal(live, now)
        return before + self._refuse(live, verdict, now)

    def _may_still_be_kept(self, live: LiveJob, now: float, deadline_s: float | None = None) -> bool:
        """Return whether sizes not measured yet may be fast enough to keep a deadline (None: the last accepted)."""
        job = live.job
        if not job.partial or not job.profile or not job.explore or live.remaining is None:
            return False
        return now < undecided_until(live, self.state.layout, now, self.config, deadline_s) - TOLERANCE_S

    def _worth_a_trial(self, live: LiveJob, now: float) -> int:
        """Return the size to measure first, on slots that no promise needs now, if only its unsure curve keeps it out.

        0: it would also be refused with an exact curve, or nothing can be measured.
        """
        twin = live.as_told(self.config)
        if twin is None or (self._lookahead.is_crowd and not self._unheld(now)):
            return 0
        draft = self.ask(twin, now, thorough=False).draft
        if draft is None:
            return 0
        first = draft.courses[live.job_id].holdings[0]
        size = first.mask.bit_count()
        if first.start_s > now + TOLERANCE_S or live.is_certain(size, self.config) or size in live.failed_sizes:
            return 0
        return size if size <= self._slots_to_try_on(draft, live, now) else 0

    def _unheld(self, now: float) -> int:
        """Return the slots that no job holds: one more plan for each of a crowd is worth it only if there are some."""
        free = self.state.layout.availability.at(now)
        for job in self.state.jobs.values():
            free &= ~job.mask
        return free

    def _slots_to_try_on(self, draft: Draft, live: LiveJob, now: float) -> int:
        """Return how many slots nobody is measured on, or keeps in a draft now, less those that pending trials need."""
        measured = [job for job in self.state.jobs.values() if job.phase is Phase.PROFILING]
        free = self.state.layout.availability.at(now)
        for job in measured:
            free &= ~job.mask
        for job_id, course in draft.courses.items():
            if job_id != live.job_id:
                free &= ~next((h.mask for h in course.holdings if h.start_s <= now + TOLERANCE_S < h.end_s), 0)
        return free.bit_count() - sum(job.trial for job in measured if not job.mask)

    def _try_out(self, live: LiveJob, size: int, now: float) -> list[Decision]:
        """Measure a job at one size before it is promised or refused; refuse it if the slots are gone again."""
        live.phase, live.trial, live.judged = Phase.PROFILING, size, len(known_speeds(live))
        live.said_waiting = ""
        live.thorough_s = now + self.config.overdue_s
        self._register(live)
        return self.replan(now, Reason("a job is measured before it is promised"), retry=False)

    def _measure_more(self, live: LiveJob, now: float) -> list[Decision]:
        """Continue measuring a job that cannot be admitted with its known speeds."""
        live.phase, live.judged = Phase.PROFILING, len(known_speeds(live))
        own = undecided_until(live, self.state.layout, now, self.config, live.job.deadline_s)
        live.thorough_s = now + self.config.waiting_retry_s
        if now < own < live.thorough_s:  # from then on a later deadline is tried, if it accepts one
            live.thorough_s = max(own, now + self.config.overdue_s)
        self._register(live)
        return self.replan(now, Reason("a job has to be measured"), retry=False)

    def _catch_up(self, now: float) -> list[Decision]:
        """Plan again, if that is due, before admission control is called for a new job.

        A rejected arrival must leave no trace: stored courses advance in time only if the job stays.
        """
        stale = self.state.broken or bool(self.state.late) or self._behind(now)
        return self._plan_again(now, Reason("the plan of the cluster says so"), retry=False) if stale else []

    def note_arrival(self, live: LiveJob, now: float) -> None:
        """Let the protection price learn from a job at its first request for admission."""
        deadline = live.job.deadline_s
        if self._protection is None or live.noted or deadline is None:
            return
        live.noted = True
        footprint = footprint_of(live.work(self.state.layout, self.config), now, deadline)
        if footprint is not None:
            window_s = max(1.0, deadline - now)
            self._protection.note(Arrival(now, footprint, window_s, live.job.value, key_of(live.job_id)))

    def note_refusal(self, live: LiveJob, now: float) -> None:
        """Let the protection price know of a job that was refused though it could keep its deadline alone."""
        deadline = live.job.deadline_s
        if self._protection is None or deadline is None:
            return
        limit_s = deadline - self.config.deadline_margin_s
        if footprint_of(live.work(self.state.layout, self.config), now, limit_s) is not None:
            self._protection.short_at_s = max(self._protection.short_at_s, now)

    def _behind(self, now: float) -> bool:
        for job in self.state.jobs.values():
            course = job.course
            if course is not None and course.holdings:
                first = course.holdings[0]
                if first.end_s > now and first.start_s < now - TOLERANCE_S and first.mask != job.mask:
                    return True
        return False

    def ask(self, live: LiveJob, now: float, *, thorough: bool = True) -> AdmissionVerdict:
        """Run admission control for a job beside all others; changes no plan."""
        state = self.state
        live.asked_s = now
        jobs = [j for j in state.jobs.values() if j.job_id != live.job_id]
        runs = tuple(state.calendar.runs.values())
        limits = [j.job.deadline_s for j in (live, *jobs) if j is live or j.promised]
        last = max((limit for limit in limits if limit is not None), default=now)
        near = [run for run in runs if run.due_s < last]  # later runs cannot collide with the promises up to then
        verdict = self._verdict(live, jobs, near, now, thorough=thorough)
        if verdict.draft is None and live.foreseen and near:  # it has priority over runs that have not come yet
            return self._verdict(live, jobs, (), now, thorough=thorough)
        if verdict.draft is None and len(near) < len(runs):  # but a later deadline that is offered may collide
            verdict = self._verdict(live, jobs, runs, now, thorough=thorough)
        return verdict

    def _verdict(
        self,
        live: LiveJob,
        jobs: Sequence[LiveJob],
        runs: Sequence[ExpectedRun],
        now: float,
        *,
        thorough: bool,
    ) -> AdmissionVerdict:
        layout = self.state.layout
        planner = self.state.planner_over(jobs, now)
        if runs:
            stand_ins = reserved(runs, layout, self.config, self.state.calendar.policy, now)
            kept = self._lookahead.keeps(planner, stand_ins)
            planner.expected = stand_ins if kept else keepable(planner, stand_ins)
        return AdmissionControl(planner, live, self._protection, thorough=thorough, lookahead=self._lookahead).decide()

    def admit(self, live: LiveJob, verdict: AdmissionVerdict, terms: Terms, now: float) -> list[Decision]:
        """Promise the deadline, and adopt the plan that proves it.

        Raises:
            ValueError: the verdict has no such plan.
        """
        if verdict.draft is None:
            raise ValueError(f"{live.job_id!r} has no proven plan; only a plan admits")
        live.phase, live.best_effort, live.at_risk = Phase.ADMITTED, False, False
        live.profiling, live.trial = None, 0
        live.promise = self._promises
        self._promises += 1
        live.course = verdict.draft.courses[live.job_id]
        live.changed()
        self._register(live)
        out = self.adopt_proof(verdict.draft, now, Reason("{job:job} was admitted", job=live.job_id))
        plan = self.plan_of(live.job_id)
        return [Admit(live.job_id, terms, live.job.deadline_s, plan, verdict.reason), *out, *self._wake(now)]

    def adopt_proof(self, draft: Draft, now: float, why: Reason) -> list[Decision]:
        """Adopt a draft that proves all promises; only these, while decisions are made together."""
        planner, out = self.state.planner(now), list[Decision]()
        if self._put_off is not None:
            self.state.keep(planner.reserve(draft), now)
            self._put_off.append(why)
        else:
            self.complete_and_adopt(planner, draft, now, out, why)
        return out

    def _refuse(self, live: LiveJob, verdict: AdmissionVerdict, now: float) -> list[Decision]:
        job = live.job
        known = live.job_id in self.state.jobs
        if known and live.phase is Phase.PROFILING:
            self.state.ask_again_s = now + 2 * TOLERANCE_S  # others may wait for the slots that it was measured on
        choice = job.on_reject
        if choice is OnReject.BEST_EFFORT:
            return self.take_best_effort(
                live, now, Reason("cannot be promised: {reason}; runs as best effort", reason=verdict.reason)
            )
        if (taken := self._take_later(live, verdict, now)) is not None:
            return taken
        if choice is OnReject.WAIT and job.deadline_s is not None:
            until = live.latest_start_s(self.state.layout, self.config)
            if until > now:
                changed = known and live.phase is not Phase.WAITING
                if live.phase is not Phase.WAITING:
                    live.phase, live.course = Phase.WAITING, None
                live.thorough_s = now + max(self.config.waiting_retry_s, (until - now) / 2)
                live.until_s = until
                self._register(live)
                rest = (
                    self.replan(now, Reason("{job:job} waits", job=live.job_id), retry=False)
                    if changed
                    else self._wake(now)
                )
                if live.said_waiting == "wait":
                    return rest
                live.said_waiting = "wait"
                reason = Reason("waits for capacity until {until:moment}: {reason}", until=until, reason=verdict.reason)
                return [*rest, Wait(live.job_id, reason, until)]
        decision = Reject(live.job_id, self.advice(verdict), verdict.earliest_deadline_s)
        if not known:
            return [decision, *self._wake(now)]
        del self.state.jobs[live.job_id]
        return [decision, *self.replan(now, Reason("{job:job} was rejected", job=live.job_id), retry=False)]

    def _take_later(self, live: LiveJob, verdict: AdmissionVerdict, now: float) -> list[Decision] | None:
        """Admit the job for the offered deadline, if it accepts that; return None if not."""
        job, offer = live.job, verdict.earliest_deadline_s
        choice = job.on_reject
        if not choice.takes_later or offer is None or offer > (job.latest_deadline_s or -INFINITY):
            return None
        live.job = replace(job, deadline_s=offer, asked_deadline_s=job.deadline_s)
        live.changed()
        again = self.ask(live, now)
        if again.draft is not None:
            part = Reason(", for {part:.0%} of its value", part=live.job.part_at(offer))
            again.reason = Reason(
                "the deadline {asked:moment} cannot be promised ({refused}); accepted {offer:moment} instead{part}: "
                "{plan}",
                asked=job.deadline_s or 0.0,
                refused=verdict.reason,
                offer=offer,
                part=part if choice is OnReject.LATE else "",
                plan=again.reason,
            )
            return self.admit(live, again, Terms.RENEGOTIATED, now)
        live.job = job
        live.changed()
        return None

    def advice(self, verdict: AdmissionVerdict) -> Reason:
        """Return why the job was refused, and what its submitter can do."""
        offer = verdict.earliest_deadline_s
        if offer is None:
            return Reason("{reason}; it could run as best effort, or on more capacity", reason=verdict.reason)
        return Reason(
            "{reason}; the earliest deadline that can be promised now is {offer:moment}; or submit it as best effort, "
            "or add capacity",
            reason=verdict.reason,
            offer=offer,
        )

    def decide_together(
        self, jobs: Iterable[Job], decide: Callable[[Job], list[Decision]], now: float
    ) -> list[Decision]:
        """Decide on jobs one by one, in order, and plan once for all the consequences.

        Each verdict is proven beside all existing promises, as if the job had been submitted alone; several may be
        proven by one plan. The remaining capacity for other jobs and growth is allocated at the end.
        """
        out = self._catch_up(now)
        lookahead, coming = self._lookahead, iter(jobs)
        with self._plan_put_off() as put_off:
            lookahead.begin(now)
            try:
                while some := list(islice(coming, lookahead.most)):
                    lookahead.expect(one for job in some if (one := self._expected(job, now)) is not None)
                    for newcomer in some:
                        out += decide(newcomer)
                        lookahead.settled(newcomer.job_id)
            finally:
                lookahead.end()
        rest = self.replan(now, among(put_off), retry=False) if put_off else self.state.wake(now)
        for i, decision in enumerate(out):
            if isinstance(decision, Admit) and (job := self.state.jobs.get(decision.job_id)) is not None:
                out[i] = replace(decision, plan=self.plan_now(job))
        return out + rest

    def change_together(
        self, jobs: Iterable[LiveJob], change: Callable[[LiveJob], list[Decision]], now: float
    ) -> list[Decision]:
        """Change live jobs one by one, in order, and plan once for all the consequences."""
        out: list[Decision] = []
        with self._plan_put_off() as put_off:
            for job in jobs:
                out += change(job)
        return out + (self.replan(now, among(put_off), retry=True) if put_off else self.state.wake(now))

    @contextmanager
    def _plan_put_off(self) -> Iterator[list[Reason]]:
        """Decide without planning; the list gets the reasons for the one plan that is to be made afterwards."""
        put_off: list[Reason] = []
        self._put_off = put_off
        try:
            yield put_off
        finally:
            self._put_off = None
        self.state.forget_what_was_cut()

    def _expected(self, job: Job, now: float) -> Expected | None:
        """Return a job that is decided on soon; None if it has no deadline, or cannot keep it."""
        if job.deadline_s is None or job.curve is None or job.job_id in self.state.jobs:
            return None
        work = self.newcomer(job, now).work(self.state.layout, self.config)
        work = replace(work, limit_s=job.deadline_s - self.config.deadline_margin_s)
        if not work.sizes or work.speeds[work.sizes[-1]] <= 0.0 or work.soonest_s(now) > work.limit_s:
            return None
        run = self.state.calendar.match(job.task, now)
        return Expected(work, None if run is None else stand_in_id(run.run_id))

    def _wake(self, now: float) -> list[Decision]:
        """Return when the plan next requires an action; once at the end if decisions are made together."""
        return [] if self._put_off is not None else self.state.wake(now)

    def replan(self, now: float, why: Reason, *, retry: bool) -> list[Decision]:
        """Plan again, and request the next wake-up; postponed while decisions are made together."""
        if self._put_off is not None:
            self._put_off.append(why)
            return []
        return self._plan_again(now, why, retry=retry) + self.state.wake(now)

    def _plan_again(self, now: float, why: Reason, *, retry: bool) -> list[Decision]:
        """Update stored courses, repair broken promises, use free slots; ``retry``: retry admission of waiting jobs."""
        state, out = self.state, list[Decision]()
        state.refresh(now)
        self._expire_profiling(now, out)
        planner = state.planner(now)
        if state.broken:
            draft = mend(planner, self.config.rescue_orders)
            state.broken = False
        else:
            draft = planner.stored()
        self.complete_and_adopt(planner, draft, now, out, why)
        if retry:
            self._retry(now, out)
        self._say_waiting(now, out)
        return out

    def _retry(self, now: float, out: list[Decision]) -> None:
        """Retry admission of waiting jobs: in order of slot-seconds per value, or of arrival if first come."""
        waiting = [job for job in self.state.jobs.values() if job.phase is Phase.WAITING]
        if self._protection is not None:
            waiting.sort(key=lambda job: self._price(job, now))
        for job in waiting:
            thorough = now >= min(job.thorough_s, job.until_s) - TOLERANCE_S
            verdict = self.ask(job, now, thorough=thorough)
            if verdict.draft is not None:
                out += [d for d in self.admit(job, verdict, Terms.DEADLINE, now) if not is_wake(d)]
            elif size := self._worth_a_trial(job, now):
                out += [d for d in self._try_out(job, size, now) if not is_wake(d)]
            elif thorough:
                out += [d for d in self._refuse(job, verdict, now) if not is_wake(d)]
        for job in list(self.state.jobs.values()):
            waits = job.phase is Phase.PROFILING and job.profiling is None and job.job_id in self.state.jobs
            if waits and job.remaining is not None and known_speeds(job):
                out += self._ask_again(job, now)

    def _ask_again(self, job: LiveJob, now: float) -> list[Decision]:
        """Retry admission of a job that waits to be measured with more workers, because something has changed."""
        if job.judged != len(known_speeds(job)):
            return [d for d in self.decide_measured(job, now) if not is_wake(d)]
        verdict = self.ask(job, now, thorough=False)
        if verdict.draft is None:
            return []
        return [d for d in self.admit(job, verdict, Terms.DEADLINE, now) if not is_wake(d)]

    def _price(self, job: LiveJob, now: float) -> float:
        """Return the least slot-seconds of a job per unit of value (infinite: its deadline cannot be kept any more)."""
        work = job.work(self.state.layout, self.config)
        footprint = footprint_of(work, now, job.job.deadline_s or INFINITY)
        return INFINITY if footprint is None or job.job.value <= 0.0 else footprint / job.job.value

    def complete_and_adopt(self, planner: Planner, draft: Draft, now: float, out: list[Decision], why: Reason) -> None:
        """Complete a draft of promises, prefer a fresh plan if that serves more jobs, and adopt the result."""
        draft = planner.complete(planner.reserve(draft))
        starved, (endless, late_s) = planner.starved(draft), planner.lateness(draft)
        late = bool(endless or late_s)
        self.state.starves = planner.are_many and bool(starved)
        is_time = now >= self.state.hopeful_s
        if ((is_time and (starved or late)) or (starved and not planner.are_many)) and planner.luxury(draft):
            other = self._afresh(planner, draft)
            if planner.are_many or (late and other is draft):  # of many it takes half a second: not with each event
                self._hope_later(now)
            if other is not None and other is not draft:
                other = planner.complete(planner.reserve(other))
                endless_then, late_then_s = planner.lateness(other)
                helps = endless_then < endless or (
                    endless_then == endless and late_s - late_then_s > self._worth_a_new_plan_s(planner, late_s)
                )
                hurts = (endless_then, late_then_s) > (endless, late_s)
                if helps or (planner.starved(other) < starved and not hurts):
                    draft = other
                elif late:
                    self._hope_later(now)
        self.state.adopt(draft, now, out, why)

    def _hope_later(self, now: float) -> None:
        """Late jobs gain nothing from a new plan now, or one of very many jobs was just made: try again in a while."""
        self.state.hopeful_s = now + self.config.waiting_retry_s / _LOOKS

    def _worth_a_new_plan_s(self, planner: Planner, late_s: float) -> float:
        """Return by how many seconds jobs at risk must end earlier to justify that others give up surplus slots."""
        least = self.config.patience_pauses * planner.longest_pause_s
        return max(least, _WORTH_OF_LATENESS * late_s, TOLERANCE_S)

    def _afresh(self, planner: Planner, draft: Draft) -> Draft | None:
        """Plan all promises anew with every reservation that the draft holds; None if no plan proves them.

        Returns the draft itself if that is what it is.
        """
        calendar, now = self.state.calendar, planner.now
        runs = [run for run in calendar.runs.values() if stand_in_id(run.run_id) in draft.courses]
        if not runs:
            return draft if draft.planned_anew else planner.fresh()
        planner.expected = stand_ins(runs, planner.layout, self.config, calendar.policy, now)
        other = planner.fresh(guarded=True)
        planner.expected = ()
        return None if other is None else planner.unguarded(other)

    def after_measuring(self, job: LiveJob, now: float) -> list[Decision]:
        """Decide on a job after its measurement, or measure it with more workers."""
        state = self.state
        job.profiling = None
        if job.trial:
            return self.decide_measured(job, now)
        goes_on = known_speeds(job) == {} or now < undecided_until(job, state.layout, now, self.config)
        if not missing_sizes(job, state.layout, self.config) or not goes_on or in_a_hurry(job, now, self.config):
            return self.decide_measured(job, now)
        job.course = None
        out = self.replan(now, Reason("the next size is measured"), retry=False)
        decided = job.job_id not in state.jobs or job.phase is not Phase.PROFILING
        if decided or job.profiling is not None or job.judged == len(known_speeds(job)):
            return out
        return [d for d in out if not is_wake(d)] + self.decide_measured(job, now)

    def decide_measured(self, job: LiveJob, now: float) -> list[Decision]:
        """Decide on admission from the sizes measured so far: all sizes, or those that there were slots for."""
        if not known_speeds(job):
            reason = Reason(
                "no number of workers could be measured; give scaling_curve= (steps/s by number of workers)"
            )
            if job.job.on_reject is OnReject.BEST_EFFORT:
                return self.take_best_effort(job, now, Reason("{reason}; runs as best effort", reason=reason))
            del self.state.jobs[job.job_id]
            return [
                Reject(job.job_id, reason, None),
                *self.replan(now, Reason("{job:job} was rejected", job=job.job_id), retry=False),
            ]
        if job.remaining is None:
            return self._wake(now)
        job.settle(self.state.layout, self.config, now)
        job.take_measured(self.config)
        job.course = job.course if job.profiling is not None else None  # a running measurement may have to continue
        return self.decide(job, now)

    def _expire_profiling(self, now: float, out: list[Decision]) -> None:
        """Give up sizes that take too long, and jobs that waited too long for slots to be measured on.

        The consequences of one are planned before the next is handled; those nested plans do not start this loop again.
        """
        if self._expiring:
            return
        self._expiring = True
        try:
            self._expire_each(now, out)
        finally:
            self._expiring = False

    def _expire_each(self, now: float, out: list[Decision]) -> None:
        for job in list(self.state.jobs.values()):
            if job.phase is not Phase.PROFILING or job.job_id not in self.state.jobs:
                continue
            if job.profiling is not None and now >= job.profiling.until_s - TOLERANCE_S:
                job.failed_sizes.add(job.profiling.size)
                out += [d for d in self.after_measuring(job, now) if not is_wake(d)]
            elif job.trial and job.profiling is None and now >= job.thorough_s - TOLERANCE_S:
                if job.job.on_reject is not OnReject.WAIT:  # another job took the slots; a waiting job may get others
                    job.failed_sizes.add(job.trial)
                out += [d for d in self.decide_measured(job, now) if not is_wake(d)]
            elif job.profiling is None:
                limit = wait_limit(job, self.state.layout, now, self.config)
                if limit is not None and now >= limit - TOLERANCE_S:
                    out += [d for d in self._waited_in_vain(job, now) if not is_wake(d)]
                elif job.judged and job.judged == len(known_speeds(job)) and now >= job.thorough_s - TOLERANCE_S:
                    out += [d for d in self.decide_measured(job, now) if not is_wake(d)]

    def _waited_in_vain(self, job: LiveJob, now: float) -> list[Decision]:
        """Decide on a job for which no slots to measure it on were free in time."""
        if known_speeds(job) and job.remaining is not None:
            return self.decide_measured(job, now)
        what = "measure its speed on" if not known_speeds(job) else "hear from it how long it is"
        reason = Reason(
            "waited {waited:duration} for slots to {what}, and the deadline {deadline:moment} comes too near: give a "
            "later one, best_effort=True, or scaling_curve= (steps/s by number of workers) for a decision at once",
            waited=now - job.waiting_since_s,
            what=what,
            deadline=job.job.last_deadline_s or 0.0,
        )
        if job.job.on_reject is OnReject.BEST_EFFORT:
            return self.take_best_effort(job, now, reason)
        del self.state.jobs[job.job_id]
        return [Reject(job.job_id, reason, None)]

    def _say_waiting(self, now: float, out: list[Decision]) -> None:
        for job in self.state.jobs.values():
            if job.phase is not Phase.PROFILING:
                if job.best_effort and job.competes:
                    self._say_no_block(job, now, out)
                continue
            known = known_speeds(job)
            if job.profiling is not None:
                job.said_waiting = ""
            elif job.trial:
                continue  # it is measured or refused at once
            elif job.mask if job.remaining is None or not known else job.judged != len(known):
                continue  # it got slots to report its length, or is decided on next
            elif job.said_waiting != (saying := f"profile {len(known)}"):
                job.said_waiting = saying
                limit = wait_limit(job, self.state.layout, now, self.config)
                out.append(Wait(job.job_id, self._for_what(job, known, now), limit))

    def _say_no_block(self, job: LiveJob, now: float, out: list[Decision]) -> None:
        """Report once that a best-effort job waits for a larger cluster, and not for other jobs to make room."""
        layout = self.state.layout
        sizes = () if job.mask else job.work(layout, self.config).sizes
        if job.mask or (sizes and layout.blocks(layout.availability.at(now), level_of(sizes[0]))):
            job.said_waiting = ""
        elif job.said_waiting != "block":
            job.said_waiting = "block"
            reason = Reason(
                "best effort, and waits for a larger cluster: {no_block}", no_block=no_block(job.job, layout, now)
            )
            out.append(Wait(job.job_id, reason, None))

    def _for_what(self, job: LiveJob, known: Iterable[int], now: float) -> Reason:
        """Return what a job with unknown speed or length waits for; ``known`` are the sizes with known speed."""
        more = sizes_to_measure(job, self.state.layout, now, self.config)[:1]
        if not known:
            return Reason("waits for slots that no promise needs, to measure its speed on them")
        if job.remaining is None or not more:
            return Reason("waits for slots that no promise needs, to learn its length")
        return Reason(
            "its deadline cannot be promised with {known}: waits for slots that no promise needs, to measure its speed "
            "with {more}",
            known=_among_sizes(known),
            more=_among_sizes(more),
        )


def among(reasons: Sequence[Reason]) -> Reason:
    """Summarize several reasons for one plan: the first, and the number of others."""
    if len(reasons) == 1:
        return reasons[0]
    return Reason("{first}, and {others} more", first=reasons[0], others=len(reasons) - 1)


def _among_sizes(sizes: Iterable[int]) -> str:
    """Return numbers of workers as words."""
    *first, last = sorted(sizes)
    return ", ".join(map(str, first)) + f" or {workers(last)}" if first else workers(last)


def is_wake(decision: Decision) -> bool:
    """Return whether a decision only requests a wake-up."""
    return isinstance(decision, WakeMeAt)
