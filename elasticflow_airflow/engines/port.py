"""The engine port: the small interface through which the service drives whatever runs the workers.

It is the only access to running jobs: the service opens no file of a job itself (see ``job_files.py``).
Declarative and level-triggered: the service repeats the desired state, the engine reports the actual state.
Every call is idempotent by (job, generation) and returns quickly; nothing here blocks on training.
Adapters may not import Airflow or the store. Which one a service uses is decided in ``service/engine_choice.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from elasticflow_airflow.engines.job_files import JobFiles
from elasticflow_airflow.runtime.protocol import Report, RescaleMode, SessionConfig
from elasticflow_airflow.scheduler_core.model.values import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNode:
    """A node as the engine sees it. ``busy`` maps a slot index to a sentence that names the foreign holder."""

    node_id: str
    slots: int
    device: str
    """"cuda" or "cpu"."""
    device_type: str
    """Device model ("NVIDIA H200", "x86_64"), used in the signatures of scaling curves."""
    busy: Mapping[int, str] = field(default_factory=dict)
    leaving_at: float | None = None
    """When the machine goes away (UTC seconds), if that was announced."""

    def leaves_at(self, ordered: float | None) -> float | None:
        """Return when it goes away: as somebody has ordered, or as was announced, whichever is earlier."""
        return min((at for at in (ordered, self.leaving_at) if at is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """The desired state of a job's gang, which ``apply`` establishes.

    ``generation`` numbers are never reused within a job id. ``cleared_generation`` is the fence of restart mode: the
    service has seen every generation up to it end and has judged their checkpoints; the engine starts workers of
    ``generation`` only when every earlier generation that it ever started is cleared.
    ``secret_env`` is passed to the workers; it is never written to disk in plain text or logged.
    ``lease_s``: when no call for this job arrives for this many seconds, the supervisor saves and stops by itself.
    """

    job_id: str
    incarnation: int
    generation: int
    cleared_generation: int
    placement: tuple[Slot, ...]
    session: SessionConfig
    python: str
    requirements: tuple[str, ...] = ()
    """Packages beside those of ``python``: see ``prepare_environment``."""
    env: Mapping[str, str]
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    mode: RescaleMode = RescaleMode.RESTART
    lease_s: float = 600.0
    grace_s: float = 60.0
    """Seconds that workers ordered to leave may take to save before SIGTERM, and again between SIGTERM and SIGKILL."""
    reason: str = ""
    lost: tuple[str, ...] = ()
    """In place: ids of workers that are dead or abandoned (the engine kills those that are still alive)."""

    @property
    def incarnation_dir(self) -> Path:
        """Folder of this incarnation (see runtime/protocol.py for its layout)."""
        return Path(self.session.incarnation_dir)


class GangState(StrEnum):
    """State of the workers of one generation."""

    PENDING = "pending"
    """Accepted, but an earlier generation is not cleared yet."""
    STARTING = "starting"
    RUNNING = "running"
    """Every rank has reported ``started``; for a plain script: every process exists."""
    LEAVING = "leaving"
    """Ordered to save and leave; at least one process is still alive."""
    ENDED = "ended"
    """No process is left; ``outcome`` tells how the gang ended."""


STANDING = (GangState.STARTING, GangState.RUNNING, GangState.LEAVING)
"""States of gangs that may have processes and hold their slots."""


class GangOutcome(StrEnum):
    """How a generation ended."""

    FINISHED = "finished"
    """Every worker exited with status 0 and rank 0 reported ``finished`` (plain script: status 0 is enough)."""
    STOPPED = "stopped"
    """Left on request (new generation, stop, expired lease); the reports tell whether it saved."""
    FAILED = "failed"
    """A worker ended by itself, unsuccessfully."""
    LOST = "lost"
    """The supervisor or node died, and the workers with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerObservation:
    """One worker process. ``exit_code`` as in subprocess (negative: signal); None while alive or when unknown."""

    worker_id: str
    rank: int
    slot: Slot
    pid: int | None
    exit_code: int | None
    log_name: str
    """The ``worker_id`` to pass to ``read_log``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangObservation:
    """The actual state of one generation of a job. Ended ones are reported until ``forget`` is called for the job.

    ``reports`` are all reports of this generation since the previous observation (at-least-once delivery: after a
    restart of the service all of them are delivered again, in order).
    """

    job_id: str
    incarnation: int
    generation: int
    state: GangState
    outcome: GangOutcome | None
    workers: tuple[WorkerObservation, ...]
    reports: tuple[Report, ...] = ()
    failure: str | None = None
    """For FAILED and LOST: what happened, with the last lines of the failed rank's log."""
    failed_rank: int | None = None
    trouble: str | None = None
    """Why the gang cannot be observed, for instance because a script damaged its files. The other fields then hold
    what is known anyway, above all whether it holds its slots (any state but ENDED)."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a log. ``next_offset`` counts bytes since the beginning of the log, across rotations.

    ``start_offset`` is larger than requested when the requested part was rotated away.
    """

    data: bytes
    start_offset: int
    next_offset: int
    end_of_file: bool
    """True: the worker has ended and everything has been read."""


