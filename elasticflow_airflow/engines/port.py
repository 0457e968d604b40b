"""The engine port: the few verbs by which the service drives whatever runs the workers.

It is the only door to what runs: the service opens no file of a job (see ``job_files.py``).
Declarative and level-triggered: the service says again and again what should be, the engine reports what is.
Every call is idempotent by (job, generation) and returns quickly; nothing here blocks on training.
Adapters may not import Airflow or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from elasticflow_airflow.engines.job_files import JobFiles
from elasticflow_airflow.runtime.protocol import Report, RescaleMode, SessionConfig
from elasticflow_airflow.scheduler_core.model.values import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNode:
    """A node as the engine sees it. ``busy`` maps slot index to a sentence that names the foreign holder."""

    node_id: str
    slots: int
    device: str
    """"cuda" or "cpu"."""
    device_type: str
    """Model of the device, for signatures of scaling curves ("NVIDIA H200", "x86_64")."""
    busy: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """What should run for a job: the desired state that ``apply`` brings about.

    ``generation`` numbers never start again within a job id. ``cleared_generation`` is the fence of restart mode: the
    service has seen every generation up to it gone and has judged their checkpoints; the engine starts workers of
    ``generation`` only when every earlier generation that it ever started is cleared.
    ``secret_env`` is given to the workers, never written to disk in plain text or logged.
    ``lease_s``: without any call for this job for so long, the supervisor saves and stops by itself.
    """

    job_id: str
    incarnation: int
    generation: int
    cleared_generation: int
    placement: tuple[Slot, ...]
    session: SessionConfig
    python: str
    env: Mapping[str, str]
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    mode: RescaleMode = RescaleMode.RESTART
    lease_s: float = 600.0
    grace_s: float = 60.0
    """How long workers that were told to leave may take to save before SIGTERM, and again before SIGKILL."""
    reason: str = ""
    lost: tuple[str, ...] = ()
    """In place: ids of workers that are dead or given up (the engine kills those that still live)."""

    @property
    def incarnation_dir(self) -> Path:
        """Folder of this incarnation (see runtime/protocol.py for its layout)."""
        return Path(self.session.incarnation_dir)


class GangState(StrEnum):
    """Where the workers of one generation stand."""

    PENDING = "pending"
    """Accepted, but an earlier generation is not cleared yet."""
    STARTING = "starting"
    RUNNING = "running"
    """Every rank has reported ``started``; for a plain script: every process is there."""
    LEAVING = "leaving"
    """Told to save and leave; at least one process is still there."""
    ENDED = "ended"
    """No process is left; ``outcome`` says how it ended."""


STANDING = (GangState.STARTING, GangState.RUNNING, GangState.LEAVING)
"""Gangs that may have processes, and hold their slots."""


class GangOutcome(StrEnum):
    """How a generation ended."""

    FINISHED = "finished"
    """Every worker left with status 0 and rank 0 reported ``finished`` (a plain script: status 0)."""
    STOPPED = "stopped"
    """Left because it was told to (new generation, stop, expired lease); whether it saved, the reports tell."""
    FAILED = "failed"
    """A worker ended by itself without success."""
    LOST = "lost"
    """The supervisor or node died, and the workers with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerObservation:
    """One worker process. ``exit_code`` as of subprocess (negative: signal); None while it lives or is unknown."""

    worker_id: str
    rank: int
    slot: Slot
    pid: int | None
    exit_code: int | None
    log_name: str
    """What ``read_log`` takes as ``worker_id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangObservation:
    """What is: one generation of a job. Ended ones are reported until ``forget`` is called for the job.

    ``reports`` are all reports of this generation that came since the observation before (at least once: after a
    restart of the service all of them come again, in order).
    """

    job_id: str
    incarnation: int
    generation: int
    state: GangState
    outcome: GangOutcome | None
    workers: tuple[WorkerObservation, ...]
    reports: tuple[Report, ...] = ()
    failure: str | None = None
    """For FAILED and LOST: what happened, with the last lines of the failing rank's log."""
    failed_rank: int | None = None
    trouble: str | None = None
    """Why it cannot be looked at: what a script has made of its files, say. The rest is then what is known all the
    same, first of all whether it holds its slots (any state but ENDED)."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a log. ``next_offset`` counts bytes since the log began, across rotations.

    ``start_offset`` is larger than asked for when the asked part was rotated away.
    """

    data: bytes
    start_offset: int
    next_offset: int
    end_of_file: bool
    """True: the worker has ended and everything has been read."""


class EngineError(Exception):
    """The engine could not do what it was asked; the message says what to do about it."""


class SlotsHeldError(EngineError):
    """A gang was not started because somebody holds its slots; ``held`` names who. Nothing is wrong with it."""

    def __init__(self, held: Mapping[Slot, str]) -> None:
        super().__init__("; ".join(f"slot {slot.name} is held by {holder}" for slot, holder in held.items()))
        self.held = dict(held)


class Engine(Protocol):
    """What every engine can do. One contract test suite runs over all adapters."""

    @property
    def name(self) -> str:
        """Short name for logs ("local", "fake")."""
        ...

    @property
    def files(self) -> JobFiles:
        """What jobs have on disk where their workers run."""
        ...

    def inventory(self) -> tuple[EngineNode, ...]:
        """Nodes that are there now, with the slots that others hold, or gangs that this engine has no record of."""
        ...

    def apply(self, spec: GangSpec) -> None:
        """Make it so: start what is missing, keep what stays, tell the others to leave.

        Idempotent; repeated on every pass. A lower generation than one applied before is ignored. Renews the
        supervisor's lease. Raises EngineError when a worker cannot even be tried (interpreter or script missing,
        disk full), and SlotsHeldError when others hold slots of it: nobody was told to leave for it then.
        """
        ...

    def latest(self, job_id: str) -> int:
        """The highest generation that was ever applied for a job and is remembered; 0: none.

        A service whose database was lost knows of none, and must not count from 1 again.
        """
        ...

    def stop(self, job_id: str, grace_s: float, reason: str = "") -> None:
        """Tell all workers of the job to save and leave; SIGTERM after ``grace_s``, SIGKILL after it again.

        Idempotent.
        """
        ...

    def renew(self, job_id: str) -> None:
        """Renew the lease of the job's supervisors (the service still knows and wants this job)."""
        ...

    def observe(self) -> tuple[GangObservation, ...]:
        """Every generation of every job that runs, or has ended and is not forgotten.

        Raises EngineError only for what is wrong with the machine or with all of them: what is wrong with the files of
        one job is told as the ``trouble`` of its gangs. Those can be renewed and stopped like any other.
        """
        ...

    def forget(self, job_id: str) -> None:
        """The job is terminal and everything was read: drop its ended generations (files stay). Idempotent."""
        ...

    def read_log(self, job_id: str, incarnation: int, worker_id: str, offset: int, limit: int) -> LogChunk:
        """Read a worker's log from a byte offset.

        Raises KeyError for a worker that never was, EngineError where the log cannot be read.
        """
        ...

    def stacks(self, job_id: str) -> Mapping[str, str]:
        """What each live worker of a job is doing: the Python stacks of its threads, by worker id.

        Where a worker cannot be asked, a sentence in brackets says why; no worker ever comes to harm by it. May take
        some seconds. Empty for a job without live workers. Raises EngineError when this engine cannot ask.
        """
        ...

    def close(self) -> None:
        """Let go of the engine; running gangs go on."""
        ...
