"""A replica in modelled time: the real ``Lease``, and in miniature the threads that the service has around it.

The thread of the lease is as in ``leadership.py``; a tenure as in ``election.py``: a write as a barrier, then passes
that read, decide, write under the mandate, and have nodes do what was committed, each by a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from elasticflow_airflow.service.leadership.lease import Lease, LeaseRequest, LeaseTerms
from support.histories.database import Database, Generation, Job, Transaction
from support.histories.modelled_time import LOST, Call, Code, Process, Thread, World
from support.histories.nodes import Node, Push, Storage
from support.histories.protocol import Flaw

_RETRY_S, _LOOK_S, _REST_S = 0.25, 1.5, 0.4
_PASS_S, _PULL_S = 1.6, 1.2
_ENGINE_REST_S = 2.0
_MOST_MOVES = 2
_HANDLER_LIMIT_S = 4.0

Gang = tuple[str, int]
Rows = tuple[dict[str, Job], dict[Gang, Generation]]
Change = tuple[Any, ...]


class LateLease(Lease):
    """Counts from the answer."""

    def answered(self, request: LeaseRequest, epoch: int | None) -> None:
        super().answered(LeaseRequest(request.ask, request.epoch, self._clock()), epoch)


class EndlessLease(Lease):
    """Is valid until the database says that it is lost."""

    def may_decide(self, epoch: int | None = None) -> bool:
        held = self._held
        return held is not None and not self._resigned and epoch in (None, held[0])


class FaithfulLease(Lease):
    """Keeps its epoch though it was given up, if the answer to that has not come."""

    def stand_again(self) -> None:
        held = self._held
        super().stand_again()
        self._held = None if held is None else (held[0], float("-inf"))


class HastyLease(Lease):
    """Is valid again as soon as its holder stands again."""

    def stand_again(self) -> None:
        self._resigned = False


_LEASES = {
    Flaw.VALID_FROM_ANSWER: LateLease,
    Flaw.NEVER_STOPS: EndlessLease,
    Flaw.STANDS_AGAIN_AT_ONCE: HastyLease,
    Flaw.RENEWS_AFTER_GIVING_UP: FaithfulLease,
}


class Parts:
    """What all replicas are connected to."""

    def __init__(
        self, world: World, database: Database, nodes: list[Node], storage: Storage, flaws: Set[Flaw], terms: LeaseTerms
    ) -> None:
        self.world, self.database, self.nodes, self.storage = world, database, nodes, storage
        self.flaws, self.terms = flaws, terms
        self.traps: dict[str, list[Callable[[Replica], float]]] = {}
        """What happens to the next replica that comes to a point."""
        self.without_engine: dict[str, float] = {}
        """Until when a replica cannot open its engine."""
        self.clients = 0
        """How many have not got what they wanted."""


class Mandate:
    """Of one tenure: its epoch, and what nodes are to have by what was committed."""

    __slots__ = ("epoch", "is_over", "orders")

    def __init__(self, epoch: int) -> None:
        self.epoch, self.is_over = epoch, False
        self.orders: dict[Gang, Generation] | None = None
        """None before anything was read."""


class Address:
    """Where clients reach a replica, whichever process is there now."""

    def __init__(self, name: str) -> None:
        self.name, self.instance = name, 0
        self.replica: Replica | None = None

    @property
    def is_up(self) -> bool:
        return self.replica is not None and self.replica.is_alive


class Replica(Process):
    """One process of the service."""

    def __init__(self, parts: Parts, address: Address, life: int, rate: float) -> None:
        """``rate``: how fast its clock goes."""
        super().__init__(address.name, life)
        self._parts, self._world, self._address = parts, parts.world, address
        self._database, self._flaws, self._rate = parts.database, parts.flaws, rate
        kind = next((kind for flaw, kind in _LEASES.items() if flaw in self._flaws), Lease)
        world, offset_s = self._world, world_offset(self._world)
        self.lease = kind(parts.terms, lambda: world.now_s * rate + offset_s)
        self._offset_s = offset_s
        self._number = 0
        self._published: set[str] = set()
        """Results that this process knows to be published."""
        self._seen: dict[str, tuple[dict[Gang, str], tuple[Gang, ...]]] = {}
        """By node, what it has last said to this tenure, and which gangs it had been told to stop by then."""
        address.instance += 1
        address.replica = self
        self._database.listeners[self.name] = self
        world.note("process starts", self.name, life)
        self._lease_thread = Thread(world, self, self._keep_lease())
        self._loop = Thread(world, self, self._decide_for_ever())

    def resign(self) -> None:
        """Hand over."""
        self._world.note("resigns", self.name, self.life)
        self.lease.resign()
        self._lease_thread.wake()

    def _pause(self) -> Code:
        """Leave the lease to others for a while, as it cannot open its engine."""
        self.resign()
        yield _ENGINE_REST_S
        before = self.lease.epoch
        self.lease.stand_again()
        self._note_mandate(before)
        self._lease_thread.wake()

    def hear(self, *_: Any) -> None:
        """Hear that a lease was given up."""
        self._lease_thread.wake()

    def kill(self) -> None:
        """End at once."""
        if self.is_alive:
            self._world.note("killed", self.name, self.life)
            self.is_alive = False
            trip_s = self._world.trip_s(self.name, self._database.name)
            if trip_s is not None:
                self._world.at(self._world.now_s + trip_s, lambda *_: self._database.lose(self))

    def stop(self, seconds: float) -> None:
        """Stand still."""
        until_s = min(self._world.now_s + seconds, max(self._world.now_s, self._world.calm_s))
        self._world.note("stopped", self.name, self.life, until_s)
        self.stopped_until_s = max(self.stopped_until_s, until_s)

    def _trapped(self, point: str) -> float | None:
        """Have happen to it what shall happen at this point; then the thread has to rest for so many seconds."""
        waiting = self._parts.traps.pop(point, None)
        return None if waiting is None else max(trap(self) for trap in waiting)

    # -- the lease

    def _keep_lease(self) -> Code:
        lease, renew_s, database = self.lease, self.lease.terms.renew_s, self._database
        traps = self._parts.traps
        while True:
            before, request = lease.epoch, lease.request()
            if before is None and not lease.stands:
                yield _LOOK_S
                continue
            if traps and before is not None:
                self._trapped("the lease is asked for")
            answer = yield database.ask, request
            if answer is LOST:
                yield _RETRY_S / self._rate
                continue
            granted, epoch, left_s = answer
            lease.answered(request, epoch if granted else None)
            self._note_mandate(before)
            if lease.epoch != before:
                self._loop.wake()
            if lease.epoch is not None:
                wait_s = renew_s if lease.stands else 0.0
            elif lease.stands:
                wait_s = _LOOK_S if left_s is None else min(_LOOK_S, max(0.02, left_s + 0.01))
            else:
                wait_s = 0.0
            yield wait_s / self._rate

    def _note_mandate(self, before: int | None) -> None:
        held = self.lease._held
        if held is None:
            if before is not None:
                self._world.note("mandate ends", self.name, self.life)
        elif self.lease.stands:
            until_s = (held[1] - self._offset_s) / self._rate
            if Flaw.NEVER_STOPS in self._flaws:
                until_s = float("inf")
            self._world.note("mandate", self.name, self.life, held[0], until_s)

    # -- deciding

    def _decide_for_ever(self) -> Code:
        lease = self.lease
        while True:
            epoch = lease.epoch
            if epoch is None or not lease.stands:
                yield 60.0
            else:
                yield from self._tenure(Mandate(epoch))

    def _tenure(self, mandate: Mandate) -> Code:
        parts, world, lease, flaws, traps = self._parts, self._world, self.lease, self._flaws, self._parts.traps
        if Flaw.NO_BARRIER not in flaws and not (yield from self._write(mandate, None)):
            yield _REST_S
            return
        if parts.without_engine.get(self.name, 0.0) > world.now_s:
            yield from self._pause()
            return
        self._seen, is_first = {}, True
        links = [Thread(world, self, self._command(mandate, node)) for node in parts.nodes]
        while lease.epoch == mandate.epoch and lease.stands:
            if not lease.may_decide(mandate.epoch):
                yield _REST_S
                continue
            rows: Any = yield self._database.read, mandate.epoch, is_first
            if rows is LOST:
                yield _REST_S
                continue
            is_first = False
            jobs, generations = rows
            changes, relied = self._decide(jobs, generations)
            if Flaw.ACT_BEFORE_COMMIT in flaws:
                yield from self._act(mandate, links, _applied(jobs, generations, changes))
            if changes:
                if not (yield from self._write(mandate, (changes, relied))):
                    yield _REST_S
                    continue
                jobs, generations = _applied(jobs, generations, changes)
            decided_s = world.now_s
            world.note("decides", self.name, self.life, mandate.epoch)
            if traps and (rest_s := self._trapped("between commit and act")) is not None:
                yield rest_s
            if Flaw.ACT_BEFORE_COMMIT not in flaws:
                yield from self._act(mandate, links, (jobs, generations))
            if decided_s > world.calm_s and not parts.clients:
                stored = self._database.jobs.values()
                world.is_over = all(job.is_over and (job.is_published or not job.result) for job in stored)
            yield _PASS_S
        mandate.is_over = True

    def _write(self, mandate: Mandate, what: tuple[list[Change], dict[str, bool]] | None) -> Code:
        """Write as the leader; returns whether it is certain that it was written."""
        database, traps, epoch = self._database, self._parts.traps, mandate.epoch
        transaction = Transaction(self, epoch)
        if (yield database.begin, transaction) is LOST:
            return False
        if traps and (rest_s := self._trapped("in a transaction")) is not None:
            yield rest_s
        if not self.lease.may_decide(epoch):
            database.roll_back(transaction)
            return False
        found = yield database.check, transaction
        if found is LOST:
            return False
        if found != mandate.epoch and Flaw.WRITE_WITHOUT_EPOCH not in self._flaws:
            database.roll_back(transaction)
            return False
        if traps and (rest_s := self._trapped("before commit")) is not None:
            yield rest_s
        answer = yield database.commit, transaction, lambda database: self._change(database, epoch, what)
        return answer is True

    def _change(self, database: Database, epoch: int, what: tuple[list[Change], dict[str, bool]] | None) -> bool:
        """Make a change at the database; False if a row that it relied on is another by now."""
        if what is None:
            self._world.note("barrier", self.name, self.life, epoch)
            return True
        changes, relied = what
        if Flaw.DECIDE_ON_STALE_ROWS not in self._flaws and any(
            database.jobs[name].cancel != cancel for name, cancel in relied.items()
        ):
            return False
        for kind, job, *more in changes:
            if kind == "place" and (database.jobs[job].last_generation >= more[0].number or database.jobs[job].is_over):
                return False  # There is such a row.
        self._world.note("commit", self.name, self.life, epoch, changes)
        _apply(database.jobs, database.generations, changes)
        return True

    def _decide(
        self, jobs: dict[str, Job], generations: dict[Gang, Generation]
    ) -> tuple[list[Change], dict[str, bool]]:
        """Return changes, and on which jobs' wish to be cancelled they rely."""
        changes: list[Change] = []
        relied: dict[str, bool] = {}
        draw = self._world.random.random
        placed: set[str] = set()
        busy: set[tuple[str, int]] = set()
        for gang, generation in generations.items():
            name = gang[0]
            ends = self._ends(gang, generation)
            job = jobs[name]
            if None not in ends:
                changes.append(("end", name, gang[1]))
                if all(end == "finished" for end in ends) and not job.is_over and not job.cancel:
                    relied[name] = False
                    changes.append(("finish", name, f"{name}{gang[1]} as told by {self.name}.{self.life}"))
                    placed.add(name)
                continue
            placed.add(name)
            busy.update(generation.placement)
            if generation.is_wanted and (
                job.cancel
                or any(end is not None and end != "finished" for end in ends)
                or (gang[1] <= _MOST_MOVES and not any(ends) and draw() < 0.15)
            ):
                changes.append(("stop", name, gang[1]))
        free: list[tuple[str, int]] | None = None
        for name, job in jobs.items():
            if job.result and not job.is_published:
                if job.result in self._published:
                    changes.append(("published", name))
            elif job.is_over or name in placed:
                continue
            elif job.cancel:
                changes.append(("cancel", name))
            else:
                if free is None:
                    every = ((node.name, index) for node in self._parts.nodes for index in range(node.slots))
                    free = [slot for slot in every if slot not in busy]
                    self._world.random.shuffle(free)
                if free:
                    size = 1 + int(draw() * min(3, len(free)))
                    placement, free = tuple(sorted(free[:size])), free[size:]
                    relied[name] = False
                    changes.append(
                        ("place", name, Generation(name, job.last_generation + 1, placement, 0.5 + 4.0 * draw()))
                    )
        return changes, relied

    def _ends(self, gang: Gang, generation: Generation) -> list[str | None]:
        """Return how it has ended, node by node: None where it may run, or may still be started."""
        found: list[str | None] = []
        for node in dict.fromkeys(slot[0] for slot in generation.placement):
            states, stopped = self._seen.get(node, ({}, ()))
            state = states.get(gang)
            if state is None:
                # It was never started there; and never will be, once a command that stops it was obeyed.
                found.append("stopped" if gang in stopped else None)
            else:
                found.append(state or None)
        return found

    # -- acting

    def _act(self, mandate: Mandate, links: list[Thread], rows: Rows) -> Code:
        jobs, generations = rows
        if mandate.orders != generations:
            mandate.orders = generations
            for link in links:
                link.wake()
        for name, job in jobs.items():
            if job.result and not job.is_published and job.result not in self._published:
                if self._parts.traps and (rest_s := self._trapped("before a result is published")) is not None:
                    yield rest_s
                if (yield self._parts.storage.publish, name, job.result) is not LOST:
                    self._published.add(job.result)

    def _command(self, mandate: Mandate, node: Node) -> Code:
        lease, traps = self.lease, self._parts.traps
        told: Any = None
        while not mandate.is_over:
            if mandate.orders is None or not lease.may_decide(mandate.epoch):
                if lease.epoch != mandate.epoch:
                    return
                yield _REST_S
                continue
            self._number += 1
            push = self._push(mandate, node.name)
            if traps and (rest_s := self._trapped("before a command is sent")) is not None:
                yield rest_s
            answer = yield node.push, push
            if answer is LOST:
                yield _REST_S
            elif answer.__class__ is int:
                yield from self._outbid(mandate, answer)
                yield _REST_S
            else:
                self._seen[node.name] = (answer, push.stops)
                if answer != told:
                    told = answer
                    self._loop.wake()
                yield _PULL_S

    def _push(self, mandate: Mandate, node: str) -> Push:
        starts, stops = [], []
        for gang, generation in (mandate.orders or {}).items():
            slots = tuple(index for name, index in generation.placement if name == node)
            if slots and generation.is_wanted:
                starts.append((gang, slots, generation.lasts_s))
            elif slots:
                stops.append(gang)
        return Push(mandate.epoch, self._number, tuple(starts), tuple(stops))

    def _outbid(self, mandate: Mandate, seen: int) -> Code:
        """Go on with an epoch above one that a node has seen, as ``Mandate.outbid`` does."""
        lease, epoch = self.lease, mandate.epoch
        if seen <= epoch:
            return
        request = lease.request()
        if not lease.may_decide(epoch):
            return
        if (yield self._database.raise_epoch, epoch, seen + 1) is True:
            before = lease.epoch
            lease.answered(request, seen + 1)
            mandate.epoch = seen + 1
            self._note_mandate(before)
            if self._parts.traps and (rest_s := self._trapped("the epoch is raised")) is not None:
                yield rest_s

    # -- clients

    def handle(self, call: Call, what: tuple[str, str]) -> None:
        """Handle the request of a client in a thread of its own."""
        call.limit()  # This process may be killed, or not know whether it was stored.
        Thread(self._world, self, self._handle(call, *what))

    def _handle(self, call: Call, what: str, name: str) -> Code:
        transaction = Transaction(self, None)
        if (yield self._database.begin, transaction) is LOST:
            return
        if Flaw.ANSWER_BEFORE_COMMIT in self._flaws:
            call.answer("accepted")
        if self._parts.traps and (rest_s := self._trapped("in a handler")) is not None:
            yield rest_s
        answer = yield self._database.commit, transaction, lambda database: self._store(database, what, name)
        if answer is not LOST:
            call.answer(answer)

    def _store(self, database: Database, what: str, name: str) -> str:
        job = database.jobs.get(name)
        if what == "submit":
            if job is None:
                database.jobs[name] = Job(name)
                self._world.note("stored", self.name, self.life, name)
            return "accepted"
        if job is None or job.is_over:
            return "refused"
        if not job.cancel:
            database.jobs[name] = job._replace(cancel=True)
            self._world.note("to be cancelled", self.name, self.life, name)
        return "accepted"


def world_offset(world: World) -> float:
    """What the clock of a process shows when modelled time begins: nothing may depend on it."""
    return 1000.0 * world.random.random()


def _applied(jobs: dict[str, Job], generations: dict[Gang, Generation], changes: list[Change]) -> Rows:
    jobs, generations = dict(jobs), dict(generations)
    _apply(jobs, generations, changes)
    return jobs, generations


def _apply(jobs: dict[str, Job], generations: dict[Gang, Generation], changes: list[Change]) -> None:
    """Make changes to rows. Those that are not there any more stay as they are, as with an UPDATE."""
    for kind, name, *more in changes:
        job = jobs[name]
        if kind == "place":
            generations[name, more[0].number] = more[0]
            jobs[name] = job._replace(last_generation=more[0].number)
        elif kind == "finish":
            jobs[name] = job._replace(state="done", result=more[0])
        elif kind == "cancel":
            jobs[name] = job._replace(state="cancelled")
        elif kind == "published":
            jobs[name] = job._replace(is_published=True)
        elif kind == "end":
            generations.pop((name, more[0]), None)
        elif (name, more[0]) in generations:
            generations[name, more[0]] = generations[name, more[0]]._replace(is_wanted=False)
