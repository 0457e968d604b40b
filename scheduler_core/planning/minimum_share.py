"""Minimum satisfactory share by progressive filling (ElasticFlow, ASPLOS 2023, section 4.1, Algorithm 1).

Jobs are taken one after another; each gets the smallest level that finishes it in time in the capacity that the
previous ones left free. Unlike in the paper, the filling pays for every start-up, change of size and tail, and needs no
concave curve. Works on counts per block size; the slots of the gangs are chosen by
:mod:`~elasticflow_airflow.scheduler_core.planning.share_placement`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Self

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Work

_HALVINGS = 7
"""Number of bisection steps in the search for the best time of a change of level."""
_MARK_EVERY = 4
"""After so many works at least, a filling remembers what they left free."""
_MARKS = 32
"""So many of these a filling of many works has."""


class ShareStretch(NamedTuple):
    """A part of a job's minimum satisfactory share: ``size`` slots from ``start_s`` until ``end_s``."""

    start_s: float
    end_s: float
    size: int


class ShareShape(StrEnum):
    """How a share uses the time until its limit, if a constant level would end well before it."""

    FLAT = "flat"
    """One level throughout."""
    FALLING = "falling"
    """The level as briefly as possible, then the next smaller size to the limit: fewer slot-seconds, one more pause."""
    RISING = "rising"
    """The next smaller size first, for as long as possible."""


def fill(
    free: FreeCapacity,
    works: Iterable[Work],
    now: float,
    extra_pauses: Mapping[str, int],
    shape: ShareShape = ShareShape.FLAT,
    spare_pauses: int = 0,
) -> tuple[dict[str, list[ShareStretch]], str | None]:
    """Fill in the given order; return the shares and the id of the first job that did not fit (None: all did).

    ``extra_pauses`` is the number of migrations that each job must be able to afford. ``spare_pauses``: as many more
    for each job, if they delay its end only, and not beyond its limit. Changes ``free``.
    """
    shares: dict[str, list[ShareStretch]] = {}
    for work in works:
        extra_s = extra_pauses.get(work.job_id, 0) * work.pause_s
        share = minimum_share(free, work, now, extra_s)
        if share is not None and shape is not ShareShape.FLAT:
            share = _slimmed(free, work, now, extra_s + spare_pauses * work.pause_s, shape, share)
        if share is None:
            return shares, work.job_id
        if spare_pauses:
            _prolong(free, work, spare_pauses * work.pause_s, share)
        for start, end, size in share:
            free.reserve(start, end, size)
        shares[work.job_id] = share
    return shares, None


