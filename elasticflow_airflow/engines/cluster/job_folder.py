"""The files of a job's folder that travel between the service and the nodes, and in which direction.

Paths are relative to the state directories, which may differ: ``jobs/<job>/i000001/…``. The runtime and the supervisors
do not know that their files travel.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.engines.local.machines import Changes
from elasticflow_airflow.runtime.protocol import open_ordinary, write_atomic

LARGEST_BYTES = 4 << 20
"""Limit on a file that is sent whole: a script can write anything into its folder."""
_SMALL_BYTES = 64 * 1024
"""The same for a heartbeat, and for what tells workers where to meet."""
LARGEST_GROWN_BYTES = 1 << 30
"""Of a growing file, what comes after this is not sent."""
_SUPERVISOR = re.compile(r"g\d{6,}-(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_INCARNATION = re.compile(r"i\d{6,}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")
_REPORT = re.compile(r"g\d{6,}-(?P<worker>.+)\.jsonl")
_HEARTBEAT = re.compile(r"(?P<worker>.+)\.json")
_LOG = re.compile(r"(?P<worker>.+)\.log\.\d+")
_ORDERS = ("spec.json", "order.json", "kill.json", "go")
"""From the service to a supervisor; ``go`` last, when everything that its workers read is there."""
_STATES = {"status.json", "warm", "warming", "supervisor.log"}


class Direction(Enum):
    """The direction in which a file travels."""

    DOWN = auto()
    """From the service to one node, or to all nodes of the job."""
    UP = auto()
    """From a node to the service."""
    ACROSS = auto()
    """From a node to the service and on to the job's other nodes: workers look for each other by it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a path says about its file. ``node_id``, ``worker_id``: to whom it belongs, where the path tells."""

    incarnation: str
    """Folder of the incarnation: ``jobs/<job>/i000001``."""
    direction: Direction
    grows: bool = False
    """It is only appended to, so that only the new part is sent."""
    node_id: str | None = None
    worker_id: str | None = None


@functools.lru_cache(maxsize=1 << 14)
def place_of(path: str) -> Place | None:
    """Return what a relative path says about its file; None when the file does not travel, or is none of ours."""
    parts = path.split("/")
    if len(parts) < 4 or parts[0] != "jobs" or not _JOB.fullmatch(parts[1]) or not _INCARNATION.fullmatch(parts[2]):
        return None
    incarnation, names = "/".join(parts[:3]), parts[3:]
    if not all(_NAME.fullmatch(name) for name in names):
        return None  # Among others "..", and files that are being written.
    match names:
        case ["session.json" | "membership.json"]:
            return Place(incarnation, Direction.DOWN)
        case ["supervisors", name] if name.endswith(".failed"):
            return Place(incarnation, Direction.ACROSS)
        case ["supervisors", folder, name] if found := _SUPERVISOR.fullmatch(folder):
            if name in _ORDERS:
                return Place(incarnation, Direction.DOWN, node_id=found["node"])
            if name in _STATES:
                return Place(incarnation, Direction.UP, grows=name.endswith(".log"), node_id=found["node"])
        case ["rendezvous", _]:
            return Place(incarnation, Direction.ACROSS)
        case ["heartbeats", name] if found := _HEARTBEAT.fullmatch(name):
            return Place(incarnation, Direction.ACROSS, worker_id=found["worker"])
        case ["reports", name] if found := _REPORT.fullmatch(name):
            return Place(incarnation, Direction.ACROSS, grows=True, worker_id=found["worker"])
        case ["logs", name] if found := _LOG.fullmatch(name):
            return Place(incarnation, Direction.UP, grows=True, worker_id=found["worker"])
    return None


def is_heartbeat(path: str) -> bool:
    """Return whether a relative path is that of a heartbeat, which holds a time by its node's clock."""
    return "/heartbeats/" in path


def incarnation_of(path: str) -> str:
    """Return the folder of the incarnation to which a path below it belongs."""
    return "/".join(path.split("/")[:3])


def node_of(folder_name: str) -> str | None:
    """Return the node of a supervisor's folder by its name; None when the name is not that of one."""
    found = _SUPERVISOR.fullmatch(folder_name)
    return None if found is None else found["node"]


