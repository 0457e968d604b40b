"""The engine's records of its gangs, so that a new engine finds them all, and where they are kept.

One per job, replaced atomically *before* anything is started or ordered to leave: in JSON files here, or wherever
several services reach them (:class:`Records`). Paths in them are relative to the engine's folder, so that an engine
with another folder can go on from them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elasticflow_airflow.engines.local.files.errors import is_of_the_machine
from elasticflow_airflow.engines.local.files.generation_folder import StopOrder, SupervisorFolder
from elasticflow_airflow.runtime.protocol import Member, read_json, write_json_atomic
from elasticflow_airflow.scheduler_core.model.values import Slot

logger = logging.getLogger("elasticflow.engine")


@dataclass(slots=True, kw_only=True)
class GangRecord:
    """One generation. ``started``: its supervisors were, or were about to be, started. ``told``: ordered to leave."""

    generation: int
    incarnation: int
    incarnation_dir: str
    placement: tuple[Slot, ...]
    plain: bool
    grace_s: float
    reason: str = ""
    started: bool = False
    dropped: bool = False
    """Never started and never will be: a later generation or a stop came first."""
    told: bool = False
    never_came: str | None = None
    """Why a supervisor never came up, once waiting for it was given up."""
    chain: int = 0
    """The generation that started all its workers and from which changes in place led to this one."""
    ids: tuple[str, ...] = ()
    """Worker ids by rank; empty: all workers were started for this generation."""
    lost: tuple[str, ...] = ()
    """Workers of earlier generations that are dead or abandoned."""
    adopted: bool = False
    """The change in place to this generation is done: every member trains in it."""

    capable: bool = False
    """Its session reported that it can change in place: the death of a worker does not end the others."""

    @property
    def in_place(self) -> bool:
        """Whether the generation is the result of a change in place."""
        return self.chain not in (0, self.generation)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes on which it has supervisors of its own, in rank order."""
        born = [slot for rank, slot in enumerate(self.placement) if self.is_born(rank)]
        return tuple(dict.fromkeys(slot.node_id for slot in born))

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Worker ids by rank."""
        return tuple(self.worker_id(rank) for rank in range(len(self.placement)))

    def is_born(self, rank: int) -> bool:
        """Return whether this member was started for this generation; otherwise it continues from an earlier one."""
        return not self.ids or self.ids[rank].startswith(f"g{self.generation:06d}-")

    def folder_of(self, rank: int) -> SupervisorFolder:
        """Return the folder of the supervisor that started a member."""
        born = int(self.worker_id(rank)[1:7])
        return SupervisorFolder.of(Path(self.incarnation_dir), born, self.placement[rank].node_id)

    @property
    def folders(self) -> dict[str, SupervisorFolder]:
        """Supervisor folders of all members, by node; keys of earlier generations include the generation."""
        found = {node_id: self.folder(node_id) for node_id in self.nodes}
        for rank, slot in enumerate(self.placement):
            if not self.is_born(rank):
                found[f"{slot.node_id}, since {self.ids[rank][:7]}"] = self.folder_of(rank)
        return found

    @property
    def members(self) -> tuple[Member, ...]:
        """The members as listed in the membership plan."""
        return tuple(
            Member(worker_id=self.worker_id(rank), rank=rank, node_id=slot.node_id, slot_index=slot.index)
            for rank, slot in enumerate(self.placement)
        )

    def worker_id(self, rank: int) -> str:
        """Return the id of a worker, which is also the name of its log."""
        return self.ids[rank] if self.ids else f"g{self.generation:06d}-r{rank:03d}"

    def folder(self, node_id: str) -> SupervisorFolder:
        """Return the folder of its supervisor on one of its nodes."""
        return SupervisorFolder.of(Path(self.incarnation_dir), self.generation, node_id)

    def order(self, order: StopOrder) -> None:
        """Write a stop order for all its supervisors."""
        for node_id in self.nodes:
            self.folder(node_id).write_order(order)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], root: Path) -> GangRecord:
        """Inverse of :meth:`to_json`."""
        read = {
            "placement": tuple(Slot(*slot) for slot in raw["placement"]),
            "incarnation_dir": str(root / raw["incarnation_dir"]),
            # Records of versions without changes in place have no ids.
            "ids": tuple(raw.get("ids", ())),
            "lost": tuple(raw.get("lost", ())),
        }
        return cls(**{**raw, **read})

    def to_json(self, root: Path) -> dict[str, Any]:
        """Return it with its folder relative to that of the engine."""
        return {**asdict(self), "incarnation_dir": _below(root, self.incarnation_dir)}


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """One job: its gangs that are not forgotten, and what must be kept after them."""

    job_id: str
    latest: int = 0
    """Highest generation ever applied; lower ones are ignored forever."""
    incarnation_dirs: dict[int, str] = field(default_factory=dict)
    """Folders by incarnation, for reading the logs of forgotten gangs."""
    gangs: dict[int, GangRecord] = field(default_factory=dict)
    archived: set[int] = field(default_factory=set)
    """Incarnations that are over, and whose logs are in the shared storage."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], root: Path) -> JobRecord:
        """Read a record; ``root`` is the engine's folder. Raises ValueError, KeyError, TypeError or AttributeError."""
        return cls(
            job_id=raw["job_id"],
            latest=raw["latest"],
            incarnation_dirs={int(k): str(root / v) for k, v in raw["incarnation_dirs"].items()},
            gangs={gang["generation"]: GangRecord.from_json(gang, root) for gang in raw["gangs"]},
            archived=set(raw.get("archived", ())),
        )

    def to_json(self, root: Path) -> dict[str, Any]:
        """Inverse of :meth:`from_json`."""
        found = {
            "job_id": self.job_id,
            "latest": self.latest,
            "incarnation_dirs": {str(k): _below(root, v) for k, v in self.incarnation_dirs.items()},
            "gangs": [gang.to_json(root) for _, gang in sorted(self.gangs.items())],
        }
        return {**found, "archived": sorted(self.archived)} if self.archived else found


