"""Forecasts the outcome of everything due by a time and, for missed deadlines, what is missing: slots or hours.

Works on a copy of a scheduler, which it may change. Jobs that wait for capacity, and then expected runs in the order of
their expected arrival, are taken one after another as admission control would take them, each with a joint plan.
Uncertain runs are treated as if they came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, stand_in_id
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY, Work
from elasticflow_airflow.scheduler_core.planning.planner import Planner
from elasticflow_airflow.scheduler_core.planning.proof import deadline_order, prove
from elasticflow_airflow.scheduler_core.planning.reservations import beside, place_from, stand_in
from elasticflow_airflow.scheduler_core.scheduler import Scheduler

MOST_NODES = 64
"""The largest number of additional nodes that is tried."""
MOST_OFFERS = 32
"""For how many missed deadlines a feasible one is searched; each search takes several plans."""
_PROBES = 8


class Outcome(StrEnum):
    """The outlook of one deadline."""

    KEPT = "kept"
    AT_RISK = "at_risk"
    """Promised, but no longer on course."""
    UNDECIDED = "undecided"
    """Unknown yet: it is being measured, or waits although it would fit, because others are worth more."""
    MISSED = "missed"
    """Expected, or waits for capacity, and would be rejected in the current state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One deadline: of a live job (``job_id``) or of an expected run (``run_id``). Times are UTC seconds.

    ``projected_s`` is the projected end, tail included; None if unknown. ``earliest_deadline_s`` is the earliest
    feasible deadline of a missed one; for a run that is kept by a later deadline, which it allows, it is that deadline.
    """

    outcome: Outcome
    deadline_s: float
    reason: Reason
    job_id: str = ""
    run_id: str = ""
    task: str = ""
    due_s: float | None = None
    probability: float = 1.0
    projected_s: float | None = None
    earliest_deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The outlook of every deadline, soonest first.

    ``extra_nodes`` more nodes of ``extra_slots`` slots each would keep them all (0: nothing is missing; None: no number
    that was tried is enough).
    """

    outlooks: tuple[Outlook, ...]
    extra_nodes: int | None = 0
    extra_slots: int = 0


def forecast(scheduler: Scheduler, now: float, until_s: float) -> Forecast:
    """Forecast everything that is due by ``until_s``. Changes ``scheduler``: pass a copy."""
    scheduler.handle(ev.WakeUp(), now)
    found = _outlooks(scheduler, now, until_s)
    shape = commonest(scheduler.nodes())
    if all(map(_is_well, found)) or shape is None:
        return Forecast(outlooks=found)
    # Otherwise each node that joins would retry the admission of all waiting jobs, one after another.
    waiting = _judged(scheduler.set_waiting_aside(), until_s)

    def enough(count: int) -> bool:
        twin = scheduler.twin()
        join(twin, shape, range(count), now)
        planner, jobs, policy = twin.open_books(now)
        if not all(_is_well(outlook_of(job)) for job in _judged(jobs, until_s)):
            return False
        return all(map(_is_well, _Expecting(planner, policy, offers=0).each(_due(twin, until_s), waiting)))

    return Forecast(outlooks=found, extra_nodes=fewest(enough, MOST_NODES), extra_slots=shape.slots)


def _is_well(outlook: Outlook) -> bool:
    return outlook.outcome in (Outcome.KEPT, Outcome.UNDECIDED)


def commonest(nodes: Iterable[Node]) -> Node | None:
    """Return a node of the most frequent shape (ties: the largest), if any. Draining nodes count only if all drain."""
    known = list(nodes)
    stay = [node for node in known if node.draining_until_s is None] or known
    shapes = Counter((node.slots, node.gpu_type) for node in stay)
    if not shapes:
        return None
    slots, gpu_type = max(shapes, key=lambda shape: (shapes[shape], shape))
    return Node(node_id="~more", slots=slots, gpu_type=gpu_type)


