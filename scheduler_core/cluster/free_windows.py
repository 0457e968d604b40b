"""Where a block of slots is free for so long: a search over time that remembers where it has looked in vain.

Thousands of jobs that look for slots one after another in the same plan would each walk over all that is booked for
the ones before. As long as slots are only booked and none is given back, where nothing was free nothing gets free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.work import INFINITY


class Vain:
    """What is known not to be free: before which time no block of a size is free for so many seconds."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[float], list[float]]] = {}
        """By size: seconds, and until when that was looked for in vain; both rise."""

    def until(self, size: int, seconds: float) -> float:
        """No block of ``size`` that is free for ``seconds`` begins before this time."""
        latest = -INFINITY
        for smaller, (lengths, untils) in self._steps.items():  # a larger block contains smaller ones
            if smaller <= size:
                at = bisect_right(lengths, seconds)
                if at and untils[at - 1] > latest:
                    latest = untils[at - 1]
        return latest

    def note(self, size: int, seconds: float, until_s: float) -> None:
        """Remember that before ``until_s`` there is no block of ``size`` for ``seconds``."""
        lengths, untils = self._steps.setdefault(size, ([], []))
        at = bisect_right(lengths, seconds)
        if at and untils[at - 1] >= until_s:
            return
        first = bisect_left(lengths, seconds)
        last = max(at, bisect_right(untils, until_s))
        lengths[first:last] = [seconds]
        untils[first:last] = [until_s]

    def clear(self) -> None:
        """Forget everything: slots were given back."""
        self._steps.clear()


class Booked(Protocol):
    """Which slots are taken in each stretch of time, as in :class:`~.timeline.Bookings`."""

    now: float
    everything: int
    times: list[float]
    taken: list[int]
    vain: Vain


def first_window(
    book: Booked, layout: Layout, size: int, seconds: float, latest_s: float, *, later: bool = False
) -> tuple[float, int] | None:
    """Find the first block of ``size`` that is free for ``seconds``, and when that begins; None: not by ``latest_s``.

    ``later``: not at once, but when other slots are free than now.
    """
    times, taken, everything = book.times, book.taken, book.everything
    i = max(1 if later else 0, bisect_left(times, book.vain.until(size, seconds)))
    found: tuple[float, int] | None = None
    while i < len(times) and times[i] <= latest_s and times[i] < INFINITY:
        free, blocked = _while_free(times, taken, everything, i, times[i] + seconds, layout, size)
        if blocked is None:
            found = times[i], layout.find(free, size)
            break
        i = _after(taken, everything, blocked, layout, size)
    if not later:
        book.vain.note(size, seconds, times[i] if i < len(times) else INFINITY)
    return found


def _while_free(
    times: Sequence[float], taken: Sequence[int], everything: int, i: int, end_s: float, layout: Layout, size: int
) -> tuple[int, int | None]:
    """What is free from segment ``i`` until ``end_s``; and the segment until which no block is (None: one is)."""
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
    """The first segment from which on a block is free until the end of segment ``blocked``, or the one after that."""
    free, block, first = everything & ~taken[blocked], 0, blocked + 1
    while first:
        free &= ~taken[first - 1]
        if free.bit_count() < size:
            break
        if (not block or block & taken[first - 1]) and not (block := layout.find(free, size)):
            break
        first -= 1
    return first
