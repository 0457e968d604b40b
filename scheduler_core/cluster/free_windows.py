"""Finds when a block of slots is free for a given time: a search over time that caches where it found nothing.

Otherwise each of thousands of jobs that search for slots in the same plan would scan all bookings of the previous ones.
As long as slots are only booked and none is given back, times at which nothing was free stay without free slots.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.work import INFINITY


class Vain:
    """Cache of failed searches: by size and duration, the time before which no free block begins."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[float], list[float]]] = {}
        """By size: durations in seconds, and the times before which none was found; both ascending."""

    def until(self, size: int, seconds: float) -> float:
        """Return a time before which no block of ``size`` that is free for ``seconds`` begins."""
        latest = -INFINITY
        for smaller, (lengths, untils) in self._steps.items():  # a larger block contains smaller ones
            if smaller <= size:
                at = bisect_right(lengths, seconds)
                if at and untils[at - 1] > latest:
                    latest = untils[at - 1]
        return latest

    def note(self, size: int, seconds: float, until_s: float) -> None:
        """Remember that no block of ``size`` that is free for ``seconds`` begins before ``until_s``."""
        lengths, untils = self._steps.setdefault(size, ([], []))
        at = bisect_right(lengths, seconds)
        if at and untils[at - 1] >= until_s:
            return
        first = bisect_left(lengths, seconds)
        last = max(at, bisect_right(untils, until_s))
        lengths[first:last] = [seconds]
        untils[first:last] = [until_s]

    def clear(self) -> None:
        """Discard everything, because slots were given back."""
        self._steps.clear()


class Booked(Protocol):
    """Which slots are taken in each segment of time, as in :class:`~.timeline.Bookings`."""

    now: float
    everything: int
    times: list[float]
    taken: list[int]
    vain: Vain


def first_window(
    book: Booked, layout: Layout, size: int, seconds: float, latest_s: float, *, later: bool = False
) -> tuple[float, int] | None:
    """Find the first block of ``size`` that is free for ``seconds``: its start and mask; None: none by ``latest_s``.

    ``later``: skip the current segment and begin at the next change of bookings.
    """
    if not later:
        return first_window_from(book, layout, size, seconds, book.now, latest_s, book.vain)
    begin = max(book.vain.until(size, seconds), book.times[1] if len(book.times) > 1 else INFINITY)
    return _search(book, layout, size, seconds, begin, latest_s)[0]


def first_window_from(
    book: Booked, layout: Layout, size: int, seconds: float, begin_s: float, latest_s: float, vain: Vain
) -> tuple[float, int] | None:
    """Find the first block from ``begin_s`` on, as :func:`first_window` does.

    ``vain`` caches failed searches that begin at the same time.
    """
    begin = max(begin_s, vain.until(size, seconds))
    found, until = _search(book, layout, size, seconds, begin, latest_s)
    vain.note(size, seconds, until)
    return found


def _search(
    book: Booked, layout: Layout, size: int, seconds: float, begin_s: float, latest_s: float
) -> tuple[tuple[float, int] | None, float]:
    """Return the first block from ``begin_s`` on (or None), and a time before which there is none."""
    times, taken, everything = book.times, book.taken, book.everything
    i = max(0, bisect_right(times, begin_s) - 1)
    start = max(times[i], begin_s)
    while start <= latest_s and start < INFINITY:
        free, blocked = _while_free(times, taken, everything, i, start + seconds, layout, size)
        if blocked is None:
            return (start, layout.find(free, size)), start
        i = _after(taken, everything, blocked, layout, size)
        if i == len(times):
            return None, INFINITY
        start = times[i]
    return None, start


def _while_free(
    times: Sequence[float], taken: Sequence[int], everything: int, i: int, end_s: float, layout: Layout, size: int
) -> tuple[int, int | None]:
    """Return the slots free from segment ``i`` to ``end_s``, and the segment where no block is left (None: one is)."""
    free = everything & ~taken[i]
    if free.bit_count() < size or not (block := layout.find(free, size)):
        return free, i
    for k in range(i + 1, len(times)):
        if times[k] >= end_s:
            break
        free &= ~taken[k]
        if block & taken[k] and not (block := layout.find(free, size)):
            return free, k
    return free, None


def _after(taken: Sequence[int], everything: int, blocked: int, layout: Layout, size: int) -> int:
    """Return the first segment from which a block is free to the end of segment ``blocked``, or the one after it."""
    free, block, first = everything & ~taken[blocked], 0, blocked + 1
    while first:
        free &= ~taken[first - 1]
        if free.bit_count() < size:
            break
        if (not block or block & taken[first - 1]) and not (block := layout.find(free, size)):
            break
        first -= 1
    return first
