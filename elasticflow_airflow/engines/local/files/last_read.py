"""What small files held when they were last read: one that has not changed is not read again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")

_SETTLED_NS = 100_000_000
"""Two changes within a tick of the file system's clock may leave the same stamp: what is younger is read again."""


def stamp_of(path: Path | str) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced, touched or extended: (inode, mtime in ns, size); None without it."""
    try:
        found = os.lstat(path)
    except OSError:  # It is not there, or a script has made something else of a folder above it.
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class LastRead(Generic[_T]):
    """The contents of files of one kind. Whoever gets one may not change it: the next to ask gets the same object."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], _T]] = {}
        """By path, the stamp that the file had before it was read, and what it said."""

    def get(self, path: Path, read: Callable[[], _T | None]) -> _T | None:
        """Return what ``read`` returns for a file, called if it may have changed. Raises what that raises."""
        stamp = stamp_of(path)
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        is_settled = stamp is not None and time.time_ns() - stamp[1] > _SETTLED_NS
        found = read()
        if found is not None and stamp is not None and is_settled:
            self._known[path] = (stamp, found)
        return found

    def forget(self, path: Path) -> None:
        """Forget what a file said."""
        self._known.pop(path, None)
