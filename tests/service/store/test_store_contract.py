"""What the store promises, on SQLite and on a real PostgreSQL alike."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.stored import incarnation_columns

from elasticflow_airflow.api import EventKind, JobIdentity, Length
from elasticflow_airflow.api.event_data import KeptData
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    JobState,
    Phase,
    Placement,
    RescaleCosts,
    Reservation,
    ScalingCurve,
    Slot,
)
from elasticflow_airflow.service.store.documents.columns import UnreadableError
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord, MeasuredCosts
from elasticflow_airflow.service.store.documents.scheduler_values import StoredState, state_from_json, state_to_json
from elasticflow_airflow.service.store.migrate import SchemaTooNewError, current_revision, ensure_schema
from elasticflow_airflow.service.store.store import Store, Writer, _open_engine
from elasticflow_airflow.service.store.tables import (
    SCHEMA_HEAD,
    Base,
    CandidateRow,
    DrainRow,
    GenerationRow,
    HistoryRow,
    IncarnationRow,
    JobRow,
    SampleRow,
)
from elasticflow_airflow.service.store.unit_of_work import UnstorableError, unit_of_work


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    found = Store(database_url, clock=lambda: 1000.0)
    yield found
    found.close()


SAMPLE = {"incarnation": 1, "number": 3, "at": 1.0, "step": 3, "loss": None, "steps_per_s": None, "workers": 1}


def add_job(tx: Writer, job_id: str = "daily-train-1", dag_id: str = "daily", **given) -> IncarnationRow:
    identity = JobIdentity(dag_id=dag_id, run_id="run1", task_id="train")
    tx.add(
        JobRow(
            job_id=job_id,
            identity=identity,
            recurring_key=given.pop("recurring_key", "daily.train"),
            dag_id=dag_id,
            claim=0,
            incarnation=1,
            generation=0,
            created_at=1000.0,
        )
    )
    tx.session.flush()
    values = {**incarnation_columns(identity), "submitted_at": 1000.0}
    row = IncarnationRow(job_id=job_id, incarnation=1, **{**values, **given})
    tx.add(row)
    tx.session.flush()
    return row


def generation_row(number: int, **given) -> GenerationRow:
    values = {"placement": [["node0", 0]], "workers": 1, "purpose": "train", "reason": "", "created_at": 1000.0}
    values |= {"job_id": "daily-train-1", "incarnation": 1, "fresh_start": True}
    return GenerationRow(generation=number, **{**values, **given})


def claims(store: Store, job_id: str = "daily-train-1") -> int:
    with store.read() as reader:
        job = reader.job(job_id)
        assert job is not None
        return job.claim


# -- schema ------------------------------------------------------------------------------------------------------


def test_equal_documents_are_read_once_and_one_that_is_no_json_hurts_no_other(store):
    with store.write() as tx:
        for number in range(3):
            add_job(tx, f"daily-train-{number}").costs = MeasuredCosts(startup_s=1.0)
    if store.engine.dialect.name == "sqlite":  # PostgreSQL stores no such text
        with store.engine.begin() as connection:
            connection.execute(sa.text("UPDATE incarnation SET costs = '{' WHERE job_id = 'daily-train-2'"))
    with store.read() as reader:
        one, other, bad = (reader.incarnation(f"daily-train-{n}", 1) for n in range(3))
        assert one.costs is other.costs
        assert one.costs == MeasuredCosts(startup_s=1.0)
        if store.engine.dialect.name == "sqlite":
            with pytest.raises(UnreadableError, match="it is not JSON"):
                _ = bad.costs.startup_s


def test_a_new_database_is_brought_to_head(store):
    assert current_revision(store.engine) == SCHEMA_HEAD


def of_the_next_release(store: Store, floor: str) -> None:
    """As a release after this one leaves the tables: with a column more."""
    with store.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE job ADD COLUMN of_the_next_release VARCHAR"))
        connection.execute(sa.text("UPDATE leader SET schema_floor = :floor"), {"floor": floor})
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9998'"))


def test_tables_that_a_newer_release_has_only_added_to_are_used_by_both(store):
    of_the_next_release(store, SCHEMA_HEAD)
    ensure_schema(store.engine)
    with store.write() as tx:
        add_job(tx)
    assert claims(store) == 0


def test_tables_that_a_newer_release_has_changed_are_refused(store):
    of_the_next_release(store, "9998")
    with pytest.raises(SchemaTooNewError, match="'9998'"):
        ensure_schema(store.engine)


def test_bringing_to_head_again_changes_nothing(store):
    with store.write() as tx:
        add_job(tx)
    ensure_schema(store.engine)
    assert current_revision(store.engine) == SCHEMA_HEAD
    assert claims(store) == 0


def test_the_migrations_make_what_the_models_say(store):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def migrate(store: Store, revision: str) -> None:
    """Take the database to another revision, as ``ensure_schema`` takes it to the newest."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(inspect.getfile(ensure_schema)).parent / "migrations"))
    with store.engine.connect().execution_options(elasticflow_write=True) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
        connection.commit()


