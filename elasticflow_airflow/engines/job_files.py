"""The part of the engine port that covers files: what jobs have on disk where their workers run.

Callers name jobs and incarnations; the engine decides where their files are and how they are read. Calls block on disk
I/O, and a checkpoint may be large.
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
from elasticflow_airflow.runtime.stores.store import is_remote

CANDIDATE_PATH = re.compile(r"^g(\d{6})/step-(\d{12})$")
"""Path of a candidate checkpoint below the checkpoint folder: generation, step."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a worker: its step, its phase, and the time (UTC seconds by its own clock)."""

    step: int
    phase: str
    at_s: float


class JobFiles(Protocol):
    """Operations on the files of jobs. A ``path`` is that of a candidate checkpoint (``CANDIDATE_PATH``).

    All of them raise OSError when something cannot be read or written, unless stated otherwise.
    """

    def folder(self, job_id: str, incarnation: int) -> Path:
        """Return the folder of an incarnation, as passed to its workers. Opens nothing."""
        ...

    def checkpoint(self, job_id: str, incarnation: int, path: str) -> str:
        """Return the folder or URL of a checkpoint, for users and for trainings that start from it. Opens nothing."""
        ...

    def checkpoints_url(self, job_id: str, incarnation: int) -> str | None:
        """Return the URL of an incarnation's checkpoints; None if they are in its folder. Opens nothing."""
        ...

    def exists(self, job_id: str, incarnation: int) -> bool:
        """Return whether an incarnation has files."""
        ...

    def is_checkpoint(self, path: str) -> bool:
        """Return whether the path is an existing folder, so that a training can start from it.

        A URL is taken as it is: whether something is there is seen by the training.
        """
        ...

    def prepare(self, job_id: str, incarnation: int) -> None:
        """Create the folder of an incarnation, readable by the service's user only. Idempotent."""
        ...

    def heartbeat(self, job_id: str, incarnation: int, worker_id: str) -> Heartbeat | None:
        """Return the last heartbeat of a worker; None when there is none or it cannot be read."""
        ...

    def candidates(self, job_id: str, incarnation: int, generation: int) -> list[str]:
        """Return the paths of a generation's completely written candidate checkpoints, lowest step first."""
        ...

    def verify(self, job_id: str, incarnation: int, path: str) -> str:
        """Read a candidate completely and return its digest.

        Raises ValueError when it is damaged, its subclass CheckpointUnreachable when that cannot be determined now.
        """
        ...

    def promote(self, job_id: str, incarnation: int, promotion: Promotion) -> bool:
        """Make a checkpoint the one that workers resume from; return False when it already was."""
        ...

    def adopt(self, job_id: str, incarnation: int, earlier: int, path: str) -> CandidateInfo:
        """Copy a checkpoint of an ``earlier`` incarnation, as the starting point of this one.

        Raises CheckpointUnreachable when this is impossible at present, CheckpointError when it is impossible for good.
        """
        ...

    def delete(self, job_id: str, incarnation: int, path: str) -> None:
        """Delete a candidate. Idempotent."""
        ...

    def discard(self, job_id: str, incarnation: int) -> None:
        """Delete all files of an incarnation except its checkpoints. Idempotent."""
        ...


class JobFolders:
    """Files of jobs below one folder that all nodes of the engine share (see :class:`JobFiles`)."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, job_id: str, incarnation: int) -> Path:
        """Return the folder of an incarnation."""
        return self._root / job_id / f"i{incarnation:06d}"

    def checkpoint(self, job_id: str, incarnation: int, path: str) -> str:
        """Return the path of a checkpoint."""
        return str(self._checkpoint(job_id, incarnation, path))

    def checkpoints_url(self, job_id: str, incarnation: int) -> str | None:  # noqa: ARG002  (there is none)
        """Return None: checkpoints are in the folder."""
        return None

    def exists(self, job_id: str, incarnation: int) -> bool:
        """Return whether an incarnation has files."""
        return self.folder(job_id, incarnation).exists()

    def is_checkpoint(self, path: str) -> bool:
        """Return whether the folder exists."""
        return is_remote(path) or os.path.isdir(path)

    def prepare(self, job_id: str, incarnation: int) -> None:
        """Create the folder of an incarnation."""
        self.folder(job_id, incarnation).mkdir(mode=0o700, parents=True, exist_ok=True)

    def heartbeat(self, job_id: str, incarnation: int, worker_id: str) -> Heartbeat | None:
        """Read the last heartbeat of a worker."""
        try:
            raw = read_json(heartbeat_path(self.folder(job_id, incarnation), worker_id))
            return None if raw is None else Heartbeat(int(raw["step"]), str(raw["phase"]), float(raw["at_s"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None  # Half written before a machine crash, or by another version: treated as missing.

    def candidates(self, job_id: str, incarnation: int, generation: int) -> list[str]:
        """List the folders that have a final name."""
        name = f"g{generation:06d}"
        folder = self._checkpoint(job_id, incarnation, name)
        if not folder.is_dir():
            return []
        paths = sorted(f"{name}/{entry.name}" for entry in folder.iterdir())
        return [path for path in paths if CANDIDATE_PATH.match(path)]

    def verify(self, job_id: str, incarnation: int, path: str) -> str:
        """Verify the files against the runtime's manifest, which holds a digest of each."""
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
        return adopt(self._checkpoint(job_id, earlier, path), checkpoints, incarnation=incarnation)

    def delete(self, job_id: str, incarnation: int, path: str) -> None:
        """Delete the folder of a candidate."""
        folder = self._candidate(job_id, incarnation, path)
        if folder.exists():
            shutil.rmtree(folder)

    def discard(self, job_id: str, incarnation: int) -> None:
        """Delete everything except the checkpoints."""
        folder = self.folder(job_id, incarnation)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path != checkpoint_dir(folder):
                remove(path)

    def _checkpoint(self, job_id: str, incarnation: int, path: str) -> Path:
        return checkpoint_dir(self.folder(job_id, incarnation)) / path

    def _candidate(self, job_id: str, incarnation: int, path: str) -> Path:
        if not CANDIDATE_PATH.match(path):
            raise ValueError(f"{path!r} is not the path of a candidate checkpoint")
        return self._checkpoint(job_id, incarnation, path)


def _promotion_in(checkpoints: Path) -> Promotion | None:
    """Read ``promoted.json``; None when it is missing or damaged: the training script can write to this folder."""
    try:
        return Promotion.read(checkpoints)
    except (ValueError, TypeError):
        return None


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder including its read-only parts."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for root, _, _ in os.walk(path):
        os.chmod(root, 0o700)
    shutil.rmtree(path)
