"""When which slots may be planned on: busy ones never, draining ones until their node goes, avoided ones afterwards.

Sets of slots are masks of the addresses that a :class:`~elasticflow_airflow.scheduler_core.cluster.placement.Layout`
gives them. Knows no jobs: what they hold is in :mod:`~elasticflow_airflow.scheduler_core.cluster.timeline`.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.model.values import Node


class Availability:
    """The slots that may be planned on, over time, before any reservation."""

    def __init__(self) -> None:
        self.slots = 0
        """The slots that somebody else does not keep busy, drained and avoided ones included."""
        self.drains: list[tuple[float, int]] = []
        """(time, slots): they cease to be usable then."""
        self.avoided: list[tuple[float, int]] = []
        """(time, slots): they become usable then."""

    def add(self, node: Node, index: int, slot: int) -> int:
        """Add a slot of a node, with its index there; return it, or 0 if it is busy."""
        if index in node.busy:
            return 0
        self.slots |= slot
        if index in node.avoided:
            self.avoided.append((node.avoided[index], slot))
        return slot

    def drain(self, until_s: float, slots: int) -> None:
        """Let slots cease to be usable at a time."""
        self.drains.append((until_s, slots))

    @property
    def changes(self) -> tuple[float, ...]:
        """The times at which slots become usable or cease to be."""
        return tuple(sorted({until_s for until_s, _ in (*self.drains, *self.avoided)}))

    def at(self, when_s: float) -> int:
        """Return the slots that may be planned on from ``when_s`` on."""
        usable = self.slots
        for until_s, mask in self.drains:
            if until_s <= when_s:
                usable &= ~mask
        for until_s, mask in self.avoided:
            if until_s > when_s:
                usable &= ~mask
        return usable
