"""Starts that cannot be: one sentence and a status, whatever is wrong; and one service only on a database."""

from __future__ import annotations

import os
import re
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from cryptography.fernet import Fernet

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import (
    ElasticFlowClient,
    EmbeddedStartError,
    Endpoint,
    ensure_service,
    snapshot_folder,
)
from elasticflow_airflow.service.__main__ import main
from elasticflow_airflow.service.store import service_lock
from elasticflow_airflow.service.store.migrate import current_revision
from elasticflow_airflow.service.store.open_store import refuse_jobs_from_elsewhere
from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import SnapshotRow


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Start a service that cannot be, in this process; returns its status and what it said."""
    monkeypatch.setenv("ELASTICFLOW_ENGINE", "fake")

    def run(**settings: object) -> tuple[int, list[str]]:
        for name, value in settings.items():
            monkeypatch.setenv(f"ELASTICFLOW_{name.upper()}", str(value))
        umask = os.umask(0o077)
        try:
            status = main(["--state-dir", str(tmp_path)])
        finally:
            os.umask(umask)
        return status, capsys.readouterr().err.splitlines()

    before = structlog.get_config()
    yield run
    structlog.configure(**before)  # It logs to what is captured here.


def lay_out(folder: Path, kind: str) -> None:
    """A state directory with a database of some kind in it."""
    file = folder / "elasticflow.db"
    match kind:
        case "no database":
            file.write_bytes(b"this is no database " * 500)
        case "torn":
            Store(f"sqlite:///{file}").close()
            data = bytearray(file.read_bytes())
            data[4096 : 4096 * 6] = b"\x5a" * 4096 * 5
            file.write_bytes(data)
        case "empty":
            (folder / "jobs" / "daily-train-1").mkdir(parents=True)
            file.touch()
        case "empty with its log":
            file.touch()
            (folder / "elasticflow.db-wal").write_bytes(b"what was not moved into the database yet")
        case "a folder":
            file.mkdir()
        case _:
            Store(f"sqlite:///{file}").close()
            with sqlite3.connect(file) as connection:
                connection.execute("UPDATE alembic_version SET version_num = ?", (kind,))
                connection.execute("UPDATE leader SET schema_floor = ?", (kind,))
            connection.close()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no database", r"is damaged \(file is not a database\): put a copy of it back"),
        ("torn", r"is damaged \(database disk image is malformed\): put a copy of it back"),
        ("empty", r"is empty \(0 bytes\), though .*jobs holds jobs"),
        ("empty with its log", r"is empty \(0 bytes\)"),
        ("a folder", r"elasticflow.db cannot be used: unable to open database file"),
        ("9999", r"is at schema '9999', .* install the version that wrote it"),
        ("0000abcd", r"is at schema '0000abcd', .* install the version that wrote it"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_in_one_sentence(start, tmp_path, kind, said):
    lay_out(tmp_path, kind)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("elasticflow.db*") if path.is_file()}
    status, lines = start()
    assert status == 1
    assert len(lines) == 1, lines
    assert re.match(r"elasticflow: the database .*" + said, lines[0]), lines
    if kind.startswith("empty"):
        assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_new_directory_with_an_empty_file_is_a_new_service(tmp_path, daemons, open_client):
    """As a first start leaves it that was killed at once."""
    daemons.state_dir().mkdir(mode=0o700)
    (daemons.state_dir() / "elasticflow.db").touch()
    assert open_client(daemons.embedded()).health().status == "ok"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://user:hunter2-secret@127.0.0.1:1/jobs", r"'jobs' on 127.0.0.1 cannot be used: .*refused"),
        (
            "postgresql:///jobs?host=/no/such/folder&password=hunter2-secret",
            r"'jobs' on /no/such/folder cannot be used",
        ),
        ("kdb://user:hunter2-secret@host/jobs", r"a kind of database that is not known here: kdb"),
        ("hunter2-secret", r"is no URL such as postgresql://"),
        ("sqlite:////no/such/folder/jobs.db", r"/no/such/folder/jobs.db cannot be used: .*No such file"),
    ],
)
def test_a_database_that_is_not_there_is_told_in_one_sentence(start, url, said):
    status, lines = start(database_url=url)
    assert status == 1
    assert len(lines) == 1, lines
    assert re.search(said, lines[0]), lines
    assert "hunter2" not in lines[0]


def test_keys_of_secrets_that_are_none_are_told_in_one_sentence(start, tmp_path):
    assert start(secret_key_file=tmp_path / "missing")[0] == 1
    (tmp_path / "keys").write_text("hunter2-secret\n")
    status, lines = start(secret_key_file=tmp_path / "keys")
    assert (status, len(lines)) == (1, 1), lines
    assert re.match(r"elasticflow: the file of secret keys \S+/keys: key 1 of 1 is no Fernet key: make one", lines[0])
    status, said = start(secret_key="hunter2-secret")
    assert (status, len(said)) == (2, 1), said
    assert said[0].startswith("elasticflow: ELASTICFLOW_SECRET_KEY: key 1 of 1 is no Fernet key: make one with: python")
    assert "hunter2" not in said[0] + lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("least_bytes", [0, 6000])
def test_a_full_disk_is_told_in_one_sentence(tmp_path, least_bytes):
    """Files may not grow: at once, or when the database is made."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow_airflow.service", "--state-dir", str(tmp_path)],
        env={**os.environ, "ELASTICFLOW_ENGINE": "fake"},
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (least_bytes, least_bytes)),
    )
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, len(lines)) == (1, 1), lines
    assert "ree space there" in lines[0]


