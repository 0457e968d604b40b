"""The engine's records of its gangs on disk, so that a new engine over the same folder finds them all.

One JSON file per job, replaced atomically *before* anything is started or ordered to leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.local.files.generation_folder import StopOrder, SupervisorFolder
from elasticflow_airflow.runtime.protocol import Member, read_json, write_json_atomic
from elasticflow_airflow.scheduler_core.model.values import Slot


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
    def from_json(cls, raw: Mapping[str, Any]) -> GangRecord:
        """Inverse of ``asdict``."""
        slots = tuple(Slot(*slot) for slot in raw["placement"])
        # Records of versions without changes in place have no ids.
        return cls(**{**raw, "placement": slots, "ids": tuple(raw.get("ids", ())), "lost": tuple(raw.get("lost", ()))})


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """One job: its gangs that are not forgotten, and what must be kept after them."""

    job_id: str
    latest: int = 0
    """Highest generation ever applied; lower ones are ignored forever."""
    incarnation_dirs: dict[int, str] = field(default_factory=dict)
    """Folders by incarnation, for reading the logs of forgotten gangs."""
    gangs: dict[int, GangRecord] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> JobRecord | None:
        """Read a record; None when there is none. Raises ValueError when it is damaged."""
        raw = read_json(path)
        if raw is None:
            return None
        return cls(
            job_id=raw["job_id"],
            latest=raw["latest"],
            incarnation_dirs={int(k): v for k, v in raw["incarnation_dirs"].items()},
            gangs={gang["generation"]: GangRecord.from_json(gang) for gang in raw["gangs"]},
        )

    def save(self, path: Path) -> None:
        """Replace the record atomically."""
        write_json_atomic(
            path,
            {
                "job_id": self.job_id,
                "latest": self.latest,
                "incarnation_dirs": self.incarnation_dirs,
                "gangs": [asdict(gang) for _, gang in sorted(self.gangs.items())],
            },
        )