class _Filled:
    """How far one filling came: the shares of works in its order, and the capacity that they left free."""

    def __init__(self, free: FreeCapacity) -> None:
        self.free = free
        self.works: list[tuple[Work, float]] = []
        """The works that have a share, with the seconds of their extra pauses."""
        self.shares: list[list[ShareStretch]] = []
        self.unfit: tuple[Work, float] | None = None
        """The work that came next and did not fit, if that was so."""
        self.marks: list[tuple[int, FreeCapacity]] = [(0, free.copy())]
        """The capacity after so many works, now and then."""

    def common(self, asked: Sequence[tuple[Work, float]]) -> int:
        """Return with how many of its works an order begins."""
        count = 0
        for (work, extra_s), (other, other_s) in zip(self.works, asked, strict=False):
            if extra_s != other_s or (work is not other and work != other):
                break
            count += 1
        return count

    def after(self, count: int) -> FreeCapacity:
        """Return a copy of the capacity after the first ``count`` works."""
        if count == len(self.works):
            return self.free.copy()
        since, mark = next(one for one in reversed(self.marks) if one[0] <= count)
        free = mark.copy()
        for share in self.shares[since:count]:
            for start, end, size in share:
                free.reserve(start, end, size)
        return free

    def cut(self, count: int) -> None:
        """Forget everything after the first ``count`` works."""
        if count < len(self.works):
            self.free = self.after(count)
            del self.works[count:], self.shares[count:]
            self.marks = [mark for mark in self.marks if mark[0] <= count]
        self.unfit = None

    def go_on(self, asked: Sequence[tuple[Work, float]], now: float, shape: ShareShape) -> None:
        """Fill the rest of an order that begins with all of its works, as far as it fits."""
        free, every = self.free, max(_MARK_EVERY, len(asked) // _MARKS)
        for one in asked[len(self.works) :]:
            work, extra_s = one
            share = minimum_share(free, work, now, extra_s)
            if share is not None and shape is not ShareShape.FLAT:
                share = _slimmed(free, work, now, extra_s, shape, share)
            if share is None:
                self.unfit = one
                return
            for start, end, size in share:
                free.reserve(start, end, size)
            self.works.append(one)
            self.shares.append(share)
            if len(self.works) - self.marks[-1][0] >= every:
                self.marks.append((len(self.works), free.copy()))


class Filling:
    """Fillings of one cluster at one moment. Each continues where its order first differs from the last one's.

    The proofs of one moment begin alike: those of the newcomers that are decided on one after another, and those of
    one newcomer with several limits. Gives what :func:`fill` gives. A copy of what holds it begins anew.
    """

    def __init__(self, layout: Layout, now: float) -> None:
        self.layout = layout
        self.now = now
        self._top = 0
        """Size of the largest blocks that were asked for."""
        self._last: dict[ShareShape, _Filled] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return type(self)(self.layout, self.now)

    @cached_property
    def free(self) -> FreeCapacity:
        """The capacity without any work; not to be changed."""
        return FreeCapacity(self.layout, self.now)

    def shares(
        self,
        works: Sequence[Work],
        extra_pauses: Mapping[str, int],
        shape: ShareShape = ShareShape.FLAT,
        spare_pauses: int = 0,
    ) -> tuple[dict[str, list[ShareStretch]], str | None]:
        """Fill in the given order; arguments and result are those of :func:`fill`. The shares are not to be changed."""
        top = max((work.sizes[-1] for work in works if work.sizes), default=1)
        if spare_pauses:
            return fill(self.free.copy(top), works, self.now, extra_pauses, shape, spare_pauses)
        asked = [(work, extra_pauses.get(work.job_id, 0) * work.pause_s) for work in works]
        filled, count = self._filled(asked, top, shape)
        found = {work.job_id: share for (work, _), share in zip(asked[:count], filled.shares, strict=False)}
        return found, None if count == len(asked) else asked[count][0].job_id

    def left(self, works: Sequence[Work], top: int) -> FreeCapacity:
        """Return a copy of the capacity that works leave free for blocks of up to ``top``, in the given order.

        Nothing is taken by the first one that does not fit, and by those after it.
        """
        filled, count = self._flat(works, top)
        return filled.after(count)

    def used(self, works: Sequence[Work], top: int) -> list[float]:
        """Return the slot-seconds that each work takes where :meth:`left` leaves the rest; 0: it gets nothing."""
        filled, count = self._flat(works, top)
        return [*map(_slot_seconds, filled.shares[:count]), *[0.0] * (len(works) - count)]

    def _flat(self, works: Sequence[Work], top: int) -> tuple[_Filled, int]:
        top = max((top, *(work.sizes[-1] for work in works if work.sizes)))
        return self._filled([(work, 0.0) for work in works], top, ShareShape.FLAT)

    def _filled(self, asked: Sequence[tuple[Work, float]], top: int, shape: ShareShape) -> tuple[_Filled, int]:
        """Return a filling that begins with this order, and how many of its works fit."""
        if top > self._top:
            self._top = top
            self._last.clear()
        filled = self._last.get(shape)
        if filled is None:
            filled = self._last[shape] = _Filled(self.free.copy(self._top))
        count = filled.common(asked)
        if count < len(asked) and (count < len(filled.works) or filled.unfit != asked[count]):
            filled.cut(count)
            filled.go_on(asked, self.now, shape)
            count = len(filled.works)
        return filled, count


def _prolong(free: FreeCapacity, work: Work, by_s: float, share: list[ShareStretch]) -> None:
    """Let a share end up to ``by_s`` later, if its size fits until then."""
    start, end, size = share[-1]
    later = min(end + by_s, work.limit_s)
    if later > end and free.fits(end, later, size):
        share[-1] = ShareStretch(start, later, size)


def minimum_share(free: FreeCapacity, work: Work, now: float, extra_s: float = 0.0) -> list[ShareStretch] | None:
    """Find the smallest level at which the job ends by its limit, or None. Does not reserve."""
    now = max(now, work.release_s)
    limit = work.limit_s + TOLERANCE_S / 2
    left = work.left_at(now)
    runs: list[tuple[float, float, int]] | None = None
    for level in work.sizes:
        if level == work.size:
            finish = work.since_s + extra_s + work.remaining / work.speeds[level]
        else:
            finish = now + work.cost_of_change(now, level) + extra_s + left / work.speeds[level]
        end = finish + work.tail_s
        if end > limit:
            continue
        if end <= now:
            return [ShareStretch(now, now + TOLERANCE_S, level)]
        if free.fits(now, end, level):
            return [ShareStretch(now, end, level)]
        if runs is None:
            horizon = limit
            if limit == INFINITY:
                horizon = max(free.times[-1], now) + 10.0 * len(work.sizes) * (work.least_time_s() + extra_s) + 1e6
            runs = free.placeable(work.sizes, now, horizon)
        share = _follow(work, now, extra_s, _capped(runs, level))
        if share is not None:
            return share
    return None


def _slimmed(
    free: FreeCapacity, work: Work, now: float, extra_s: float, shape: ShareShape, share: list[ShareStretch]
) -> list[ShareStretch]:
    """Return the share with a part at the next smaller size, so that it ends just in time; unchanged if no cheaper.

    With a concave curve, every mixture of two sizes costs fewer slot-seconds than the larger size throughout.
    """
    level = max(piece.size for piece in share)
    place = work.sizes.index(level) if level in work.sizes else 0
    limit = work.limit_s
    if place == 0 or limit == INFINITY or work.release_s > now:
        return share
    smaller = work.sizes[place - 1]
    runs = free.placeable(work.sizes, now, limit)
    first, second = (level, smaller) if shape is ShareShape.FALLING else (smaller, level)
    at_first, at_second = _capped(runs, first), _capped(runs, second)
    best, least = share, _slot_seconds(share)
    enough, too_short = (limit, now) if shape is ShareShape.FALLING else (now, limit)
    for _ in range(_HALVINGS):
        switch = (enough + too_short) / 2
        found = _follow(work, now, extra_s, _until(at_first, switch) + _since(at_second, switch))
        if found is None:
            too_short = switch
            continue
        enough = switch
        if (cost := _slot_seconds(found)) < least:
            best, least = found, cost
    return best


def _slot_seconds(share: list[ShareStretch]) -> float:
    return sum(piece.size * (piece.end_s - piece.start_s) for piece in share)


def _until(runs: list[tuple[float, float, int]], at_s: float) -> list[tuple[float, float, int]]:
    """Return the part of ``runs`` before ``at_s``."""
    return [(start, min(end, at_s), fit) for start, end, fit in runs if start < at_s]


def _since(runs: list[tuple[float, float, int]], at_s: float) -> list[tuple[float, float, int]]:
    """Return the part of ``runs`` from ``at_s`` on."""
    return [(max(start, at_s), end, fit) for start, end, fit in runs if end > at_s]


def _follow(work: Work, now: float, extra_s: float, runs: list[tuple[float, float, int]]) -> list[ShareStretch] | None:
    """Follow the sizes of ``runs`` over time, but change the size only if that repays its pause."""
    shares: list[ShareStretch] = []
    left, size, ready, starting = work.left_at(now), work.size, work.since_s, work.starting
    joined = work.joined_s
    owed, speed_of = extra_s, work.speed
    for start, end, fit in runs:
        if fit == 0:
            size = 0
            continue
        target = fit
        if (
            size
            and size < fit
            and speed_of(fit) * max(0.0, end - start - work.pause_between(size, fit))
            <= speed_of(size) * (end - max(start, min(ready, end)))
        ):
            target = size
        if target != size:
            interrupted = starting and ready > start + TOLERANCE_S
            cost = work.startup_s
            if size and not interrupted:
                cost = work.pause_between(size, target, joining=start < joined)
            starting = size == 0 or interrupted
            joined = -INFINITY if starting else work.joined_after(start)
            ready, size = start + cost, target
        begin = ready if ready > start else start
        speed = speed_of(size)
        if shares and shares[-1].end_s == start and shares[-1].size == size:
            shares[-1] = ShareStretch(shares[-1].start_s, end, size)
        else:
            shares.append(ShareStretch(start, end, size))
        if begin >= end:
            continue
        if owed:
            paid = min(owed, end - begin)
            owed -= paid
            begin += paid
        finish = begin + left / speed
        if owed == 0.0 and finish + work.tail_s <= end:
            shares[-1] = ShareStretch(shares[-1].start_s, finish + work.tail_s, size)
            return shares
        left = max(0.0, left - speed * (end - begin))
    return None


def _capped(runs: list[tuple[float, float, int]], level: int) -> list[tuple[float, float, int]]:
    """Limit the sizes of ``runs`` to ``level`` and join neighbours that became equal."""
    if not runs:
        return []
    joined: list[tuple[float, float, int]] = []
    since, before = runs[0][0], min(level, runs[0][2])
    for start, _, fit in runs:
        size = fit if fit < level else level
        if size != before:
            joined.append((since, start, before))
            since, before = start, size
    joined.append((since, runs[-1][1], before))
    return joined
