"""Buddy placement: which slots a gang gets (ElasticFlow, ASPLOS 2023, section 4.3).

All slots of the cluster form one sequence of *addresses*, and a set of slots is an ``int`` with one bit per address, so
that finding a free aligned block takes a handful of shifts even with ten thousand slots. Block sizes are powers of two.
Within a node, blocks result from binary decomposition (a node of 6 is 4 + 2). Across nodes of the same type and size,
they consist of the largest block of each node, if that is the whole node or has at least four slots: two nodes of 6
hold a gang of 8, as 4 + 4, and their other slots are for gangs within a node. Two nodes of 3 hold no gang of 4: with so
few workers per node it would be limited by the network. Slots that are not free break the blocks that contain them;
until when those of draining nodes are is in ``availability.py``. Knows no jobs, no time, no promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticflow_airflow.scheduler_core.cluster.availability import Availability
from elasticflow_airflow.scheduler_core.model.values import Node, Placement, Slot

_LEAST_JOINED = 4
"""The smallest block of a node, unless it is the whole node, that can be part of a gang on several nodes."""


def level_of(size: int) -> int:
    """Return the exponent of a power of two."""
    return size.bit_length() - 1


class Layout:
    """The addresses of a set of nodes and the blocks that they form.

    ``together`` lists the node ids of gangs that span nodes now: they stay neighbours when the cluster changes.
    """

    def __init__(self, nodes: Iterable[Node], together: Sequence[Sequence[str]] = ()) -> None:
        classes: dict[tuple[int, str], list[Node]] = {}
        for node in sorted(nodes, key=lambda node: node.node_id):
            classes.setdefault((-node.slots, node.gpu_type), []).append(node)
        slots: list[Slot] = []
        starts: list[int] = [0]
        self.availability = Availability()
        self.of_type: dict[str, int] = {}
        """The addresses of each GPU type, usable or not. No block contains two types: a forest."""
        for negative, gpu_type in sorted(classes):
            size = -negative
            ordered = _order(classes[negative, gpu_type], together)
            base = len(slots)
            spans: list[tuple[int, int]] = []
            drained = [0] * len(ordered)
            largest = 1 << level_of(size)
            # The largest blocks of all nodes are adjacent, so that they form larger ones; the other slots are separate.
            joined = largest if largest == size or largest >= _LEAST_JOINED else 0
            for indices in (range(joined), range(joined, size)):
                first, length = len(slots), len(indices)
                for number, node in enumerate(ordered):
                    for index in indices:
                        bit = 1 << len(slots)
                        slots.append(Slot(node.node_id, index))
                        drained[number] |= self.availability.add(node, index, bit)
                if length and length == joined:
                    spans.append((first, len(slots) - first))
                elif length:
                    spans += [(start, length) for start in range(first, len(slots), length)]
            for node, mask in zip(ordered, drained, strict=True):
                if node.draining_until_s is not None and mask:
                    self.availability.drain(node.draining_until_s, mask)
            self.of_type[gpu_type] = self.of_type.get(gpu_type, 0) | (1 << len(slots)) - (1 << base)
            for start, length in spans:
                level = 0
                while (1 << level) <= length:
                    if level == len(starts):
                        starts.append(0)
                    step = 1 << level
                    for offset in range(0, length - step + 1, step):
                        starts[level] |= 1 << (start + offset)
                    level += 1
        self.slots = tuple(slots)
        self.starts = tuple(starts)
        self.levels = len(starts)
        self.largest_block = 1 << (self.levels - 1)
        """The most workers that a gang could have here if all slots were free."""
        self.address = {slot: i for i, slot in enumerate(slots)}

    def type_of(self, mask: int) -> str:
        """Return the GPU type of the slots in ``mask``, which are all of one type; empty if there are none."""
        return next((gpu_type for gpu_type, members in self.of_type.items() if mask & members), "")

    def blocks(self, free: int, level: int) -> int:
        """Return the first addresses of the free blocks of size ``2**level``, as a mask."""
        starts = self.starts
        if level >= len(starts):
            return 0
        found = free & starts[0]
        for k in range(level):
            found &= (found >> (1 << k)) & starts[k + 1]
        return found

    def capacity(self, free: int) -> list[int]:
        """Return, per level, the number of slots in free blocks of at least that size."""
        found = free & self.starts[0]
        rows = [found.bit_count()]
        for k in range(self.levels - 1):
            found &= (found >> (1 << k)) & self.starts[k + 1]
            rows.append(found.bit_count() << (k + 1))
        return rows

    def largest(self, free: int) -> int:
        """Return the size of the largest free block; 0 if nothing is free."""
        best = 0
        for level, count in enumerate(self.capacity(free)):
            if count:
                best = 1 << level
        return best

    def find(self, free: int, size: int) -> int:
        """Return a free block of ``size`` as a mask (0: none), taken from the smallest free block that holds it."""
        level = level_of(size)
        found = self.blocks(free, level)
        if not found:
            return 0
        step, starts = size, self.starts
        while True:
            level += 1
            if level >= len(starts):
                rest = found
                break
            larger = found & (found >> step) & starts[level]
            rest = found & ~(larger | (larger << step))
            if rest:
                break
            found = larger
            step <<= 1
        return ((1 << size) - 1) * (rest & -rest)

    def enclosing(self, free: int, inner: int, size: int) -> int:
        """Return the free block of ``size`` that contains ``inner`` (0: not free, or ``inner`` fits no such block)."""
        found = self.blocks(free, level_of(size))
        low = (inner & -inner).bit_length() - 1
        first = max(0, low - size + 1)
        window = (found >> first) & ((1 << (low - first + 1)) - 1)
        while window:
            start = window.bit_length() - 1
            block = ((1 << size) - 1) << (first + start)
            if inner & ~block == 0:
                return block
            window ^= 1 << start
        return 0

    def touching(self, free: int, size: int) -> int:
        """Return all slots of the blocks of ``size`` in which at least one slot is free."""
        level = level_of(size)
        if level >= len(self.starts):
            return 0
        for k in range(level):  # slots at most size - 1 before a free one
            free |= free >> (1 << k)
        found = free & self.starts[level]
        for k in range(level):
            found |= found << (1 << k)
        return found

    def mask_of(self, placement: Placement) -> int:
        """Return the addresses of a placement; slots of nodes that are gone are left out."""
        mask = 0
        for slot in placement.slots:
            address = self.address.get(slot)
            if address is not None:
                mask |= 1 << address
        return mask

    def placement_of(self, mask: int, before: Placement) -> Placement:
        """Return the slots of ``mask`` in rank order: survivors of ``before`` keep their order and come first."""
        kept = [s for s in before.slots if (a := self.address.get(s)) is not None and mask >> a & 1]
        held = set(kept)
        while mask:
            low = mask & -mask
            slot = self.slots[low.bit_length() - 1]
            if slot not in held:
                kept.append(slot)
            mask ^= low
        return Placement(tuple(kept))


def _order(nodes: list[Node], together: Sequence[Sequence[str]]) -> list[Node]:
    """Order equal nodes: first those of spanning gangs (largest gang first), then intact ones, then broken ones."""
    rank: dict[str, tuple[int, int, int]] = {}
    for number, group in enumerate(sorted(together, key=len, reverse=True)):
        for place, node_id in enumerate(group):
            rank.setdefault(node_id, (0, number, place))

    def key(node: Node) -> tuple[tuple[int, int, int], str]:
        if node.node_id in rank:
            return rank[node.node_id], node.node_id
        broken = bool(node.busy) or node.draining_until_s is not None
        return (2 if broken else 1, 0, 0), node.node_id

    return sorted(nodes, key=key)
