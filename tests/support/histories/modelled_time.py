"""Modelled time: events in order, processes whose threads are generators, and requests over a network that fails.

A thread yields seconds to sleep, or a request ``(method, *arguments)``: it goes on with the answer, or with ``LOST``. A
request that was given up may be executed all the same, later: never by another instance of its receiver, as its
connection is cut with that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any, Protocol

LOST: Any = object()
"""What a thread gets instead of an answer: nothing came in time, or the connection was cut."""

Code = Generator[Any, Any, Any]


class Receiver(Protocol):
    """Executes requests, while it is up; ``instance`` changes when it is started again."""

    name: str
    instance: int

    @property
    def is_up(self) -> bool: ...


class World:
    """The clock, the events to come, the network, and the history so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.history: list[tuple[Any, ...]] = []
        """What happened, in order: (when, what, ...)."""
        self.is_over = False
        self.events = 0
        self.delay_s, self.loss, self.doubles = 0.01, 0.0, 0.0
        """Of messages: the usual delay, and which part is lost, or delivered twice."""
        self.cut: dict[tuple[str, str], float] = {}
        """Until when nothing gets from one to another."""
        self.calm_s = 0.0
        """When the last fault is over: messages that were held up arrive by then."""
        self._heap: list[tuple[float, int, Callable[[Any, Any], None], Any, Any]] = []
        self._count = 0

    def at(self, when_s: float, call: Callable[[Any, Any], None], first: Any = None, second: Any = None) -> None:
        """Have something called at a time."""
        self._count += 1
        heappush(self._heap, (when_s, self._count, call, first, second))

    def note(self, what: str, *details: Any) -> None:
        """Write something into the history."""
        self.history.append((self.now_s, what, *details))

    def run(self, until_s: float) -> None:
        """Let time pass until somebody says that it is over, or until a time."""
        heap, events = self._heap, 0
        while heap and not self.is_over:
            when_s, _, call, first, second = heappop(heap)
            if when_s > until_s:
                break
            self.now_s = when_s
            events += 1
            call(first, second)
        self.events += events

    def trip_s(self, sender: str, receiver: str) -> float | None:
        """How long a message takes; None: it never arrives."""
        draw = self.random.random
        trip_s = self.delay_s * (0.2 + 1.6 * draw())
        if self.cut:
            until_s = self.cut.get((sender, receiver))
            if until_s is not None and until_s > self.now_s:
                return until_s - self.now_s + trip_s if draw() < 0.6 else None
        if self.loss and draw() < self.loss:
            # Lost packets are sent again, by the kernel, also when the sender has given up.
            late_s = 12.0 * draw() ** 3
            return min(late_s, max(0.0, self.calm_s - self.now_s)) + trip_s if draw() < 0.5 else None
        return trip_s

    def request(
        self, thread: Thread, receiver: Receiver, limit_s: float, execute: Callable[[Call, Any], None], what: Any
    ) -> Call:
        """Send a request for a thread, which waits for an answer until a limit."""
        call = Call(self, thread, receiver, self.now_s + limit_s)
        trip_s = self.trip_s(thread.process.name, receiver.name)
        if trip_s is None or trip_s >= limit_s:
            call.limit()
        if trip_s is not None:
            self.at(self.now_s + trip_s, call.arrive, execute, what)
            if self.doubles and self.random.random() < self.doubles:
                self.at(self.now_s + trip_s + 3.0 * self.random.random(), call.arrive, execute, what)
        return call


class Process:
    """One life of something that may be killed, or stopped for a while (SIGSTOP)."""

    def __init__(self, name: str, life: int = 0) -> None:
        self.name, self.life = name, life
        self.is_alive = True
        self.stopped_until_s = 0.0


class Thread:
    """Code of a process. Nothing of it runs while the process is stopped; what comes meanwhile waits."""

    __slots__ = ("_send", "_world", "process", "sleeps", "token")

    def __init__(self, world: World, process: Process, code: Code) -> None:
        self._world, self.process, self._send = world, process, code.send
        self.token = 0
        """Counts what it waited for: only the first answer to the current wait counts."""
        self.sleeps = False
        world.at(world.now_s, self.resume, 0, None)

    def resume(self, token: int, value: Any) -> None:
        """Go on, unless it has gone on already."""
        process, world = self.process, self._world
        if token != self.token or not process.is_alive:
            return
        if process.stopped_until_s > world.now_s:
            world.at(process.stopped_until_s, self.resume, token, value)
            return
        self.token = token + 1
        self.sleeps = False
        try:
            effect = self._send(value)
        except StopIteration:
            return
        if effect.__class__ is float:
            self.sleeps = True
            world.at(world.now_s + effect, self.resume, self.token, None)
        else:
            effect[0](self, *effect[1:])

    def wake(self) -> None:
        """End its sleep, if it sleeps."""
        if self.sleeps:
            self._world.at(self._world.now_s, self.resume, self.token, None)


class Call:
    """A request on its way, and the way back of its answer."""

    __slots__ = ("_is_limited", "_world", "deadline_s", "instance", "receiver", "thread", "token")

    def __init__(self, world: World, thread: Thread, receiver: Receiver, deadline_s: float) -> None:
        self._world, self.thread, self.token, self.receiver = world, thread, thread.token, receiver
        self.deadline_s, self.instance, self._is_limited = deadline_s, receiver.instance, False

    def arrive(self, execute: Callable[[Call, Any], None], what: Any) -> None:
        """Have the receiver execute it, if it is still the one to which the sender was connected."""
        if self.receiver.is_up and self.receiver.instance == self.instance:
            execute(self, what)
        else:
            self.answer(LOST)

    def limit(self) -> None:
        """Let the sender give up at its limit, as its answer may not come."""
        if not self._is_limited:
            self._is_limited = True
            self._world.at(max(self._world.now_s, self.deadline_s), self.thread.resume, self.token, LOST)

    def answer(self, value: Any) -> None:
        """Send the answer."""
        world, thread = self._world, self.thread
        trip_s = world.trip_s(self.receiver.name, thread.process.name)
        if trip_s is None or world.now_s + trip_s > self.deadline_s:
            self.limit()
        else:
            world.at(world.now_s + trip_s, thread.resume, self.token, value)
