"""A thread in each worker that follows the membership plan and writes a heartbeat about every second.

May import the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elasticflow_airflow.runtime.protocol import Membership, heartbeat_path, membership_path, write_json_atomic

_POLL_S = 0.02
_HEARTBEAT_S = 1.0


class PlanWatcher:
    """Calls ``on_plan`` (in its thread) with each new plan. ``phase`` and ``step`` are written to the heartbeat."""

    def __init__(self, folder: Path, worker_id: str, on_plan: Callable[[Membership], None]) -> None:
        self._path, self._folder = membership_path(folder), folder
        self._heartbeat = heartbeat_path(folder, worker_id)
        self._on_plan = on_plan
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.phase, self.step = "start", 0
        self._seen: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="elasticflow-plan", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def look(self) -> None:
        """Check the plan at once, in the caller's thread; costs one ``stat`` while nothing changes."""
        # The thread reports read errors and retries; they are no reason to abort a step.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._look()

    def _run(self) -> None:
        beaten_s = -_HEARTBEAT_S
        while not self._stopped.is_set():
            try:
                self._look()
                if time.monotonic() - beaten_s >= _HEARTBEAT_S:
                    beaten_s = time.monotonic()
                    self._beat()
            except FileNotFoundError:
                pass  # not written yet, or the whole folder is being removed
            except Exception as error:  # noqa: BLE001  (without this thread no change would be seen: report and go on)
                sys.stderr.write(f"elasticflow: the membership plan could not be followed: {error!r}\n")
                self._stopped.wait(1.0)
            self._stopped.wait(_POLL_S)

    def _look(self) -> None:
        with self._lock:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp == self._seen:
                return
            plan = Membership.read(self._folder)
            if plan is not None:
                self._on_plan(plan)
            self._seen = stamp

    def _beat(self) -> None:
        beat = {"step": self.step, "phase": self.phase, "at_s": time.time(), "pid": os.getpid()}
        write_json_atomic(self._heartbeat, beat, flush=False)
