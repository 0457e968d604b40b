"""The second watchdog of leases: a supervisor that stands still can end neither its workers nor itself.

Nearly always the supervisor (``local/workers/supervisor.py``) ends its workers when nobody renews its lease. One that
was stopped, or hangs in the kernel, is killed from outside, and the kernel kills its workers with it. Until then its
slots are its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.engines.local.machine.processes import ProcessId

EXTRA_S = 300.0
"""How long after the end of its lease a supervisor may take to save and to leave."""
_LOOK_S = 5.0

logger = logging.getLogger("elasticflow.node")


class LeaseWatchdog:
    """``running`` returns the supervisors that hold slots here. Leases count from when they were seen to be renewed."""

    def __init__(
        self, running: Callable[[], Iterable[tuple[ProcessId, SupervisorFolder]]], extra_s: float = EXTRA_S
    ) -> None:
        self._running, self._extra_s = running, extra_s
        self._seen: dict[ProcessId, tuple[int, float]] = {}
        """The time stamp of each lease, and when it was first seen (monotonic)."""

    def start(self) -> None:
        """Look every few seconds, in a thread."""
        threading.Thread(target=self._run, name="leases", daemon=True).start()

    def look(self) -> list[ProcessId]:
        """Kill the supervisors whose lease has ended long ago; return them."""
        now_s = time.monotonic()
        seen: dict[ProcessId, tuple[int, float]] = {}
        killed = []
        for process, folder in self._running():
            try:
                stamp, lease_s = folder.lease.stat().st_mtime_ns, folder.read_spec().lease_s
            except (OSError, ValueError, TypeError, RecursionError):
                continue  # A script has damaged it: its own watchdog has what it needs in memory.
            before = self._seen.get(process)
            seen[process] = before if before is not None and before[0] == stamp else (stamp, now_s)
            if now_s - seen[process][1] > lease_s + self._extra_s:
                logger.warning("%s is killed: its lease has ended %.0f s ago", folder.path, self._extra_s)
                process.kill()
                killed.append(process)
        self._seen = seen
        return killed

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            try:
                self.look()
            except Exception:
                logger.exception("the leases could not be looked at; it is tried again")
