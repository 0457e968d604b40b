"""The service in three shapes: its loop driven pass by pass in modelled time, its store, and the real daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from support.opened_files import OpenedFiles
from support.postgres import Postgres, postgres

from elasticflow_airflow.api import (
    AmendAnswer,
    AmendRequest,
    Attachment,
    Command,
    Event,
    JobIdentity,
    JobStatus,
    JobSubmission,
    Length,
)
from elasticflow_airflow.client import ElasticFlowClient, Endpoint, Snapshot, ensure_service, snapshot_folder
from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV, FakeEngine, fake_nodes
from elasticflow_airflow.service.job_files.candidates import CandidateService
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.loop.reconcile import Reconciler
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.requests.job_service import JobService, Submitted
from elasticflow_airflow.service.secrets import SecretBox
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store import store
from elasticflow_airflow.service.store.store import OF_CURRENT_INCARNATION, Store
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow, JobRow
from elasticflow_airflow.service.store.views import amend_answer_of

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
"""What the fake engine really does with 1, 2 and 4 workers, in steps/s."""
START_S = 1_800_000_000.0


def make_submission(snapshot: str, **given: Any) -> JobSubmission:
    """A job of 200 steps. ``fake`` changes how the modelled workers behave; ``task`` and ``run`` name the task."""
    fake = given.pop("fake", None)
    env = {} if fake is None else {BEHAVIOUR_ENV: json.dumps(fake)}
    values: dict[str, Any] = {
        "identity": JobIdentity(dag_id="daily", run_id=given.pop("run", "run1"), task_id=given.pop("task", "train")),
        "command": Command(snapshot=snapshot, script="train.py", args=given.pop("args", ()), env=env),
        "length": Length(steps=given.pop("steps", 200)),
        "global_batch_size": 32,
    }
    if not given.get("deadline_at"):
        values["best_effort"] = True
    return JobSubmission(**{**values, **given})


IS_OVER = (
    sa.select(IncarnationRow.terminal)
    .join(JobRow, OF_CURRENT_INCARNATION)
    .where(JobRow.job_id == sa.bindparam("job_id"))
)
_CODE = tempfile.TemporaryDirectory(prefix="ef-code-")


def _unpacked(snapshot: Snapshot) -> Path:
    """Code that a service has accepted: each once, as that takes a process."""
    kept = Snapshots(Path(_CODE.name), max_bytes=1 << 20, max_files=100)
    if not kept.has(snapshot.sha256):
        incoming = kept.incoming()
        incoming.write_bytes(snapshot.tar)
        kept.accept(snapshot.sha256, incoming)
        incoming.unlink()
    return kept.path(snapshot.sha256)


class _Stepping(Notifier):
    """Runs the loop in the thread that would only wake it: a handler finds its answer when it looks."""

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__()
        self._step, self._thread = step, threading.current_thread()

    def wake(self) -> None:
        if threading.current_thread() is self._thread:
            self._step()


@dataclass
class World:
    """The whole service in this process, without HTTP: time passes only when a test says so."""

    base: Path
    options: dict[str, Any]
    url: str
    engine: FakeEngine
    now_s: float = START_S
    """What the wall clock shows."""
    elapsed_s: float = 0.0
    """What the monotonic clock shows."""
    store: Store = field(init=False)
    reconciler: Reconciler = field(init=False)
    job_service: JobService = field(init=False)
    snapshots: Snapshots = field(init=False)
    candidates: CandidateService | None = None
    waits_for_candidates: bool = True
    """Whether what the loop asked about checkpoints is known before its next pass."""
    troubles: list[str] = field(default_factory=list)
    """Whose or what trouble the passes have met."""
    _pace_s: float = 0.5

    def __post_init__(self) -> None:
        self.settings = ServiceSettings(state_dir=self.base / "state", **{"verdict_wait_s": 0.01, **self.options})
        self.settings.state_dir.mkdir(mode=0o700, exist_ok=True)
        self.snapshots = Snapshots(
            self.settings.state_dir / "snapshots",
            max_bytes=self.settings.snapshot_max_bytes,
            max_files=self.settings.snapshot_max_files,
        )
        self.sha256 = self.keep_code({"train.py": "print('training')\n"})
        self.start()

    def start(self) -> None:
        """What a service does when it starts, with whatever the one before left."""
        self.store = Store(self.url, clock=self.clock)
        self.candidates = CandidateService(self.engine.files, lambda: None)
        notifier = _Stepping(self.step)
        secrets = SecretBox(self.settings.state_dir / "secret.key")
        self.reconciler = Reconciler(
            self.store,
            self.engine,
            self.settings,
            notifier,
            self.snapshots,
            secrets,
            self.candidates,
            clock=self.clock,
            monotonic=lambda: self.elapsed_s,
        )
        self.job_service = JobService(
            self.store,
            notifier,
            self.snapshots,
            secrets,
            self.settings,
            self.engine.files.exists,
            slots=lambda: sum(node.slots for node in self.reconciler.nodes),
            clock=self.clock,
            renewals=self.reconciler.renewals,
        )

    def stop(self) -> None:
        assert self.candidates is not None
        self.candidates.close()
        self.store.close()

    def restart(self) -> None:
        """The service is killed and started again: all that it knows is in the store and on the machines."""
        self.stop()
        self.engine = self.engine.restarted()
        self.start()

    def clock(self) -> float:
        return self.now_s

    # -- time ----------------------------------------------------------------------------------------------------

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, then one pass of the loop; checkpoints that it asked about are judged before the next."""
        self.now_s += seconds
        self.elapsed_s += seconds
        interval_s = self.reconciler.try_once()
        self.troubles += [problem for problem in self.reconciler.problems if problem not in self.troubles]
        self._pace_s = 0.5 if interval_s is None else min(1.0, max(0.5, interval_s))
        assert self.candidates is not None
        if self.waits_for_candidates:
            wait_for_futures(self.candidates._under_way.values())

    def run(self, seconds: float, every: float | None = None) -> None:
        """Pass after pass, as often as the loop itself asks for, within a second: each half while something changes."""
        end = self.elapsed_s + seconds
        while self.elapsed_s < end:
            self.step(min(every or self._pace_s, end - self.elapsed_s))

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = 400.0, every: float | None = None) -> Any:
        """As :meth:`run`, until something is true; ``limit_s`` is modelled time."""
        end = self.elapsed_s + limit_s
        while self.elapsed_s < end:
            if value := condition():
                return value
            self.step(every or self._pace_s)
        raise AssertionError(f"waited {limit_s} s in vain: {what}\n" + "\n".join(self.story()))

    # -- asking --------------------------------------------------------------------------------------------------

    def submission(self, **given: Any) -> JobSubmission:
        """A submission; ``within`` is its deadline in seconds from now."""
        if "within" in given:
            given["deadline_at"] = self.now_s + given.pop("within")
        return make_submission(given.pop("snapshot", self.sha256), **given)

    def submit(self, **given: Any) -> Attachment:
        submission = self.submission(**given)
        return self.attached(self.job_service.submit(submission.identity.job_id, submission))

    def attached(self, submitted: Submitted) -> Attachment:
        wanted = submitted.amendment_id
        answer = None if wanted is None else self.job_service.answered([wanted]).get(wanted)
        return submitted.attachment(self.job_service.status(submitted.job_id), answer)

    def amend(self, job_id: str, request: AmendRequest) -> AmendAnswer:
        amendment_id = self.job_service.amend(job_id, request)
        return amend_answer_of(self.job_service.answered([amendment_id])[amendment_id], self.job_service.status(job_id))

    def status(self, job: Attachment | str) -> JobStatus:
        return self.job_service.status(job if isinstance(job, str) else job.job.job_id)

    def row(self, job: Attachment, incarnation: int | None = None) -> IncarnationRow:
        with self.store.read() as reader:
            row = reader.incarnation(job.job.job_id, incarnation or self.status(job).incarnation)
        assert row is not None
        return row

    def generations(self, job: Attachment, incarnation: int | None = None) -> list[GenerationRow]:
        with self.store.read() as reader:
            return reader.generations(job.job.job_id, incarnation or self.status(job).incarnation)

    def events(self, job: Attachment | None = None, kind: str | None = None) -> list[Event]:
        from elasticflow_airflow.service.store.views import event_of

        with self.store.read() as reader:
            rows = reader.events(0, None if job is None else job.job.job_id, 10_000)
        return [event_of(row) for row in rows if kind in (None, row.kind)]

    def story(self) -> list[str]:
        return [f"{e.at - START_S:8.1f} {e.job_id} i{e.incarnation} {e.kind}: {e.reason}" for e in self.events()]

    def ended(self, job: Attachment, limit_s: float = 400.0, **pace: float) -> JobStatus:
        """Run until the job is over."""
        self.until(lambda: self.is_over(job), f"{job.job.job_id} ends", limit_s, **pace)
        return self.status(job)

    def is_over(self, job: Attachment) -> bool:
        with self.store.read() as reader:
            return bool(reader.session.scalar(IS_OVER, {"job_id": job.job.job_id}))

    def reach(self, job: Attachment, state: str, limit_s: float = 400.0) -> JobStatus:
        self.until(lambda: self.status(job).state == state, f"{job.job.job_id} is {state}", limit_s)
        return self.status(job)

    def keep_code(self, files: dict[str, str]) -> str:
        """Take a picture of some files and upload it; returns its hash."""
        with tempfile.TemporaryDirectory(dir=self.base) as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            snapshot = snapshot_folder(Path(folder))
        target = self.snapshots.path(snapshot.sha256)
        if not target.is_dir():
            shutil.copytree(_unpacked(snapshot), target)
        return snapshot.sha256

    def incarnation_dir(self, job: Attachment, incarnation: int = 1) -> Path:
        return self.engine.files.folder(job.job.job_id, incarnation)