def test_the_client_says_why_the_embedded_service_cannot_start_and_does_not_wait(daemons):
    state_dir = daemons.state_dir()
    state_dir.mkdir(mode=0o700)
    lay_out(state_dir, "no database")
    log = state_dir / "service.log"
    log.write_text("elasticflow: of another day\n")
    log.chmod(0o644)
    with pytest.raises(EmbeddedStartError) as failed:
        ensure_service(state_dir, daemons.environment(), limit_s=300.0)
    assert "cannot start: the database" in failed.value.message
    assert "is damaged" in failed.value.message
    assert "another day" not in str(failed.value)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


# -- one service on a database -----------------------------------------------------------------------------------


@pytest.fixture(
    params=[pytest.param("sqlite", marks=pytest.mark.slow), pytest.param("postgres", marks=pytest.mark.postgres)]
)
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that two state directories name."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shared.db'}"
    return str(request.getfixturevalue("postgres_url"))


def test_a_second_service_on_one_database_is_refused_and_named_the_first(daemons, open_client, shared_url):
    key = Fernet.generate_key().decode()
    first = daemons.popen("first", database_url=shared_url, secret_key=key)
    client = open_client(Endpoint(socket_path=daemons.state_dir("first") / "service.sock"))
    client.retry_for_s = 60.0
    assert client.health().pid == first.pid
    second = daemons.popen("second", database_url=shared_url)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    lines = said.decode().splitlines()
    assert len(lines) == 1, lines
    assert re.search(rf"another service .*\(host \S+, pid {first.pid}, since 20.* UTC, at unix://\S+/first/", lines[0])
    with pytest.raises(EmbeddedStartError, match=rf"cannot start: another service .*pid {first.pid}"):
        ensure_service(daemons.state_dir("second"), daemons.environment(database_url=shared_url))
    assert client.health().status == "ok"

    first.send_signal(signal.SIGKILL)
    first.wait()
    third = daemons.popen("second", database_url=shared_url, secret_key=key)
    client = open_client(Endpoint(socket_path=daemons.state_dir("second") / "service.sock"))
    client.retry_for_s = 60.0
    assert client.health().pid == third.pid


@pytest.fixture
def older_service(postgres_url: str) -> Iterator[sa.Connection]:
    """A service of a release before the lease owns the database, as far as others can see."""
    card = '{"pid": 7, "host": "old.example", "endpoint": "http://old.example:8321"}'
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        statement = f"SELECT pg_try_advisory_lock({0x456C4674}, hashtext(current_schema()::text))"
        assert connection.exec_driver_sql(f"/* elasticflow {card} */ {statement}").scalar()
        yield connection
    engine.dispose()


@pytest.mark.postgres
def test_a_database_is_not_upgraded_before_a_service_of_an_earlier_release_has_ended(postgres_url, older_service):
    waits: list[str] = []
    begun = threading.Event()

    def upgrade() -> None:
        with service_lock.without_older_services(postgres_url, waits.append, lambda: False):
            Store(postgres_url).close()
        begun.set()

    thread = threading.Thread(target=upgrade)
    thread.start()
    assert not begun.wait(2.0)
    assert current_revision(older_service.engine) is None
    (said,) = waits
    assert said.startswith("a service of an earlier release uses this database (host old.example, pid 7, at http://old")
    older_service.invalidate()  # as when it is killed
    older_service.close()
    assert begun.wait(10.0)
    thread.join()


