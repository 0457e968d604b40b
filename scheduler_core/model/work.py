"""One job as the planner sees it at one moment, and the arithmetic of its progress. Pure; knows no other job.

The only place that says what a start, a change of slots and a tail cost; plans, proofs and projections all use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.model.values import Plan, PlanSegment

INFINITY = float("inf")
TOLERANCE_S = 1e-5
"""Times closer than this are the same time: UTC seconds as floats are exact to 2.4e-7 only."""


class Holding(NamedTuple):
    """Hold the slots in ``mask`` from ``start_s`` until ``end_s`` (which covers the tail)."""

    start_s: float
    end_s: float
    mask: int


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of a job, how fast it goes at each size, what changing costs.

    ``remaining`` counts at ``since_s``, from when on the gang makes (or will make) steps at ``speed_now``;
    ``starting`` says that ``since_s`` is the end of a start-up, which a change would make it pay again. ``expected``
    (at ``since_s``, too) is what a prediction says is left, if that is less: it weighs growth, and books nothing.
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
    """It cannot hold slots before; only of work that has not come yet."""
    join_s: float = 0.0
    joined_s: float = -INFINITY
    """When the new workers of its last change have joined for sure: until then it may be as slow as before."""

    def left_at(self, now: float) -> float:
        """Steps left at ``now`` if nothing has changed since ``since_s``."""
        if self.size == 0 or now <= self.since_s:
            return self.remaining
        return max(0.0, self.remaining - self.speed_now * (now - self.since_s))

    def cost_of_change(self, now: float, size: int | None = None) -> float:
        """Seconds lost if the slots change at ``now`` to ``size`` other ones (None: at most, whatever the size)."""
        if self._begins(now):
            return self.startup_s
        if size is None:
            return self.longest_pause_s
        return self.pause_between(self.size, size, joining=now < self.joined_s)

    def standstill_s(self, now: float) -> float:
        """Seconds without a step if the slots change at ``now``: less than it costs where others have to join first."""
        return self.startup_s if self._begins(now) else self.pause_s

    def _begins(self, now: float) -> bool:
        return self.size == 0 or (self.starting and self.since_s > now + TOLERANCE_S)

    def pause_between(self, before: int, after: int, *, joining: bool = False) -> float:
        """Seconds that a running gang loses, counted at its new speed, when its slots change.

        It stands still for ``pause_s``. Before that it lacks, while new workers start, what it would gain by them: it
        goes on at its old speed. Who gets no faster, by shrinking or by moving, lacks nothing. ``joining``: it may not
        have come to the size ``before`` yet, so that its speed is at least its slowest.
        """
        if self.join_s == 0.0 or not self.sizes:
            return self.pause_s
        old, new = self.speed(self.sizes[0] if joining else before), self.speed(after)
        return self.pause_s + self.join_s * (1.0 - old / new if new > old else 0.0)

    @property
    def longest_pause_s(self) -> float:
        """What a running gang loses at most by a change of its slots."""
        return self.pause_between(self.sizes[0], self.sizes[-1]) if self.sizes else self.pause_s

    def joined_after(self, start_s: float) -> float:
        """When the new workers have joined, at the latest, of a change that begins at ``start_s``."""
        return start_s + self.join_s + self.pause_s if self.join_s else -INFINITY

    def speed(self, size: int) -> float:
        """Planned steps/s with ``size`` workers: the fastest measured size that is not larger (0: none)."""
        known = self.speeds.get(size)
        if known is not None:
            return known
        return max((self.speeds[s] for s in self.sizes if s <= size), default=0.0)

    def soonest_s(self, now: float) -> float:
        """When the result can be there if all of the cluster is its own from ``now`` on."""
        soonest = INFINITY
        for size in self.sizes:
            if size == self.size:
                soonest = min(soonest, self.since_s + self.remaining / self.speeds[size])
            elif self.speeds[size] > 0.0:
                soonest = min(soonest, now + self.cost_of_change(now, size) + self.left_at(now) / self.speeds[size])
        return soonest + self.tail_s

    def least_time_s(self) -> float:
        """Seconds from nothing to the result on an empty cluster with the fastest size."""
        if not self.sizes:
            return INFINITY
        return self.startup_s + self.remaining / self.speeds[self.sizes[-1]] + self.tail_s


class Course(NamedTuple):
    """Concrete holdings of one job with the end they lead to. ``finish_s`` is infinite when they do not suffice."""

    holdings: tuple[Holding, ...]
    finish_s: float
    promised_s: float


def likely_end(work: Work, course: Course, now: float) -> float:
    """When the last step on a course is expected: its end, or by a prediction an earlier time."""
    if work.expected >= work.remaining:
        return course.finish_s
    _, finish = legs_of(replace(work, remaining=work.expected), course.holdings, now)
    return min(finish, course.finish_s)


class Leg(NamedTuple):
    """A stretch of one size: no progress before ``ready_s``."""

    start_s: float
    end_s: float
    size: int
    ready_s: float


def legs_of(work: Work, holdings: Sequence[Holding], now: float) -> tuple[list[Leg], float]:
    """Walk through ``holdings``: the legs, every start-up and pause paid, and the time of the last step."""
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
    """Steps that are left when ``holdings`` are over."""
    legs, finish = legs_of(work, holdings, now)
    if finish < INFINITY or not legs:
        return 0.0 if finish < INFINITY else work.left_at(now)
    begins = [max(leg.start_s, leg.ready_s) for leg in legs]
    done = sum(work.speed(leg.size) * max(0.0, leg.end_s - at_s) for leg, at_s in zip(legs, begins, strict=True))
    return max(0.0, work.left_at(now) - done)


def course_of(work: Work, holdings: Sequence[Holding], now: float) -> Course:
    """Cut ``holdings`` to what the job needs and say when it ends."""
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
    """The public form of a course: segments of training up to the last step."""
    legs, _ = legs_of(work, course.holdings, now)
    segments: list[PlanSegment] = []
    for leg in legs:
        end = min(leg.end_s, course.finish_s)
        if end <= leg.start_s:
            continue
        lost = min(max(0.0, leg.ready_s - leg.start_s), end - leg.start_s)
        segments.append(PlanSegment(leg.start_s, end, leg.size, lost))
    return Plan(work.job_id, tuple(segments), course.finish_s, course.promised_s)
