"""What services on one database share without a common folder: the code of jobs, and the key of their secrets."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from support.stored import incarnation_columns

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import Snapshot, snapshot_folder
from elasticflow_airflow.engines.fake.engine import FakeEngine, fake_nodes
from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.service.assembly import assemble
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.job_files.candidates import CandidateService
from elasticflow_airflow.service.job_files.snapshots import SnapshotLostError, SnapshotRefusedError, Snapshots
from elasticflow_airflow.service.leadership.shared_key import OtherKeyError, agree_on_key, forget_lost_key
from elasticflow_airflow.service.loop.old_job_details import Retention
from elasticflow_airflow.service.loop.reconcile import Reconciler
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.secrets import SecretBox
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store import snapshot_archives
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.snapshot_archives import KEPT_AT_LEAST_S, SnapshotArchives
from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import IncarnationRow, JobRow, LeaderRow, ReplicaRow, SnapshotRow

DAY_S = 86400.0
OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))


def code(folder: Path, **files: str) -> Snapshot:
    """Code as the client packs it, with a script and a module of a package."""
    folder.mkdir()
    for name, text in {"train": "print('training')\n", "inner/part": "x = 1\n", **files}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    return snapshot_folder(folder)


def upload(snapshots: Snapshots, tar: bytes, sha256: str | None = None) -> str:
    """As the route does."""
    sha256, incoming = sha256 or hashlib.sha256(tar).hexdigest(), snapshots.incoming()
    incoming.write_bytes(tar)
    try:
        snapshots.accept(sha256, incoming)
    finally:
        incoming.unlink()
    return sha256


# -- the code, in either database -----------------------------------------------------------------------------------


class Clock:
    """A clock that only a test moves."""

    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(database_url: str, clock: Clock) -> Iterator[Store]:
    found = Store(database_url, clock=clock)
    yield found
    found.close()


@pytest.fixture
def service(store: Store, tmp_path: Path) -> Callable[[str], Snapshots]:
    """The snapshots of a service with a folder of its own."""

    def make(name: str, **limits: int) -> Snapshots:
        limits = {"max_bytes": 1 << 20, "max_files": 50, **limits}
        return Snapshots(tmp_path / name / "snapshots", archives=SnapshotArchives(store), **limits)

    return make


def stored(store: Store) -> list[str]:
    with store.read() as reader:
        return sorted(reader.session.scalars(sa.select(SnapshotRow.sha256)))


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes()) for path in found}


def test_what_one_service_has_taken_another_unpacks(service, store, tmp_path):
    one, other, tar = service("one"), service("other"), code(tmp_path / "code").tar
    sha256 = upload(one, tar)
    with store.read() as reader:
        assert reader.session.get(SnapshotRow, sha256).archive == tar
    assert other.has(sha256)
    assert not other.path(sha256).exists(), "it is only unpacked where it is needed"
    assert other.ensure(sha256) == other.path(sha256)
    assert files(other.path(sha256)) == files(one.path(sha256)) != {}
    assert [path.name for path in other.path(sha256).parent.iterdir()] == [sha256]
    assert other.ensure(sha256) == other.path(sha256)


def test_large_code_is_read_in_parts(service, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_archives, "_PART_BYTES", 1000)
    one, other = service("one"), service("other")
    sha256 = upload(one, code(tmp_path / "code", data=f"x = {'1' * 12_345}").tar)
    assert files(other.ensure(sha256)) == files(one.path(sha256))


def test_code_that_nobody_has_taken_is_told(service):
    one = service("one")
    assert not one.has("0" * 64)
    with pytest.raises(SnapshotLostError, match="is not in the database: submit the job again"):
        one.ensure("0" * 64)
    assert list(one.path("0" * 64).parent.iterdir()) == []


def test_what_is_refused_is_not_stored(service, store):
    one = service("one")
    with pytest.raises(SnapshotRefusedError, match="has the SHA-256"):
        upload(one, b"\0" * 1024, sha256="0" * 64)
    with pytest.raises(SnapshotRefusedError):
        upload(one, b"no tar at all" * 1000)
    assert stored(store) == []


def test_many_at_once_take_and_unpack_it_once(service, store, tmp_path):
    tar = code(tmp_path / "code").tar
    with ThreadPoolExecutor(6) as pool:
        (sha256,) = set(pool.map(lambda n: upload(service(f"taker{n % 2}"), tar), range(6)))
        folders = set(pool.map(lambda n: service(f"other{n % 2}").ensure(sha256), range(6)))
    assert stored(store) == [sha256]
    assert len(folders) == 2
    for folder in folders:
        assert [path.name for path in folder.parent.iterdir()] == [sha256]


def test_damaged_code_is_never_unpacked_and_can_be_uploaded_again(service, store, tmp_path):
    one, other, tar = service("one"), service("other"), code(tmp_path / "code").tar
    sha256 = upload(one, tar)
    with store.write() as tx:
        tx.session.get(SnapshotRow, sha256).archive = tar.replace(b"training", b"trailing")
    with pytest.raises(SnapshotLostError, match=r"is damaged in the database \(its SHA-256 is [0-9a-f]{64}\)"):
        other.ensure(sha256)
    assert list(other.path(sha256).parent.iterdir()) == []
    assert not other.has(sha256), "so that a client uploads it"
    upload(other, tar)
    assert service("third").ensure(sha256).is_dir()


def test_code_that_a_service_has_but_the_database_has_not_counts_as_missing(service, store, tmp_path):
    """It is from before the database kept code, or was deleted there: the next upload puts it there."""
    one, tar = service("one"), code(tmp_path / "code").tar
    sha256 = upload(Snapshots(one.path("0" * 64).parent, max_bytes=1 << 20, max_files=50), tar)
    assert not one.has(sha256)
    with pytest.raises(SnapshotRefusedError, match="has the SHA-256"):
        upload(one, tar + b"\0" * 512, sha256=sha256)
    upload(one, tar)
    assert one.has(sha256)
    assert stored(store) == [sha256]


def test_a_limit_that_is_smaller_here_is_told(service, tmp_path):
    sha256 = upload(service("one"), code(tmp_path / "code").tar)
    with pytest.raises(SnapshotLostError, match="cannot be unpacked here: the code has more than 1 files"):
        service("other", max_files=1).ensure(sha256)


def test_submits_of_the_same_code_ask_the_database_once(service, store, tmp_path):
    one = service("one")
    sha256, asked = upload(one, code(tmp_path / "code").tar), []
    sa.event.listen(store.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    assert all(one.has(sha256) for _ in range(20))
    assert len([statement for statement in asked if "snapshot" in statement]) == 1
    asked.clear()
    assert service("other").has(sha256)
    assert [statement.split()[0] for statement in asked if "snapshot" in statement] == ["SELECT"], "fresh: no write"


# -- code of the release before ------------------------------------------------------------------------------------


def test_code_of_live_jobs_from_before_is_stored_with_the_hash_of_its_upload(service, store, tmp_path):
    tar = code(tmp_path / "code", **{"n" * 120: "", "é": "y = 2"}).tar
    one = service("one")
    before = Snapshots(one.path("0" * 64).parent, max_bytes=1 << 20, max_files=50)
    used, unused = upload(before, tar), upload(before, code(tmp_path / "other code", train="print(1)").tar)
    one.share({used, "f" * 64})
    one.share({used})
    assert stored(store) == [used] != [unused]
    with store.read() as reader:
        assert reader.session.get(SnapshotRow, used).archive == tar
    assert files(service("other").ensure(used)) == files(one.path(used))
    assert {path.name for path in one.path(used).parent.iterdir()} == {used, unused}


def test_code_that_another_program_has_packed_stays_where_it_is_and_is_told(service, store, tmp_path, capsys):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("train.py")
        member.mtime = 1_700_000_000
        archive.addfile(member)
    one = service("one")
    before = Snapshots(one.path("0" * 64).parent, max_bytes=1 << 20, max_files=50)
    sha256 = upload(before, buffer.getvalue())
    one.share({sha256})
    assert stored(store) == []
    assert "was not packed by this project's client" in capsys.readouterr().out
    assert one.ensure(sha256).is_dir()
    assert [path.name for path in one.path(sha256).parent.iterdir()] == [sha256]


# -- for how long it is kept ---------------------------------------------------------------------------------------


def live_job(store: Store, sha256: str, **columns: Any) -> None:
    """A job that has this code."""
    identity = JobIdentity(dag_id="daily", run_id=f"run of {sha256}", task_id="train")
    submission = JobSubmission(
        identity=identity,
        command=Command(snapshot=sha256, script="train.py"),
        length=Length(steps=10),
        global_batch_size=8,
        best_effort=True,
    )
    values = {**incarnation_columns(identity), "submission": StoredSubmission.of(submission), "submitted_at": 0.0}
    with store.write() as tx:
        tx.add(
            JobRow(
                job_id=identity.job_id,
                identity=identity,
                recurring_key=identity.recurring_key,
                dag_id=identity.dag_id,
                claim=1,
                incarnation=1,
                generation=0,
                created_at=0.0,
            )
        )
        tx.session.flush()
        tx.add(IncarnationRow(job_id=identity.job_id, incarnation=1, **{**values, **columns}))


def test_code_is_forgotten_when_no_job_has_it_and_none_was_submitted_for_long(service, store, tmp_path, clock):
    one = service("one")
    used, over, asked, old, older, new = (
        upload(one, code(tmp_path / name, train=f"print({name!r})").tar)
        for name in ("used", "over", "asked", "old", "older", "new")
    )
    ages_s = {used: 99, over: 98, asked: 97, old: 95, older: 96, new: 1}
    with store.write() as tx:
        for sha256, days in ages_s.items():
            tx.session.get(SnapshotRow, sha256).stored_at = clock.now_s - days * DAY_S
    live_job(store, used)
    live_job(store, over, terminal=True, drained=True)
    assert service("other").has(asked), "a client that is about to submit asks for it"
    before = clock.now_s - 90 * DAY_S
    with store.write() as tx:
        in_use = tx.snapshots_in_use()
        assert in_use == {used}
        assert tx.forget_snapshots(before, in_use, 2) == 2
    assert stored(store) == sorted([used, asked, old, new]), "the oldest first, in small batches"
    with store.write() as tx:
        assert tx.forget_snapshots(before, in_use, 2) == 1
        assert tx.forget_snapshots(before, in_use, 2) == 0
    assert stored(store) == sorted([used, asked, new])


def test_folders_go_with_time_and_come_back_when_they_are_needed(service, tmp_path, clock):
    one, now_s = service("one"), time.time()
    used, unused, new = (upload(one, code(tmp_path / str(n), train=f"print({n})").tar) for n in range(3))
    for sha256 in (used, unused):
        os.utime(one.path(sha256), (now_s - 99 * DAY_S,) * 2)
    (one.path(used).parent / "of somebody else").mkdir()
    one.forget_unused({used}, now_s - 90 * DAY_S)
    assert {path.name for path in one.path(used).parent.iterdir()} == {used, new, "of somebody else"}
    assert one.ensure(unused).is_dir()
    one.ensure(used)
    one.forget_unused(set(), now_s - 90 * DAY_S)
    assert one.path(used).is_dir(), "it has just been asked for"


def test_without_a_shared_database_the_folder_is_all_there_is_and_nothing_of_it_goes(tmp_path):
    alone = Snapshots(tmp_path / "snapshots", max_bytes=1 << 20, max_files=50)
    sha256 = upload(alone, code(tmp_path / "code").tar)
    os.utime(alone.path(sha256), (0, 0))
    alone.forget_unused(set(), time.time())
    alone.share({sha256})
    assert alone.has(sha256)
    assert alone.ensure(sha256).stat().st_mtime == 0
    remove(alone.path(sha256))
    with pytest.raises(SnapshotLostError, match=r"is not in .*snapshots: submit the job again"):
        alone.ensure(sha256)


# -- the key, in either database -----------------------------------------------------------------------------------


def box(folder: Path, *keys: str) -> SecretBox:
    folder.mkdir(exist_ok=True)
    return SecretBox(folder / "secret.key", keys)


def noted(store: Store) -> str | None:
    with store.read() as reader:
        return reader.session.get(LeaderRow, 1).key_id


def test_services_with_the_same_key_agree(store, tmp_path):
    assert noted(store) is None
    for name in ("one", "other", "one"):
        agree_on_key(store, box(tmp_path / name, NEW))
    assert noted(store) == box(tmp_path / "one", NEW).key_id


def test_a_service_without_the_key_is_told_so(store, tmp_path):
    agree_on_key(store, box(tmp_path / "one", OLD))
    other = box(tmp_path / "other", NEW)
    with pytest.raises(OtherKeyError) as refused:
        agree_on_key(store, other)
    said, old_id = str(refused.value), box(tmp_path / "one", OLD).key_id
    for part in (old_id, other.key_id, "ELASTICFLOW_SECRET_KEY", "ELASTICFLOW_SECRET_KEY_FILE", "secret.key"):
        assert part in said
    assert OLD not in said
    assert NEW not in said
    assert noted(store) == old_id


def test_keys_in_the_folders_of_two_services_are_two_keys(store, tmp_path):
    agree_on_key(store, box(tmp_path / "one"))
    agree_on_key(store, box(tmp_path / "one"))
    with pytest.raises(OtherKeyError):
        agree_on_key(store, box(tmp_path / "other"))


def test_a_key_that_was_lost_is_forgotten_where_nothing_and_nobody_needs_it(store, tmp_path):
    agree_on_key(store, box(tmp_path / "one"))
    other = box(tmp_path / "other")
    with store.write() as tx:
        tx.add(ReplicaRow(replica_id="one", seen_at=store.clock() - 5.0))
    forget_lost_key(store, other)
    with pytest.raises(OtherKeyError):
        agree_on_key(store, other)
    with store.write() as tx:
        tx.session.get(ReplicaRow, "one").seen_at = store.clock() - 100.0
    forget_lost_key(store, other)
    agree_on_key(store, other)
    assert noted(store) == other.key_id


def test_a_key_is_replaced_without_a_moment_in_which_a_service_cannot_read(store, tmp_path):
    """As the how-to tells: the new key last, then first, then alone; one service after the other each time."""
    one, other = tmp_path / "one", tmp_path / "other"
    sealed = box(one, OLD).seal({"TOKEN": "of before"})
    for keys in ((OLD,), (OLD, NEW), (NEW, OLD)):
        for folder in (one, other):
            agree_on_key(store, box(folder, *keys))
            assert box(folder, *keys).open(sealed) == {"TOKEN": "of before"}
    assert noted(store) == box(one, NEW).key_id
    agree_on_key(store, box(one, OLD, NEW))  # One that restarts with what it had before.
    agree_on_key(store, box(one, NEW, OLD))
    agree_on_key(store, box(other, NEW))
    with pytest.raises(OtherKeyError):
        agree_on_key(store, box(one, OLD))


def test_of_services_that_start_at_once_with_different_keys_one_is_refused(store, tmp_path):
    boxes = [box(tmp_path / str(n), Fernet.generate_key().decode()) for n in range(6)]
    barrier = threading.Barrier(len(boxes))

    def start(one: SecretBox) -> bool:
        barrier.wait(30)
        try:
            agree_on_key(store, one)
        except OtherKeyError:
            return False
        return True

    with ThreadPoolExecutor(len(boxes)) as pool:
        agreed = list(pool.map(start, boxes))
    assert agreed.count(True) == 1
    assert noted(store) == boxes[agreed.index(True)].key_id


# -- two services on one PostgreSQL --------------------------------------------------------------------------------


@dataclass
class Service:
    """The parts of a service, with a folder and an engine of its own. Its loop passes when a test says so."""

    settings: ServiceSettings
    engine: FakeEngine
    parts: ServiceParts
    reconciler: Reconciler
    candidates: CandidateService

    @property
    def snapshots(self) -> Snapshots:
        return self.parts.snapshots

    def submit(self, sha256: str, **given: Any) -> str:
        """Submit a job of one training script."""
        submission = JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id="train"),
            command=Command(snapshot=sha256, script="train.py"),
            length=Length(steps=1000),
            global_batch_size=8,
            best_effort=True,
            **given,
        )
        return " ".join(self.parts.job_service.submit(submission.identity.job_id, submission).warnings)

    def spec(self) -> Any:
        """Let the loop pass until its engine has a gang; returns what the engine was told of it."""
        for _ in range(50):
            self.reconciler.try_once()
            assert not self.reconciler.problem
            if self.engine.world.gangs:
                (gang,) = self.engine.world.gangs.values()
                return gang.spec
        raise AssertionError("nothing was started")


@pytest.fixture
def start(postgres_url: str, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Start services on one PostgreSQL."""
    started: list[Service] = []

    def make(name: str, **given: Any) -> Service:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = ServiceSettings(state_dir=folder, database_url=postgres_url, verdict_wait_s=0.01, **given)
        engine = FakeEngine(fake_nodes(1, 2), folder / "jobs")
        started.append(Service(settings, engine, *assemble(settings, engine, Notifier())))
        return started[-1]

    yield make
    for one in started:
        one.candidates.close()
        one.engine.close()
        one.parts.store.close()


