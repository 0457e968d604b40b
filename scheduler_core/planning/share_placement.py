"""Places the shares of a filling on concrete slots, from now to their ends, which proves that they can be placed.

Steps through the times of changes: gangs end, shrink into a part of their block, grow into the block around them, or
start in the smallest free block that holds them. Other gangs migrate only if no block is free otherwise (ElasticFlow,
section 4.3; here every migration costs the migrated job a pause, which the caller checks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from heapq import heapify, heappop, heappush
from operator import or_

from elasticflow_airflow.scheduler_core.cluster.placement import Layout, level_of
from elasticflow_airflow.scheduler_core.model.work import Holding, Work
from elasticflow_airflow.scheduler_core.planning.minimum_share import ShareStretch


class NoPlaceError(Exception):
    """The shares cannot be placed: a gang is not aligned with the blocks, or the counts were wrong."""


def place(
    layout: Layout, works: Sequence[Work], shares: Mapping[str, Sequence[ShareStretch]], now: float, avoid: int
) -> tuple[dict[str, list[Holding]], dict[str, int]]:
    """Return concrete holdings for every job of ``works``, and the number of migrations of each migrated job.

    ``avoid`` are slots that are in use now; they are taken only if nothing else is free.

    Raises:
        NoPlaceError: the shares cannot be placed.
    """
    changes: dict[float, list[tuple[int, int]]] = {now: []}
    for i, work in enumerate(works):
        end_before = now if work.mask else None
        for start, end, size in shares[work.job_id]:
            if end_before is not None and end_before < start:
                changes.setdefault(end_before, []).append((i, 0))
            changes.setdefault(start, []).append((i, size))
            end_before = end
        if end_before is not None:
            changes.setdefault(end_before, []).append((i, 0))
    roll = _Roll(layout, works, now, avoid)
    lost = [at_s for at_s in layout.availability.changes if at_s > now]
    for until_s in lost:
        changes.setdefault(until_s, [])
    for when in sorted(changes):
        roll.step(changes[when], when, check_all=when == now or when in lost)
    return {work.job_id: roll.holdings[i] for i, work in enumerate(works)}, roll.migrations


class _Roll:
    """The slots of all gangs at one moment, and their earlier holdings."""

    def __init__(self, layout: Layout, works: Sequence[Work], now: float, avoid: int) -> None:
        self.layout = layout
        self.works = works
        self.avoid = avoid
        self.held = [work.mask for work in works]
        self.written = self.held.copy()
        self.since = [now] * len(works)
        self.holdings: list[list[Holding]] = [[] for _ in works]
        self.migrations: dict[str, int] = {}
        self.usable = layout.availability.at(now)
        self.taken = 0
        self.block = 0
        self.by_size: dict[int, int] = {}
        """By number of slots: all slots of the gangs of that size."""
        self.owner: dict[int, int] = {}
        """By slot: the gang that holds it. Avoids a search over all gangs, most of which hold no slots at a time."""
        for i, mask in enumerate(self.held):
            self._own(i, 0, mask)

    def step(self, changes: list[tuple[int, int]], when: float, *, check_all: bool) -> None:
        """Apply the sizes that ``changes`` requests at ``when``."""
        held = self.held
        wanted = dict(changes)
        touched = set(wanted)
        todo: list[tuple[int, int]] = []
        if check_all:
            self.usable = self.layout.availability.at(when)
            for i, own in enumerate(held):
                if own & ~self.usable and i not in wanted:
                    todo.append((own.bit_count(), i))
                    touched.add(i)
        for i, size in wanted.items():
            own = held[i]
            if size == 0:
                self._hold(i, 0)
            elif own and size < own.bit_count():
                part = self.layout.find(own & self.usable, size)
                if part:
                    self._hold(i, part)
                else:
                    todo.append((size, i))
            elif own.bit_count() != size or own & ~self.usable:
                todo.append((size, i))
        queue = [(-size, i) for size, i in todo]  # the largest first
        heapify(queue)
        waiting = {i for _, i in queue}
        while queue:
            negative, i = heappop(queue)
            waiting.discard(i)
            for j in self._put(i, -negative):
                touched.add(j)
                if j not in waiting:
                    waiting.add(j)
                    heappush(queue, (-held[j].bit_count(), j))
                self._hold(j, 0)
            self._hold(i, self.block)
        for i in touched:
            self._write(i, when)

    def _hold(self, i: int, mask: int) -> None:
        self._own(i, self.held[i], mask)
        self.held[i] = mask

    def _own(self, i: int, before: int, after: int) -> None:
        """Record that gang ``i`` holds ``after`` instead of ``before``."""
        self.taken = self.taken & ~before | after
        if before:
            self.by_size[before.bit_count()] &= ~before
        if after:
            size = after.bit_count()
            self.by_size[size] = self.by_size.get(size, 0) | after
            for slot in _slots(after):
                self.owner[slot] = i

    def _put(self, i: int, size: int) -> list[int]:
        """Find a block for gang ``i``, stored in ``self.block``; return the gangs that must make room."""
        layout, own = self.layout, self.held[i]
        free = self.usable & ~(self.taken & ~own)
        self.block = 0
        if own and own.bit_count() < size:
            self.block = layout.enclosing(free, own, size)
        if not self.block:
            self.block = layout.find(free & ~(self.avoid & ~own), size) or layout.find(free, size)
        if self.block:
            return []
        larger = reduce(or_, (mask for many, mask in self.by_size.items() if many >= size), 0)
        if own.bit_count() >= size:
            larger &= ~own
        starts = layout.blocks(self.usable & ~larger, level_of(size))
        if not starts:
            raise NoPlaceError
        others, shape, least = self.taken & ~own, (1 << size) - 1, size + 1
        while starts:
            low = starts & -starts
            count = (shape * low & others).bit_count()
            if count < least:
                self.block, least = shape * low, count
            starts ^= low
        return sorted({self.owner[slot] for slot in _slots(self.block & self.taken & ~own)})

    def _write(self, i: int, when: float) -> None:
        """Record that gang ``i`` holds other slots from ``when`` on, if it does."""
        before, after = self.written[i], self.held[i]
        if before == after:
            return
        if before and after and before.bit_count() == after.bit_count():
            job_id = self.works[i].job_id
            self.migrations[job_id] = self.migrations.get(job_id, 0) + 1
        if before and when > self.since[i]:
            self.holdings[i].append(Holding(self.since[i], when, before))
        self.written[i] = after
        self.since[i] = when


def _slots(mask: int) -> Iterator[int]:
    """Yield each slot of a mask, as a mask of its own."""
    while mask:
        slot = mask & -mask
        yield slot
        mask ^= slot