@pytest.fixture(scope="session", autouse=True)
def nobody_cuts_the_power() -> Iterator[None]:
    """A database of this process is not made to reach the disk: what is killed has written all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_PRAGMAS", (*store._PRAGMAS, "synchronous=OFF"))
        yield


@pytest.fixture(scope="session", autouse=True)
def each_statement_is_compiled_once() -> Iterator[None]:
    """All SQLite databases of this process share a dialect, and what it has compiled: some thirty statements a test."""
    opened: list[sa.Engine] = []
    open_engine = store._open_engine

    def with_shared_dialect(url: str) -> sa.Engine:
        engine = open_engine(url)
        if engine.dialect.name == "sqlite":
            opened[:] = opened or [engine]
            engine.dialect = engine.pool._dialect = opened[0].dialect
            engine._compiled_cache = opened[0]._compiled_cache
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_open_engine", with_shared_dialect)
        yield


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database with its tables, to be copied: the migrations take longer than most tests."""
    path = tmp_path_factory.mktemp("migrated") / "empty.db"
    Store(f"sqlite:///{path}").close()
    assert not path.with_name("empty.db-wal").exists(), "a copy of the file is the whole database"
    return path


@pytest.fixture(scope="session")
def opened_files() -> OpenedFiles:
    """Who opens files of jobs in this process."""
    return OpenedFiles()


