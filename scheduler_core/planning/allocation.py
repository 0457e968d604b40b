"""Allocation beside what is booked: a newcomer's share, best effort, profiling windows, and elastic growth.

Growth is ElasticFlow's Algorithm 2 (ASPLOS 2023, section 4.2) by marginal return, GPU-seconds saved per extra GPU,
including the pause. A job grows only into unreserved slots, for as long as they are unreserved, and only if it pays.
If a job is predicted to end before its booked end, growth is weighed by the prediction; the booking stays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from heapq import heappop, heappush

from elasticflow_airflow.scheduler_core.cluster.free_windows import first_window
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.work import (
    INFINITY,
    TOLERANCE_S,
    Course,
    Holding,
    Work,
    course_of,
    left_after,
    likely_end,
)
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft

_PIECES = 6
"""Number of free periods that a job without a promise is planned over; later periods are found in later plans."""


def share_now(draft: Draft, work: Work, limit: float) -> Course | None:
    """Find the smallest size that starts now in free slots and keeps the limit without another change."""
    now, layout = draft.now, draft.layout
    left = work.left_at(now)
    for size in work.sizes:
        if size == work.size:
            end = work.since_s + work.remaining / work.speeds[size] + work.tail_s
            if end <= limit + TOLERANCE_S and draft.book.free_until(work.mask, now) >= end:
                return course_of(work, [Holding(now, max(end, now + TOLERANCE_S), work.mask)], now)
        end = now + work.cost_of_change(now, size) + left / work.speeds[size] + work.tail_s
        if end > limit + TOLERANCE_S / 2:
            continue
        free = draft.book.free_over(now, end)
        block = (work.mask and layout.enclosing(free, work.mask, size)) or layout.find(free, size)
        if block:
            return course_of(work, [Holding(now, end, block)], now)
    return None


def share_later(draft: Draft, work: Work, limit: float) -> Course | None:
    """Find the earliest end at one constant size, starting now or when slots become free; None if after ``limit``."""
    now, layout, book = draft.now, draft.layout, draft.book
    left = work.left_at(now)
    limit = limit + TOLERANCE_S / 2
    if not work.sizes or work.speeds[work.sizes[-1]] <= 0.0:
        return None
    best = _at_once(draft, work, left, limit) if work.size else None  # a running gang pays less for its first slots
    for size in reversed(work.sizes):
        seconds = work.startup_s + left / work.speeds[size] + work.tail_s
        if seconds == INFINITY:
            continue
        latest = min(limit, best.promised_s if best else limit) - seconds
        found = first_window(book, layout, size, seconds, latest, later=bool(work.size))
        if found is None:
            continue
        start, block = found
        end = start + work.startup_s + left / work.speeds[size] + work.tail_s
        course = course_of(work, [Holding(start, end, block)], now)
        if best is None or (course.promised_s, start) < (best.promised_s, best.holdings[0].start_s):
            best = course
    return best


def _at_once(draft: Draft, work: Work, left: float, limit: float) -> Course | None:
    """Find the fastest size that a running gang can hold from now to its end; None if that is after ``limit``."""
    now = draft.now
    for size in reversed(work.sizes):
        end = now + work.cost_of_change(now, size) + left / work.speeds[size] + work.tail_s
        if end > limit:
            continue
        found = first_window(draft.book, draft.layout, size, end - now, now)
        if found is not None:
            return course_of(work, [Holding(now, end, found[1])], now)
    return None


def window(draft: Draft, mask: int, size: int, seconds: float) -> Holding | None:
    """Find slots for ``size`` workers that are free for ``seconds`` from now on; those of ``mask`` if possible."""
    free = draft.book.free_over(draft.now, draft.now + seconds)
    if mask and mask.bit_count() == size and mask & ~free == 0:
        block = mask
    else:
        block = (mask and draft.layout.enclosing(free, mask, size)) or draft.layout.find(free, size)
    return Holding(draft.now, draft.now + seconds, block) if block else None


def while_free(draft: Draft, work: Work, size: int, before_s: float = INFINITY) -> Course | None:
    """Hold ``size`` slots wherever and while they are unreserved; None if there are none now or later.

    Also returns None if it finds early that the job cannot be done before ``before_s``.
    """
    now, book = draft.now, draft.book
    pieces: list[Holding] = []
    holds = work.size == size and not work.mask & book.taken[0]  # its slots need not be a block that a search finds
    brief = 2.0 * work.startup_s
    """Periods up to this length are not worth a start."""
    index, course = 0 if holds else bisect_left(book.times, book.vain.until(size, brief)), None
    while len(pieces) < _PIECES and index < len(book.times):
        start = max(book.times[index], now)
        if start == INFINITY or start >= before_s:
            break
        if (book.everything & ~book.taken[index]).bit_count() < size:
            index += 1
            continue
        own = work.mask if start == now and work.size == size else 0
        block, until = _longest(draft, size, index, own)
        if block == 0 or (block != own and until - start <= brief):
            index += 1
            continue
        if not pieces and not holds:
            book.vain.note(size, brief, start)
        pieces.append(Holding(start, until, block))
        course = course_of(work, pieces, now)
        if course.finish_s < INFINITY or until == INFINITY:
            return course
        while index < len(book.times) and book.times[index] < until:
            index += 1
    if not pieces and not holds:
        book.vain.note(size, brief, book.times[index] if index < len(book.times) else INFINITY)
    return course


def _longest(draft: Draft, size: int, index: int, own: int) -> tuple[int, float]:
    """Return the block that stays free the longest from segment ``index`` on, and its end; ``own`` if that is free."""
    book, layout = draft.book, draft.layout
    free = book.everything & ~book.taken[index]
    if own and own & ~free == 0:
        return own, book.free_until(own, max(book.times[index], draft.now))
    block = layout.find(free, size)
    if not block:
        return 0, 0.0
    for k in range(index + 1, len(book.times)):
        free &= ~book.taken[k]
        if block & ~free:
            other = layout.find(free, size)
            if not other:
                return block, book.times[k]
            block = other
    return block, INFINITY


def as_soon_as_possible(draft: Draft, work: Work) -> Course | None:
    """Find the earliest end in free slots, for a job whose deadline is lost.

    If no end is in sight, prefer a course that starts at once, then the one with the most progress. Slots that become
    free later are considered then.
    """
    best = share_later(draft, work, INFINITY)
    endless: list[Course] = []
    for size in work.sizes:
        course = while_free(draft, work, size, best.promised_s if best else INFINITY)
        if course is not None and course.promised_s == INFINITY:
            endless.append(course)
        elif course is not None and (best is None or course.promised_s < best.promised_s):
            best = course

    def rank(course: Course) -> tuple[bool, float]:
        waits = course.holdings[0].start_s > draft.now + TOLERANCE_S
        return waits, left_after(work, course.holdings, draft.now)

    return min(endless, key=rank, default=None) if best is None else best


def grow(draft: Draft, works: Iterable[Work], config: SchedulerConfig) -> None:
    """Give free slots to the jobs that save the most GPU-seconds per slot, until no growth pays any more."""
    room = draft.book.free_now.bit_count()  # growing takes from it, and gives nothing back
    if not room:
        return
    by_id: dict[str, Work] = {}
    options: list[tuple[float, str, Course]] = []
    room_to_grow = _RoomToGrow(draft)

    def consider(work: Work) -> None:
        option = _option(draft, work, config, room)
        if option is not None:
            heappush(options, (-option[0], work.job_id, option[1]))

    courses = draft.courses
    for work in works:
        course = courses.get(work.job_id)
        if course is not None and course.finish_s < INFINITY and room_to_grow.has(work, course):
            by_id[work.job_id] = work
            consider(work)
    while options and room:
        _, winner, course = heappop(options)
        if draft.is_free(course, beside=draft.courses[winner]):  # else another job took these slots meanwhile
            draft.drop(winner)
            draft.put(winner, course)
            room = draft.book.free_now.bit_count()
        consider(by_id[winner])


class _RoomToGrow:
    """Which jobs could grow into the free slots at all: of thousands, those beside the few that are free.

    As of the beginning, before any has grown.
    """

    def __init__(self, draft: Draft) -> None:
        self._layout, self._soon_s = draft.layout, draft.now + TOLERANCE_S
        self._free = draft.book.free_now
        self._next = dict[tuple[tuple[int, ...], int], int]()
        """By the sizes that a job can have, and the one that it has: the slots with which it may grow.

        Those beside a block of the next size that is free but for its own; all, where such a block is free.
        """

    def has(self, work: Work, course: Course) -> bool:
        """Return whether some block of a larger size is free, perhaps but for the job's own slots."""
        first = course.holdings[0] if course.holdings else None
        if first is None or first.mask != work.mask or not first.start_s <= self._soon_s < first.end_s:
            return True  # It is about to change.
        key = work.sizes, work.size
        beside = self._next.get(key)
        if beside is None:
            beside = self._next[key] = self._beside(work)
        return bool(work.mask & beside)

    def _beside(self, work: Work) -> int:
        larger = bisect_right(work.sizes, work.size)
        if larger == len(work.sizes):
            return 0
        target = work.sizes[larger]
        return -1 if self._layout.find(self._free, target) else self._layout.touching(self._free, target)


