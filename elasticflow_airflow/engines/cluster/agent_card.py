"""The card in an agent's folder: which process is the agent of this folder, and where it listens."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.runtime.protocol import write_atomic

_FILE, _LOCK = "agent.json", "agent.lock"
_LEAVE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class AgentCard:
    """``fingerprint``: of the settings with which it was started, as whoever started it has made it."""

    process: ProcessId
    url: str
    fingerprint: str

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the card of the folder's last agent; None when there is none that can be read."""
        try:
            found = json.loads((folder / _FILE).read_bytes())
            process = ProcessId.from_json(found["process"])
            return None if process is None else cls(process, str(found["url"]), str(found["fingerprint"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, folder: Path) -> None:
        """Write the card. Raises OSError."""
        write_atomic(folder / _FILE, json.dumps(asdict(self)).encode())

    def end(self) -> None:
        """End the agent; its supervisors go on."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.process.kill(number)
            end_s = time.monotonic() + _LEAVE_LIMIT_S
            while self.process.is_alive() and time.monotonic() < end_s:
                time.sleep(0.02)


@contextmanager
def only_agent(folder: Path) -> Iterator[None]:
    """Hold an agent's folder. Raises ValueError when another agent does, and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            card = AgentCard.read(folder)
            who = "another agent" if card is None else f"the agent with pid {card.process.pid}, at {card.url},"
            raise ValueError(f"{who} uses {folder}: end it first, or give this one another folder") from None
        yield
    finally:
        os.close(descriptor)
