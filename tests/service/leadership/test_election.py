"""Replicas in this process on a real PostgreSQL: the row, the fences, the news, and what is told to people."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.pgbouncer import pgbouncer

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.engines.fake.engine import FakeEngine, fake_nodes
from elasticflow_airflow.service.assembly import Assembly
from elasticflow_airflow.service.leadership.election import Election, Mandate
from elasticflow_airflow.service.leadership.lease import LeaseTerms
from elasticflow_airflow.service.leadership.lease_table import LeaseTable
from elasticflow_airflow.service.leadership.news import News, tell
from elasticflow_airflow.service.leadership.tenure import Seat
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.store import DATABASE_AWAY, LostOwnershipError, Store

pytestmark = pytest.mark.postgres

Make = Callable[..., "Replica"]


class Replica:
    """One replica with its own folder and store; its engine models nothing but nodes."""

    def __init__(self, name: str, url: str, folder: Path, key: str, **settings: Any) -> None:
        state_dir = folder / name
        state_dir.mkdir(mode=0o700)
        self.settings = ServiceSettings(state_dir=state_dir, engine="cluster", secret_key=key, **settings)
        self.store = Store(url, replica_id=name)
        self.seat, self.left = Seat(lambda: self.election.tell_of_runs()), list[str]()
        self.notifier = Notifier()
        self.engines: list[FakeEngine] = []
        self.election = Election(
            Assembly.of(self.settings, self.store, self.notifier, self.seat),
            url,
            replica_id=name,
            own_url=f"http://{name}.example:8321",
            card={"host": f"{name}.example", "version": "9"},
            open_engine=self._open,
            leave=self.left.append,
        )
        self.mandates: list[Mandate] = []

    def _open(self, mandate: Mandate) -> FakeEngine:
        self.mandates.append(mandate)
        self.engines.append(FakeEngine(fake_nodes(1, 2), self.settings.state_dir / "jobs"))
        return self.engines[-1]

    def close(self) -> None:
        self.election.close()
        self.store.close()


@pytest.fixture
def make(postgres_url: str, tmp_path: Path) -> Iterator[Make]:
    from cryptography.fernet import Fernet

    key, made = Fernet.generate_key().decode(), list[Replica]()

    def start(name: str, url: str = postgres_url, **settings: Any) -> Replica:
        quick = {"leader_lease_s": 1.5, "leader_renew_s": 0.3}
        made.append(Replica(name, url, tmp_path, key, **{**quick, **settings}))
        made[-1].election.start()
        return made[-1]

    yield start
    for one in reversed(made):
        one.close()


def write(store: Store) -> None:
    with store.write() as tx:
        tx.add_event(EventKind.SERVICE_STARTED, "somebody writes")


def test_the_first_leads_and_the_next_follows_until_the_first_steps_down(make, wait):
    one, other = make("one"), make("other")
    assert (one.seat.is_filled, other.seat.is_filled) == (True, False)
    assert other.election.replicas.leader_url == "http://one.example:8321"
    began_s = time.monotonic()
    one.election.step_down()
    wait(lambda: other.seat.is_filled, "the other takes over")
    assert time.monotonic() - began_s < 1.4, "it did not wait for the end of the lease"
    wait(lambda: not one.seat.is_filled, "the first has left its seat")
    status = other.election.replicas.status()
    assert (status.epoch, status.leader, status.change, status.failed_over_at) == (2, "other", "hand-over", None)
    assert [one.replica_id for one in status.replicas] == ["one", "other"]


def test_a_leader_that_cannot_renew_stops_before_another_begins(make, wait, monkeypatch):
    one, other = make("one"), make("other")
    mandate = one.mandates[0]
    times: dict[str, float] = {}

    def cut(*_: object, **__: object) -> None:
        raise sa.exc.OperationalError("", {}, RuntimeError("the network is cut"))

    monkeypatch.setattr(one.election._table, "_run", cut)
    wait(lambda: not mandate.holds() and times.setdefault("stopped", time.monotonic()), "it stops")
    assert not other.seat.is_filled
    wait(lambda: other.seat.is_filled, "the other takes over")
    assert other.election.replicas.status().change == "fail-over"
    with pytest.raises(LostOwnershipError, match="could not be renewed"):
        write(one.store.for_decisions(mandate.check))
    monkeypatch.undo()
    wait(lambda: not one.seat.is_filled, "the first sees that it leads no more")
    assert one.election.replicas.role == "follower"


def test_what_an_earlier_leader_writes_is_refused_by_its_epoch_though_it_believes_to_lead(make, wait):
    one, other = make("one"), make("other")
    mandate = one.mandates[0]
    one.election.step_down()
    wait(lambda: other.seat.is_filled, "the other takes over")
    mandate.holds = lambda: True  # as between two instructions of a process that stood still
    with pytest.raises(LostOwnershipError, match="another replica decides"):
        write(one.store.for_decisions(mandate.check))
    write(one.store)  # what handlers write needs no mandate
    write(other.store.for_decisions(other.mandates[0].check))


def test_a_new_leader_waits_for_a_write_of_the_one_before_and_a_frozen_one_is_ended(make, wait, postgres_url):
    one = make("one")
    deciding = one.store.for_decisions(one.mandates[0].check)
    inside, goes_on, ended = threading.Event(), threading.Event(), list[BaseException]()

    def stand_still() -> None:
        try:
            with deciding.write() as tx:
                tx.add_event(EventKind.SERVICE_STARTED, "half a write")
                inside.set()
                goes_on.wait(30.0)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=stand_still)
    thread.start()
    assert inside.wait(10.0)
    one.election.leadership.lease.resign()
    one.election.leadership.wake()
    began_s = time.monotonic()
    other = make("other")
    assert other.seat.is_filled
    assert time.monotonic() - began_s > 1.0, "it has waited for the lock"
    goes_on.set()
    thread.join(10.0)
    assert isinstance(ended[0], DATABASE_AWAY), ended
    with other.store.read() as reader:
        assert all("half" not in str(event.reason) for event in reader.events(0, None, 100))


def test_a_database_that_restarts_costs_no_tenure_while_nobody_else_takes_the_lease(make, wait, postgres_server):
    one = make("one")
    tenure = one.seat._tenure
    postgres_server.stop()
    try:
        wait(lambda: not one.mandates[0].holds(), "it stops deciding")
        assert "the lease cannot be asked for" in one.election.replicas.problems()[0]
    finally:
        postgres_server.start()
    wait(lambda: one.mandates[0].holds(), "it goes on")
    assert one.seat._tenure is tenure
    assert one.election.replicas.status().epoch == 1


def test_a_higher_epoch_that_nodes_have_seen_is_outbid_only_by_who_leads(make, wait):
    one, other = make("one"), make("other")
    mandate = one.mandates[0]
    assert mandate.above(40) == 41
    wait(lambda: one.election.leadership.view.epoch == 41, "the row says so")
    assert mandate.holds()
    write(one.store.for_decisions(mandate.check))
    one.election.step_down()
    wait(lambda: other.seat.is_filled, "the other takes over")
    assert other.mandates[0].epoch == 42
    with pytest.raises(Exception, match="another replica decides"):
        mandate.above(90)
    assert other.election.leadership.view.epoch == 42


def test_a_replica_whose_engine_cannot_be_opened_leaves_the_lease_to_others(make, wait, monkeypatch):
    from elasticflow_airflow.engines.port import EngineError

    one, other = make("one"), make("other")

    def fail(_: Mandate) -> FakeEngine:
        raise EngineError("no node answers: start its agent")

    monkeypatch.setattr(other.election, "_open_engine", fail)
    one.election.step_down()
    wait(lambda: other.seat.vacancy, "it has tried")
    assert "no node answers" in other.seat.problems()[0]
    third = make("third")
    wait(lambda: third.seat.is_filled, "another one leads")


def test_two_on_a_database_without_an_engine_that_fails_over(postgres_url, tmp_path):
    terms = LeaseTerms(1.5, 0.3)
    tables = [LeaseTable(postgres_url, name, terms, own_url=None, card={}, channel="c") for name in ("one", "other")]
    Store(postgres_url).close()
    from elasticflow_airflow.service.leadership.lease import Lease

    lease = Lease(terms)
    view, granted = tables[0].ask(lease.request())
    assert (view.epoch, view.change, granted) == (1, "start", True)
    view, granted = tables[1].ask(lease.request())
    assert (view.holder, granted, view.is_held) == ("one", False, True)
    for table in tables:
        table.close()


# -- news --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pooled_url(postgres_url: str, postgres_server: Any) -> Iterator[str]:
    """The same database through a pooler of transactions."""
    name = sa.make_url(postgres_url).database
    with pgbouncer(postgres_server.base, postgres_server.user) as url:
        yield url.format(name).replace("postgresql:", "postgresql+psycopg:")


def heard_from(url: str, store: Store) -> tuple[News, list[str]]:
    heard: list[str] = []
    news = News(url, store.channel, "listener", heard.append, lambda: None)
    news.start()
    return news, heard


def test_a_write_of_another_replica_is_heard_at_once_and_ones_own_is_not(postgres_url, wait):
    writer, listener = Store(postgres_url, replica_id="writer"), Store(postgres_url, replica_id="listener")
    news, heard = heard_from(postgres_url, listener)
    wait(lambda: news.hears, "it hears")
    heard.clear()
    write(listener)
    began_s = time.monotonic()
    write(writer)
    wait(lambda: heard, "it is heard")
    assert time.monotonic() - began_s < 1.0
    tell(writer.engine_without_transactions, writer.channel, "writer", "runs")
    wait(lambda: "runs" in heard, "what is added is heard, too")
    assert heard == ["", "runs"]
    news.close()
    writer.close()
    listener.close()


def test_behind_a_pooler_of_transactions_everything_works_by_looking(make, wait, pooled_url):
    one, other = make("one", pooled_url), make("other", pooled_url)
    assert (one.seat.is_filled, other.seat.is_filled) == (True, False)
    wait(lambda: other.election.news.hears is False, "it is noticed")
    for _ in range(20):  # more often than a driver needs to prepare a statement
        write(other.store)
        write(one.store.for_decisions(one.mandates[0].check))
    one.election.step_down()
    wait(lambda: other.seat.is_filled, "the other takes over")


# -- what is told ------------------------------------------------------------------------------------------------


def test_a_clock_that_is_minutes_off_is_named(make):
    one = make("one")
    replicas = one.election.replicas
    assert replicas.problems() == []
    replicas.clock = lambda: time.time() + 120.0
    replicas.say()
    (said,) = replicas.problems()
    assert "the clock of one.example is 120 s ahead of that of the database: set both by a time server" in said


def test_a_database_that_only_reads_is_named(postgres_url, tmp_path):
    """As a standby answers, or a server whose disk is full."""
    Store(postgres_url).close()
    url = f"{postgres_url}&options=-cdefault_transaction_read_only%3Don"
    table = LeaseTable(url, "one", LeaseTerms(), own_url=None, card={}, channel="c")
    from elasticflow_airflow.service.leadership.lease import Lease

    with pytest.raises(DATABASE_AWAY, match="read-only transaction"):
        table.ask(Lease(LeaseTerms()).request())
    table.close()


def test_the_id_of_a_replica_stays_with_its_folder(tmp_path):
    from elasticflow_airflow.service.leadership.election import replica_id_of

    first = replica_id_of(tmp_path)
    assert replica_id_of(tmp_path) == first
    assert uuid.UUID(first)
    (tmp_path / "replica-id").write_text("")
    assert replica_id_of(tmp_path) != first
    assert os.path.exists(tmp_path / "replica-id")
