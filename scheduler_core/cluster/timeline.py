"""Free capacity over time, in two views: counts per block size (numpy), and exact slots (bit masks).

:class:`FreeCapacity` answers how large a gang fits if migrations are allowed. It has one row per power of two: the
slots in free blocks of at least that size minus the slots of gangs of at least that size. A set of power-of-two gangs
can be placed, after migrations, if and only if no row is negative (place the largest first: each fits if its row says
so). A plain count of slots is not enough: 3 + 3 free slots hold no gang of 4.

:class:`Bookings` answers which slots are not reserved. Both know only times and slots, no jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from elasticflow_airflow.scheduler_core.cluster.free_windows import Vain
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Holding

_ROOM = 64
_FEW = 512
_SIZES = np.array([1 << level for level in range(31)], dtype=np.int32)


class FreeCapacity:
    """Step function of free capacity by block size, from ``now`` to infinity.

    ``top`` limits it to blocks of up to that size, if no larger ones are needed. ``largest`` has, for each segment, the
    number of rows that allow a gang of their size (the exponent of the largest gang plus one). It is updated with each
    reservation, so that queries read one number per segment and not all rows.
    """

    def __init__(self, layout: Layout, now: float, top: int | None = None) -> None:
        self.levels = layout.levels if top is None else min(layout.levels, top.bit_length())
        self.times: list[float] = [now]
        bases = [layout.capacity(layout.availability.at(now))]
        for until_s in layout.availability.changes:
            if until_s > self.times[-1]:
                self.times.append(until_s)
                bases.append(layout.capacity(layout.availability.at(until_s)))
        count = len(bases)
        self.rows: npt.NDArray[np.int32] = np.zeros((self.levels, count + _ROOM), dtype=np.int32)
        self.rows[:, :count] = np.array(bases, dtype=np.int32).T[: self.levels]
        self.largest: npt.NDArray[np.int8] = np.zeros(count + _ROOM, dtype=np.int8)
        self._untidy = 2 * count + _ROOM
        """Number of segments above which equal neighbours are merged."""
        self._recount(0, count)

    def copy(self, top: int | None = None) -> FreeCapacity:
        """Return an independent copy, for trials; ``top`` as for a new one."""
        twin = object.__new__(FreeCapacity)
        twin.levels = self.levels if top is None else min(self.levels, top.bit_length())
        twin.times = self.times.copy()
        twin.rows = self.rows[: twin.levels].copy()
        twin.largest = np.minimum(self.largest, np.int8(twin.levels))
        twin._untidy = self._untidy
        return twin

    def segment(self, when_s: float) -> int:
        """Return the index of the segment that contains ``when_s``."""
        return max(0, bisect_right(self.times, when_s) - 1)

    def _recount(self, i: int, j: int) -> None:
        """Recompute the largest gang that fits in each of the segments ``i:j``."""
        if j - i <= _FEW:
            least = np.minimum.accumulate(self.rows[:, i:j], axis=0)
            np.add.reduce(least >= _SIZES[: self.levels, None], axis=0, dtype=np.int8, out=self.largest[i:j])
            return
        lowest = self.rows[0, i:j].copy()
        count = (lowest >= 1).astype(np.int8)
        for level in range(1, self.levels):  # row by row: the working set stays in the processor's cache
            np.minimum(lowest, self.rows[level, i:j], out=lowest)
            count += lowest >= 1 << level
        self.largest[i:j] = count

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
            self.largest = np.concatenate([self.largest, np.zeros(count, dtype=np.int8)])
        self.rows[:, at : count + 1] = self.rows[:, at - 1 : count]
        self.largest[at : count + 1] = self.largest[at - 1 : count]
        times.insert(at, when_s)
        return at

    def fits(self, start_s: float, end_s: float, size: int) -> bool:
        """Return whether a gang of ``size`` can be placed during the whole time."""
        level = size.bit_length()
        if level > self.levels:
            return False
        i, j = self.segment(start_s), bisect_left(self.times, end_s)
        return j <= i or int(np.minimum.reduce(self.largest[i:j])) >= level

    def reserve(self, start_s: float, end_s: float, size: int) -> None:
        """Subtract a gang of ``size`` from the free capacity."""
        i = self._split(start_s)
        j = self._split(end_s)
        if j > i:
            self.rows[: size.bit_length(), i:j] -= size
            self._recount(i, j)

    def release(self, start_s: float, end_s: float, size: int) -> None:
        """Undo :meth:`reserve` of the same gang."""
        i = self._split(start_s)
        j = self._split(end_s)
        if j > i:
            self.rows[: size.bit_length(), i:j] += size
            self._recount(i, j)
        if len(self.times) > self._untidy:
            self._tidy()

    def _tidy(self) -> None:
        """Merge neighbouring segments with equal free capacity."""
        count = len(self.times)
        borders = np.concatenate(([True], (self.rows[:, 1:count] != self.rows[:, : count - 1]).any(axis=0)))
        left = int(np.count_nonzero(borders))
        self.rows[:, :left] = self.rows[:, :count][:, borders]
        self.largest[:left] = self.largest[:count][borders]
        self.times = [when for when, border in zip(self.times, borders.tolist(), strict=True) if border]
        self._untidy = 2 * left + _ROOM

    def withhold(self, edges: npt.NDArray[np.float64], slots: npt.NDArray[np.int32]) -> None:
        """Subtract slots, wherever they are: ``slots[k]`` of them from ``edges[k]`` until ``edges[k + 1]``."""
        used = slots > 0
        borders = edges[np.concatenate((used, [False])) | np.concatenate(([False], used))]
        if not len(borders):
            return
        before = np.array(self.times)
        times = np.union1d(before, borders[borders > before[0]])
        since = np.searchsorted(before, times, side="right") - 1
        within = np.searchsorted(edges, times, side="right") - 1
        inside = (within >= 0) & (within < len(slots))
        taken = np.where(inside, slots[np.clip(within, 0, len(slots) - 1)], 0).astype(np.int32)
        rows = self.rows[:, since]
        self.times = times.tolist()
        self.rows = np.where(taken > 0, np.maximum(rows - taken, 0), rows)
        self.largest = self.largest[since]
        self._recount(0, len(times))

    def slot_seconds(self, start_s: float, end_s: float) -> float:
        """Return free slots times seconds between two times, wherever the slots are."""
        i, j = self.segment(start_s), bisect_left(self.times, end_s)
        if j <= i:
            return 0.0
        borders = np.clip([*self.times[i:j], end_s], start_s, end_s)
        return float(np.maximum(self.rows[0, i:j], 0) @ np.diff(borders))

    def least(self) -> list[int]:
        """Return, per level, the slots in free blocks of at least that size at the worst moment."""
        found: list[int] = self.rows[:, : len(self.times)].min(axis=1).tolist()
        return found

    def placeable(self, sizes: tuple[int, ...], start_s: float, end_s: float) -> list[tuple[float, float, int]]:
        """Return the stretches of ``[start_s, end_s)``, each with the largest of ``sizes`` that fits (0: none)."""
        i, j = self.segment(start_s), bisect_left(self.times, end_s)
        if j <= i:
            return [(start_s, end_s, 0)] if end_s > start_s else []
        by_level = [0] * (self.levels + 1)
        for size in sizes:
            for level in range(size.bit_length(), self.levels + 1):
                by_level[level] = size
        largest = self.largest[i:j]
        runs: list[tuple[float, float, int]] = []
        begin, fit = start_s, by_level[largest[0]]
        for border in (largest[1:] != largest[:-1]).nonzero()[0].tolist():
            size = by_level[largest[border + 1]]
            if size != fit:
                end = self.times[i + border + 1]
                runs.append((begin, end, fit))
                begin, fit = end, size
        runs.append((begin, end_s, fit))
        return runs


class Bookings:
    """Which slots are taken at which time, from ``now`` on. Unusable slots count as taken.

    A segment begins and ends with each holding, also where the same slots are taken before and after.
    """

    def __init__(self, layout: Layout, now: float) -> None:
        everything = (1 << len(layout.slots)) - 1
        self.now = now
        self.everything = everything
        self.times: list[float] = [now]
        self.taken: list[int] = [everything & ~layout.availability.at(now)]
        self.is_disjoint = True
        """Whether no slot was booked twice, and nothing for no time, when all was booked at once."""
        self.vain = Vain()
        """Cache of times without a free block, for repeated searches."""
        for until_s in layout.availability.changes:
            if until_s > self.times[-1]:
                self.times.append(until_s)
                self.taken.append(everything & ~layout.availability.at(until_s))

    @classmethod
    def of(cls, layout: Layout, now: float, holdings: Iterable[Holding]) -> Bookings:
        """Book many holdings at once, in one sweep over time."""
        book = cls(layout, now)
        events: list[tuple[float, int, int]] = []
        held = 0
        for start, end, mask in holdings:
            if end > now:
                if end <= start or (start <= now and held & mask):
                    book.is_disjoint = False
                if start <= now:
                    held |= mask
                else:
                    events.append((start, 1, mask))
                events.append((end, 0, mask))
        if not events:
            return book
        unusable = dict(zip(book.times, book.taken, strict=True))
        events += [(when_s, 0, 0) for when_s in unusable if when_s > now]
        events.sort()  # at equal times ends come before starts
        away, last_s = unusable[now], now
        times, taken = [now], [held | away]
        for when_s, starts, mask in events:
            if when_s != last_s:
                if last_s != now:
                    times.append(last_s)
                    taken.append(held | away if away else held)
                away, last_s = unusable.get(when_s, away), when_s
            if starts and held & mask:
                book.is_disjoint = False
            held = held | mask if starts else held ^ (held & mask)  # "& ~mask" takes longer
        times.append(last_s)
        taken.append(held | away if away else held)
        book.times, book.taken = times, taken
        return book

    @property
    def free_now(self) -> int:
        """The slots that nobody has booked at this moment."""
        return self.everything & ~self.taken[0]

    def copy(self) -> Bookings:
        """Return an independent copy, for trials."""
        return self.since(self.now)

    def since(self, now: float) -> Bookings:
        """Return an independent copy that begins at a later time."""
        twin = object.__new__(Bookings)
        twin.now, twin.everything, twin.is_disjoint = now, self.everything, self.is_disjoint
        first = bisect_right(self.times, now)
        twin.times, twin.taken = [now, *self.times[first:]], self.taken[max(0, first - 1) :]
        twin.vain = Vain()
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

    def free_over(self, start_s: float, end_s: float, own: tuple[Holding, ...] = ()) -> int:
        """Return the slots that are free throughout; those booked by ``own`` count as free while it holds them."""
        times, taken, blocked = self.times, self.taken, 0
        i, j = max(0, bisect_right(times, start_s + TOLERANCE_S) - 1), bisect_left(times, end_s - TOLERANCE_S)
        if own:
            for begin, end, mask in own:
                a = max(i, bisect_left(times, max(begin, self.now)))
                b = min(j, bisect_left(times, end))
                if a >= b:
                    continue
                blocked = reduce(or_, taken[i:a], blocked) | reduce(or_, taken[a:b], 0) & ~mask
                i = b
        return self.everything & ~reduce(or_, taken[i:j], blocked)

    def free_until(self, mask: int, start_s: float, own: tuple[Holding, ...] = ()) -> float:
        """Return until when all of ``mask`` is free from ``start_s`` on (``start_s`` itself: not free at all).

        Slots booked by ``own`` count as free.
        """
        times, taken = self.times, self.taken
        first = max(0, bisect_right(times, start_s + TOLERANCE_S) - 1)
        if len(own) == 1 and own[0].start_s <= max(start_s, self.now):
            covered = bisect_left(times, own[0].end_s)
            others = mask & ~own[0].mask
            if others:
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
        return INFINITY

    def take(self, holding: Holding) -> None:
        """Book a holding."""
        i, j = self._split(max(holding.start_s, self.now)), self._split(holding.end_s)
        mask = holding.mask
        self.taken[i:j] = [held | mask for held in self.taken[i:j]]

    def give_back(self, holding: Holding) -> None:
        """Undo :meth:`take` of the same holding."""
        if holding.end_s <= self.now:
            return
        self.vain.clear()
        i, j = self._split(max(holding.start_s, self.now)), self._split(holding.end_s)
        others = ~holding.mask
        self.taken[i:j] = [held & others for held in self.taken[i:j]]