def join(scheduler: Scheduler, shape: Node, numbers: Iterable[int], now: float) -> None:
    """Add nodes like ``shape`` to a scheduler, one per number."""
    for event in joining(shape, numbers):
        scheduler.handle(event, now)


def joining(shape: Node, numbers: Iterable[int]) -> list[ev.NodeJoined]:
    """Return the events that add nodes like ``shape``, one per number."""
    return [ev.NodeJoined(replace(shape, node_id=f"~more{number:04}")) for number in numbers]


def fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """Return the least number from 1 to ``most`` that is enough, by doubling, then bisection; None if none is."""
    low, high = 0, min(1, most)
    while high == 0 or not enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _outlooks(scheduler: Scheduler, now: float, until_s: float) -> tuple[Outlook, ...]:
    planner, jobs, policy = scheduler.open_books(now)
    judged = _judged(jobs, until_s)
    waiting = [job for job in judged if job.phase is Phase.WAITING]
    found = [outlook_of(job) for job in judged if job.phase is not Phase.WAITING]
    found += _Expecting(planner, policy).outlooks(_due(scheduler, until_s), waiting)
    return tuple(sorted(found, key=lambda one: (one.deadline_s, one.job_id, one.run_id)))


def _judged(jobs: Iterable[LiveJob], until_s: float) -> list[LiveJob]:
    """Return jobs with a deadline by ``until_s``, without those that fell back to best effort and still store one."""
    due = [job for job in jobs if job.job.deadline_s is not None and job.job.deadline_s <= until_s]
    return [job for job in due if not job.best_effort]


def missed_runs(scheduler: Scheduler, now: float, until_s: float) -> tuple[Outlook, ...]:
    """Return the runs expected by ``until_s`` that would be missed, without feasible deadlines. Changes nothing.

    Needs one joint plan if it keeps them all, else one for each run.
    """
    planner, _, policy = scheduler.open_books(now)
    runs, expecting = _due(scheduler, until_s), _Expecting(planner, policy, offers=0)
    if expecting.all_fit(runs):
        return ()
    return tuple(one for one in expecting.outlooks(runs) if one.outcome is Outcome.MISSED)


def keeps_runs(scheduler: Scheduler, now: float, run_ids: Container[str]) -> bool:
    """Return whether one joint plan keeps all these expected runs and every promise. Changes nothing."""
    planner, _, policy = scheduler.open_books(now)
    runs = [run for run in _due(scheduler, INFINITY) if run.run_id in run_ids]
    return _Expecting(planner, policy).all_fit(runs)


def _due(scheduler: Scheduler, until_s: float) -> list[ExpectedRun]:
    """Return expected runs in the order of their likely arrival."""
    runs = [run for run in scheduler.expected_runs() if run.due_s <= until_s]
    return sorted(runs, key=lambda run: (run.due_s + run.lateness.quantile(0.5), run.run_id))


def outlook_of(job: LiveJob) -> Outlook:
    """Return the outlook of a live job's deadline by the stored plan.

    Raises:
        ValueError: the job is best effort.
    """
    deadline = job.job.deadline_s
    assert deadline is not None  # checked by the caller
    course = job.course
    projected = course.promised_s if course is not None and course.promised_s < INFINITY else None
    if job.best_effort:
        raise ValueError(f"job {job.job_id!r} is best effort; it has no deadline")
    if job.phase is not Phase.ADMITTED:
        measured = job.phase is Phase.PROFILING
        state = "its speed is still being measured" if measured else f"it is {job.phase.value}"
        outcome, reason = Outcome.UNDECIDED, Reason("not promised yet: {state}", state=state)
    elif job.at_risk or projected is None or projected > deadline:
        outcome = Outcome.AT_RISK
        late = 0.0 if projected is None else projected - deadline
        if projected is None:
            trouble = "no slots can be had for it"
        elif late > 0.0:
            trouble = "projected {late:duration} late"
        else:
            trouble = "it should have ended by now, and has not said so"
        reason = Reason(f"promised, and no longer on course: {trouble}", late=late)
    else:
        outcome, reason = Outcome.KEPT, Reason("promised; {spare:duration} to spare", spare=deadline - projected)
    return Outlook(
        outcome=outcome,
        deadline_s=deadline,
        reason=reason,
        job_id=job.job_id,
        task=job.job.task,
        projected_s=projected,
    )


