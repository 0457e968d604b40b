"""Requests the stacks of trainers by a signal and reads their output. Never signals a process that it would kill.

A process that has installed the handler has a file (``runtime.process.stacks``); the kernel tells whether the handler
is still installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.runtime.process.stacks import SIGNAL
from elasticflow_airflow.runtime.protocol import open_ordinary

LIMIT_S = 5.0
"""How long a trainer may take to answer (it may be stopped, or the machine busy)."""
MOST_BYTES = 64 * 1024
"""Limit on one trainer's answer."""
_LOOK_S = 0.05
_OUTERMOST = ("in <module>", "in _run_module_as_main", "  ...")
"""Ends of the last line of an answer: the main thread comes last, with its outermost frame (or "...") at the end."""
_SETTLED_LOOKS = 4
"""Other lines can end like this, too: an answer is complete when it has not grown for this many polls."""
_QUIET_LOOKS = 30
"""Same, for answers that end with another line: they are written in small pieces, with pauses on a busy machine."""


@dataclass(slots=True)
class _Asked:
    path: Path
    size: int = 0
    same: int = 0

    def is_whole(self) -> bool:
        size = self.path.stat().st_size
        self.same = self.same + 1 if size == self.size and size else 0
        self.size = size
        if self.same < _SETTLED_LOOKS:
            return False
        return self.same >= _QUIET_LOOKS or self._tail().endswith(tuple(f"{end}\n" for end in _OUTERMOST))

    def _tail(self) -> str:
        with open_ordinary(self.path) as file:
            file.seek(max(0, self.size - 100))
            return file.read().decode(errors="replace")


def ask(trainers: Mapping[str, tuple[ProcessId | None, Path]], limit_s: float = LIMIT_S) -> dict[str, str]:
    """Return each trainer's stacks by worker id, or a sentence why not; ``trainers`` has processes and files."""
    found: dict[str, str] = {}
    asked: dict[str, _Asked] = {}
    for worker_id, (process, path) in trainers.items():
        problem = _ask(process, path)
        if problem is None:
            asked[worker_id] = _Asked(path)
        else:
            found[worker_id] = problem
    end_s = time.monotonic() + limit_s
    while asked and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        for worker_id in [worker_id for worker_id, one in asked.items() if one.is_whole()]:
            found[worker_id] = _read(asked.pop(worker_id).path)
    for worker_id, one in asked.items():
        text = _read(one.path)
        found[worker_id] = text or f"(it has not answered within {limit_s:.0f} s: is it stopped, or being killed?)"
    return dict(sorted(found.items()))


def handles(pid: int, number: int = SIGNAL) -> bool:
    """Return whether a process handles a signal, by /proc: without a handler the signal would kill it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _ask(process: ProcessId | None, path: Path) -> str | None:
    """Send the signal; return the reason if it was not sent, else None."""
    if process is None or not process.is_alive():
        return "(it is starting, or has just ended: there is no process to ask)"
    if not path.exists():
        return "(its script has not begun yet, or it was started by a version that cannot be asked)"
    if not handles(process.pid):
        return "(its script has taken the handler away: a signal would end it, so it was not asked)"
    os.truncate(path, 0)  # The trainer appends, so its answer starts at 0.
    process.kill(SIGNAL)
    return None


def _read(path: Path) -> str:
    with open_ordinary(path) as file:
        data = file.read(MOST_BYTES + 1)
    text = data[:MOST_BYTES].decode(errors="replace")
    return text + ("\n(... and more)" if len(data) > MOST_BYTES else "")
