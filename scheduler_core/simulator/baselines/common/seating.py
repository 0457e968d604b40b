"""Placement of gangs of given sizes: which gangs fit together, and which slots each gets.

Uses the buddy blocks of :mod:`~elasticflow_airflow.scheduler_core.cluster.placement` (ElasticFlow, ASPLOS 2023, section
4.3), for policies that decide only for the present. Knows only the ids of jobs, and no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from elasticflow_airflow.scheduler_core.cluster.placement import Layout, level_of


class Room:
    """Tracks which further gangs can be placed if migrations are allowed.

    Exact for power-of-two gangs on aligned blocks: a set of them fits if and only if for each block size the gangs of
    at least that size do not exceed the slots in free blocks of at least that size.
    """

    def __init__(self, layout: Layout, usable: int) -> None:
        self._rows = layout.capacity(usable)

    @property
    def slots(self) -> int:
        """Number of free slots."""
        return self._rows[0] if self._rows else 0

    def fits(self, size: int) -> bool:
        """Whether one more gang of ``size`` (a power of two) can be placed."""
        level = level_of(size)
        return level < len(self._rows) and all(row >= size for row in self._rows[: level + 1])

    def take(self, size: int) -> None:
        """Reserve room for a gang of ``size``; it must fit."""
        for level in range(level_of(size) + 1):
            self._rows[level] -= size

    def give_back(self, size: int) -> None:
        """Undo :meth:`take`."""
        for level in range(level_of(size) + 1):
            self._rows[level] += size


def seat(layout: Layout, usable: int, wanted: Sequence[tuple[str, int]], held: Mapping[str, int]) -> dict[str, int]:
    """Return slots (masks) for gangs that fit together: ``wanted`` are ids and sizes, ``held`` their present slots.

    A gang of unchanged size stays, a shrinking gang keeps a part of its block, and a growing gang grows around its
    block if possible. Running gangs of unchanged size are moved only if there is no block otherwise, and as few as
    possible.

    Raises:
        ValueError: the gangs do not fit together (see :class:`Room`).
    """
    seats: dict[str, int] = {}
    stays: set[str] = set()
    free = usable
    order = {job_id: number for number, (job_id, _) in enumerate(wanted)}
    todo: list[tuple[int, int, int, str]] = []
    for job_id, size in wanted:
        own = held.get(job_id, 0)
        if own.bit_count() == size and own & ~free == 0 and layout.enclosing(own, own, size) == own:
            seats[job_id] = own
            stays.add(job_id)
            free &= ~own
    for job_id, size in wanted:
        if job_id in seats:
            continue
        own = held.get(job_id, 0)
        part = layout.find(own & free, size) if own.bit_count() > size else 0
        if part:
            seats[job_id] = part
            free &= ~part
        else:
            todo.append((-size, 0 if own else 1, order[job_id], job_id))
    heapify(todo)
    while todo:
        negative, _, _, job_id = heappop(todo)
        size, own, block = -negative, held.get(job_id, 0), 0
        if own and own & ~free == 0:
            block = layout.enclosing(free, own, size)
        block = block or layout.find(free, size)
        if not block:
            block = _cheapest(layout, usable, size, seats, stays)
            for other, mask in list(seats.items()):
                if mask & block:
                    free |= seats.pop(other)
                    stays.discard(other)
                    heappush(todo, (-mask.bit_count(), 0, order[other], other))
        seats[job_id] = block
        free &= ~block
    return seats


def _cheapest(layout: Layout, usable: int, size: int, seats: Mapping[str, int], stays: set[str]) -> int:
    """Return the block whose clearing moves the fewest gangs that would otherwise stay in place."""
    larger = 0
    for mask in seats.values():
        if mask.bit_count() >= size:
            larger |= mask
    starts = layout.blocks(usable & ~larger, level_of(size))
    if not starts:
        raise ValueError(f"a gang of {size} does not fit beside {sorted(m.bit_count() for m in seats.values())}")
    best, least = 0, (1 << 62, 0, 0)
    shape = (1 << size) - 1
    while starts:
        low = starts & -starts
        block = shape * low
        hit = [job_id for job_id, mask in seats.items() if mask & block]
        cost = (sum(job_id in stays for job_id in hit), len(hit), sum(seats[j].bit_count() for j in hit))
        if cost < least:
            best, least = block, cost
        starts ^= low
    return best
