"""A model of the database: the row of the lease, the lock of writers, and what is committed.

``tests/service/leadership/test_database_model.py`` compares it with PostgreSQL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from elasticflow_airflow.service.leadership.lease import Ask, LeaseRequest
from support.histories.modelled_time import LOST, Call, Process, Thread, World
from support.histories.protocol import Flaw

IDLE_LIMIT_S = 3.0
"""A write transaction whose process says nothing for so long is ended."""
ASK_LIMIT_S, WAIT_LIMIT_S = 1.0, 8.0
"""How long a replica waits for an answer: about its lease, and to anything else."""

Placement = tuple[tuple[str, int], ...]
"""Slots: (node, index)."""


class Job(NamedTuple):
    """A row of a job."""

    name: str
    state: str = "waiting"
    """Or ``done`` or ``cancelled``: then it is over."""
    cancel: bool = False
    last_generation: int = 0
    result: str | None = None
    is_published: bool = False

    @property
    def is_over(self) -> bool:
        return self.state != "waiting"


class Generation(NamedTuple):
    """A row of a generation that has not ended."""

    job: str
    number: int
    placement: Placement
    lasts_s: float
    is_wanted: bool = True


@dataclass(slots=True)
class LeaderRow:
    """The row of the lease, with the statements of ``lease_table.py``. Times are the database's."""

    lease_s: float
    flaws: Set[Flaw] = frozenset()
    epoch: int = 0
    holder: str | None = None
    until_s: float | None = None
    change: str | None = None

    def ask(self, me: str, request: LeaseRequest, now_s: float) -> bool:
        """Make a request; returns whether it was granted."""
        if request.ask is Ask.TAKE:
            return self._take(me, now_s)
        is_mine = self.epoch == request.epoch and self.holder == me
        if request.ask is Ask.GIVE_UP:
            if is_mine:
                self.holder = self.until_s = None
            return is_mine
        if Flaw.RENEW_WITHOUT_EPOCH in self.flaws:
            is_mine = self.holder == me
        if is_mine or Flaw.RENEW_WITHOUT_CONDITION in self.flaws:
            self.until_s = now_s + self.lease_s
            return True
        return False

    def _take(self, me: str, now_s: float) -> bool:
        has_ended = self.until_s is not None and self.until_s < now_s
        if not (self.holder in (None, me) or has_ended or Flaw.TAKE_BEFORE_END in self.flaws):
            return False
        if self.epoch == 0:
            self.change = "start"
        else:
            self.change = "hand-over" if self.holder is None else "fail-over"
        self.epoch += 1
        self.holder, self.until_s = me, now_s + self.lease_s
        return True

    def raise_epoch(self, me: str, epoch: int, higher: int, now_s: float) -> bool:
        """Have the lease of a replica go on with a higher epoch; returns whether it does."""
        may = self.epoch == epoch and self.holder == me and higher > self.epoch
        if not may and Flaw.RAISE_WITHOUT_CONDITION not in self.flaws:
            return False
        self.epoch = higher
        if Flaw.RAISE_WITHOUT_RENEWAL not in self.flaws:
            self.until_s = now_s + self.lease_s
        return True

    def left_s(self, now_s: float) -> float | None:
        """How long the lease still lasts; negative: it has ended."""
        return None if self.until_s is None else self.until_s - now_s


class Transaction:
    """A write transaction. ``epoch``: in which the loop writes; None: of a handler."""

    __slots__ = ("call", "epoch", "idle_since_s", "is_open", "process")

    def __init__(self, process: Process, epoch: int | None) -> None:
        self.process, self.epoch = process, epoch
        self.is_open, self.idle_since_s = False, 0.0
        self.call: Call | None = None


class Listener(Protocol):
    """A replica that hears of news."""

    def hear(self, first: Any, second: Any) -> None:
        """Hear that a lease was given up."""