@pytest.mark.postgres
def test_a_job_that_one_service_took_another_runs_with_its_code_and_secrets(start, tmp_path):
    one, leader = start("one", secret_key=f"{NEW},{OLD}"), start("leader", secret_key=NEW)
    snapshot = code(tmp_path / "code")
    sha256 = upload(one.snapshots, snapshot.tar)
    one.submit(sha256, secret_env={"TOKEN": "hunter2-of-the-hub"})
    assert not leader.snapshots.path(sha256).exists()
    spec = leader.spec()
    assert spec.secret_env == {"TOKEN": "hunter2-of-the-hub"}
    assert Path(spec.session.code_dir) == leader.snapshots.path(sha256)
    assert (Path(spec.session.code_dir) / "train.py").read_text() == "print('training')\n"
    assert not list(tmp_path.glob("*/secret.key"))


@pytest.mark.postgres
def test_a_service_that_did_not_take_the_code_checks_the_script_and_names_what_changed(start, tmp_path):
    one, other = start("one", secret_key=NEW), start("other", secret_key=NEW)
    first = upload(one.snapshots, code(tmp_path / "first").tar)
    one.submit(first)
    second = upload(one.snapshots, code(tmp_path / "second", train="print('changed')").tar)
    assert "changed: train.py." in other.submit(second)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "other.py").touch()
    third = upload(one.snapshots, snapshot_folder(tmp_path / "third").tar)
    with pytest.raises(Refusal, match=r"'train.py' is not in the uploaded code"):
        other.submit(third)
    with pytest.raises(Refusal, match="was not uploaded"):
        other.submit("0" * 64)
    with one.parts.store.write() as tx:
        tx.session.execute(sa.delete(SnapshotRow).where(SnapshotRow.sha256 == first))
    remove(other.snapshots.path(first))
    assert f"changed: unknown, since the code {first} is not in the database" in other.submit(second)