def _option(draft: Draft, work: Work, config: SchedulerConfig, room: int) -> tuple[float, Course] | None:
    """Return the best larger size for one job as (GPU-seconds saved per extra slot, course); ``room``: free slots."""
    present = draft.courses[work.job_id]
    mask = draft.mask_now(work.job_id)
    size = mask.bit_count()
    candidates = [s for s in work.sizes if size < s <= size + room]
    if not candidates:
        return None
    now, layout, book = draft.now, draft.layout, draft.book
    free_now = book.free_now | mask
    if now < work.grows_from_s - TOLERANCE_S:
        if any(target > work.size and layout.find(free_now, target) for target in candidates):
            draft.held_back.add(work.job_id)
        candidates = [target for target in candidates if target <= work.size]
        if not candidates:
            return None
    keeps = work.size in candidates and not work.mask & ~free_now  # the slots that it holds cost no pause
    candidates = [work.size] if keeps else candidates[:1]
    left = work.left_at(now)
    best: tuple[float, Course] | None = None
    for target in candidates:
        if work.speeds[target] <= 0.0:
            continue  # its gain is unknown
        pauses_s = config.min_saving_pauses * work.pause_between(size, target) if size else 0.0
        least = max(TOLERANCE_S, pauses_s, config.min_saving_s if size else 0.0)
        if target == work.size and not work.mask & ~free_now:
            soonest, enough = work.since_s + work.remaining / work.speeds[target], TOLERANCE_S
        else:
            soonest, enough = now + work.cost_of_change(now, target) + left / work.speeds[target], least
        if present.finish_s - soonest < enough or not layout.find(free_now, target):
            continue
        course = _at_size(draft, work, target, mask, present)
        if course is None:
            continue
        before, after = likely_end(work, present, now), likely_end(work, course, now)
        if course.holdings[0].mask == work.mask:  # shrinking would cost a pause, however near the end is
            pays = present.finish_s - course.finish_s >= TOLERANCE_S
        else:
            pays = before - after >= least
        if not pays:
            continue
        rate = INFINITY
        if size:
            spent = size * (before - now) - target * (after - now)
            rate = spent / (target - size)
        if best is None or rate > best[0]:
            best = (rate, course)
    return best


