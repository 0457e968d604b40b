"""Reads the memory of another process of this machine, where the system allows it: one copy, and no socket between.

Linux only (``process_vm_readv``), and among processes of one user. Where it is not to be had, in another container or
behind a stricter system, nobody is told but the caller. The standard library only.
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
"""A process names a single other one that may read it."""

Piece = tuple[int, int, int]
"""Address there, address here, number of bytes."""


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@contextlib.contextmanager
def readable_by(pid: int) -> Iterator[dict[str, Any]]:
    """Let a process read this one's memory meanwhile; yields what it must know for :func:`reach`."""
    libc = ctypes.CDLL(None)
    word = ctypes.create_string_buffer(secrets.token_bytes(_WORD_BYTES), _WORD_BYTES)
    with _one_at_a_time:
        # Where processes may read none but their children unless they are named (Yama); else it is refused, and vain.
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
        """Copy one piece; returns its size. Raises OSError: it is gone, or may not be read."""
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
        """Copy all pieces, with as many threads as there are cores for; yields the size of each that is done."""
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
    """The process that has told this by :func:`readable_by`; None where it cannot be read."""
    if told["where"] != _where() or not told["where"]:
        return None
    found = ctypes.create_string_buffer(_WORD_BYTES)
    try:
        neighbour = Neighbour(int(told["pid"]))
        neighbour.read((int(told["at"]), ctypes.addressof(found), _WORD_BYTES))
    except (OSError, AttributeError):  # not allowed; or no Linux
        return None
    # Another process of this number would have other things there.
    return neighbour if found.raw.hex() == told["word"] else None


def _where() -> str:
    """This machine, since its start, and this container: where process numbers mean the same. Empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
