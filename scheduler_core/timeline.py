"""Free capacity over time, in two views: counts per block size (numpy), and the very slots (bit masks).

:class:`FreeCapacity` answers how large a gang fits, migrations allowed: one row per power of two of the slots in free
blocks of at least that size minus those of gangs of at least that size. A set of power-of-two gangs can be placed,
after migrations, if and only if no row is negative (place the largest first: each fits where a row says so). Bare
slots would not do: 3 + 3 free slots hold no gang of 4.

:class:`Bookings` answers which slots nobody has reserved. Both know times and slots only, no jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from elasticflow_airflow.scheduler_core.placement import Layout
from elasticflow_airflow.scheduler_core.work import TOLERANCE_S, Holding

_ROOM = 64


class FreeCapacity:
    """Step function of free capacity by block size from ``now`` to the end of time."""

    def __init__(self, layout: Layout, now: float) -> None:
        self.levels = layout.levels
        self.times: list[float] = [now]
        bases = [layout.capacity(layout.usable_at(now))]
        for until_s in layout.changes:
            if until_s > self.times[-1]:
                self.times.append(until_s)
                bases.append(layout.capacity(layout.usable_at(until_s)))
        self.rows: npt.NDArray[np.int32] = np.zeros((self.levels, len(bases) + _ROOM), dtype=np.int32)
        self.rows[:, : len(bases)] = np.array(bases, dtype=np.int32).T

    def copy(self) -> FreeCapacity:
        """An independent copy, for trying things out."""
        twin = object.__new__(FreeCapacity)
        twin.levels = self.levels
        twin.times = self.times.copy()
        twin.rows = self.rows.copy()
        return twin

    def segment(self, when_s: float) -> int:
        """Index of the segment that contains ``when_s``."""
        return max(0, bisect_right(self.times, when_s) - 1)

    def _split(self, when_s: float) -> int:
        times = self.times
        at = bisect_left(times, when_s)
        if at < len(times) and times[at] == when_s:
            return at
        if at == 0:
            return 0
        count = len(times)
        if count == self.rows.shape[1]:
            grown = np.zeros((self.levels, 2 * count), dtype=np.int32)
            grown[:, :count] = self.rows
            self.rows = grown
        self.rows[:, at : count + 1] = self.rows[:, at - 1 : count]
        times.insert(at, when_s)
        return at

    def fits(self, start_s: float, end_s: float, size: int) -> bool:
        """Whether a gang of ``size`` can be placed throughout."""
        level = size.bit_length()
        if level > self.levels:
            return False
        i, j = self.segment(start_s), bisect_left(self.times, end_s)
        window = self.rows[:level, i:j]
        return window.size == 0 or bool(window.min() >= size)

    def reserve(self, start_s: float, end_s: float, size: int) -> None:
        """Take a gang of ``size`` out of the free capacity."""
        i = self._split(start_s)
        j = self._split(end_s)
        self.rows[: size.bit_length(), i:j] -= size

    def withhold(self, start_s: float, end_s: float, slots: int) -> None:
        """Take ``slots`` slots, wherever they are, out of the free capacity."""
        i, j = self._split(start_s), self._split(end_s)
        self.rows[:, i:j] = np.maximum(self.rows[:, i:j] - slots, 0)

    def placeable(self, sizes: tuple[int, ...], start_s: float, end_s: float) -> list[tuple[float, float, int]]:
        """For each stretch of ``[start_s, end_s)``: the largest of ``sizes`` that can be placed there (0: none)."""
        i, j = self.segment(start_s), bisect_left(self.times, end_s)
        usable = [s for s in sizes if s.bit_length() <= self.levels]
        if j <= i or not usable:
            return [(start_s, end_s, 0)] if end_s > start_s else []
        top = usable[-1].bit_length()
        least = np.minimum.accumulate(self.rows[:top, i:j], axis=0)
        fit = np.zeros(j - i, dtype=np.int32)
        for size in usable:
            fit[least[size.bit_length() - 1] >= size] = size
        runs: list[tuple[float, float, int]] = []
        sizes_at = fit.tolist()
        begin, current = start_s, sizes_at[0]
        for at, size in zip(self.times[i + 1 : j], sizes_at[1:], strict=True):
            if size != current:
                runs.append((begin, at, current))
                begin, current = at, size
        runs.append((begin, end_s, current))
        return runs


class Bookings:
    """Which slots are taken when, from ``now`` on. Slots that are not usable count as taken."""

    def __init__(self, layout: Layout, now: float) -> None:
        everything = (1 << len(layout.slots)) - 1
        self.now = now
        self.everything = everything
        self.times: list[float] = [now]
        self.taken: list[int] = [everything & ~layout.usable_at(now)]
        for until_s in layout.changes:
            if until_s > self.times[-1]:
                self.times.append(until_s)
                self.taken.append(everything & ~layout.usable_at(until_s))

    @classmethod
    def of(cls, layout: Layout, now: float, holdings: Iterable[Holding]) -> Bookings:
        """Book many holdings at once, by one sweep over time."""
        book = cls(layout, now)
        events: list[tuple[float, int, int]] = []
        for start, end, mask in holdings:
            if end > now:
                events.append((max(start, now), 1, mask))
                events.append((end, 0, mask))
        if not events:
            return book
        base = list(zip(book.times, book.taken, strict=True))
        events.sort()  # at equal times ends come before starts
        times: list[float] = []
        taken: list[int] = []
        held, position, i = 0, 0, 0
        unusable = base[0][1]
        points = sorted({t for t, _, _ in events} | set(book.times))
        for t in points:
            while position < len(base) and base[position][0] <= t:
                unusable = base[position][1]
                position += 1
            while i < len(events) and events[i][0] == t:
                _, starts, mask = events[i]
                held = held | mask if starts else held & ~mask
                i += 1
            times.append(t)
            taken.append(held | unusable)
        book.times, book.taken = times, taken
        return book

    def copy(self) -> Bookings:
        """An independent copy, for trying things out."""
        twin = object.__new__(Bookings)
        twin.now, twin.everything = self.now, self.everything
        twin.times, twin.taken = self.times.copy(), self.taken.copy()
        return twin

    def _split(self, when_s: float) -> int:
        at = bisect_left(self.times, when_s)
        if at < len(self.times) and self.times[at] == when_s:
            return at
        if at == 0:
            return 0
        self.times.insert(at, when_s)
        self.taken.insert(at, self.taken[at - 1])
        return at

    def _range(self, start_s: float, end_s: float) -> tuple[int, int]:
        first = max(0, bisect_right(self.times, start_s + TOLERANCE_S) - 1)
        return first, bisect_left(self.times, end_s - TOLERANCE_S)

    def free_over(self, start_s: float, end_s: float, own: tuple[Holding, ...] = ()) -> int:
        """Slots that are free throughout; those booked by ``own`` count as free while it holds them."""
        i, j = self._range(start_s, end_s)
        blocked, taken = 0, self.taken
        if own:
            times = self.times
            for begin, end, mask in own:
                a = max(i, bisect_left(times, max(begin, self.now)))
                b = min(j, bisect_left(times, end))
                if a >= b:
                    continue
                for k in range(i, a):
                    blocked |= taken[k]
                inside = 0
                for k in range(a, b):
                    inside |= taken[k]
                blocked |= inside & ~mask
                i = b
        for k in range(i, j):
            blocked |= taken[k]
        return self.everything & ~blocked

    def free_until(self, mask: int, start_s: float, own: tuple[Holding, ...] = ()) -> float:
        """Until when all of ``mask`` is free, beginning at ``start_s`` (``start_s`` itself: not even then).

        What ``own`` has booked counts as free.
        """
        times, taken = self.times, self.taken
        first = max(0, bisect_right(times, start_s + TOLERANCE_S) - 1)
        if len(own) == 1 and own[0].start_s <= max(start_s, self.now):
            covered = bisect_left(times, own[0].end_s)
            others = mask & ~own[0].mask
            for k in range(first, covered):
                if taken[k] & others:
                    return max(start_s, times[k])
            first, own = max(first, covered), ()
        for k in range(first, len(times)):
            blocked = taken[k] & mask
            if blocked:
                for begin, end, held in own:
                    if begin <= times[k] + TOLERANCE_S and times[k] < end:
                        blocked &= ~held
                if blocked:
                    return max(start_s, times[k])
        return float("inf")

    def take(self, holding: Holding) -> None:
        """Book a holding."""
        i, j = self._split(max(holding.start_s, self.now)), self._split(holding.end_s)
        for k in range(i, j):
            self.taken[k] |= holding.mask

    def give_back(self, holding: Holding) -> None:
        """Undo :meth:`take` of the same holding."""
        if holding.end_s <= self.now:
            return
        i, j = self._split(max(holding.start_s, self.now)), self._split(holding.end_s)
        for k in range(i, j):
            self.taken[k] &= ~holding.mask