@pytest.mark.postgres
def test_who_waits_for_a_service_of_an_earlier_release_can_be_told_to_stop(postgres_url, older_service):
    with (
        pytest.raises(service_lock.OwnedError, match="earlier release uses this database"),
        service_lock.without_older_services(postgres_url, lambda _: None, lambda: True),
    ):
        raise AssertionError("it must not begin")


@pytest.mark.postgres
def test_what_was_upgraded_is_opened_at_once(postgres_url, older_service):
    """Services before the lease refuse such a database by its schema."""
    Store(postgres_url).close()
    with service_lock.without_older_services(postgres_url, lambda _: None, lambda: True):
        pass


@pytest.mark.postgres
def test_the_first_replica_must_have_the_folder_of_the_service_that_was_alone(postgres_url, tmp_path, start):
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")

    def as_of_the_release_before(terminal: str) -> None:
        with engine.connect() as connection:
            connection.exec_driver_sql("CREATE TABLE alembic_version (version_num varchar(32))")
            connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('0011')")
            connection.exec_driver_sql("CREATE TABLE incarnation (terminal boolean)")
            connection.exec_driver_sql(f"INSERT INTO incarnation VALUES (true), ({terminal})")

    refuse_jobs_from_elsewhere(postgres_url, tmp_path)  # A new database.
    as_of_the_release_before("false")
    for kind in ("cluster", "local"):
        status, (line,) = start(database_url=postgres_url, engine=kind)
        assert status == 1
        assert re.search(rf"unfinished jobs \(1\) .* not in {tmp_path}\. Start one service .* directory first", line)
        assert current_revision(engine) == "0011"
    (tmp_path / "engine").mkdir()
    refuse_jobs_from_elsewhere(postgres_url, tmp_path)
    (tmp_path / "engine").rmdir()
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE incarnation SET terminal = true")
    refuse_jobs_from_elsewhere(postgres_url, tmp_path)
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE incarnation SET terminal = false")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0012'")
    refuse_jobs_from_elsewhere(postgres_url, tmp_path)
    engine.dispose()


# -- folders that differ -----------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_a_service_with_a_folder_of_its_own_takes_over_with_the_same_key_only(daemons, open_client, postgres_url, wait):
    def serve(name: str, **settings: object) -> tuple[ElasticFlowClient, subprocess.Popen[bytes]]:
        process = daemons.popen(name, stderr=subprocess.DEVNULL, database_url=postgres_url, **settings)
        client = open_client(Endpoint(socket_path=daemons.state_dir(name) / "service.sock"))
        client.retry_for_s = 60.0
        assert client.health().pid == process.pid
        return client, process

    def kill(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    code = daemons.base / "code"
    code.mkdir()
    (code / "train.py").write_text("print('training')")
    snapshot = snapshot_folder(code)
    client, first = serve("first")
    client.upload_snapshot(snapshot)
    identity = JobIdentity(dag_id="daily", run_id="run1", task_id="train")
    job = client.submit(
        JobSubmission(
            identity=identity,
            command=Command(snapshot=snapshot.sha256, script="train.py"),
            length=Length(steps=1_000_000),
            global_batch_size=8,
            best_effort=True,
            secret_env={"TOKEN": "hunter2"},
        )
    )
    kill(first)
    store = Store(postgres_url)
    with store.write() as tx:
        tx.session.execute(sa.delete(SnapshotRow))  # As a release without this table has left it.
    _, again = serve("first")
    with store.read() as reader:
        assert reader.session.get(SnapshotRow, snapshot.sha256).archive == snapshot.tar
    kill(again)
    other = daemons.popen("second", database_url=postgres_url)
    _, said = other.communicate(timeout=60)
    lines = said.decode().splitlines()
    assert (other.returncode, len(lines)) == (1, 1), lines
    assert "which this service does not have" in lines[0]
    key = (daemons.state_dir("first") / "secret.key").read_text()
    assert key not in lines[0]
    client, _ = serve("second", secret_key=key)
    assert not client.status(job.job.job_id).state.terminal
    unpacked = daemons.state_dir("second") / "snapshots" / snapshot.sha256 / "train.py"
    wait(unpacked.is_file, "it has the code that the first service took")
    store.close()
