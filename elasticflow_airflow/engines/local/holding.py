"""Finds the running gangs of a job through the holders of this machine's slots, for jobs with damaged files.

A supervisor holds the locks of its slots for as long as its workers may be alive, and its working directory is its own
folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.layout import NodeLayout
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangState, WorkerObservation
from elasticflow_airflow.scheduler_core.model.values import Slot


@dataclass(frozen=True, slots=True)
class SlotHolders:
    """Reads the locks of all slots; only supervisors of the service in ``state_dir`` count."""

    nodes: Mapping[str, NodeLayout]
    lock_dir: Path
    state_dir: Path

    def of(self, job_id: str, wanted: Sequence[Slot] | None = None) -> dict[Slot, dict[str, Any]]:
        """Return the slots (of ``wanted``, if given) that a job's supervisors hold, with each lock's holder entry."""
        found = {}
        for node in self.nodes.values():
            for index, layout in enumerate(node.slots):
                slot = Slot(node.node_id, index)
                holder = slots.holder_of(self.lock_dir, layout.lock_name) if wanted is None or slot in wanted else None
                if holder and holder.get("job_id") == job_id and holder.get("state_dir") == str(self.state_dir):
                    found[slot] = holder
        return found

    def renew(self, job_id: str) -> None:
        """Renew the leases of a job's supervisors."""
        for pid in self._pids(job_id):
            folder = _folder_of(pid)
            if folder is not None:
                folder.renew()

    def ask_to_leave(self, job_id: str) -> None:
        """Make a job's supervisors save and leave, by SIGTERM, when no order file reaches them."""
        for pid in self._pids(job_id):
            process = ProcessId.of(pid)
            if process is not None and _folder_of(pid) is not None:
                process.kill(signal.SIGTERM)

    def latest(self, job_id: str) -> int:
        """Return the highest running generation of a job; 0 when there is none."""
        return max((_number(holder, "generation") for holder in self.of(job_id).values()), default=0)

    def observe(self, job_id: str, trouble: str) -> list[GangObservation]:
        """Return the running gangs of a job whose record cannot be read."""
        by_generation: dict[int, list[tuple[Slot, dict[str, Any]]]] = {}
        for slot, holder in sorted(self.of(job_id).items()):
            by_generation.setdefault(_number(holder, "generation"), []).append((slot, holder))
        return [
            GangObservation(
                job_id=job_id,
                incarnation=_incarnation_of(_number(held[0][1], "pid")),
                generation=generation,
                state=GangState.RUNNING,
                outcome=None,
                workers=unseen_workers([slot for slot, _ in held]),
                trouble=trouble,
            )
            for generation, held in sorted(by_generation.items())
        ]

    def _pids(self, job_id: str) -> set[int]:
        return {_number(holder, "pid") for holder in self.of(job_id).values()} - {0}


def unseen_workers(placement: Sequence[Slot], ids: Sequence[str] = ()) -> tuple[WorkerObservation, ...]:
    """Return workers of which only the slots are known."""
    return tuple(
        WorkerObservation(worker_id=name, rank=rank, slot=slot, pid=None, exit_code=None, log_name=name)
        for rank, slot in enumerate(placement)
        for name in (ids[rank] if ids else f"unknown-r{rank:03d}",)
    )


def lost_unseen(before: GangObservation, trouble: str) -> GangObservation:
    """Return the observation of a gang that has no process left and whose outcome cannot be read."""
    return GangObservation(
        job_id=before.job_id,
        incarnation=before.incarnation,
        generation=before.generation,
        state=GangState.ENDED,
        outcome=GangOutcome.LOST,
        workers=before.workers,
        failure=trouble,
        trouble=trouble,
    )


def _folder_of(pid: int) -> SupervisorFolder | None:
    """Return the folder of a supervisor, which is its working directory; None when it has ended."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return None
    return SupervisorFolder(path) if path.parent.name == "supervisors" else None


def _incarnation_of(pid: int) -> int:
    folder = _folder_of(pid)
    name = "" if folder is None else folder.path.parent.parent.name
    return int(name[1:]) if name[:1] == "i" and name[1:].isdecimal() else 0


def _number(holder: Mapping[str, Any], name: str) -> int:
    value = holder.get(name)
    return value if type(value) is int and 0 < value < 1 << 31 else 0
