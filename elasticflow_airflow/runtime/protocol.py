"""File protocol between a supervisor and the workers of a job; they communicate in no other way.

These are plain JSON files in the folder of one incarnation. They survive a ``kill -9`` of either side and need neither
torch nor pydantic. This module may import the standard library only: it is used by the service, by the supervisor and
by training interpreters that have nothing but torch.

Layout of an incarnation's folder::

    session.json                     what to train (SessionConfig); written before the first worker starts
    membership.json                  the current workers (Membership); replaced atomically at each generation
    rendezvous/g000003.json          address of the store that rank 0's agent hosts, for plain torchrun scripts
    rendezvous/g000003-session.json  address of the store where the sessions of a generation form their group
    heartbeats/<worker>.json         {"step", "phase", "at_s"}, about every second
    reports/g000003-<worker>.jsonl   one Report a line, appended by one worker (or for it, by its supervisor)
    stacks/<worker>.txt              stacks of a worker's threads, written on request (runtime/process/stacks.py)
    logs/<worker>.log[.N]            standard output and error of one worker
    checkpoints/g000003/step-000000000120/   candidate checkpoint, written by workers of generation 3
    checkpoints/promoted.json        the checkpoint to resume from (Promotion); only the service writes it
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

SESSION_ENV = "ELASTICFLOW_SESSION"
"""Environment variable: path of ``session.json``. If unset, the script runs alone or under a bare torchrun."""
WORKER_ENV = "ELASTICFLOW_WORKER"
"""Environment variable: the id of this worker in the membership plan."""
GENERATION_ENV = "ELASTICFLOW_GENERATION"
"""Environment variable: the generation this worker was started for; the plan may have a newer one."""

WORLD_ENV = "ELASTICFLOW_WORLD"
"""Environment variable: "rank,size" of this worker in the plan it was started for; its torchrun knows only itself."""

ADDRESS_ENV = "ELASTICFLOW_ADDRESS"
"""Environment variable: see :func:`own_address`."""

SUBMITTED_ENV = "ELASTICFLOW_SUBMITTED"
"""Environment variable: submitted settings, as JSON, of a training that is repeated alone; see SUBMITTED_FIELDS."""

SUBMITTED_FIELDS = (
    "steps",
    "epochs",
    "samples",
    "global_batch_size",
    "micro_batch_size",
    "logical_workers",
    "threads",
    "consistency",
    "init_from",
    "seed",
    "target_loss",
)
"""Fields of SessionConfig that determine the weights."""

_LONGEST_LINE_BYTES = 1 << 20
_LARGEST_FILE_BYTES = 1 << 24
MOST_BYTES_A_LOOK = 1 << 24


class RescaleMode(StrEnum):
    """How a job changes from one generation to the next."""

    RESTART = "restart"
    """All workers save and exit with status 0; the next generation resumes from the promoted checkpoint."""
    IN_PLACE = "in_place"
    """Workers that are in both plans continue and adopt the new generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker of a generation. ``worker_id`` stays the same while the worker lives; ``rank`` may change."""

    worker_id: str
    rank: int
    node_id: str
    slot_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The membership plan: the workers of ``generation``, in rank order. No members means save and exit."""

    generation: int
    mode: RescaleMode
    members: tuple[Member, ...]
    reason: str = ""
    lost: tuple[str, ...] = ()
    """Workers of earlier generations that are dead, or hang and are being killed. A worker that waits for one of them
    in a collective aborts it at once. While all live, the old generation trains on until the new one is ready."""

    def rank_of(self, worker_id: str) -> int | None:
        """Return the rank of a worker in this plan, or None if it is not in it."""
        return next((m.rank for m in self.members if m.worker_id == worker_id), None)

    def write(self, incarnation_dir: Path) -> None:
        """Replace the plan atomically."""
        write_json_atomic(membership_path(incarnation_dir), asdict(self))

    @classmethod
    def read(cls, incarnation_dir: Path) -> Membership | None:
        """Read the current plan; None before the first one is written."""
        raw = read_json(membership_path(incarnation_dir))
        if raw is None:
            return None
        members = tuple(Member(**m) for m in raw["members"])
        return cls(
            generation=raw["generation"],
            mode=RescaleMode(raw["mode"]),
            members=members,
            reason=raw.get("reason", ""),
            lost=tuple(raw.get("lost", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Settings of a job for its workers; the same for every worker and generation of an incarnation.

    One of ``script`` (path inside ``code_dir``) and ``module`` is set. ``steps`` or ``epochs`` gives the length;
    ``samples`` is the size of one epoch, if the submitter knows it. ``micro_batch_size`` None lets the session choose;
    the service halves it after an out-of-memory error. ``logical_workers`` (a power of two that divides
    ``global_batch_size``; None: the session chooses) never changes during the life of a job; ``consistency`` is
    "consistent" (the result does not depend on the number of workers) or "fast". ``init_from`` is the folder of a
    checkpoint whose *weights* start this incarnation. ``target_loss`` ends the training early, once the smoothed loss
    (stepping/loss_target.py) reaches it; then neither length is required. ``progress_regex`` and ``progress_file`` are
    for plain scripts. ``promoted`` is the checkpoint that the service has promoted; if the checkpoint and
    ``promoted.json`` are both lost, this is the only record that it existed.
    """

    job_id: str
    incarnation: int
    incarnation_dir: str
    code_dir: str
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    working_dir: str | None = None
    steps: int | None = None
    epochs: int | None = None
    samples: int | None = None
    global_batch_size: int = 1
    micro_batch_size: int | None = None
    logical_workers: int | None = None
    consistency: str = "consistent"
    init_from: str | None = None
    seed: int | None = None
    """Seed of all randomness; None: the script's, else 0."""
    script_decides: bool = False
    """Whether the script determines ``logical_workers``: no number was submitted and no training has used one yet. The
    script's number is then adopted."""
    threads: int | None = None
    """Number of torch threads in each worker, as submitted or as this training began; None: the script's, else chosen
    by the session."""
    checkpoint_interval_s: float | None = None
    """Seconds between saves; None: chosen from the cost of saving, see runtime/checkpoints/interval.py."""
    failures: int = 0
    """How often this incarnation has resumed from a checkpoint because workers failed."""
    keep_checkpoints: int = 2
    progress_regex: str | None = None
    progress_file: str | None = None
    target_loss: float | None = None
    promoted: Promotion | None = None
    checkpoints_url: str | None = None
    """Where the checkpoints are, if not in the incarnation's folder: an fsspec URL."""

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the candidates and of ``promoted.json``."""
        return checkpoint_dir(Path(self.incarnation_dir))

    @property
    def checkpoints(self) -> Path | str:
        """Folder or URL of the candidates."""
        return self.checkpoints_url or self.checkpoint_dir

    def write(self) -> None:
        """Write ``session.json`` atomically."""
        fields = asdict(self)
        if self.checkpoints_url is None:
            del fields["checkpoints_url"]  # Trainings that run on an earlier version know no such field.
        write_json_atomic(session_path(Path(self.incarnation_dir)), fields)

    @classmethod
    def read(cls, path: Path) -> SessionConfig:
        """Read ``session.json``. Raises ValueError if it is missing or damaged."""
        raw = read_json(path)
        if raw is None:
            raise ValueError(f"no session file at {path}")
        promoted = raw.get("promoted")
        return cls(
            **{
                **raw,
                "args": tuple(raw.get("args", ())),
                "promoted": None if promoted is None else Promotion(**promoted),
            }
        )

    def submitted(self) -> dict[str, Any]:
        """Return the settings in SUBMITTED_FIELDS, which determine the weights, without those that are None."""
        said = {name: getattr(self, name) for name in SUBMITTED_FIELDS}
        return {name: value for name, value in said.items() if value is not None}


def threads_in(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads set by OMP_NUM_THREADS in an environment; None if it is unset or invalid."""
    text = environ.get("OMP_NUM_THREADS", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


DEVICE_FAULT = "device_fault"
"""Failure kind: the device is broken, whatever script uses it."""
UNTRAINED = "untrained"
"""Failure kind: a script that uses a session ended with status 0 before its first step."""


class ReportKind(StrEnum):
    """Kinds of reports of a worker. ``Report.data`` holds the keys named here (optional ones in brackets)."""

    USES_SESSION = "uses_session"
    """From rank 0, before the script runs: the script, or a module of its folder that it imports, imports the runtime.
    If it then ends with status 0 without STARTED, it has trained nothing, however it exited."""
    STARTED = "started"
    """This worker is in the report's generation and continues at ``step``. [resumed_from, init_from, samples, steps,
    micro_batch_size, logical_workers, seed, threads, in_place]: ``samples`` is the size of one epoch and ``steps`` the
    total length, as far as the session knows them; ``threads`` is the number of torch threads here; ``in_place`` tells
    whether this session can be rescaled without a restart. A worker that adopted the generation while it trained adds
    from_generation, pause_s (how long training paused for it), state_bytes and recovered (whether a worker had
    died)."""
    PROGRESS = "progress"
    """``step`` steps are done in total. [loss, window_steps, window_s, epoch]: speed = window_steps / window_s.

    For the time since the last report, from rank 0: samples (used by all workers), samples_per_s, and how this worker
    spent its time: data_s, compute_s, reduce_s, wait_s, pause_s, save_s, other_s (stepping.measuring.Activity); also
    memory_bytes and device_memory_bytes (peaks so far), and noise_scale (of the gradients, in samples). With a target:
    target_loss, smoothed_loss, and occasionally loss_curve {width, losses} (means over ``width`` steps each, from the
    beginning) with steps_left and steps_left_error, in steps, as far as they can be predicted."""
    WORKER = "worker"
    """One worker's own measurements, from every rank, less often than PROGRESS. window_steps, samples (its own), data_s
    ... other_s and memory_bytes as in PROGRESS. Not a progress report; no window spans a change of workers."""
    CHECKPOINT = "checkpoint"
    """A complete candidate at ``step``. path (relative to the checkpoint folder), digest, size_bytes, write_s."""
    STOPPED = "stopped"
    """The worker exited at ``step`` as the plan asked: after saving, or, in place, while other workers hold the state.
    [logical_workers: set if it exited before the first step, because the script has fewer of them than workers]"""
    FINISHED = "finished"
    """All steps are done, or the target is reached, and the result is saved. [metrics, loss]; ``path`` of the final
    candidate checkpoint. With a target: target_reached, smoothed_loss, loss_curve."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device ran out of memory. micro_batch_size, message."""
    FAILED = "failed"
    """The worker fails for a known reason: message, [kind: "nan_loss" | "exception" | "bad_checkpoint" | UNTRAINED |
    DEVICE_FAULT]."""
    WARNING = "warning"
    """A warning for the user: message. [absent: workers that should have joined but did not answer at the switch]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One line of a report file. ``at_s`` is UTC seconds by the worker's clock."""

    kind: ReportKind
    generation: int
    worker_id: str
    rank: int
    step: int
    at_s: float = field(default_factory=time.time)
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """Encode as one JSON line. Non-finite floats become strings ("nan", "inf"), never bare NaN."""
        raw = asdict(self)
        raw["data"] = {
            k: repr(v) if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))) else v
            for k, v in self.data.items()
        }
        return json.dumps(raw, allow_nan=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Report:
        """Decode one line. Raises ValueError if it is incomplete or not a report.

        Field types are checked, because scripts can write to this file; ``data`` may hold anything.
        """
        try:
            raw = json.loads(line)
            report = cls(**{**raw, "kind": ReportKind(raw["kind"])})
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"not a report line: {line[:200]!r}") from error
        numbers = (report.generation, report.rank, report.step)
        if (
            not all(isinstance(number, int) for number in numbers)
            or not isinstance(report.worker_id, str)
            or not isinstance(report.at_s, int | float)
            or not isinstance(report.data, dict)
        ):
            raise ValueError(f"not a report line: {line[:200]!r}")
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Contents of ``promoted.json``: the checkpoint to resume from. ``path`` is relative to the checkpoint folder."""

    path: str
    generation: int
    step: int
    digest: str

    def write(self, incarnation_dir: Path) -> None:
        """Replace ``promoted.json`` atomically."""
        write_json_atomic(promoted_path(checkpoint_dir(incarnation_dir)), asdict(self))

    @classmethod
    def read(cls, checkpoints: Path) -> Promotion | None:
        """Read ``promoted.json`` of a checkpoint folder; None if nothing has been promoted yet."""
        raw = read_json(promoted_path(checkpoints))
        return None if raw is None else cls(**raw)


def own_address() -> str:
    """Return the address at which the other workers of a job can connect to this one."""
    return os.environ.get(ADDRESS_ENV, "127.0.0.1")


def session_path(incarnation_dir: Path) -> Path:
    """Path of ``session.json``."""
    return incarnation_dir / "session.json"


def membership_path(incarnation_dir: Path) -> Path:
    """Path of ``membership.json``."""
    return incarnation_dir / "membership.json"


def checkpoint_dir(incarnation_dir: Path) -> Path:
    """Folder of the checkpoints."""
    return incarnation_dir / "checkpoints"


def promoted_path(checkpoints: Path) -> Path:
    """Path of ``promoted.json``."""
    return checkpoints / "promoted.json"


def report_path(incarnation_dir: Path, generation: int, worker_id: str) -> Path:
    """Path of the report file of one worker in one generation."""
    return incarnation_dir / "reports" / f"g{generation:06d}-{worker_id}.jsonl"


def rendezvous_path(incarnation_dir: Path, generation: int) -> Path:
    """Path of the file in which a generation's rank 0 publishes the address of its store."""
    return incarnation_dir / "rendezvous" / f"g{generation:06d}.json"


def meeting_path(incarnation_dir: Path, generation: int) -> Path:
    """Path of the file with the address of the store where the sessions of a generation form their group."""
    return incarnation_dir / "rendezvous" / f"g{generation:06d}-session.json"


def heartbeat_path(incarnation_dir: Path, worker_id: str) -> Path:
    """Path of the file that a worker updates about every second as a sign of life, with its current phase."""
    return heartbeats_path(incarnation_dir) / f"{worker_id}.json"


def stacks_path(incarnation_dir: Path, worker_id: str) -> Path:
    """Path of the file for the stacks of a worker's threads; it exists once the worker can be asked for them."""
    return incarnation_dir / "stacks" / f"{worker_id}.txt"


def heartbeats_path(incarnation_dir: Path) -> Path:
    """Folder of the heartbeats."""
    return incarnation_dir / "heartbeats"


def candidate_name(generation: int, step: int) -> str:
    """Path of a candidate checkpoint, relative to the checkpoint folder."""
    return f"g{generation:06d}/step-{step:012d}"


def append_report(path: Path, report: Report) -> None:
    """Append one report with a single write, so that a line is incomplete only if the machine crashes during it.

    Raises OSError if it cannot be written; the file then contains no part of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)  # never block on a pipe
    try:
        line = report.to_line()
        written = os.write(descriptor, line)
        if written < len(line):
            # Otherwise the next report would continue this line and be lost, too. Each file has a single writer.
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, f"the disk took only {written} of {len(line)} bytes", str(path))
    finally:
        os.close(descriptor)


def read_reports(path: Path, offset: int = 0) -> Iterator[tuple[Report, int]]:
    """Yield each complete report from a byte offset on, with the offset after it. An incomplete last line is not read.

    Damaged and overlong lines in the middle are skipped: later reports supersede them. Raises OSError, or ValueError
    if the path is not a regular file.
    """
    while True:
        reports, next_offset = read_some_reports(path, offset)
        yield from reports
        if next_offset == offset:
            return
        offset = next_offset


def read_some_reports(path: Path, offset: int = 0) -> tuple[list[tuple[Report, int]], int]:
    """Read reports from a byte offset on; return them and the offset for the next call.

    Each report comes with the offset after it. At most 16 MiB are read, because a script may write anything to the
    file. Raises the same errors as :func:`read_reports`.
    """
    found: list[tuple[Report, int]] = []
    end, too_long = offset + MOST_BYTES_A_LOOK, False
    try:
        file = open_ordinary(path)
    except FileNotFoundError:
        return found, offset
    with file:
        file.seek(offset)
        while offset < end and (line := file.readline(_LONGEST_LINE_BYTES)):
            if line.endswith(b"\n"):
                offset += len(line)
                if not too_long:
                    with contextlib.suppress(ValueError):
                        found.append((Report.from_line(line), offset))
                too_long = False
            elif len(line) == _LONGEST_LINE_BYTES:
                offset += len(line)
                too_long = True
            else:
                break
    return found, offset


def write_json_atomic(path: Path, value: Mapping[str, Any], *, flush: bool = True) -> None:
    """Write JSON atomically (see :func:`write_atomic`)."""
    write_atomic(path, json.dumps(value, indent=1).encode(), flush=flush)


def write_atomic(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Write to a temporary file, flush it to disk and rename it: readers see the old or the new content, complete.

    Without ``flush`` the file may be missing or empty after a crash of the machine (not of a process).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def open_ordinary(path: Path) -> BinaryIO:
    """Open a file that a training script may have created, for reading, without blocking on a pipe or device.

    Raises OSError, and ValueError if it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise ValueError(f"{path} is no ordinary file")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing. Raises ValueError if it is damaged or not a regular file."""
    try:
        with open_ordinary(path) as file:
            raw = file.read(_LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(raw) > _LARGEST_FILE_BYTES:
        raise ValueError(f"{path} has more than {_LARGEST_FILE_BYTES} bytes")
    try:
        value = json.loads(raw)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value