class _Expecting:
    """Takes waiting jobs and expected runs in turn, each beside the promises and those taken before it."""

    def __init__(self, planner: Planner, policy: CalendarPolicy, *, offers: int = MOST_OFFERS) -> None:
        """``offers``: for how many missed ones a feasible deadline is searched; each search takes several plans."""
        self.planner, self.policy, self.offers = planner, policy, offers
        self.taken: list[Work] = []
        self.ends: dict[str, float] = {}

    def outlooks(self, runs: Sequence[ExpectedRun], waiting: Sequence[LiveJob] = ()) -> list[Outlook]:
        """Return one for each waiting job, then for each run; projections are those of the last joint plan."""
        found = list(self.each(runs, waiting))
        return [
            replace(one, projected_s=self.ends.get(one.job_id or stand_in_id(one.run_id)))
            if one.outcome is Outcome.KEPT
            else one
            for one in found
        ]

    def each(self, runs: Sequence[ExpectedRun], waiting: Sequence[LiveJob]) -> Iterator[Outlook]:
        """Yield the same one after another, without projections."""
        yield from (self._admit(job) for job in waiting)
        yield from (self._take(run) for run in runs)

    def all_fit(self, runs: Sequence[ExpectedRun]) -> bool:
        """Return whether one joint plan keeps them all: the final plan of :meth:`outlooks` if it kept them."""
        works = [work for work in (self._work(run) for run in runs) if work is not None]
        return len(works) == len(runs) and self._fit(works)

    def _work(self, run: ExpectedRun) -> Work | None:
        planner, parts = self.planner, (self.policy.quantile, 0.5)
        return stand_in(run, planner.layout, planner.config, planner.now, parts, self.policy.unseen)

    def _admit(self, job: LiveJob) -> Outlook:
        """Return the outlook of a job that waits for capacity."""
        planner, deadline = self.planner, job.job.deadline_s
        assert deadline is not None  # checked by the caller
        outlook = Outlook(
            outcome=Outcome.KEPT, deadline_s=deadline, reason=Reason(""), job_id=job.job_id, task=job.job.task
        )
        work = job.work(planner.layout, planner.config)
        work = replace(work, limit_s=deadline - planner.config.deadline_margin_s)
        if not work.sizes:
            kind = "waits for capacity: no usable number of workers: it needs at least {least}"
            reason = Reason(kind, least=job.job.min_workers)
            return replace(outlook, outcome=Outcome.MISSED, reason=reason)
        if self._fits(work):
            if planner.config.objective is not Objective.FIRST_COME:
                reason = Reason(
                    "not promised yet: it waits, though it would fit, since others are expected that are worth more"
                )
                return replace(outlook, outcome=Outcome.UNDECIDED, reason=reason)
            self.taken.append(work)
            return replace(outlook, reason=Reason("waits, and fits beside all that is promised"))
        reason = Reason("waits for capacity: it does not fit beside {others}", others=self._others())
        least = planner.now + work.least_time_s()
        earliest = self._earliest(work, max(work.limit_s, least))
        return replace(outlook, outcome=Outcome.MISSED, reason=reason, earliest_deadline_s=earliest)

    def _others(self) -> Reason:
        """Return the jobs and runs that it does not fit beside."""
        jobs = sum(1 for job in self.planner.jobs if job.promised)
        more = len(self.taken)
        before = "" if not more else " and 1 that comes before it" if more == 1 else " and {more} that come before it"
        return Reason("{jobs:#promised job}" + before, jobs=jobs, more=more)

    def _take(self, run: ExpectedRun) -> Outlook:
        planner = self.planner
        outlook = Outlook(
            outcome=Outcome.KEPT,
            deadline_s=run.deadline_s,
            reason=Reason(""),
            run_id=run.run_id,
            task=run.task,
            due_s=run.due_s,
            probability=run.probability,
        )
        work = self._work(run)
        if work is None:
            patient = stand_in(
                replace(run, deadline_after_s=1e9),
                planner.layout,
                planner.config,
                planner.now,
                (self.policy.quantile,),
                0.0,
            )
            if patient is None:
                size = Reason("no usable number of workers: it needs at least {least}", least=run.min_workers)
                return replace(outlook, outcome=Outcome.MISSED, reason=size)
            least = patient.release_s + patient.least_time_s()
            reason = Reason(
                "too long even with the cluster to itself: expected from {release:moment}, it needs {need:duration} at "
                "its fastest",
                release=patient.release_s,
                need=patient.least_time_s(),
            )
            return self._later(run, replace(outlook, outcome=Outcome.MISSED, reason=reason), patient, least)
        if self._fits(work):
            self.taken.append(work)
            return replace(outlook, reason=Reason("fits beside all that is promised and expected before it"))
        others = sum(1 for job in planner.jobs if job.promised)
        reason = Reason(
            "does not fit beside {others:#promised job} and {runs:#expected run} that come before it",
            others=others,
            runs=len(self.taken),
        )
        return self._later(run, replace(outlook, outcome=Outcome.MISSED, reason=reason), work, work.limit_s)

    def _later(self, run: ExpectedRun, missed: Outlook, work: Work, low: float) -> Outlook:
        """Return the missed outlook with its earliest feasible deadline; kept by that deadline if the run allows it."""
        earliest, margin = self._earliest(work, low), self.planner.config.deadline_margin_s
        missed = replace(missed, earliest_deadline_s=earliest)
        if run.latest_s is None:
            return missed
        agreed = run.latest_s if earliest is None else min(run.latest_s, earliest)
        later = replace(work, limit_s=agreed - margin)
        if not self._fits(later):
            return missed
        self.taken.append(later)
        kind = "{missed}; promised by {agreed:moment} instead, as it allows"
        reason = Reason(kind, missed=missed.reason, agreed=agreed)
        return replace(missed, outcome=Outcome.KEPT, earliest_deadline_s=agreed, reason=reason)

    def _fits(self, work: Work) -> bool:
        """Return whether a joint plan with everything taken so far keeps all limits; remembers the ends in it."""
        return self._fit([*self.taken, work])

    def _fit(self, works: Sequence[Work]) -> bool:
        planner = self.planner
        ordered = deadline_order([*planner.promised(), *works])
        courses, _ = prove(
            planner.layout, planner.filling, ordered, planner.now, planner.held(), planner.config.proof_rounds
        )
        if courses is None:
            draft = beside(planner.stored(), works)
            if draft is None:
                return False
            courses = draft.courses
        self.ends.update({one.job_id: courses[one.job_id].promised_s for one in works})
        return True

    def _earliest(self, work: Work, low: float) -> float | None:
        """Return the earliest feasible deadline, by bisection; None if no free time was found for it at all."""
        if not self.offers:
            return None
        self.offers -= 1
        planner, margin = self.planner, self.planner.config.deadline_margin_s
        ends = dict(self.ends)
        draft = beside(planner.stored(), self.taken) or planner.stored()
        course = place_from(draft, replace(work, limit_s=INFINITY))
        high = course.promised_s if course is not None else INFINITY
        if high == INFINITY:
            return None
        high = max(high, low)
        if not self._fits(replace(work, limit_s=high)):
            return None
        for _ in range(_PROBES):
            if high - low <= 60.0:
                break
            middle = (low + high) / 2
            low, high = (low, middle) if self._fits(replace(work, limit_s=middle)) else (middle, high)
        self.ends = ends
        return high + margin