@pytest.fixture
def make_world(
    tmp_path: Path, migrated_database: Path, opened_files: OpenedFiles, request: pytest.FixtureRequest
) -> Iterator[Callable[..., World]]:
    """Make services in this process: ``make_world(nodes=1, slots=4, url=..., **settings)``.

    No pass of their loop may fail, and no job may be set aside, unless the test is marked ``trouble``. The engine port
    is the only door to what runs: the service opens no file of a job.
    """
    worlds: list[World] = []
    opened_files.jobs.clear()
    opened_files.wrong.clear()

    def make(nodes: int = 1, slots: int = 4, url: str | None = None, **options: Any) -> World:
        base = tmp_path / f"world{len(worlds)}"
        base.mkdir()
        world: list[World] = []
        if url is None:
            shutil.copyfile(migrated_database, base / "test.db")
        # The workers' clock is the monotonic one: on their machine nothing jumps.
        engine = FakeEngine(
            fake_nodes(nodes, slots),
            base / "state" / "jobs",
            clock=lambda: START_S + (world[0].elapsed_s if world else 0.0),
        )
        world.append(World(base, options, url or f"sqlite:///{base / 'test.db'}", engine))
        worlds.append(world[0])
        opened_files.watch(base / "state" / "jobs")
        return world[0]

    yield make
    for world in worlds:
        world.stop()
    if request.node.get_closest_marker("trouble") is None:
        assert not (found := [trouble for world in worlds for trouble in world.troubles]), found
    assert not opened_files.wrong, opened_files.wrong


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """One node of four slots."""
    return make_world()


