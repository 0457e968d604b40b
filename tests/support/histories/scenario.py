"""From a seed to a history: who is there, what clients want, and what goes wrong when.

Everything goes wrong until a moment; from then on nothing does, and what was accepted has to be finished.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from elasticflow_airflow.service.leadership.lease import LeaseTerms
from support.histories.database import Database
from support.histories.modelled_time import LOST, Code, Process, Thread, World
from support.histories.nodes import Node, Storage
from support.histories.protocol import Flaw
from support.histories.replicas import Address, Parts, Replica

TERMS = LeaseTerms(6.0, 2.0)
PROMISED_DRIFT = 0.01
"""By how much clocks may go too fast or too slow, for at most one replica to take itself for the leader."""
REPLACED_S = 3.0
"""How long after the end of a lease, at most, another replica has decided, once nothing fails any more."""
FINISHED_S = 90.0
"""How long after the last fault all jobs are finished."""
_POINTS = (
    *2 * ("before a command is sent",),
    "between commit and act",
    "in a transaction",
    *2 * ("before commit",),
    "the lease is asked for",
    "before a result is published",
    "in a handler",
    "the epoch is raised",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A history, and what it took."""

    seed: int
    history: list[tuple[Any, ...]]
    events: int
    faults: int
    seconds: float


def run(seed: int, flaws: Set[Flaw] = frozenset(), drift: float = PROMISED_DRIFT) -> Run:
    """Make the history of a seed. ``drift``: by how much clocks go too fast or too slow, at most."""
    return _Scenario(seed, flaws, drift).run()