class EngineError(Exception):
    """The engine could not carry out a request; the message says what to do about it."""


class SupersededError(EngineError):
    """Another service commands the nodes: this one may not (any more), and nothing was changed."""


class Fencing(Protocol):
    """Under which number nodes are commanded. A node refuses every number that is lower than one that it has seen."""

    def epoch(self) -> int:
        """Return the number for a request that is sent now. Raises SupersededError when none may be sent."""
        ...

    def above(self, seen: int) -> int:
        """Return a number above one that a node has seen, and go on with it.

        Raises SupersededError when that one belongs to a service that has replaced this one.
        """
        ...


class SlotsHeldError(EngineError):
    """A gang was not started because its slots are held; ``held`` maps them to the holders. The gang itself is fine."""

    def __init__(self, held: Mapping[Slot, str]) -> None:
        super().__init__("; ".join(f"slot {slot.name} is held by {holder}" for slot, holder in held.items()))
        self.held = dict(held)


class Engine(Protocol):
    """Interface of every engine. One contract test suite runs over all adapters."""

    @property
    def name(self) -> str:
        """Short name for logs ("local", "fake")."""
        ...

    @property
    def files(self) -> JobFiles:
        """The files that jobs have on disk where their workers run."""
        ...

    def inventory(self) -> tuple[EngineNode, ...]:
        """Return the present nodes, with the slots held by others or by gangs of which this engine has no record."""
        ...

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """Tell whoever provides machines how many there should be, and which of them nobody needs.

        Those are drained (``leaving_at`` of the inventory), then left, and may be removed; asked again without them,
        they are used again. Ignored where nobody provides machines.
        """
        ...

    def problems(self) -> list[str]:
        """Return why machines cannot be used that should be: sentences for people, with what to do."""
        ...

    def prepare_environment(self, python: str, requirements: tuple[str, ...]) -> bool:
        """Return whether the present nodes have an environment with these packages; otherwise have it built there.

        Does not block; asked again until it is there, before a job with ``requirements`` gets any slots. A node that
        comes later builds it before it starts the first worker. Raises EngineError, with the installer's last lines,
        when it cannot be built; asked again, it is tried again.
        """
        ...

    def apply(self, spec: GangSpec) -> None:
        """Establish the desired state: start missing workers, keep those that stay, order the others to leave.

        Idempotent; repeated on every pass. A generation lower than one already applied is ignored. Renews the
        supervisor's lease. Raises EngineError when a worker cannot even be started (interpreter or script missing,
        disk full), and SlotsHeldError when others hold its slots: no worker was ordered to leave in that case.
        """
        ...

    def latest(self, job_id: str) -> int:
        """Return the highest generation ever applied for a job that is still on record; 0 when there is none.

        A service that lost its database knows no generations, and must not count from 1 again.
        """
        ...

    def stop(self, job_id: str, grace_s: float, reason: str = "") -> None:
        """Order all workers of the job to save and leave; SIGTERM after ``grace_s``, SIGKILL after ``grace_s`` more.

        Idempotent.
        """
        ...

    def renew(self, job_id: str) -> None:
        """Renew the lease of the job's supervisors (the service still knows and wants this job)."""
        ...

    def observe(self) -> tuple[GangObservation, ...]:
        """Return every generation of every job that is running, or has ended and is not forgotten.

        Each report is returned once in the life of the engine, in order. A call that raises takes none along.

        Raises EngineError only for problems of the machine or of all gangs: a problem with the files of one job is
        reported as the ``trouble`` of its gangs. Those can be renewed and stopped like any other.
        """
        ...

    def forget(self, job_id: str) -> None:
        """Drop the ended generations of a terminal job that has been read completely (files stay). Idempotent."""
        ...

    def read_log(self, job_id: str, incarnation: int, worker_id: str, offset: int, limit: int) -> LogChunk:
        """Read a worker's log from a byte offset.

        Raises KeyError for a worker that never existed, EngineError when the log cannot be read.
        """
        ...

    def stacks(self, job_id: str) -> Mapping[str, str]:
        """Return the Python stacks of the threads of each live worker of a job, by worker id.

        For a worker whose stacks cannot be read, the value is a sentence in brackets that says why; reading never
        harms a worker. May take some seconds. Empty for a job without live workers. Raises EngineError when this
        engine cannot read stacks.
        """
        ...

    def close(self) -> None:
        """Release the engine; running gangs continue."""
        ...
