"""Base class of policies that promise by booking: a job is admitted with the exact slots and times it will hold.

Bookings never overlap and never move for a new job, so no later decision can make an admitted job late. A subclass
chooses the bookings of a new job (:meth:`BookingPolicy.offer`). This base class stores and carries them out, and
rebooks when reality differs: a lost gang or node, a report of less progress, a job that has not ended when its booking
does. A job that then no longer fits is finished as soon as possible and announced as at risk.

Knows no clock, disk, network or thread, and nothing of the future.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, AtRisk, Decision, OnTrack, Reject, Terms, Wait
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Phase, Placement
from elasticflow_airflow.scheduler_core.model.work import (
    INFINITY,
    TOLERANCE_S,
    Course,
    Holding,
    Work,
    course_of,
    plan_of,
)
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.times import moment

GUARD_S = 0.01
"""Slots are free for other jobs this long after the end of a booking: end times are floats and not exact."""
_UNKNOWN_S = 3600.0
"""Length of one booking of a job of unknown length."""
_STARTS = 48
"""Number of next start times (now and when bookings change) at which a gang of constant size is tried."""


class BookingPolicy(GangPolicy):
    """Admits jobs that it can book. Deterministic. Subclasses implement :meth:`offer`."""

    def __init__(self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        super().__init__(config, nodes)
        self._courses: dict[str, Course] = {}
        """The holdings of each admitted job from now to its end, tail included."""
        self._stale: set[str] = set()
        """Jobs whose course may no longer be accurate."""
        self._due: dict[str, int] = {}
        """Slots (masks) booked for the present, by job."""

    # -- what a subclass decides -----------------------------------------------------------------------------------

    @abstractmethod
    def offer(self, job: JobView, work: Work, book: Bookings) -> Course | str:
        """Return bookings for a job that end by ``work.limit_s``, or the reason why there are none.

        ``book`` has the bookings of all other jobs. For a best-effort job the limit is infinite.
        """

    def judge(self, newcomer: JobView) -> Admit | Reject | Wait:
        """Admit a job with a booking, or refuse it."""
        job, now = newcomer.job, newcomer.now
        work = self._work(job, now, promised=True)
        course = self.offer(newcomer, work, self._book(now, without=job.job_id))
        if isinstance(course, str):
            return self.refuse(newcomer, course)
        self._courses[job.job_id] = course
        deadline = job.job.deadline_s
        plan, booked = plan_of(work, course, now), Reason(f"booked until {moment(course.promised_s)}")
        if deadline is None:
            return Admit(job.job_id, Terms.BEST_EFFORT, None, plan, booked)
        return Admit(job.job_id, Terms.DEADLINE, deadline, plan, booked)

    # -- the port --------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event and return the decisions that follow."""
        match event:
            case (
                ev.GangLost(job_id)
                | ev.GangReformed(job_id)
                | ev.GangStarted(job_id)
                | ev.JobMeasured(job_id)
                | ev.JobProgressed(job_id)
            ):
                self._stale.add(job_id)
            case ev.NodeJoined() | ev.NodeLost() | ev.NodeDraining() | ev.SlotSlow():
                self._stale.update(self._courses)
        return super().handle(event, now)

    def projected_finish_s(self, job_id: str) -> float | None:
        """Return when the last step is made according to the booking; None if unknown."""
        course = self._courses.get(job_id)
        return None if course is None or course.finish_s == INFINITY else course.finish_s

    # -- bookings --------------------------------------------------------------------------------------------------

    def wanted(self, scene: Scene) -> Wanted:
        """Return the jobs whose bookings hold slots now, and when that changes."""
        now, again = scene.now, INFINITY
        claims: list[Claim] = []
        self._due = {}
        for job in scene.jobs:
            course = self._courses.get(job.job_id)
            for start, end, mask in course.holdings if course is not None else ():
                if start > now + TOLERANCE_S:
                    again = min(again, start)
                elif end > now + TOLERANCE_S:
                    self._due[job.job_id] = mask
                    claims.append(Claim(job.job_id, (mask.bit_count(),), "booked"))
                    again = min(again, end)
        return Wanted(claims, again if again < INFINITY else None)

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Return the booked slots; a booking begins late if another job still holds its slots."""
        seats: dict[str, int] = {}
        for claim in wanted.claims:
            mask = self._due[claim.job_id]
            if not mask & ~free:
                seats[claim.job_id] = mask
                free &= ~mask
        return seats, dict.fromkeys(seats, "booked")

    def _replan(self, now: float, why: str, *, retry: bool = False) -> list[Decision]:
        return [*self._repair(now), *super()._replan(now, why, retry=retry)]

    def _work(self, job: GangJob, now: float, *, promised: bool) -> Work:
        """Return the work to book: at promised speeds, with the margin before the deadline as its limit."""
        job.settle(self.layout, self.config, now)
        work = job.work(self.layout, self.config)
        limit = INFINITY
        if promised and job.job.deadline_s is not None:
            limit = job.job.deadline_s - self.config.deadline_margin_s
        return replace(work, limit_s=limit)

    def _book(self, now: float, without: str) -> Bookings:
        """Return the bookings of all jobs but one; an overdue job keeps the slots it holds for ``overdue_s``."""
        holdings: list[Holding] = []
        for job in self.jobs.values():
            course = self._courses.get(job.job_id)
            if job.job_id == without:
                continue
            if course is not None and course.promised_s > now:
                holdings.extend(course.holdings[:-1])
                last = course.holdings[-1]
                holdings.append(Holding(last.start_s, last.end_s + GUARD_S, last.mask))
            elif job.mask:
                holdings.append(Holding(now, now + self.config.overdue_s, job.mask))
        return Bookings.of(self.layout, now, holdings)

    def _repair(self, now: float) -> list[Decision]:
        """Rebook jobs whose booking is gone, over or no longer accurate; promised jobs first, by deadline."""
        for job_id in list(self._courses):
            job = self.jobs.get(job_id)
            if job is None or job.phase is not Phase.ADMITTED:
                del self._courses[job_id]
        self._stale &= set(self._courses)
        todo: list[tuple[float, int, GangJob]] = []
        for job in self.jobs.values():
            if job.phase is not Phase.ADMITTED:
                continue
            course = self._courses.get(job.job_id)
            if course is not None and job.job_id not in self._stale and course.promised_s > now + TOLERANCE_S:
                continue
            work = self._work(job, now, promised=job.promised)
            if work.left_at(now) <= TOLERANCE_S * max(1.0, work.speed_now):
                continue  # its last step is made, and its end will be reported soon
            if course is not None and course.promised_s > now + TOLERANCE_S:
                holdings = [held for held in course.holdings if held.end_s > now + TOLERANCE_S]
                if course_of(work, holdings, now).finish_s < INFINITY:
                    continue
            todo.append((work.limit_s, job.number, job))
        self._stale.clear()
        out: list[Decision] = []
        for _, _, job in sorted(todo, key=lambda item: item[:2]):
            self._courses.pop(job.job_id, None)
            out.extend(self._rebook(job, now))
        return out

    def _rebook(self, job: GangJob, now: float) -> list[Decision]:
        work, book = self._work(job, now, promised=job.promised), self._book(now, without=job.job_id)
        found = self.offer(self.view(job, now), work, book) if job.promised else ""
        course = soonest(work, book, self.layout) if isinstance(found, str) else found
        if course is not None:
            self._courses[job.job_id] = course
        end = INFINITY if course is None else course.promised_s
        late = end > work.limit_s + TOLERANCE_S
        if late and not job.at_risk and job.job.deadline_s is not None:
            job.at_risk = True
            reason = Reason("what it had booked does not suffice any more")
            return [AtRisk(job.job_id, job.job.deadline_s, end, reason)]
        if job.at_risk and not late and job.job.deadline_s is not None:
            job.at_risk = False
            return [OnTrack(job.job_id, job.job.deadline_s, end)]
        return []

    def _change_nodes(self, nodes: Iterable[Node], now: float) -> None:
        """Apply a new set of nodes; drop bookings with slots that are not available throughout."""
        nothing = Placement()
        before = {
            job_id: [(start, end, self.layout.placement_of(mask, nothing)) for start, end, mask in course.holdings]
            for job_id, course in self._courses.items()
        }
        super()._change_nodes(nodes, now)
        empty = Bookings(self.layout, now)
        for job_id, places in before.items():
            holdings = tuple(Holding(start, end, self.layout.mask_of(place)) for start, end, place in places)
            there = all(
                held.mask.bit_count() == place.workers and not held.mask & ~empty.free_over(held.start_s, held.end_s)
                for held, (_, _, place) in zip(holdings, places, strict=True)
            )
            if there:
                self._courses[job_id] = self._courses[job_id]._replace(holdings=holdings)
            else:
                del self._courses[job_id]


def rising(work: Work) -> tuple[int, ...]:
    """Return the sizes that are faster than all smaller ones, i.e. up to the knee."""
    best, sizes = 0.0, []
    for size in work.sizes:
        if work.speeds[size] > best:
            sizes.append(size)
            best = work.speeds[size]
    return tuple(sizes)


def constant_gangs(work: Work, book: Bookings, layout: Layout, starts: int = _STARTS) -> Iterator[Course]:
    """Yield bookings of one size on one block, each from its start to the job's end, for algorithms to choose from.

    Tries all sizes up to the knee, now and at the next ``starts`` times at which bookings change.
    """
    now = book.now
    left = work.left_at(now)
    for start in book.times[:starts]:
        if start > now and start + work.startup_s + work.tail_s > work.limit_s:
            return
        for size in rising(work):
            own = work.mask if start <= now and size == work.size else 0
            cost = max(0.0, work.since_s - now) if own else work.startup_s
            if start <= now and work.mask and not own:
                cost = work.cost_of_change(now)
            end = start + cost + left / work.speeds[size] + work.tail_s
            if end > work.limit_s + TOLERANCE_S:
                continue
            free = book.free_over(start, end + GUARD_S)
            block = own if own and not own & ~free else 0
            if not block:
                block = layout.find(free, size)
            if block:
                course = course_of(work, [Holding(start, end + 1.0, block)], now)
                if course.promised_s <= work.limit_s + TOLERANCE_S:
                    yield course


def soonest(work: Work, book: Bookings, layout: Layout) -> Course | None:
    """Return the constant gang that ends first, ignoring the limit; at unknown length the smallest, for an hour."""
    if not work.sizes:
        return None
    if work.remaining == INFINITY or not rising(work):
        free = book.free_over(book.now, book.now + _UNKNOWN_S)
        block = work.mask if work.mask and not work.mask & ~free else layout.find(free, min(work.sizes))
        return Course((Holding(book.now, book.now + _UNKNOWN_S, block),), INFINITY, INFINITY) if block else None
    late = replace(work, limit_s=INFINITY)
    return min(constant_gangs(late, book, layout, starts=1 << 62), key=lambda course: course.promised_s, default=None)