class Database:
    """The whole database. Its public methods with a thread are requests (see ``modelled_time.py``)."""

    name = "db"

    def __init__(self, world: World, lease_s: float, flaws: Set[Flaw]) -> None:
        self._world, self._flaws = world, flaws
        self.instance, self.is_up = 0, True
        self.clock_offset_s = 0.0
        self.row = LeaderRow(lease_s, flaws)
        self.jobs: dict[str, Job] = {}
        self.generations: dict[tuple[str, int], Generation] = {}
        """Those that have not ended."""
        self.listeners: dict[str, Listener] = {}
        """By name, who hears that a lease was given up."""
        self._writing: Transaction | None = None
        self._waiting: deque[Transaction] = deque()
        self._is_watched = False

    def now_s(self) -> float:
        """What its clock shows."""
        return self._world.now_s + self.clock_offset_s

    # -- the row of the lease

    def ask(self, thread: Thread, request: LeaseRequest) -> None:
        """Answers whether it was granted, the epoch, and how long the lease lasts."""
        self._world.request(thread, self, ASK_LIMIT_S, self._ask, request)

    def _ask(self, call: Call, request: LeaseRequest) -> None:
        row, process, now_s = self.row, call.thread.process, self.now_s()
        if row.ask(process.name, request, now_s):
            self._world.note("granted", request.ask.name, process.name, process.life, request.epoch, row.epoch)
            call.answer((True, row.epoch, row.left_s(now_s)))
            if request.ask is Ask.GIVE_UP:
                self._tell(process.name)
        else:
            call.answer((False, row.epoch, row.left_s(now_s)))

    def _tell(self, sender: str) -> None:
        for name, listener in self.listeners.items():
            trip_s = None if name == sender else self._world.trip_s(self.name, name)
            if trip_s is not None:
                self._world.at(self._world.now_s + trip_s, listener.hear)

    def raise_epoch(self, thread: Thread, epoch: int, higher: int) -> None:
        """Answers whether it was raised."""
        self._world.request(thread, self, ASK_LIMIT_S, self._raise, (epoch, higher))

    def _raise(self, call: Call, what: tuple[int, int]) -> None:
        process = call.thread.process
        raised = self.row.raise_epoch(process.name, *what, self.now_s())
        if raised:
            self._world.note("granted", "RAISE", process.name, process.life, what[0], self.row.epoch)
        call.answer(raised)

    # -- reading and writing

    def read(self, thread: Thread, epoch: int, is_first: bool) -> None:
        """Answers a snapshot of jobs and generations."""
        self._world.request(thread, self, WAIT_LIMIT_S, self._read, (epoch, is_first))

    def _read(self, call: Call, what: tuple[int, bool]) -> None:
        if what[1]:
            self._world.note("first read", call.thread.process.name, call.thread.process.life, what[0])
        call.answer((dict(self.jobs), dict(self.generations)))

    def begin(self, thread: Thread, transaction: Transaction) -> None:
        """Answers when no other transaction writes."""
        self._world.request(thread, self, WAIT_LIMIT_S, self._begin, transaction)

    def _begin(self, call: Call, transaction: Transaction) -> None:
        if transaction.call is not None:
            return  # A connection does not double what it carries, and what has ended does not begin again.
        transaction.call = call
        self._waiting.append(transaction)
        self._next()
        if not transaction.is_open:
            call.limit()

    def check(self, thread: Thread, transaction: Transaction) -> None:
        """Answers the epoch of the row, as a statement of the transaction."""
        self._world.request(thread, self, WAIT_LIMIT_S, self._check, transaction)

    def _check(self, call: Call, transaction: Transaction) -> None:
        self._end_idle()
        if not transaction.is_open:
            call.answer(LOST)
            return
        transaction.idle_since_s = self._world.now_s
        call.answer(self.row.epoch)

    def commit(self, thread: Thread, transaction: Transaction, change: Callable[[Database], Any]) -> None:
        """Makes a change, and answers what it returned."""
        self._world.request(thread, self, WAIT_LIMIT_S, self._commit, (transaction, change))

    def _commit(self, call: Call, what: tuple[Transaction, Callable[[Database], Any]]) -> None:
        transaction, change = what
        self._end_idle()
        if not transaction.is_open:
            call.answer(LOST)
            return
        found = change(self)
        self.end(transaction)
        call.answer(found)

    def roll_back(self, transaction: Transaction) -> None:
        """Sent by a process that does not go on; without it, the transaction ends by its limit."""
        trip_s = self._world.trip_s(transaction.process.name, self.name)
        if trip_s is not None:
            self._world.at(self._world.now_s + trip_s, lambda *_: self.end(transaction))

    def end(self, transaction: Transaction) -> None:
        """End a transaction, whatever its state is."""
        transaction.is_open = False
        if transaction is self._writing:
            self._writing = None
            self._next()
        elif transaction in self._waiting:
            self._waiting.remove(transaction)

    def lose(self, process: Process) -> None:
        """Notice that a process is dead."""
        mine = [one for one in (self._writing, *self._waiting) if one is not None and one.process is process]
        for transaction in mine[::-1]:
            self.end(transaction)

    def stop(self) -> None:
        """Go down: what is committed stays."""
        self.is_up = False
        self.instance += 1
        cut = [one for one in (self._writing, *self._waiting) if one is not None]
        self._writing, self._waiting = None, deque()
        for transaction in cut:
            if not transaction.is_open and transaction.call is not None:
                transaction.call.answer(LOST)
            transaction.is_open = False

    def start(self) -> None:
        """Come up again."""
        self.is_up = True

    def _watch(self, *_: Any) -> None:
        self._is_watched = False
        self._next()

    def _end_idle(self) -> None:
        writing = self._writing
        if writing is not None and self._world.now_s >= writing.idle_since_s + IDLE_LIMIT_S:
            self._world.note("idle transaction ended", writing.process.name, writing.process.life, writing.epoch)
            self.end(writing)

    def _next(self) -> None:
        self._end_idle()
        while self._writing is None and self._waiting:
            transaction = self._waiting.popleft()
            call = transaction.call
            assert call is not None
            if not transaction.process.is_alive or call.deadline_s < self._world.now_s:
                continue  # Its connection is closed.
            self._writing = transaction
            transaction.is_open, transaction.idle_since_s = True, self._world.now_s
            call.answer(True)
        if self._waiting and self._writing is not None and not self._is_watched:
            self._is_watched = True
            self._world.at(self._writing.idle_since_s + IDLE_LIMIT_S, self._watch)
