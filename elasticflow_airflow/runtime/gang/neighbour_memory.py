"""Reads the memory of another process on this machine where the system allows it: a single copy, without a socket.

Linux only (``process_vm_readv``), and between processes of one user. Where it is not available, in another container
or on a stricter system, only the caller learns of it. May import the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PIECE_BYTES = 16 << 20
_MOST_THREADS = 4
_WORD_BYTES = 16
_PR_SET_PTRACER = 0x59616D61
_one_at_a_time = threading.Lock()
"""A process can name only one other process that may read it."""

Piece = tuple[int, int, int]
"""Address in the other process, address in this process, number of bytes."""


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@contextlib.contextmanager
def readable_by(pid: int) -> Iterator[dict[str, Any]]:
    """Let a process read this one's memory inside the context; yields what that process must pass to :func:`reach`."""
    libc = ctypes.CDLL(None)
    word = ctypes.create_string_buffer(secrets.token_bytes(_WORD_BYTES), _WORD_BYTES)
    with _one_at_a_time:
        # Needed under Yama, where processes may read only their children unless named; elsewhere it fails harmlessly.
        libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
        try:
            yield {"where": _where(), "pid": os.getpid(), "word": word.raw.hex(), "at": ctypes.addressof(word)}
        finally:
            libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


class Neighbour:
    """A process whose memory can be read."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._call: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        self._call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]

    def read(self, piece: Piece) -> int:
        """Copy one piece; returns its size. Raises OSError if the process is gone or may not be read."""
        there, here, count = piece
        done = 0
        while done < count:
            into, source = _Span(here + done, count - done), _Span(there + done, count - done)
            copied = self._call(self._pid, ctypes.byref(into), 1, ctypes.byref(source), 1, 0)
            if copied <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"memory of process {self._pid} cannot be read: {os.strerror(number)}")
            done += copied
        return count

    def read_all(self, pieces: Sequence[Piece]) -> Iterator[int]:
        """Copy all pieces, with one thread per available core up to a limit; yields each finished piece's size."""
        small = [
            (there + at, here + at, min(_PIECE_BYTES, count - at))
            for there, here, count in pieces
            for at in range(0, count, _PIECE_BYTES)
        ]
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        if threads == 1 or len(small) < 2:
            yield from map(self.read, small)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="elasticflow-read") as pool:
            yield from pool.map(self.read, small)


def reach(told: Mapping[str, Any]) -> Neighbour | None:
    """Return the process described by what its :func:`readable_by` yielded; None if it cannot be read."""
    if told["where"] != _where() or not told["where"]:
        return None
    found = ctypes.create_string_buffer(_WORD_BYTES)
    try:
        neighbour = Neighbour(int(told["pid"]))
        neighbour.read((int(told["at"]), ctypes.addressof(found), _WORD_BYTES))
    except (OSError, AttributeError):  # not allowed, or not Linux
        return None
    # Another process with this PID would have other bytes at that address.
    return neighbour if found.raw.hex() == told["word"] else None


def _where() -> str:
    """Identify this boot of the machine and this PID namespace, in which PIDs are comparable. Empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