@pytest.fixture
def world_class() -> type[World]:
    """For tests that make worlds in processes of their own."""
    return World


# -- the real daemon ---------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 30.0) -> Any:
    """Wait for something to be true; fails the test after a limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {limit_s} s in vain: {what}")


@pytest.fixture
def wait() -> Callable[..., Any]:
    """:func:`wait_until`."""
    return wait_until


def pids_of(state_dir: Path) -> list[int]:
    """Processes that serve a state directory, zombies left out."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"elasticflow_airflow.service" in words and os.fsencode(state_dir) in words:
            found.append(int(name))
    return found


@dataclass
class Daemons:
    """Real services on sockets in a short folder, each gone at the end of the test."""

    base: Path
    state_dirs: list[Path] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, **settings: object) -> dict[str, str]:
        own = {"engine": "fake", "slot_lock_dir": self.base / "locks", "idle_exit_s": 60, **settings}
        return {f"ELASTICFLOW_{name.upper()}": str(value) for name, value in own.items()}

    def state_dir(self, name: str = "state") -> Path:
        path = self.base / name
        if path not in self.state_dirs:
            self.state_dirs.append(path)
        return path

    def embedded(self, name: str = "state", **settings: object) -> Endpoint:
        """The embedded service of a state directory, started if it is not there."""
        return ensure_service(self.state_dir(name), self.environment(**settings))

    def popen(
        self, name: str = "state", *arguments: str, stderr: int = subprocess.PIPE, **settings: object
    ) -> subprocess.Popen[bytes]:
        """A service as a child of this process."""
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticflow_airflow.service", "--state-dir", str(self.state_dir(name)), *arguments],
            env={**os.environ, **self.environment(**settings)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        self.processes.append(process)
        return process

    def served(self, token: str, name: str = "served", **settings: object) -> Endpoint:
        """A service on TCP, as ``elasticflow serve`` runs it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = self.popen(name, host="127.0.0.1", port=port, token=token, **settings)
        endpoint = Endpoint.from_url(f"http://127.0.0.1:{port}", token=token)

        def answers() -> bool:
            assert process.poll() is None, process.stderr and process.stderr.read()
            try:
                return httpx.get(f"{endpoint.base_url}/healthz", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, "the served service answers")
        return endpoint

    def pids(self, name: str = "state") -> list[int]:
        """Processes that serve a state directory."""
        return pids_of(self.state_dir(name))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for state_dir in self.state_dirs:
            for pid in pids_of(state_dir):
                os.kill(pid, signal.SIGKILL)
            # A killed process has no command line any more, even before it is reaped.
            wait_until(lambda d=state_dir: not pids_of(d), f"the service of {state_dir} is gone")


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets, whatever the test is called."""
    with tempfile.TemporaryDirectory(prefix="ef-") as folder:
        yield Path(folder)


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemons]:
    """Start real services."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with short_folder() as base:
        found = Daemons(base)
        yield found
        found.end()


@pytest.fixture(scope="module")
def shared_daemons() -> Iterator[Daemons]:
    """Services that all tests of a module share: for tests that only ask, or that use jobs of their own."""
    with short_folder() as base:
        found = Daemons(base)
        yield found
        found.end()


@pytest.fixture
def open_client() -> Iterator[Callable[[Endpoint], ElasticFlowClient]]:
    """Clients that are closed at the end."""
    clients: list[ElasticFlowClient] = []

    def make(endpoint: Endpoint) -> ElasticFlowClient:
        clients.append(ElasticFlowClient(endpoint, retry_for_s=0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


# -- a real PostgreSQL -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A private PostgreSQL on a Unix socket."""
    with postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """URL of an empty database."""
    name = f"test{uuid.uuid4().hex}"
    postgres_server.sql(f"CREATE DATABASE {name}")
    yield ServiceSettings(database_url=postgres_server.url.format(name)).store_url()
    postgres_server.sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same contract for both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'contract.db'}"
    url = request.getfixturevalue("postgres_url")
    assert isinstance(url, str)
    return url
