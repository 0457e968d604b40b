"""A model of node agents and of the shared storage: what replicas can do in the world outside of the database."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from support.histories.modelled_time import Call, Thread, World
from support.histories.protocol import Flaw

PUSH_LIMIT_S = 3.0
"""How long a replica waits for the answer of a node."""


@dataclass(slots=True)
class Part:
    """The workers of a gang on one node."""

    slots: tuple[int, ...]
    began_s: float
    ends_s: float
    ends_as: str = "finished"
    """Or ``stopped`` or ``lost``."""


class Push(NamedTuple):
    """What a node is to have."""

    epoch: int
    number: int
    starts: tuple[tuple[tuple[str, int], tuple[int, ...], float], ...]
    """(gang, slots, how long it lasts)."""
    stops: tuple[tuple[str, int], ...]


class Node:
    """A node agent and its machine: the agent is started again without its memory, but for the epoch on its disk."""

    def __init__(self, world: World, name: str, slots: int, flaws: Set[Flaw], seen: int = 0) -> None:
        """``seen``: the highest epoch, of services on a database that is lost."""
        self._world, self.name, self.slots, self._flaws = world, name, slots, flaws
        self.instance, self.is_up = 0, True
        self._epoch, self._number = seen, 0
        self.parts: dict[tuple[str, int], Part] = {}
        """All that was ever started here."""

    def push(self, thread: Thread, push: Push) -> None:
        """Answers what each gang's workers here are doing; or, as a number, the higher epoch that was seen."""
        self._world.request(thread, self, PUSH_LIMIT_S, self._push, push)

    def _push(self, call: Call, push: Push) -> None:
        world, flaws = self._world, self._flaws
        if push.epoch < self._epoch and Flaw.NODE_WITHOUT_EPOCH not in flaws:
            call.answer(self._epoch)
            return
        if push.epoch != self._epoch:
            self._epoch, self._number = push.epoch, 0
        if push.number <= self._number and Flaw.NODE_WITHOUT_NUMBER not in flaws:
            call.answer(self._epoch)
            return
        self._number = push.number
        world.note("obeys", self.name, push.epoch, push.number)
        now_s, parts = world.now_s, self.parts
        for gang, slots, lasts_s in push.starts:
            if gang not in parts:
                parts[gang] = Part(slots, now_s, now_s + lasts_s)
                world.note("start", self.name, gang, slots)
        for gang in push.stops:
            part = parts.get(gang)
            if part is not None and part.ends_s > now_s and part.ends_as == "finished":
                left_s = now_s + 0.1 + world.random.random()
                if left_s < part.ends_s:
                    part.ends_s, part.ends_as = left_s, "stopped"
                world.note("stop", self.name, gang)
        call.answer({gang: part.ends_as if part.ends_s <= now_s else "" for gang, part in parts.items()})

    def restart(self) -> None:
        """Start the agent again: gangs go on."""
        self._world.note("agent started again", self.name)
        self.instance += 1
        self._number = 0
        if Flaw.NODE_FORGETS_EPOCH in self._flaws:
            self._epoch = 0

    def remember(self, epoch: int) -> None:
        """Have seen an epoch, of a service on a database that is lost."""
        self._world.note("node has seen", self.name, epoch)
        self._epoch = max(self._epoch, epoch)

    def reboot(self) -> None:
        """Start the machine again: nothing runs afterwards."""
        self._world.note("machine started again", self.name)
        self.restart()
        for part in self.parts.values():
            if part.ends_s > self._world.now_s:
                part.ends_s, part.ends_as = self._world.now_s, "lost"

    def close(self) -> None:
        """Write into the history how long gangs have held their slots."""
        for gang, part in self.parts.items():
            self._world.note("held", self.name, gang, part.slots, part.began_s, part.ends_s)


class Storage:
    """The shared storage, where results are published: it knows no epochs."""

    name = "storage"
    instance, is_up = 0, True

    def __init__(self, world: World) -> None:
        self._world = world

    def publish(self, thread: Thread, job: str, result: str) -> None:
        """Answers when it is published."""
        self._world.request(thread, self, PUSH_LIMIT_S, self._publish, (job, result))

    def _publish(self, call: Call, what: tuple[str, str]) -> None:
        self._world.note("published", call.thread.process.name, *what)
        call.answer(True)
