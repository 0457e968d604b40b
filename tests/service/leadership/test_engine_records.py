"""The engine's records in the database: who does not lead writes nothing, whatever the moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from elasticflow_airflow.engines.port import EngineError, SupersededError
from elasticflow_airflow.service.leadership.engine_records import DatabaseRecords
from elasticflow_airflow.service.store.store import connect_options
from elasticflow_airflow.service.store.tables import Base, EngineRecordRow, LeaderRow

pytestmark = pytest.mark.postgres
RECORD = {"job_id": "job", "latest": 3, "incarnation_dirs": {"1": "jobs/job/i000001"}, "gangs": []}


@pytest.fixture
def engine(postgres_url: str) -> Iterator[sa.Engine]:
    found = sa.create_engine(postgres_url, connect_args=connect_options(postgres_url), isolation_level="AUTOCOMMIT")
    Base.metadata.create_all(found, tables=[LeaderRow.__table__, EngineRecordRow.__table__])  # type: ignore[list-item]
    elect(found, 1)
    yield found
    found.dispose()


def elect(engine: sa.Engine, epoch: int) -> None:
    with engine.connect() as connection:
        connection.execute(sa.delete(LeaderRow))
        connection.execute(sa.insert(LeaderRow).values(id=1, epoch=epoch, schema_floor="0012"))


def test_a_record_is_found_by_the_next_leader_and_not_changed_by_the_former(engine: sa.Engine) -> None:
    former = DatabaseRecords(engine, lambda: 1)
    former.save("job", RECORD)
    former.save("job", {**RECORD, "latest": 4})
    elect(engine, 2)
    for write in (former.save, former.keep_note):
        with pytest.raises(SupersededError, match="another service leads"):
            write("job", RECORD)
    leader = DatabaseRecords(engine, lambda: 2)
    assert leader.load() == ({"job": {**RECORD, "latest": 4}}, {})
    leader.save("job", {**RECORD, "latest": 5})
    assert leader.load()[0]["job"]["latest"] == 5


def test_a_write_that_meets_an_election_is_before_or_after_it(engine: sa.Engine) -> None:
    """While the election is not committed, the former leader's write waits; then it changes nothing."""
    former = DatabaseRecords(engine, lambda: 1)
    former.save("job", RECORD)
    refused = threading.Event()

    def write() -> None:
        with pytest.raises(SupersededError):
            former.save("job", {**RECORD, "latest": 9})
        refused.set()

    writing = threading.Thread(target=write)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as election, election.begin():
        election.execute(sa.update(LeaderRow).values(epoch=2))
        writing.start()
        assert not refused.wait(0.3), "it waits for the election"
    writing.join(10)
    assert refused.is_set()
    assert former.load()[0]["job"]["latest"] == 3


def test_a_note_is_no_record_of_a_job(engine: sa.Engine) -> None:
    records = DatabaseRecords(engine, lambda: 1)
    assert records.note("ray-nodes") is None
    records.keep_note("ray-nodes", {"nodes": {"n0": "http://a"}})
    records.keep_note("ray-nodes", {"nodes": {"n0": "http://b"}})
    assert records.note("ray-nodes") == {"nodes": {"n0": "http://b"}}
    assert records.load() == ({}, {})


def test_a_damaged_record_is_named_and_stays(engine: sa.Engine) -> None:
    records = DatabaseRecords(engine, lambda: 1)
    with engine.connect() as connection:
        connection.execute(sa.text("INSERT INTO engine_record VALUES ('job', '[1]', 1)"))
    found, damaged = records.load()
    assert (found, set(damaged)) == ({}, {"job"})
    assert "not an object" in damaged["job"]
    records.put_away("job")
    assert set(records.load()[1]) == {"job"}
    records.save("job", RECORD)
    assert records.load() == ({"job": RECORD}, {})


def test_a_database_that_is_away_is_told_of(engine: sa.Engine) -> None:
    away = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:9/x", connect_args={"connect_timeout": 2})
    records = DatabaseRecords(away, lambda: 1)
    for call in (records.load, lambda: records.save("job", RECORD)):
        with pytest.raises(EngineError, match="the engine's records cannot be") as raised:
            call()
        assert not isinstance(raised.value, SupersededError)


def test_who_knows_that_another_leads_asks_nobody(engine: sa.Engine) -> None:
    def superseded() -> int:
        raise SupersededError("another service leads")

    with pytest.raises(SupersededError):
        DatabaseRecords(engine, superseded).save("job", RECORD)
    assert DatabaseRecords(engine, lambda: 1).load() == ({}, {})