def _at_size(draft: Draft, work: Work, size: int, mask: int, present: Course) -> Course | None:
    """Hold ``size`` slots from now to the end, or until they are reserved and then continue as planned."""
    now, layout, book = draft.now, draft.layout, draft.book
    own = present.holdings
    speed = work.speeds[size]
    if work.size == size:
        end = work.since_s + work.remaining / speed + work.tail_s
        if book.free_until(work.mask, now, own) >= end:
            return course_of(work, [Holding(now, max(end, now + TOLERANCE_S), work.mask)], now)
    end = now + work.cost_of_change(now, size) + work.left_at(now) / speed + work.tail_s
    free = book.free_over(now, end, own)
    block = (mask and layout.enclosing(free, mask, size)) or layout.find(free, size)
    if block:
        return course_of(work, [Holding(now, end, block)], now)
    free = book.free_now | mask
    if work.size == size and work.mask & ~free == 0:
        block = work.mask
    else:
        block = (mask and layout.enclosing(free, mask, size)) or layout.find(free, size)
    if not block:
        return None
    until = book.free_until(block, now, own)
    if until <= now + 2.0 * work.cost_of_change(now, size):
        return None
    later = [Holding(max(start, until), stop, held) for start, stop, held in own if stop > until + TOLERANCE_S]
    course = course_of(work, [Holding(now, until, block), *later], now)
    return course if course.finish_s < INFINITY else None