def _below(root: Path, path: str) -> str:
    """Return a path below ``root`` relative to it, and any other one as it is."""
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


class Records(Protocol):
    """Where the records of jobs are kept, as JSON. Methods raise OSError, and EngineError where it is no file.

    Where several services share it, only the one that leads can write: SupersededError tells the others.
    """

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the records by job id and, by job id, why others cannot be read."""
        ...

    def save(self, job_id: str, record: Mapping[str, Any]) -> None:
        """Replace a record atomically, and for good."""
        ...

    def where(self, job_id: str) -> str:
        """Return for people where a record is."""
        ...

    def put_away(self, job_id: str) -> None:
        """Keep a record that cannot be read for whoever inspects it; it is not loaded again here."""
        ...

    def note(self, name: str) -> dict[str, Any] | None:
        """Return what was noted beside the records; None when nothing was, or it cannot be read."""
        ...

    def keep_note(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a note."""
        ...


class FileRecords:
    """Records in files ``engine/<job>.json`` below the engine's folder."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / "engine"

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Read all files; those that a crash or somebody has damaged are named."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, dict[str, Any]] = {}
        damaged: dict[str, str] = {}
        for path in sorted(self._folder.glob("*.json")):
            job_id = path.name.removesuffix(".json")
            try:
                raw = read_json(path)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and is_of_the_machine(error, self._root):
                    raise
                damaged[job_id] = repr(error)
                continue
            if raw is not None:
                found[job_id] = raw
        return found, damaged

    def save(self, job_id: str, record: Mapping[str, Any]) -> None:
        """Replace the file."""
        write_json_atomic(self._path(job_id), record)

    def where(self, job_id: str) -> str:
        """Return the path of the file."""
        return str(self._path(job_id))

    def put_away(self, job_id: str) -> None:
        """Rename the file."""
        path = self._path(job_id)
        if os.path.lexists(path):
            os.replace(path, path.with_suffix(".damaged"))

    def note(self, name: str) -> dict[str, Any] | None:
        """Read ``<name>.json`` in the engine's folder."""
        try:
            return read_json(self._root / f"{name}.json")
        except (OSError, ValueError):
            return None

    def keep_note(self, name: str, value: Mapping[str, Any]) -> None:
        """Write ``<name>.json`` in the engine's folder."""
        write_json_atomic(self._root / f"{name}.json", value)

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


def adopt_files(root: Path, records: Records) -> list[str]:
    """Take over the records that a service had in files below ``root`` before it had others beside it.

    Only where nothing is on record yet: later, files that are still somewhere tell of what was long ago. Returns the
    ids of their jobs. Raises OSError and EngineError.
    """
    if not (root / "engine").is_dir() or any(records.load()):
        return []
    adopted = []
    for job_id, raw in FileRecords(root).load()[0].items():
        try:
            record = JobRecord.from_json(raw, root).to_json(root)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("the engine's record of job %s in %s cannot be taken over: %r", job_id, root, error)
            continue
        records.save(job_id, record)
        adopted.append(job_id)
    return adopted