def test_what_an_older_version_wrote_is_taken_over(store, database_url):
    with store.write() as tx:
        add_job(tx)
        tx.add(generation_row(1))
    migrate(store, "0001")
    assert current_revision(store.engine) == "0001"
    store.close()
    again = Store(database_url)
    with again.read() as reader:
        row, generation = reader.incarnation("daily-train-1", 1), reader.generation("daily-train-1", 1)
    again.close()
    assert (row.logical_workers, row.in_place) == (None, InPlaceRecord())
    assert row.seed == int(row.equality_key[:8], 16) & 0x7FFFFFFF, "as it was trained with"
    assert (generation.mode, generation.continues, generation.lost) == ("restart", None, [])


START = "import sys; from elasticflow_airflow.service.store.store import Store; sys.stdin.read(1); Store(sys.argv[1])"


def test_services_that_start_together_migrate_once(database_url):
    starters = [subprocess.Popen([sys.executable, "-c", START, database_url], stdin=subprocess.PIPE) for _ in range(3)]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.close()
    assert [starter.wait(60) for starter in starters] == [0, 0, 0]
    store = Store(database_url)
    assert current_revision(store.engine) == SCHEMA_HEAD
    store.close()


def test_who_migrates_looks_and_migrates_in_one_transaction(tmp_path, monkeypatch):
    """Another one that looks before the first has migrated would migrate again, and fail.

    On SQLite: for PostgreSQL ``env.py`` takes a lock, within what Alembic keeps once a process.
    """
    from alembic.runtime.migration import MigrationContext

    looked, read = threading.Barrier(2), MigrationContext.get_current_heads

    def held_up(context):
        heads = read(context)
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.5)
        return heads

    monkeypatch.setattr(MigrationContext, "get_current_heads", held_up)
    with ThreadPoolExecutor(2) as threads:
        opened = [threads.submit(Store, f"sqlite:///{tmp_path}/new.db") for _ in range(2)]
        for store in [one.result(60) for one in opened]:
            assert current_revision(store.engine) == SCHEMA_HEAD
            store.close()


def test_a_database_of_a_newer_version_is_refused(store, database_url):
    with store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(sa.text("UPDATE leader SET schema_floor = '9999'"))
    with pytest.raises(SchemaTooNewError, match=r"9999.*install the version that wrote it"):
        Store(database_url)


# -- transactions ------------------------------------------------------------------------------------------------


def test_what_raises_is_rolled_back_whole(store):
    def fail() -> None:
        with store.write() as tx:
            tx.add_event(EventKind.SUSPENDED, "suspended", add_job(tx))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with store.read() as reader:
        assert reader.job("daily-train-1") is None
        assert reader.events(0, None, 10) == []


def test_writers_of_one_process_take_turns(store):
    with store.write() as tx:
        add_job(tx)

    def count() -> None:
        for _ in range(20):
            with store.write() as tx:
                job = tx.job("daily-train-1")
                assert job is not None
                job.claim += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert claims(store) == 80


