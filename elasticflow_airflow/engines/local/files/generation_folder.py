"""Communication between engine and supervisor: JSON files in one folder per generation and node.

Layout, inside an incarnation's folder::

    supervisors/g000001-node0/spec.json       what to run (SupervisorSpec), by the engine, before the supervisor starts
                              order.json      order to leave (StopOrder), by the engine
                              kill.json       workers to kill at once, by the engine
                              go              the generation may start, by the engine
                              warming         touched while the imports make progress, by the supervisor
                              warm            the imports are done, by the supervisor
                              lease           touched by the engine at each apply and renew
                              status.json     actual state (Status), by the supervisor, which holds supervisor.lock
                              <worker>.trainer.json  pid of the trainer, by the trainer
                              <worker>.exit.json     exit code of the trainer, by its agent
                              supervisor.log  log of the supervisor itself
    supervisors/g000001.failed                first failure of the chain that began with it, on any node

None of them holds secrets: these are passed on the supervisor's standard input. Standard library only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.runtime.protocol import open_ordinary, read_json, write_json_atomic

_LAST_WORDS_BYTES = 4096
OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Transient errors of the machine, which no job has caused."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to run. ``lock_name`` is its slot's lock; ``env`` holds what differs between workers."""

    worker_id: str
    rank: int
    slot_index: int
    lock_name: str
    env: Mapping[str, str]
    fork_trainer: bool = True
    """False on GPUs: a process that may have touched CUDA must not be forked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSpec:
    """What the supervisor of one node runs for one generation."""

    job_id: str
    incarnation: int
    generation: int
    node_id: str
    world_size: int
    incarnation_dir: str
    state_dir: str
    lock_dir: str
    python: str
    base_python: str = ""
    """With ``requirements``: the interpreter to whose packages they are added; ``python`` is their environment's."""
    requirements: tuple[str, ...] = ()
    env: Mapping[str, str]
    workers: tuple[WorkerSpec, ...]
    lease_s: float
    grace_s: float
    chain: int
    """The first generation of the chain of changes in place to which this one belongs."""
    address: str = "127.0.0.1"
    code_dir: str = ""
    progress_regex: str | None = None
    progress_file: str | None = None
    log_segment_bytes: int
    log_segments: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SupervisorSpec:
        """Inverse of ``asdict``."""
        workers = tuple(WorkerSpec(**worker) for worker in raw["workers"])
        return cls(**{**raw, "workers": workers, "requirements": tuple(raw.get("requirements", ()))})

    @property
    def is_plain(self) -> bool:
        """Whether the job is declared as a plain script, which does not use sessions."""
        return self.progress_regex is not None or self.progress_file is not None


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Order to save and leave: SIGTERM after ``grace_s``, SIGKILL after ``grace_s`` more. ``kill``: do not wait."""

    grace_s: float
    reason: str = ""
    kill: bool = False


@dataclass(slots=True, kw_only=True)
class WorkerStatus:
    """What the supervisor knows of one worker."""

    rank: int
    agent: ProcessId | None = None
    trainer: ProcessId | None = None
    exit_code: int | None = None
    ended: bool = False
    signalled: bool = False
    """The supervisor sent a signal while the worker was alive: its end is not a failure of its own."""


@dataclass(slots=True, kw_only=True)
class Status:
    """The actual state as written by the supervisor. ``ended`` is the last thing it writes.

    ``told``: the workers were ordered to leave (why: ``reason``). ``terminated``: a plain script got SIGTERM.
    ``failed``: a worker ended by itself, unsuccessfully, before any order. ``failure``: why nothing was started;
    ``slot_held``: the cause is that another holder took a slot first.
    """

    supervisor: ProcessId | None = None
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    told: bool = False
    reason: str = ""
    terminated: bool = False
    failed: bool = False
    failure: str | None = None
    slot_held: bool = False
    ended: bool = False

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Status:
        """Inverse of ``asdict``."""
        workers = {
            worker_id: WorkerStatus(
                **{
                    **worker,
                    "agent": ProcessId.from_json(worker["agent"]),
                    "trainer": ProcessId.from_json(worker["trainer"]),
                }
            )
            for worker_id, worker in raw["workers"].items()
        }
        return cls(**{**raw, "supervisor": ProcessId.from_json(raw["supervisor"]), "workers": workers})


@dataclass(frozen=True, slots=True)
class SupervisorFolder:
    """Paths and accessors of the folder of one generation and node."""

    path: Path

    @classmethod
    def of(cls, incarnation_dir: Path, generation: int, node_id: str) -> SupervisorFolder:
        """Return the folder of one generation and node."""
        return cls(incarnation_dir / "supervisors" / f"g{generation:06d}-{node_id}")

    @property
    def lease(self) -> Path:
        """Touched by the engine; any change of its mtime counts, whatever the clock says."""
        return self.path / "lease"

    @property
    def go(self) -> Path:
        """Written by the engine when the generation may start; until then the supervisor only warms up."""
        return self.path / "go"

    @property
    def warming(self) -> Path:
        """Touched by the supervisor while the imports make progress."""
        return self.path / "warming"

    @property
    def warm(self) -> Path:
        """Written by the supervisor when all imports are done."""
        return self.path / "warm"

    @property
    def log(self) -> Path:
        """The supervisor's own log."""
        return self.path / "supervisor.log"

    @property
    def status_file(self) -> Path:
        """The supervisor's actual state."""
        return self.path / "status.json"

    def trainer_file(self, worker_id: str) -> Path:
        """Return the file in which a trainer writes its pid."""
        return self.path / f"{worker_id}.trainer.json"

    def exit_file(self, worker_id: str) -> Path:
        """Return the file in which an agent writes its trainer's exit code."""
        return self.path / f"{worker_id}.exit.json"

    def write_spec(self, spec: SupervisorSpec) -> None:
        """Write ``spec.json``."""
        raw = asdict(spec)
        if not spec.requirements:  # Node agents of the versions without them can read the rest.
            del raw["base_python"], raw["requirements"]
        write_json_atomic(self.path / "spec.json", raw)

    def has_spec(self) -> bool:
        """Return whether ``spec.json`` was written."""
        return (self.path / "spec.json").exists()

    def has_order(self) -> bool:
        """Return whether ``order.json`` was written."""
        return (self.path / "order.json").exists()

    def read_spec(self) -> SupervisorSpec:
        """Read ``spec.json``. Raises ValueError when it is missing."""
        spec = _read(self.path / "spec.json", SupervisorSpec.from_json)
        if spec is None:
            raise ValueError(f"no spec.json in {self.path}")
        return spec

    def write_order(self, order: StopOrder) -> None:
        """Order the supervisor to make its workers leave. Orders after one with ``kill`` are ignored."""
        try:
            before = self.read_order()
        except ValueError:
            before = None  # Whatever a script has put there is replaced.
        if self.path.is_dir() and before != order and not (before and before.kill):
            write_json_atomic(self.path / "order.json", asdict(order))

    def read_order(self) -> StopOrder | None:
        """Return the order; None when there is none."""
        return _read(self.path / "order.json", lambda raw: StopOrder(**raw))

    def order_kill(self, worker_ids: Iterable[str]) -> None:
        """Order the supervisor to kill workers at once; workers named before stay in the list."""
        before = self.read_kills()
        wanted = before | set(worker_ids)
        if self.path.is_dir() and wanted != before:
            write_json_atomic(self.path / "kill.json", {"workers": sorted(wanted)})

    def read_kills(self) -> set[str]:
        """Return the ids of the workers to kill at once."""
        return _read(self.path / "kill.json", lambda raw: set(raw["workers"])) or set()

    def read_status(self) -> Status | None:
        """Return the last status of the supervisor; None before it wrote one."""
        return _read(self.status_file, Status.from_json)

    def write_status(self, status: Status) -> None:
        """Write ``status.json``."""
        write_json_atomic(self.status_file, asdict(status))

    def warming_stamp(self) -> int:
        """Return the mtime (ns) of ``warming``, of which any change means progress; 0 when there was none."""
        try:
            return self.warming.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def open_log(self) -> IO[bytes]:
        """Open the supervisor's own log for appending. Raises OSError; does not block if a pipe is in its place."""
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "ab")

    def last_words(self) -> str:
        """Return the end of the supervisor's own log."""
        with open_ordinary(self.log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_WORDS_BYTES))
            return file.read(_LAST_WORDS_BYTES).decode(errors="replace").strip()

    def renew(self) -> None:
        """Touch the lease."""
        if self.path.is_dir():
            self.lease.touch(exist_ok=True)
            os.utime(self.lease)


def _read(path: Path, build: Callable[[dict[str, Any]], _T]) -> _T | None:
    """Read a file; None when it is missing. Raises OSError, and ValueError when the content is not as expected."""
    raw = read_json(path)
    try:
        return None if raw is None else build(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold what it should: {error!r}") from error


def failure_path(incarnation_dir: Path, chain: int) -> Path:
    """Return the marker file that a worker of a chain failed, for the other supervisors of the chain."""
    return incarnation_dir / "supervisors" / f"g{chain:06d}.failed"