def supervisor_folders(root: Path, incarnation: str, nodes: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (node, relative path) of the supervisor folders of an incarnation, on these nodes or on all."""
    for name in _names(root / incarnation / "supervisors"):
        node_id = node_of(name)
        if node_id is not None and (nodes is None or node_id in nodes):
            yield node_id, f"{incarnation}/supervisors/{name}"


def files_down(root: Path, incarnation: str, nodes: Collection[str]) -> list[str]:
    """Return the existing files that travel to these nodes, in the order in which they must arrive there."""
    folders = sorted(path for _, path in supervisor_folders(root, incarnation, nodes))
    fixed = [f"{incarnation}/session.json", f"{incarnation}/membership.json"]
    orders = [f"{folder}/{name}" for name in _ORDERS for folder in folders]
    first = [path for path in (*fixed, *orders) if not path.endswith("/go")]
    gone = [path for path in orders if path.endswith("/go")]
    return [*first, *_across(root, incarnation), *gone]


def files_up(root: Path, incarnation: str, nodes: Collection[str]) -> list[str]:
    """Return the files of these nodes that travel to the service: all that grows comes after what tells of it."""
    found = [
        f"{folder}/{name}"
        for _, folder in supervisor_folders(root, incarnation, nodes)
        for name in _names(root / folder)
        if name in _STATES
    ]
    logs = [f"{incarnation}/logs/{name}" for name in _names(root / incarnation / "logs")]
    return [path for path in (*found, *_across(root, incarnation), *logs) if place_of(path) is not None]


def _across(root: Path, incarnation: str) -> list[str]:
    found = [
        f"{incarnation}/supervisors/{n}" for n in _names(root / incarnation / "supervisors") if n[-7:] == ".failed"
    ]
    for folder in ("rendezvous", "heartbeats", "reports"):
        found += [f"{incarnation}/{folder}/{name}" for name in _names(root / incarnation / folder)]
    return [path for path in found if place_of(path) is not None]  # not the folders of supervisors


def read_whole(path: Path) -> bytes | None:
    """Read a file that is sent whole; None when it is missing, too large or no regular file."""
    most = _SMALL_BYTES if path.parent.name in ("heartbeats", "rendezvous") else LARGEST_BYTES
    with contextlib.suppress(OSError, ValueError), open_ordinary(path) as file:
        data = file.read(most + 1)
        return data if len(data) <= most else None
    return None


def read_part(path: Path, offset: int, limit: int) -> bytes:
    """Read up to ``limit`` bytes of a growing file; empty when there is nothing there, or it is no regular file."""
    with contextlib.suppress(OSError, ValueError), open_ordinary(path) as file:
        file.seek(offset)
        return file.read(limit)
    return b""


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises OSError."""
    write_atomic(path, data, flush=False)


def write_part(path: Path, offset: int, data: bytes) -> None:
    """Write a part of a growing file, unless parts before it are missing. Idempotent. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size >= offset:
            os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # It is not there, or a script has made something else of it.
        return []


def has_ended(path: Path) -> bool:
    """Return whether the supervisor of a folder has written its last status."""
    try:
        status = SupervisorFolder(path).read_status()
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    return status is not None and status.ended


def unfinished(root: Path, nodes: Collection[str] | None, has_ended: Callable[[Path], bool]) -> set[str]:
    """Return the incarnations with a supervisor on these nodes (None: on any) that has not ended."""
    found = set()
    for job in _names(root / "jobs"):
        for name in _names(root / "jobs" / job):
            incarnation = f"jobs/{job}/{name}"
            if any(not has_ended(root / path) for _, path in supervisor_folders(root, incarnation, nodes)):
                found.add(incarnation)
    return found


def make_incarnation(root: Path, incarnation: str, checkpoints: Path | None) -> None:
    """Create the folder of an incarnation, with a link to its checkpoints if they are in a folder. Idempotent."""
    folder = root / incarnation
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    link = folder / "checkpoints"
    if checkpoints is not None and not os.path.lexists(link):
        with contextlib.suppress(FileExistsError):  # Another thread was faster.
            link.symlink_to(checkpoints)


class Arrivals:
    """Notes when something of an incarnation has come from a node, or was written for one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        """The later is the higher: stored with the lock held, in the order in which they were taken."""
        self._states: dict[str, int] = {}
        self._reports: dict[str, int] = {}
        self._all = 0

    def note_file(self, path: str) -> None:
        """Note that a file has come from a node; called when it can be read."""
        match path.split("/")[3:4]:
            case ["reports"]:
                with self._lock:
                    self._reports[incarnation_of(path)] = next(self._numbers)
            case ["heartbeats" | "logs"]:
                pass  # Nothing is judged by them.
            case _:
                self.note(incarnation_of(path))

    def note(self, incarnation: str) -> None:
        """Note that the state of an incarnation may have changed; called when it has."""
        with self._lock:
            self._states[incarnation] = next(self._numbers)

    def note_all(self) -> None:
        """Note that something of any incarnation may have changed: a node has come, or gone."""
        with self._lock:
            self._all = next(self._numbers)

    @property
    def everything(self) -> int:
        """Differs from earlier ones where :meth:`note_all` was called since."""
        return self._all

    def of(self, incarnation: str) -> Changes:
        """Return the numbers of an incarnation."""
        states = max(self._states.get(incarnation, 0), self._all)
        return Changes(states, max(self._reports.get(incarnation, 0), self._all))

    def forget(self, incarnation: str) -> None:
        """Forget an incarnation whose folder was deleted."""
        self._states.pop(incarnation, None)
        self._reports.pop(incarnation, None)
