"""One lock file per slot in a machine-wide folder: no two gangs get the same slot, whichever services run them.

A supervisor holds the locks of its slots for as long as its workers may be alive; the kernel releases them when it
dies.
Standard library only: supervisors import it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.protocol import open_ordinary

_PATIENCE_S = 2.0
"""How long a supervisor retries: an inventory may be testing the lock at the same moment."""

_LARGEST_BYTES = 1 << 16


class SlotHeldError(Exception):
    """The slot is held already; the message names the holder."""


def default_lock_dir() -> Path:
    """Return the machine-wide folder of this user's slot locks."""
    return Path(tempfile.gettempdir()) / f"elasticflow-slots-{os.getuid()}"


def prepare_lock_dir(lock_dir: Path) -> None:
    """Create the folder, private to this user. Raises OSError when another user owns it or it is not a folder."""
    lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = lock_dir.lstat()
    if found.st_uid != os.getuid() or not lock_dir.is_dir() or lock_dir.is_symlink():
        raise OSError(f"{lock_dir} is not a folder of this user (uid {os.getuid()})")
    if found.st_mode & 0o077:
        lock_dir.chmod(0o700)


def acquire(lock_dir: Path, lock_name: str, holder: dict[str, Any]) -> int:
    """Lock a slot, write its holder and return the descriptor to keep open. Raises SlotHeldError."""
    path = lock_dir / f"{lock_name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                other = _read(path)
                raise SlotHeldError(f"slot {lock_name} is held by {describe(other)}") from None
            time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    return descriptor


def holder_of(lock_dir: Path, lock_name: str) -> dict[str, Any] | None:
    """Return the present holder of a slot, as written by it; None when the slot is free."""
    path = lock_dir / f"{lock_name}.lock"
    with _opened(path) as descriptor:
        if descriptor is None:
            return None
        try:
            # Shared: concurrent inventories do not disturb each other, and nothing is written.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(path)
        return None


def describe(holder: Mapping[str, Any]) -> str:
    """Return a phrase that names the holder."""
    if not {"job_id", "state_dir", "pid"} <= holder.keys():
        return "another process (its lock file does not say which)"
    return f"job {holder['job_id']} of the service in {holder['state_dir']} (supervisor pid {holder['pid']})"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_ordinary(path) as file:
            value = json.loads(file.read(_LARGEST_BYTES) or "{}")
    except (ValueError, RecursionError, OSError):
        return {}  # The holder is writing it right now, or another process has.
    return value if isinstance(value, dict) else {}
