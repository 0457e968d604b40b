"""One job as the planner sees it at one moment, and the arithmetic of its progress. Pure; knows no other job.

This is the only place that defines the costs of a start, a change of slots and a tail; plans, proofs and projections
all use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.model.values import Plan, PlanSegment

INFINITY = float("inf")
TOLERANCE_S = 1e-5
"""Times closer than this count as equal: UTC seconds as floats are exact to 2.4e-7 only."""


class Holding(NamedTuple):
    """Hold the slots in ``mask`` from ``start_s`` until ``end_s``, which includes the tail."""

    start_s: float
    end_s: float
    mask: int


@dataclass(frozen=True, slots=True)
class Work:
    """The remaining work of a job, its speed at each size, and the costs of changing its slots.

    ``remaining`` is the number of steps left at ``since_s``, from which time on the gang makes (or will make) steps at
    ``speed_now``. ``starting`` means that ``since_s`` is the end of a start-up, which a change would restart.
    ``expected`` is the predicted number of steps left at ``since_s``, if smaller; it is used to weigh growth, never to
    book slots.
    """

    job_id: str
    remaining: float
    since_s: float
    mask: int
    size: int
    speed_now: float
    starting: bool
    sizes: tuple[int, ...]
    speeds: dict[int, float]
    startup_s: float
    pause_s: float
    tail_s: float
    limit_s: float
    expected: float = INFINITY
    release_s: float = -INFINITY
    """It cannot hold slots before this time; set only for work that has not been submitted yet."""
    join_s: float = 0.0
    joined_s: float = -INFINITY
    """When the new workers of its last change have surely joined; until then its speed may be the old one."""
    grows_from_s: float = -INFINITY
    """It does not grow before. Its last start or change is under way, and would be begun anew; or it was a restart, and
    the time lost is not made up for yet. Otherwise a job that grew whenever slots become free for a moment would only
    ever start."""

    def left_at(self, now: float) -> float:
        """Return the steps left at ``now`` if nothing has changed since ``since_s``."""
        if self.size == 0 or now <= self.since_s:
            return self.remaining
        return max(0.0, self.remaining - self.speed_now * (now - self.since_s))

    def cost_of_change(self, now: float, size: int | None = None) -> float:
        """Return the seconds lost if the slots change at ``now`` to ``size`` others (None: the most for any size)."""
        if self._begins(now):
            return self.startup_s
        if size is None:
            return self.longest_pause_s
        return self.pause_between(self.size, size, joining=now < self.joined_s)

    def delay_s(self, now: float, size: int) -> float:
        """Return the seconds until it makes steps with ``size`` slots: of a change, or of the start under way."""
        return max(0.0, self.since_s - now) if size == self.size else self.cost_of_change(now, size)

    def end_s(self, now: float, size: int) -> float:
        """Return when it has its result if it holds ``size`` slots from ``now`` on; infinite without a speed."""
        speed = self.speeds[size]
        if speed <= 0.0:
            return INFINITY
        if size == self.size:
            return self.since_s + self.remaining / speed + self.tail_s
        return now + self.cost_of_change(now, size) + self.left_at(now) / speed + self.tail_s

    def standstill_s(self, now: float) -> float:
        """Return the seconds without a step if the slots change at ``now``: below the cost if workers must join."""
        return self.startup_s if self._begins(now) else self.pause_s

    def _begins(self, now: float) -> bool:
        return self.size == 0 or (self.starting and self.since_s > now + TOLERANCE_S)

    def pause_between(self, before: int, after: int, *, joining: bool = False) -> float:
        """Return the seconds that a running gang loses, counted at its new speed, when its slots change.

        The gang stands still for ``pause_s``. Before that, while new workers start, it continues at its old speed and
        so loses the difference to its new speed. A gang that gets no faster, by shrinking or migrating, does not lose
        this. ``joining``: the gang may not have reached the size ``before`` yet, so its slowest speed is assumed.
        """
        if self.join_s == 0.0 or not self.sizes:
            return self.pause_s
        old, new = self.speed(self.sizes[0] if joining else before), self.speed(after)
        return self.pause_s + self.join_s * (1.0 - old / new if new > old else 0.0)

    @property
    def longest_pause_s(self) -> float:
        """The most seconds that a running gang loses by a change of its slots."""
        return self.pause_between(self.sizes[0], self.sizes[-1]) if self.sizes else self.pause_s

    def joined_after(self, start_s: float) -> float:
        """Return the latest time at which the new workers of a change that begins at ``start_s`` have joined."""
        return start_s + self.join_s + self.pause_s if self.join_s else -INFINITY

    def speed(self, size: int) -> float:
        """Return the planned steps/s with ``size`` workers: the best of the known sizes up to it (0: none)."""
        known = self.speeds.get(size)
        if known is not None:
            return known
        return max((self.speeds[s] for s in self.sizes if s <= size), default=0.0)

    def soonest_s(self, now: float) -> float:
        """Return the earliest time of the result if the job has the whole cluster from ``now`` on."""
        return min((self.end_s(now, size) for size in self.sizes), default=INFINITY)

    def least_time_s(self) -> float:
        """Return the seconds from the start to the result on an empty cluster with the fastest size."""
        if not self.sizes:
            return INFINITY
        return self.startup_s + self.remaining / self.speeds[self.sizes[-1]] + self.tail_s


class Course(NamedTuple):
    """Concrete holdings of one job and the resulting end. ``finish_s`` is infinite if they do not suffice."""

    holdings: tuple[Holding, ...]
    finish_s: float
    promised_s: float


def likely_end(work: Work, course: Course, now: float) -> float:
    """Return when the last step of a course is expected: its end, or an earlier time if a prediction says so."""
    if work.expected >= work.remaining:
        return course.finish_s
    _, finish = legs_of(replace(work, remaining=work.expected), course.holdings, now)
    return min(finish, course.finish_s)


class Leg(NamedTuple):
    """A period at one size, without progress before ``ready_s``."""

    start_s: float
    end_s: float
    size: int
    ready_s: float


def legs_of(work: Work, holdings: Sequence[Holding], now: float) -> tuple[list[Leg], float]:
    """Return the legs of ``holdings``, with every start-up and pause paid, and the time of the last step."""
    legs: list[Leg] = []
    mask, ready, starting, left = work.mask, work.since_s, work.starting, work.remaining
    end_before, first, joined = now, True, work.joined_s
    for begin, end, held in holdings:
        start = begin if begin > now else now
        gap = start > end_before + TOLERANCE_S
        counted = ready
        if gap or held != mask:
            if first:
                left = work.left_at(now)
            if mask == 0 or gap or (starting and ready > start + TOLERANCE_S):
                ready, starting, joined = start + work.startup_s, True, -INFINITY
            else:
                pause_s = work.pause_between(mask.bit_count(), held.bit_count(), joining=start < joined)
                ready, starting, joined = start + pause_s, False, work.joined_after(start)
            counted = ready
        elif not first and start > ready:
            counted = start
        size = held.bit_count()
        legs.append(Leg(start, end, size, ready))
        speed = work.speed(size)
        if speed > 0.0 or left <= 0.0:
            finish = counted + (left / speed if left > 0.0 else 0.0)
            if finish + work.tail_s <= end + TOLERANCE_S:
                return legs, finish
            if end > counted:
                left = max(0.0, left - speed * (end - counted))
        mask, end_before, first = held, end, False
    return legs, INFINITY


def left_after(work: Work, holdings: Sequence[Holding], now: float) -> float:
    """Return the steps left at the end of ``holdings``."""
    legs, finish = legs_of(work, holdings, now)
    if finish < INFINITY or not legs:
        return 0.0 if finish < INFINITY else work.left_at(now)
    begins = [max(leg.start_s, leg.ready_s) for leg in legs]
    done = sum(work.speed(leg.size) * max(0.0, leg.end_s - at_s) for leg, at_s in zip(legs, begins, strict=True))
    return max(0.0, work.left_at(now) - done)


def course_of(work: Work, holdings: Sequence[Holding], now: float) -> Course:
    """Cut ``holdings`` to what the job needs, and return them with its end."""
    legs, finish = legs_of(work, holdings, now)
    if finish == INFINITY:
        return Course(tuple(holdings), INFINITY, INFINITY)
    promised = finish + work.tail_s
    used = list(holdings[: len(legs)])
    last = used[-1]
    if promised < last.end_s - TOLERANCE_S:
        used[-1] = Holding(last.start_s, max(promised, last.start_s), last.mask)
    return Course(tuple(used), finish, promised)


def plan_of(work: Work, course: Course, now: float) -> Plan:
    """Return the public form of a course: training segments up to the last step."""
    legs, _ = legs_of(work, course.holdings, now)
    segments: list[PlanSegment] = []
    for leg in legs:
        end = min(leg.end_s, course.finish_s)
        if end <= leg.start_s:
            continue
        lost = min(max(0.0, leg.ready_s - leg.start_s), end - leg.start_s)
        segments.append(PlanSegment(leg.start_s, end, leg.size, lost))
    return Plan(work.job_id, tuple(segments), course.finish_s, course.promised_s)
