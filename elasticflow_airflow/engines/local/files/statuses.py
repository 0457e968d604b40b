"""The statuses of supervisors as they were last read: a file that has not changed is not read again."""

from __future__ import annotations

import time
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder

_SETTLED_NS = 100_000_000


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced, touched or extended: (inode, mtime in ns, size); None without it."""
    try:
        found = path.lstat()
    except OSError:  # It is not there, or a script has made something else of a folder above it.
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def is_settled(stamp: tuple[int, int, int] | None) -> bool:
    """Return whether any later change shows in the stamp: two within a tick of the file system's clock may not."""
    return stamp is not None and time.time_ns() - stamp[1] > _SETTLED_NS


class Statuses:
    """Reads statuses. Whoever gets one may not change it: the next one to ask gets the same object."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], Status]] = {}
        """By folder, the stamp that the file had before it was read, and what it said."""

    def read(self, folder: SupervisorFolder) -> Status | None:
        """See :meth:`SupervisorFolder.read_status`."""
        stamp = stamp_of(folder.status_file)
        known = self._known.get(folder.path)
        if known is not None and known[0] == stamp:
            return known[1]
        settled = is_settled(stamp)
        status = folder.read_status()
        if status is not None and stamp is not None and settled:
            self._known[folder.path] = (stamp, status)
        return status

    def forget(self, folder: SupervisorFolder) -> None:
        """Forget what a folder held."""
        self._known.pop(folder.path, None)