class _Scenario:
    def __init__(self, seed: int, flaws: Set[Flaw], drift: float) -> None:
        self._world = world = World(seed)
        draw = world.random
        self._seed, self._drift, self._faults = seed, drift, 0
        nodes = [Node(world, f"n{number}", draw.randint(1, 3), flaws) for number in range(1, draw.randint(1, 3) + 1)]
        if draw.random() < 0.15:  # They have served a database that was lost.
            nodes = [Node(world, node.name, node.slots, flaws, draw.randint(1, 9)) for node in nodes]
        self._parts = Parts(world, Database(world, TERMS.lease_s, flaws), nodes, Storage(world), flaws, TERMS)
        self._addresses = [Address(f"r{number}") for number in range(1, draw.choice((2, 2, 3, 3, 4)) + 1)]
        self._set_back_s = 0.0
        self._is_promised = drift <= PROMISED_DRIFT
        self._points = draw.sample(_POINTS, 3)
        """Where replicas are stopped in this history."""

    def run(self) -> Run:
        world, parts = self._world, self._parts
        draw = world.random
        plan = self._plan()
        world.calm_s = max((end_s for _, end_s, _ in plan), default=2.0) + 0.5
        for address in self._addresses:
            self._start(address)
        for start_s, _, fault in plan:
            world.at(start_s, self._fail, fault)
        world.at(world.calm_s, self._be_calm)
        for number in range(draw.randint(2, 5)):
            self._ask_for("submit", f"j{number}", draw.uniform(0.1, 0.8 * world.calm_s))
        world.run(world.calm_s + FINISHED_S)
        for node in parts.nodes:
            node.close()
        world.note("over", world.is_over, {job.name: job.state for job in parts.database.jobs.values()})
        facts = ("promise", self._is_promised, world.calm_s, TERMS.lease_s + self._set_back_s + REPLACED_S)
        return Run(self._seed, [(0.0, *facts), *world.history], world.events, self._faults, world.now_s)

    # -- clients

    def _ask_for(self, what: str, name: str, when_s: float) -> None:
        self._parts.clients += 1
        client = Process(f"client of {name}")

        def start(*_: Any) -> None:
            Thread(self._world, client, self._client(what, name))

        self._world.at(when_s, start)

    def _client(self, what: str, name: str) -> Code:
        """Ask, through any replica, until there is an answer."""
        world, draw = self._world, self._world.random
        answer: Any = LOST
        while answer is LOST:
            address = draw.choice(self._addresses)
            answer = yield self._send, address, what, name
            if answer is LOST:
                yield 0.5
        world.note("answered", what, name, answer)
        self._parts.clients -= 1
        if what == "submit" and draw.random() < 0.4:
            self._ask_for("cancel", name, world.now_s + 8.0 * draw.random())

    def _send(self, thread: Thread, address: Address, what: str, name: str) -> None:
        replica = address.replica
        if replica is None:
            self._world.at(self._world.now_s + 0.1, thread.resume, thread.token, LOST)
        else:
            self._world.request(thread, address, 4.0, replica.handle, (what, name))

    # -- what goes wrong

    def _start(self, address: Address) -> None:
        life = 0 if address.replica is None else address.replica.life + 1
        if address.replica is not None and address.replica.is_alive:
            address.replica.kill()
        Replica(self._parts, address, life, 1.0 + self._drift * self._world.random.uniform(-1.0, 1.0))

    def _fail(self, fault: Callable[[], None], _: Any) -> None:
        self._faults += 1
        fault()

    def _be_calm(self, *_: Any) -> None:
        world = self._world
        world.note("nothing fails any more")
        world.loss = world.doubles = 0.0
        world.delay_s = 0.01
        world.cut.clear()
        self._parts.traps.clear()
        for address in self._addresses:
            if not address.is_up or address.replica is None or not address.replica.lease.stands:
                self._start(address)

    def _plan(self) -> list[tuple[float, float, Callable[[], None]]]:
        """Return faults: when each begins, when it is over, and what it does."""
        draw = self._world.random
        plan: list[tuple[float, float, Callable[[], None]]] = []
        # Few kinds in one history: what only some together bring about happens more often (Groce, ISSTA 2012).
        some = [kind for kind in _FAULTS if kind == "trap" or draw.random() < 0.4]
        kinds = draw.choices(some, [_FAULTS[kind][1] for kind in some], k=draw.randint(2, 9))
        at_s = 0.5
        for kind in kinds:
            at_s += draw.expovariate(1 / 2.0)
            plan += _FAULTS[kind][0](self, at_s)
        return plan

    def _some_replica(self) -> Callable[[], Replica | None]:
        """Return who: often the leader of that moment."""
        if self._world.random.random() < 0.6:
            return self._leader
        address = self._world.random.choice(self._addresses)
        return lambda: address.replica

    def _leader(self) -> Replica | None:
        name = self._parts.database.row.holder
        return next((address.replica for address in self._addresses if address.name == name), None)

    def _kill(self, at_s: float) -> list[Any]:
        who, down_s = self._some_replica(), self._world.random.expovariate(1 / 3.0)

        def kill() -> None:
            replica = who()
            if replica is not None:
                replica.kill()
                self._world.at(self._world.now_s + down_s, lambda *_: self._start_again(replica))

        return [(at_s, at_s + down_s, kill)]

    def _start_again(self, replica: Replica) -> None:
        if replica._address.replica is replica:
            self._start(replica._address)

    def _stop(self, at_s: float) -> list[Any]:
        who, seconds = self._some_replica(), self._stopped_s()

        def stop() -> None:
            replica = who()
            if replica is not None:
                replica.stop(seconds)

        return [(at_s, at_s + seconds, stop)]

    def _stopped_s(self) -> float:
        draw = self._world.random
        return draw.choice(
            (draw.uniform(0.5, 4.0), draw.uniform(5.0, 12.0), draw.uniform(7.0, 9.0), 30.0 * draw.random())
        )

    def _trap(self, at_s: float) -> list[Any]:
        """Have the next replica at some point stop, or killed there; and perhaps more go wrong meanwhile."""
        draw, world = self._world.random, self._world
        point, seconds = draw.choice(self._points), self._stopped_s()
        how = draw.choices(("stop", "kill", "cut off", "hand over"), (4, 2, 2, 4))[0]
        rest_s = draw.uniform(0.2, 3.2) if how == "hand over" else 0.0
        more_s = draw.uniform(0.5, 1.0) * (rest_s or seconds)
        more = draw.choices(("", "agent", "reboot", "jump", "cut"), (4, 2, 1, 1, 1))[0]

        def trap(replica: Replica) -> float:
            world.note("comes to a trap", point, replica.name, replica.life)
            if how == "kill":
                replica.kill()
                world.at(min(world.calm_s, world.now_s + seconds / 3), lambda *_: self._start_again(replica))
            elif how == "stop":
                replica.stop(seconds)
            elif how == "hand over":
                replica.resign()  # One of its threads is slow meanwhile.
                world.at(min(world.calm_s, world.now_s + seconds), lambda *_: self._start_again(replica))
            else:
                world.cut[replica.name, "db"] = world.cut["db", replica.name] = world.now_s + seconds
            if more and world.now_s + more_s < world.calm_s:
                for when_s, _, fault in _FAULTS[more][0](self, world.now_s + more_s):
                    world.at(when_s, self._fail, fault)
            return rest_s

        def arm() -> None:
            self._parts.traps.setdefault(point, []).append(trap)

        return [(at_s, at_s + seconds + 3.0, arm)]

    def _cut(self, at_s: float) -> list[Any]:
        draw, world = self._world.random, self._world
        name = draw.choice(self._addresses).name
        others = draw.choice((("db",), tuple(node.name for node in self._parts.nodes), ("db", *_names(self._parts))))
        others = others if draw.random() < 0.7 else (draw.choice(others),)
        seconds, ways = self._stopped_s(), draw.choice(("both", "both", "there", "back"))

        def cut() -> None:
            until_s = min(world.now_s + seconds, world.calm_s)
            world.note("cut off", name, others, ways, until_s)
            for other in others:
                if ways != "back":
                    world.cut[name, other] = until_s
                if ways != "there":
                    world.cut[other, name] = until_s

        return [(at_s, at_s + seconds, cut)]

    def _bad_network(self, at_s: float) -> list[Any]:
        draw, world = self._world.random, self._world
        seconds, loss, doubles = draw.uniform(2.0, 8.0), 0.4 * draw.random(), 0.3 * draw.random()
        delay_s = draw.choice((0.01, 0.1, 0.6, 1.2))

        def begin() -> None:
            world.note("bad network", loss, doubles, delay_s)
            world.loss, world.doubles, world.delay_s = loss, doubles, delay_s

        def end() -> None:
            world.loss, world.doubles, world.delay_s = 0.0, 0.0, 0.01

        return [(at_s, at_s + seconds, begin), (at_s + seconds, at_s + seconds, end)]

    def _restart_agent(self, at_s: float) -> list[Any]:
        draw, nodes = self._world.random, self._parts.nodes
        some = nodes if draw.random() < 0.5 else [draw.choice(nodes)]
        return [(at_s, at_s, node.restart) for node in some]

    def _know_better(self, at_s: float) -> list[Any]:
        """Have a node come that has obeyed a service on another database, which is lost."""
        node, more = self._world.random.choice(self._parts.nodes), self._world.random.randint(1, 5)
        return [(at_s, at_s, lambda: node.remember(self._parts.database.row.epoch + more))]

    def _no_engine(self, at_s: float) -> list[Any]:
        """Replicas cannot open their engines: one after the other takes the lease and gives it up."""
        draw, world, some = self._world.random, self._world, self._addresses
        some = some if draw.random() < 0.4 else [draw.choice(some)]
        seconds = draw.uniform(2.0, 12.0)

        def begin() -> None:
            world.note("no engine", [address.name for address in some], world.now_s + seconds)
            for address in some:
                self._parts.without_engine[address.name] = min(world.now_s + seconds, world.calm_s)

        return [(at_s, at_s + seconds + 2.0, begin)]

    def _reboot(self, at_s: float) -> list[Any]:
        node, seconds = self._world.random.choice(self._parts.nodes), self._world.random.uniform(0.5, 4.0)

        def down() -> None:
            node.reboot()
            node.is_up = False

        def up() -> None:
            node.is_up = True

        return [(at_s, at_s, down), (at_s + seconds, at_s + seconds, up)]

    def _hand_over(self, at_s: float) -> list[Any]:
        """One replica after the other hands over, and is started again; or only the leader."""
        draw = self._world.random
        everybody = draw.random() < 0.4
        who = [self._by_address(address) for address in self._addresses] if everybody else [self._leader]
        plan: list[Any] = []
        for one in who:
            plan += self._hand_over_of(one, at_s, draw.uniform(0.3, 2.5))
            at_s += draw.uniform(1.0, 3.0)
        return plan

    def _hand_over_of(self, who: Callable[[], Replica | None], at_s: float, seconds: float) -> list[Any]:
        def resign() -> None:
            replica = who()
            if replica is not None and replica.is_alive:
                replica.resign()
                self._world.at(self._world.now_s + seconds, lambda *_: self._start_again(replica))

        return [(at_s, at_s + seconds, resign)]

    @staticmethod
    def _by_address(address: Address) -> Callable[[], Replica | None]:
        return lambda: address.replica

    def _all_down(self, at_s: float) -> list[Any]:
        seconds = self._world.random.uniform(0.5, 10.0)

        def kill() -> None:
            for address in self._addresses:
                if address.replica is not None:
                    address.replica.kill()

        def start() -> None:
            for address in self._addresses:
                if not address.is_up:
                    self._start(address)

        return [(at_s, at_s, kill), (at_s + seconds, at_s + seconds, start)]

    def _restart_database(self, at_s: float) -> list[Any]:
        world, database, seconds = self._world, self._parts.database, self._world.random.uniform(0.05, 4.0)

        def down() -> None:
            world.note("database goes down")
            database.stop()

        def up() -> None:
            world.note("database is back")
            database.start()

        return [(at_s, at_s, down), (at_s + seconds, at_s + seconds, up)]

    def _jump(self, at_s: float) -> list[Any]:
        draw, world = self._world.random, self._world
        seconds = draw.choice((draw.uniform(-8.0, 8.0), draw.uniform(2.0, 6.0)))

        def jump() -> None:
            world.note("clock of the database jumps", seconds)
            self._parts.database.clock_offset_s += seconds
            if seconds > 0:
                self._is_promised = False
            else:
                self._set_back_s -= seconds

        return [(at_s, at_s, jump)]


def _names(parts: Parts) -> tuple[str, ...]:
    return tuple(node.name for node in parts.nodes)


_FAULTS: dict[str, tuple[Callable[[_Scenario, float], list[tuple[float, float, Callable[[], None]]]], float]] = {
    "kill": (_Scenario._kill, 2.0),
    "stop": (_Scenario._stop, 2.0),
    "trap": (_Scenario._trap, 7.0),
    "cut": (_Scenario._cut, 2.5),
    "network": (_Scenario._bad_network, 1.5),
    "agent": (_Scenario._restart_agent, 0.8),
    "reboot": (_Scenario._reboot, 0.8),
    "hand-over": (_Scenario._hand_over, 1.2),
    "all down": (_Scenario._all_down, 0.4),
    "database": (_Scenario._restart_database, 0.8),
    "jump": (_Scenario._jump, 0.5),
    "node of old": (_Scenario._know_better, 1.0),
    "no engine": (_Scenario._no_engine, 0.8),
}
"""And how often each occurs, compared to the others."""