COUNT = """
import sys
from elasticflow_airflow.service.store.store import Store
store = Store(sys.argv[1])
for _ in range(40):
    with store.write() as tx:
        tx.job("daily-train-1").claim += 1
"""


def test_writers_of_several_processes_take_turns(store, database_url):
    with store.write() as tx:
        add_job(tx)
    writers = [subprocess.Popen([sys.executable, "-c", COUNT, database_url]) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert claims(store) == 120


def test_readers_see_a_transaction_whole_or_not_at_all(store):
    with store.write() as tx:
        row = add_job(tx)
        tx.add_event(EventKind.SUSPENDED, "suspended", row)
        with store.read() as reader:
            assert reader.job("daily-train-1") is None
    with store.read() as reader:
        assert len(reader.events(0, "daily-train-1", 10)) == 1


def test_rows_can_be_read_after_their_session(store):
    with store.write() as tx:
        add_job(tx)
    with store.read() as reader:
        found = reader.current("daily-train-1")
    assert found is not None
    assert found[1].submission.length == Length(steps=10)


# -- events ------------------------------------------------------------------------------------------------------


def test_events_are_ordered_and_say_which_was_the_last(store):
    with store.write() as tx:
        row = add_job(tx)
        ids = [tx.add_event(KeptData(generation=n, workers=1), f"number {n}", row) for n in range(5)]
        tx.add_event(EventKind.NODE_CHANGED, "of nobody")
    assert ids == sorted(ids)
    with store.read() as reader:
        assert [e.data["generation"] for e in reader.events(0, "daily-train-1", 10)] == [0, 1, 2, 3, 4]
        assert [e.data["generation"] for e in reader.events(ids[2], "daily-train-1", 1)] == [3]
        assert reader.events(ids[4], None, 10)[0].kind == "node_changed"
        assert reader.last_event_id() == ids[4] + 1
        found = reader.incarnation("daily-train-1", 1)
        assert found is not None
        assert found.last_event_id == ids[4]


def test_the_id_of_an_event_is_never_given_again(store):
    with store.write() as tx:
        first = tx.add_event(EventKind.NODE_LOST, "a")
    with store.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM event"))
    with store.write() as tx:
        assert tx.add_event(EventKind.NODE_CHANGED, "b") > first


def test_candidates_that_are_there_are_those_of_jobs_that_are_not_drained(store):
    with store.write() as tx:
        for job_id, drained in (("a-1", False), ("b-1", True), ("c-1", False)):
            add_job(tx, job_id, drained=drained)
            for step, status in ((30, "valid"), (10, "deleted"), (20, "invalid"), (40, "new")):
                path = f"g000001/step-{step:012}"
                tx.add(
                    CandidateRow(
                        job_id=job_id, incarnation=1, path=path, generation=1, step=step, digest="", status=status
                    )
                )
    with store.read() as reader:
        found = [(row.step, row.job_id, row.status) for row in reader.open_candidates()]
    assert sorted(found) == [(30, "a-1", "valid"), (30, "c-1", "valid"), (40, "a-1", "new"), (40, "c-1", "new")]
    assert [step for step, _, _ in found] == [30, 30, 40, 40]


# -- queries -----------------------------------------------------------------------------------------------------


def test_jobs_are_listed_newest_first_and_by_what_was_asked(store):
    with store.write() as tx:
        add_job(tx, "a-1", submitted_at=1.0, state="succeeded", terminal=True, drained=True)
        add_job(tx, "b-1", submitted_at=2.0, state="running")
        add_job(tx, "c-1", dag_id="weekly", submitted_at=3.0, state="running")

    def ids(**given) -> list[str]:
        asked = {"state": None, "dag_id": None, "live": None, "limit": 10}
        with store.read() as reader:
            return [row.job_id for _, row in reader.list_current(**{**asked, **given})]

    assert ids() == ["c-1", "b-1", "a-1"]
    assert ids(limit=1) == ["c-1"]
    assert ids(state="running") == ["c-1", "b-1"]
    assert ids(dag_id="daily") == ["b-1", "a-1"]
    assert ids(live=True) == ["c-1", "b-1"]
    assert ids(live=False) == ["a-1"]
    assert ids(text="DAILY run1") == ["b-1", "a-1"]
    assert ids(text="daily running") == ["b-1"]
    assert ids(text="dai%y") == [], "a word is no pattern"
    assert ids(text="train", limit=1) == ["c-1"]
    assert ids(text="B-") == ["b-1"]
    with store.read() as reader:
        assert [row.job_id for _, row in reader.undrained()] == ["b-1", "c-1"]
        assert reader.live_count() == 2


def test_pages_of_a_list_have_every_job_once_also_those_of_the_same_moment(store):
    with store.write() as tx:
        for number in range(23):
            add_job(tx, f"job-{number:02}", submitted_at=float(number // 5))

    def page(limit, after) -> list[tuple[float, str]]:
        with store.read() as reader:
            found = reader.list_current(state=None, dag_id=None, live=None, limit=limit, after=after)
            return [(row.submitted_at, row.job_id) for _, row in found]

    whole = page(100, None)
    assert len(whole) == 23
    for limit in (1, 4, 7):
        found, after = [], None
        while some := page(limit, after):
            found, after = found + some, some[-1]
        assert found == whole


def test_the_limit_counts_only_jobs_of_the_identity_that_was_asked_for(store):
    asked = {"namespace": "default", "run_id": "run0", "task_id": "train", "map_index": 2}
    others = ({"namespace": "elsewhere"}, {"run_id": "run1"}, {"task_id": "test"}, {"map_index": -1}, {"dag_id": "w"})
    with store.write() as tx:
        for at, change in enumerate(({}, *others)):
            identity = JobIdentity.model_validate({"dag_id": "daily", **asked, **change})
            row = add_job(
                tx,
                identity.job_id,
                dag_id=identity.dag_id,
                recurring_key=identity.recurring_key,
                submitted_at=float(at),
            )
            found = tx.job(row.job_id)
            assert found is not None
            found.identity = identity

    def ats(dag_id, limit=1, **identity) -> list[float]:
        with store.read() as reader:
            found = reader.list_current(state=None, dag_id=dag_id, live=None, limit=limit, identity=identity)
            return [row.submitted_at for _, row in found]

    assert ats("daily", **asked) == [0.0]
    assert ats(None, **asked) == [5.0]
    assert ats(["w", "daily"], limit=9, **asked) == [5.0, 0.0]
    assert ats([]) == []
    for part, at in (("namespace", 4.0), ("run_id", 4.0), ("task_id", 4.0), ("map_index", 3.0)):
        assert ats("daily", **{part: asked[part]}) == [at]
    whole = {part: value for part, value in asked.items() if part != "run_id"}
    assert ats("daily", limit=9, **whole) == [2.0, 0.0]


def test_the_last_success_is_that_of_another_run(store):
    with store.write() as tx:
        promoted = Promotion(path="g000001/step-000000000010", generation=1, step=10, digest="a")
        for job_id, finished_at in (("a-1", 10.0), ("b-1", 30.0), ("c-1", 20.0)):
            add_job(tx, job_id, state="succeeded", promoted=promoted, finished_at=finished_at)
        add_job(tx, "d-1", state="failed", promoted=promoted, finished_at=40.0)
    with store.read() as reader:
        for other_than, expected in (("x-1", "b-1"), ("b-1", "c-1")):
            found = reader.last_success("daily.train", other_than)
            assert found is not None
            assert found.job_id == expected
        assert reader.last_success("weekly.train", "x-1") is None


def test_generations_are_open_until_they_are_handled(store):
    with store.write() as tx:
        add_job(tx)
        for number in (2, 1):
            tx.add(generation_row(number))
    with store.write() as tx:
        assert [g.generation for g in tx.open_generations()] == [1, 2]
        tx.open_generations()[0].handled = True
    with store.read() as reader:
        assert [g.generation for g in reader.open_generations()] == [2]
        assert [g.generation for g in reader.generations("daily-train-1", 1)] == [1, 2]


def test_how_a_generation_goes_on_comes_back(store):
    record = InPlaceRecord(failures=1, recoveries=(0.1, 1_800_000_000.123456))
    with store.write() as tx:
        add_job(tx, logical_workers=8, in_place=record)
        tx.add(generation_row(7, mode="in_place", continues=5, lost=["g000005-r001"]))
        tx.add(DrainRow(node_id="node0", until_at=1_800_000_000.123456))
    with store.read() as reader:
        row, generation = reader.incarnation("daily-train-1", 1), reader.generation("daily-train-1", 7)
        assert reader.drains() == {"node0": 1_800_000_000.123456}
    assert (row.logical_workers, row.in_place) == (8, record)
    assert (generation.mode, generation.continues, generation.lost) == ("in_place", 5, ["g000005-r001"])


# -- values ------------------------------------------------------------------------------------------------------


def scheduler_state(**given) -> JobState:
    job = Job(
        job_id="daily-train-1",
        submitted_s=1_800_000_000.123456,
        deadline_s=1_800_000_600.1,
        total_steps=1e7 + 0.1,
        curve=ScalingCurve({1: 1 / 3, 2: 0.6, 4: 1.1}),
        costs=RescaleCosts(startup_s=1.5, pause_s=0.1, tail_s=2.25),
    )
    values = {
        "job": job,
        "phase": Phase.ADMITTED,
        "best_effort": False,
        "remaining_steps": 1234.5678901234567,
        "as_of_s": 1_800_000_000.123456,
        "placement": Placement((Slot("node0", 1), Slot("node1", 0))),
        "measured": {1: 1 / 3},
        "parked_from": Phase.WAITING,
        "failed_sizes": (8,),
        "profile_until_s": 3.5,
        "reserved": (Reservation(1.0, float("inf"), Placement((Slot("node0", 0),))),),
    }
    return JobState(**{**values, **given})


@pytest.mark.parametrize("given", [{}, {"measured": {}, "reserved": (), "parked_from": None, "remaining_steps": None}])
def test_a_scheduler_state_comes_back_to_the_last_bit(store, given):
    state = scheduler_state(**given)
    with store.write() as tx:
        add_job(tx, scheduler_state=StoredState.of(state))
    with store.read() as reader:
        row = reader.incarnation("daily-train-1", 1)
    assert row is not None
    assert row.scheduler_state.state == state


def test_a_state_of_an_older_version_is_read_with_defaults():
    raw = state_to_json(scheduler_state())
    del raw["reserved"], raw["job"]["costs"]["tail_s"]
    raw["something_of_tomorrow"] = 1
    state = state_from_json(raw)
    assert state.reserved == ()
    assert state.job.costs.tail_s == 0.0


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ({"starting": False}, True),
        ({"starting": True, "no_progress_until_s": 1_800_000_010.0}, False),
        ({"starting": True, "no_progress_until_s": 1_799_999_990.0}, True),
    ],
    ids=["it trains", "it starts", "a report came first"],
)
def test_of_a_state_without_it_is_concluded_whether_the_gang_has_started(given, started):
    """A job of the release before that were taken to start for ever would never grow."""
    raw = state_to_json(scheduler_state(**given))
    del raw["started"]
    assert StoredState(raw).state.started is started


def test_times_bytes_and_words_come_back_unchanged(store):
    words = "ünï “text” 漢字 \U0001f600"
    with store.write() as tx:
        add_job(tx, submitted_at=1_800_000_000.123456, secret_env=bytes(range(256)), state_reason=words)
        tx.add(HistoryRow(recurring_key="k", signature="s", speeds={1: 1 / 3}, updated_at=0.1))
    with store.read() as reader:
        row = reader.incarnation("daily-train-1", 1)
        past = reader.history("k", "s")
    assert row is not None
    assert past is not None
    assert (row.submitted_at, row.secret_env, str(row.state_reason)) == (1_800_000_000.123456, bytes(range(256)), words)
    assert past.speeds == {1: 1 / 3}


def test_samples_are_thinned_to_multiples(store):
    with store.write() as tx:
        add_job(tx)
        add_job(tx, "b-1")
        for number in range(8):
            for job_id in ("daily-train-1", "b-1"):
                tx.add(SampleRow(job_id=job_id, incarnation=1, number=number, at=1.0, step=number, workers=1))
    with unit_of_work(store) as work:
        work.thin_samples("daily-train-1", 1, 4)
        work.commit()
    with store.read() as reader:
        assert [row.step for row in reader.samples("daily-train-1", 1)] == [0, 4]
        assert len(reader.samples("b-1", 1)) == 8


def test_rows_are_written_together_if_the_same_columns_changed(store):
    """Jobs in different phases change in different columns: in order of their keys, these alternate."""
    names = [f"j-{number}" for number in range(8)]
    with store.write() as tx:
        for name in names:
            add_job(tx, name)
    said: list[str] = []
    sa.event.listen(store.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
    with unit_of_work(store) as work:
        rows = sorted((row for _, row in work.current_rows), key=lambda row: row.job_id)
        for number, row in enumerate(rows):
            row.step, row.speeds = 10 + number, {1: 1.0 + number}
            if number % 2:
                row.loss = float(number)
            row.at_risk = row.at_risk  # what did not change is not written
        work.add_samples([{**SAMPLE, "job_id": name, "loss": 1.0 if name > "j-3" else None} for name in names])
        said.clear()
        work.commit()
        assert len([one for one in said if one.startswith("UPDATE")]) == 2
        assert len([one for one in said if one.startswith("INSERT")]) == 1
        assert not any("at_risk" in one for one in said)
        assert rows[3].speeds == {1: 4.0}
        assert not any("FROM incarnation" in one for one in said), "nothing is read again"
    with store.read() as reader:
        rows = [reader.incarnation(name, 1) for name in names]
        assert [(row.step, row.loss, row.speeds) for row in rows] == [
            (10 + number, float(number) if number % 2 else None, {1: 1.0 + number}) for number in range(8)
        ]
        assert [[one.loss for one in reader.samples(name, 1)] for name in names] == [[None]] * 4 + [[1.0]] * 4


def test_tasks_are_loaded_once_also_those_that_are_new(store):
    with store.write() as tx:
        add_job(tx)
    said: list[str] = []
    with unit_of_work(store) as work:
        work.load_tasks(["never seen", "nor this"])
        sa.event.listen(store.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
        assert work.history("never seen", "any") is None
        assert work.recurring_task("nor this") is None
        assert not said
        assert work.history("not asked for", "any") is None
        assert said


def test_whose_row_is_there_already_is_said_and_nothing_is_written(store):
    with store.write() as tx:
        add_job(tx)
        add_job(tx, "b-1")
        tx.add(SampleRow(job_id="b-1", **SAMPLE))
        tx.add(generation_row(1, job_id="b-1"))
    with unit_of_work(store) as work:
        work.add_samples([{"job_id": job_id, **SAMPLE} for job_id in ("daily-train-1", "b-1")])
        work.add(generation_row(1))
        with pytest.raises(UnstorableError, match=r"sample .*b-1.*stored already") as said:
            work.commit()
    assert said.value.job_id == "b-1"
    with unit_of_work(store) as work:
        work.current_generations.clear()  # as if what is there had not been read
        work.session.expunge_all()
        for job_id in ("daily-train-1", "b-1"):
            work.add(generation_row(1, job_id=job_id))
        with pytest.raises(UnstorableError, match=r"generation .*stored already") as said:
            work.commit()
    assert said.value.job_id == "b-1"
    with store.read() as reader:
        assert not reader.samples("daily-train-1", 1)
        assert reader.generation("daily-train-1", 1) is None


def test_what_was_held_between_two_moments_is_found_with_its_job(store):
    with store.write() as tx:
        add_job(tx)
        for number, (since, until) in enumerate([(10.0, 20.0), (30.0, 40.0), (50.0, None), (None, 60.0)], 1):
            over = until is not None
            tx.add(generation_row(number, holding_at=since, ended_at=until, handled=over, state="ended"))
    with store.read() as reader:

        def between(from_at: float, until_at: float, limit: int = 10) -> list[int]:
            found = reader.generations_between(from_at, until_at, limit)
            assert all(job.job_id == generation.job_id for job, generation in found)
            return [generation.generation for _, generation in found]

        assert between(0.0, 100.0) == [1, 2, 3]
        assert between(15.0, 35.0) == [1, 2]
        assert between(20.0, 30.0) == []
        assert between(70.0, 80.0) == [3]
        assert between(0.0, 100.0, 2) == [2, 3]


def test_submissions_between_two_moments_are_found_with_those_that_were_not_over(store):
    with store.write() as tx:
        add_job(tx, "a-1", submitted_at=10.0, finished_at=20.0, terminal=True)
        add_job(tx, "b-1", submitted_at=30.0, finished_at=40.0, terminal=True)
        add_job(tx, "c-1", submitted_at=50.0)
    with store.read() as reader:

        def between(from_at: float, until_at: float) -> list[str]:
            return [row.job_id for _, row in reader.incarnations_between(from_at, until_at, 10)]

        assert between(0.0, 100.0) == ["a-1", "b-1", "c-1"]
        assert between(15.0, 35.0) == ["a-1", "b-1"]
        assert between(45.0, 49.0) == []
        assert between(70.0, 80.0) == ["c-1"]


# -- a whole job -------------------------------------------------------------------------------------------------


def test_a_job_from_its_submit_to_its_acknowledgement(make_world, database_url):
    world = make_world(url=database_url)
    job = world.submit(within=600)
    assert job.created
    world.ended(job)
    assert world.job_service.acknowledge(job.job.job_id, job.claim).acknowledged
    kinds = [event.kind for event in world.events(job)]
    milestones = ["submitted", "measured", "admitted", "succeeded", "acknowledged"]
    assert [kind for kind in dict.fromkeys(kinds) if kind in milestones] == milestones
    status = world.status(job)
    assert (status.state, status.step, status.result.met) == ("succeeded", 200, True)
    world.until(lambda: world.row(job).drained, "the engine has forgotten it")
    assert world.engine.world.gangs == {}


def test_a_service_that_is_restarted_goes_on_with_the_store(make_world, database_url):
    world = make_world(url=database_url)
    job = world.submit(within=900, steps=600)
    while not world.status(job).state.terminal:
        world.run(3)
        world.restart()
    assert world.status(job).state == "succeeded"
    assert world.status(job).result.steps == 600


@pytest.mark.parametrize(("query", "expected"), [("", {"connect_timeout": 10}), ("?connect_timeout=3", {})])
def test_a_server_that_falls_silent_is_noticed_before_leases_end(query, expected):
    """Whose machine is gone: nothing refuses, and the system's own limit is a quarter of an hour."""
    pytest.importorskip("psycopg")
    engine = _open_engine(f"postgresql+psycopg://nobody@127.0.0.1:9/none{query}")
    asked = {}

    @sa.event.listens_for(engine, "do_connect")
    def _refuse(_dialect, _record, _arguments, options):
        asked.update(options)
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        engine.connect()
    assert int(asked["connect_timeout"]) == expected.get("connect_timeout", 3)
    assert asked["tcp_user_timeout"] == 30_000
    assert asked["keepalives_idle"] + asked["keepalives_interval"] * asked["keepalives_count"] <= 30


def test_an_open_sqlite_is_given_none_of_that(tmp_path):
    with _open_engine(f"sqlite:///{tmp_path}/x.db").connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1
