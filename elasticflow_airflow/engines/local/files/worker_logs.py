"""Worker logs: segments named by their first byte, so that offsets continue across rotations.

``g000001-r000.log.000000000000`` holds the log from byte 0 on; ``g000001-r000.log`` links to the newest segment, for
human readers. Standard library only: supervisors import it.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticflow_airflow.runtime.protocol import open_ordinary

SEGMENT_BYTES = 8 * 1024 * 1024
KEEP_SEGMENTS = 4
_START = re.compile(r"[0-9]{1,18}")

_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC


def segments(logs_dir: Path, name: str) -> list[tuple[int, Path]]:
    """Return start offset and path of each existing segment, oldest first."""
    prefix = f"{name}.log."
    try:
        with os.scandir(logs_dir) as entries:
            # A script can put anything there: links and pipes are not segments.
            names = [one.name for one in entries if one.name.startswith(prefix) and one.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):  # a script can put a file in its place
        return []
    return sorted((int(name[len(prefix) :]), logs_dir / name) for name in names if _START.fullmatch(name, len(prefix)))


@dataclass(frozen=True, slots=True)
class LogRead:
    """A piece of a log; ``at_end``: there is nothing after it at present."""

    data: bytes
    start_offset: int
    at_end: bool


def read(logs_dir: Path, name: str, offset: int, limit: int) -> LogRead:
    """Read up to ``limit`` bytes from an absolute offset, or from a later one if that part was rotated away."""
    there = segments(logs_dir, name)
    if not there:
        return LogRead(b"", offset, True)
    offset = min(max(offset, there[0][0]), there[-1][0] + _size(there[-1][1]))
    pieces: list[bytes] = []
    position = offset
    for index, (start, path) in enumerate(there):
        next_start = there[index + 1][0] if index + 1 < len(there) else None
        if next_start is not None and position >= next_start:
            continue
        if position < start:  # There is a gap between the two segments.
            if position > offset:
                return _joined(pieces, offset, False)
            offset = position = start
        try:
            with open_ordinary(path) as file:
                file.seek(position - start)
                piece = file.read(limit - (position - offset))
        except (FileNotFoundError, NotADirectoryError):
            # Rotated away since the folder was listed: the remaining log begins later.
            return read(logs_dir, name, next_start or offset, limit) if not pieces else _joined(pieces, offset, False)
        pieces.append(piece)
        position += len(piece)
        if position - offset >= limit:
            break
    end = there[-1][0] + _size(there[-1][1])
    return _joined(pieces, min(offset, end), position >= end)


def tail(logs_dir: Path, name: str, limit: int) -> bytes:
    """Return the last ``limit`` bytes."""
    there = segments(logs_dir, name)
    if not there:
        return b""
    end = there[-1][0] + _size(there[-1][1])
    return read(logs_dir, name, max(0, end - limit), limit).data


class LogArchive(Protocol):
    """Keeps the logs of incarnations that are over, for services without this folder. Nothing here waits for it."""

    def keep(self, incarnation_dir: Path) -> None:
        """Have the logs of an incarnation copied; tried again until it succeeds."""
        ...

    def kept(self) -> list[Path]:
        """Return the folders of the incarnations whose logs were copied since the last call."""
        ...

    def fetch(self, incarnation_dir: Path, name: str) -> None:
        """Bring the log of a worker back into the folder; waits for that. Raises OSError."""
        ...


class LogWriter:
    """Appends to a worker's log and rotates it. A full disk loses lines but never stops the training."""

    def __init__(
        self, logs_dir: Path, name: str, segment_bytes: int = SEGMENT_BYTES, keep: int = KEEP_SEGMENTS
    ) -> None:
        self._dir, self._name = logs_dir, name
        self._segment_bytes, self._keep = segment_bytes, keep
        there = segments(logs_dir, name)
        self._start = there[-1][0] if there else 0
        self._size = _size(there[-1][1]) if there else 0
        self._descriptor: int | None = None
        self.lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Append data; bytes lost to a full disk are counted and noted in the log once there is space again."""
        if self.lost_bytes:
            data = f"[elasticflow: {self.lost_bytes} bytes of output lost, the disk was full]\n".encode() + data
        try:
            self._append(data)
        except OSError:
            self.close()
            self.lost_bytes += len(data)
        else:
            self.lost_bytes = 0

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._size >= self._segment_bytes:
                self._rotate()
            if self._descriptor is None:
                self._open()
            assert self._descriptor is not None
            written = os.write(self._descriptor, view[: self._segment_bytes - self._size])
            self._size += written
            view = view[written:]

    def _rotate(self) -> None:
        self.close()
        self._start += self._size
        self._size = 0
        for _, path in segments(self._dir, self._name)[: -(self._keep - 1) or None]:
            path.unlink(missing_ok=True)

    def _open(self) -> None:
        path = self._dir / f"{self._name}.log.{self._start:012d}"
        self._descriptor = os.open(path, _APPENDING, 0o600)
        link, fresh = self._dir / f"{self._name}.log", self._dir / f".{self._name}.link"
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        fresh.symlink_to(path.name)
        fresh.replace(link)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _joined(pieces: list[bytes], start_offset: int, at_end: bool) -> LogRead:
    return LogRead(b"".join(pieces), start_offset, at_end)
