"""The modelled database of the histories does what PostgreSQL does: the same requests, the same answers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from support.histories.database import IDLE_LIMIT_S, Database, LeaderRow, Transaction
from support.histories.modelled_time import LOST, Process, Thread, World

from elasticflow_airflow.service.leadership.lease import Ask, LeaseRequest, LeaseTerms
from elasticflow_airflow.service.leadership.lease_table import LeaseTable
from elasticflow_airflow.service.store.store import DATABASE_AWAY, LostOwnershipError, Store

TERMS = LeaseTerms(60.0, 10.0)
REPLICAS = ("one", "two", "three")

pytestmark = pytest.mark.postgres


@dataclass
class Both:
    """The row, and its model, with the same history."""

    store: Store
    tables: dict[str, LeaseTable]
    model: LeaderRow = field(default_factory=lambda: LeaderRow(TERMS.lease_s))
    now_s: float = 1000.0
    """What the clock of the modelled database shows: no real time counts, as leases last a minute."""

    def ask(self, me: str, ask: Ask, epoch: int) -> None:
        request = LeaseRequest(ask, epoch, 0.0)
        view, granted = self.tables[me].ask(request)
        assert granted == self.model.ask(me, request, self.now_s), (me, ask, epoch)
        # The answer to a request that gave it up is the row as it is now.
        self.compare()
        if granted:
            assert (view.epoch, view.holder) == (self.model.epoch, self.model.holder)

    def raise_epoch(self, me: str, epoch: int, higher: int) -> None:
        raised = self.tables[me].raise_epoch(epoch, higher)
        assert raised == self.model.raise_epoch(me, epoch, higher, self.now_s), (me, epoch, higher)
        self.compare()

    def jump(self, seconds: float) -> None:
        """Have the clock of the database show another time: for the row, its end is that much nearer."""
        self.now_s += seconds
        with self.store.engine_without_transactions.connect() as connection:
            connection.execute(sa.text("UPDATE leader SET until_at = until_at - :seconds"), {"seconds": seconds})
        self.compare()

    def compare(self) -> None:
        view = self.tables["one"].look()
        assert (view.epoch, view.holder) == (self.model.epoch, self.model.holder)
        assert (view.change or "start") == (self.model.change or "start")
        left_s = self.model.left_s(self.now_s)
        assert (view.left_s is None) == (left_s is None)
        if left_s is not None and view.left_s is not None:
            assert left_s - 15.0 < view.left_s <= left_s  # what the test itself took


@pytest.fixture
def both(postgres_url: str) -> Iterator[Both]:
    store = Store(postgres_url)
    tables = {me: LeaseTable(postgres_url, me, TERMS, own_url=None, card={}, channel=store.channel) for me in REPLICAS}
    yield Both(store, tables)
    for table in tables.values():
        table.close()
    store.close()


@pytest.mark.parametrize("seed", range(8))
def test_the_row_of_the_lease(both, seed):
    draw = random.Random(seed)
    for _ in range(60):
        me, epoch = draw.choice(REPLICAS), max(0, both.model.epoch - draw.choice((0, 0, 0, 1, 2)))
        match draw.choices(("take", "renew", "give up", "raise", "jump"), (5, 4, 2, 3, 3))[0]:
            case "take":
                both.ask(me, Ask.TAKE, 0)
            case "renew":
                both.ask(me, Ask.RENEW, epoch)
            case "give up":
                both.ask(me, Ask.GIVE_UP, epoch)
            case "raise":
                both.raise_epoch(me, epoch, epoch + draw.randint(-1, 3))
            case "jump":
                both.jump(draw.choice((-100.0, 30.0, 61.0, 200.0)))


def test_a_raised_epoch_renews_the_lease(both):
    """The right to decide counts from the request that raised it: so must the lease."""
    both.ask("one", Ask.TAKE, 0)
    both.jump(40.0)
    both.raise_epoch("one", 1, 7)
    left_s = both.tables["one"].look().left_s
    assert left_s is not None
    assert left_s > TERMS.stop_s


# -- transactions of two leaders


@dataclass
class Script:
    """Steps of an old and a new leader, at the modelled database: what each got, in order."""

    world: World = field(default_factory=lambda: World(1))
    got: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.database = Database(self.world, TERMS.lease_s, frozenset())
        self.world.calm_s = 60.0
        self.database.row.epoch = 1

    def write(self, name: str, epoch: int, begin_s: float, pause_s: float, *, after: str) -> None:
        """Write in a thread, with a pause after a step of the transaction."""

        def code() -> Any:
            transaction = Transaction(Process(name), epoch)
            yield begin_s + 1e-9
            if (yield self.database.begin, transaction) is LOST:
                self.got.append((name, "not begun"))
                return
            if after == "begin":
                yield pause_s + 1e-9
            found = yield self.database.check, transaction
            if found != epoch:
                self.database.roll_back(transaction)
                self.got.append((name, "not begun" if found is LOST else "lost ownership"))
                return
            if after == "check":
                yield pause_s + 1e-9
            done = yield self.database.commit, transaction, lambda _: True
            self.got.append((name, "committed" if done is True else "away"))

        Thread(self.world, Process(name), code())

    def elect(self, at_s: float, epoch: int) -> None:
        self.world.at(at_s, lambda *_: setattr(self.database.row, "epoch", epoch))


def real(url: str, old_pause_s: float, after: str) -> list[Any]:
    """The same with the real store: the old leader writes from 0 s on, the new one is elected, and writes, at 0.5 s."""
    got: list[tuple[float, str, str]] = []
    checked_s: dict[int, float] = {}
    stores = {name: Store(url) for name in ("old", "new")}  # of two processes
    begun = threading.Event()

    def checks(epoch: int, pause: Callable[[], None]) -> Callable[[sa.Connection], None]:
        def check(connection: sa.Connection) -> None:
            if after == "begin":
                begun.set()
                pause()
            if connection.execute(sa.text("SELECT epoch FROM leader")).scalar() != epoch:
                checked_s[epoch] = time.monotonic()
                raise LostOwnershipError("another replica decides")

        return check

    def write(name: str, epoch: int, pause_s: float) -> None:
        try:
            with stores[name].for_decisions(checks(epoch, lambda: time.sleep(pause_s))).write():
                begun.set()
                time.sleep(pause_s if after == "check" else 0.0)
                inside_s = time.monotonic()  # Whoever comes next is not inside before this is committed.
            got.append((inside_s, name, "committed"))
        except LostOwnershipError:
            got.append((checked_s[epoch], name, "lost ownership"))
        except DATABASE_AWAY:
            got.append((time.monotonic(), name, "away"))

    with stores["new"].engine_without_transactions.connect() as connection:
        connection.execute(sa.text("UPDATE leader SET epoch = 1"))
        old = threading.Thread(target=write, args=("old", 1, old_pause_s))
        old.start()
        assert begun.wait(30)
        connection.execute(sa.text("UPDATE leader SET epoch = 2"))
        new = threading.Thread(target=write, args=("new", 2, 0.0))
        new.start()
        new.join()
        old.join()
    for store in stores.values():
        store.close()
    return [(name, outcome) for _, name, outcome in sorted(got)]


@pytest.mark.parametrize(
    ("after", "pause_s", "expected"),
    [
        ("check", 1.5, [("old", "committed"), ("new", "committed")]),
        ("begin", 1.5, [("old", "lost ownership"), ("new", "committed")]),
        ("check", IDLE_LIMIT_S + 1.5, [("new", "committed"), ("old", "away")]),
    ],
)
def test_a_barrier_waits_for_the_last_write_of_the_leader_before(postgres_url, after, pause_s, expected):
    script = Script()
    script.write("old", 1, 0.0, pause_s, after=after)
    script.elect(0.5, 2)
    script.write("new", 2, 0.6, 0.0, after="")
    script.world.run(60.0)
    assert script.got == expected
    assert real(postgres_url, pause_s, after) == expected
