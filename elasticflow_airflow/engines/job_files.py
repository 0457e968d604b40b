"""What jobs have on disk where their workers run, behind verbs: the part of the engine port that is about files.

Jobs and incarnations are named; where their files lie, and how they are read, is the engine's affair. A call takes as
long as a disk does, and a checkpoint may be large.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticflow_airflow.runtime.protocol import Promotion, checkpoint_dir, heartbeat_path, read_json
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, adopt, verify_candidate

CANDIDATE_PATH = re.compile(r"^g(\d{6})/step-(\d{12})$")
"""Path of a candidate checkpoint below the folder of all: generation, step."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker said last: the step it is at, what it is doing, and when (UTC seconds, its own clock)."""

    step: int
    phase: str
    at_s: float


class JobFiles(Protocol):
    """The verbs. A ``path`` is that of a candidate checkpoint (``CANDIDATE_PATH``).

    What cannot be read or written raises OSError, unless a verb says otherwise.
    """

    def folder(self, job_id: str, incarnation: int) -> Path:
        """Where an incarnation has its files, as its workers are told. Opens nothing."""
        ...

    def checkpoint(self, job_id: str, incarnation: int, path: str) -> Path:
        """Where a checkpoint of it lies, for people and for trainings that begin with it. Opens nothing."""
        ...

    def exists(self, job_id: str, incarnation: int) -> bool:
        """Whether there are files of an incarnation."""
        ...

    def is_checkpoint(self, path: str) -> bool:
        """Whether there is a folder that a training can begin with."""
        ...

    def prepare(self, job_id: str, incarnation: int) -> None:
        """Have a folder for an incarnation, for nobody's eyes but the service's user. Idempotent."""
        ...

    def heartbeat(self, job_id: str, incarnation: int, worker_id: str) -> Heartbeat | None:
        """The last sign of life of a worker; None when there is none, or none that can be read."""
        ...

    def candidates(self, job_id: str, incarnation: int, generation: int) -> list[str]:
        """Paths of a generation's candidate checkpoints that are written to their end, oldest step first."""
        ...

    def verify(self, job_id: str, incarnation: int, path: str) -> str:
        """Read all of a candidate; returns its digest.

        Raises ValueError when it is damaged, its subclass CheckpointUnreachable when that cannot be said now.
        """
        ...

    def promote(self, job_id: str, incarnation: int, promotion: Promotion) -> bool:
        """Let a checkpoint count for whoever starts from now on; False: it did already."""
        ...

    def adopt(self, job_id: str, incarnation: int, earlier: int, path: str) -> CandidateInfo:
        """Copy a checkpoint of an ``earlier`` incarnation, as what this one begins with.

        Raises CheckpointUnreachable when that cannot be done now, CheckpointError when it never can.
        """
        ...

    def delete(self, job_id: str, incarnation: int, path: str) -> None:
        """Delete a candidate. Idempotent."""
        ...

    def discard(self, job_id: str, incarnation: int) -> None:
        """Delete all that an incarnation has left but its checkpoints. Idempotent."""
        ...


class JobFolders:
    """Files of jobs below one folder, which all nodes of the engine share (see :class:`JobFiles`)."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, job_id: str, incarnation: int) -> Path:
        """Where an incarnation has its files."""
        return self._root / job_id / f"i{incarnation:06d}"

    def checkpoint(self, job_id: str, incarnation: int, path: str) -> Path:
        """Where a checkpoint lies."""
        return checkpoint_dir(self.folder(job_id, incarnation)) / path

    def exists(self, job_id: str, incarnation: int) -> bool:
        """Whether there are files of an incarnation."""
        return self.folder(job_id, incarnation).exists()

    def is_checkpoint(self, path: str) -> bool:
        """Whether there is such a folder."""
        return os.path.isdir(path)

    def prepare(self, job_id: str, incarnation: int) -> None:
        """Make the folder of an incarnation."""
        self.folder(job_id, incarnation).mkdir(mode=0o700, parents=True, exist_ok=True)

    def heartbeat(self, job_id: str, incarnation: int, worker_id: str) -> Heartbeat | None:
        """Read the last sign of life of a worker."""
        try:
            raw = read_json(heartbeat_path(self.folder(job_id, incarnation), worker_id))
            return None if raw is None else Heartbeat(int(raw["step"]), str(raw["phase"]), float(raw["at_s"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None  # Half written by a machine that went down, or of another version: the same as none.

    def candidates(self, job_id: str, incarnation: int, generation: int) -> list[str]:
        """List what has its final name."""
        name = f"g{generation:06d}"
        folder = self.checkpoint(job_id, incarnation, name)
        if not folder.is_dir():
            return []
        paths = sorted(f"{name}/{entry.name}" for entry in folder.iterdir())
        return [path for path in paths if CANDIDATE_PATH.match(path)]

    def verify(self, job_id: str, incarnation: int, path: str) -> str:
        """Verify what the runtime wrote: a manifest with a digest of every file."""
        return verify_candidate(self._candidate(job_id, incarnation, path)).digest

    def promote(self, job_id: str, incarnation: int, promotion: Promotion) -> bool:
        """Write ``promoted.json``."""
        folder = self.folder(job_id, incarnation)
        if _promotion_in(checkpoint_dir(folder)) == promotion:
            return False
        promotion.write(folder)
        return True

    def adopt(self, job_id: str, incarnation: int, earlier: int, path: str) -> CandidateInfo:
        """Copy a checkpoint from one folder to the other."""
        checkpoints = checkpoint_dir(self.folder(job_id, incarnation))
        return adopt(self.checkpoint(job_id, earlier, path), checkpoints, incarnation=incarnation)

    def delete(self, job_id: str, incarnation: int, path: str) -> None:
        """Delete the folder of a candidate."""
        folder = self._candidate(job_id, incarnation, path)
        if folder.exists():
            shutil.rmtree(folder)

    def discard(self, job_id: str, incarnation: int) -> None:
        """Delete everything beside the checkpoints."""
        folder = self.folder(job_id, incarnation)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path != checkpoint_dir(folder):
                remove(path)

    def _candidate(self, job_id: str, incarnation: int, path: str) -> Path:
        if not CANDIDATE_PATH.match(path):
            raise ValueError(f"{path!r} is not the path of a candidate checkpoint")
        return self.checkpoint(job_id, incarnation, path)


def _promotion_in(checkpoints: Path) -> Promotion | None:
    """What ``promoted.json`` says; None also where it is damaged: the folder is the training's, who may write there."""
    try:
        return Promotion.read(checkpoints)
    except (ValueError, TypeError):
        return None


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its read-only parts."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for root, _, _ in os.walk(path):
        os.chmod(root, 0o700)
    shutil.rmtree(path)