@pytest.mark.postgres
@pytest.mark.trouble
def test_a_job_whose_code_is_lost_fails_with_the_reason_and_no_other_does(start, tmp_path):
    one = start("one", secret_key=NEW)
    leader = start("leader", secret_key=NEW, apply_attempts=2, apply_limit_s=0)
    sha256 = upload(one.snapshots, code(tmp_path / "code").tar)
    one.submit(sha256)
    with one.parts.store.write() as tx:
        tx.session.get(SnapshotRow, sha256).archive = b"what a disk has made of it"
    for _ in range(20):
        leader.reconciler.try_once()
        assert not leader.reconciler.problem
    (status,) = leader.parts.job_service.list_jobs(None, None, None, 10)
    assert status.state == "failed"
    assert status.failure is not None
    assert sha256 in status.failure


@pytest.mark.postgres
def test_keys_of_two_services_that_differ_are_told_at_the_start(start, tmp_path):
    one = start("one")
    one.submit(upload(one.snapshots, code(tmp_path / "code").tar), secret_env={"TOKEN": "hunter2"})
    start("one")
    with pytest.raises(OtherKeyError, match="which this service does not have"):
        start("other")


@pytest.mark.postgres
def test_a_service_that_gets_its_keys_by_configuration_reads_what_it_has_stored_before(start, tmp_path):
    before = start("one")
    sealed = SecretBox(before.settings.state_dir / "secret.key").seal({"TOKEN": "a"})
    after = start("one", secret_key=NEW)
    assert after.parts.job_service.secrets.open(sealed) == {"TOKEN": "a"}
    other = start("other", secret_key=NEW)
    assert other.parts.job_service.secrets.key_id == after.parts.job_service.secrets.key_id


@pytest.mark.postgres
def test_the_loop_forgets_code_that_nobody_uses(start, tmp_path):
    one = start("one", secret_key=NEW, keep_days=90)
    used, unused = (upload(one.snapshots, code(tmp_path / str(n), train=f"print({n})").tar) for n in range(2))
    one.submit(used)
    store, later_s = one.parts.store, time.time() + 91 * DAY_S

    def trim(now: float, keep_days: float) -> list[str]:
        settings = one.settings.model_copy(update={"keep_days": keep_days})
        Retention().trim(store, one.engine.files, one.snapshots, settings, now, 0.0)
        return stored(store)

    assert trim(time.time() + KEPT_AT_LEAST_S / 2, 1e-6) == sorted([used, unused])
    assert trim(later_s, 92.0) == sorted([used, unused])
    assert trim(later_s, 90.0) == [used]
    assert one.snapshots.path(used).is_dir()
    assert not one.snapshots.path(unused).exists()
