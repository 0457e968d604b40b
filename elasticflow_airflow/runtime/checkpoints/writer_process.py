"""The trainer's side of the checkpoint writer process: starts it, sends it work and receives the results.

The writer is a fresh interpreter, never a fork, because a trainer has threads and perhaps CUDA. May import the
standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.checkpoints.writer import MESSAGE_BYTES

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_LEAVE_LIMIT_S = 10.0


class WriterDiedError(RuntimeError):
    """The writer exited or was killed; its unfinished writes are lost."""


class WriterProcess:
    """One writer process. Raises OSError if it cannot be started."""

    def __init__(self, nice: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # PDEATHSIG is sent when the *thread* that started the process ends.
        dies_with_thread = threading.current_thread() is threading.main_thread()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(nice), str(int(dies_with_thread))]
        path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "elasticflow_airflow.runtime.checkpoints.writer", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send one message, with the descriptor of new shared memory if there is any. Raises WriterDiedError."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], [] if descriptor is None else [descriptor])
        except OSError as error:
            raise WriterDiedError(self._how_it_ended()) from error

    def receive(self, limit_s: float | None) -> dict[str, Any] | None:
        """Return the next answer, or None if there is none within the limit. Raises WriterDiedError."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
            try:
                raw = self._socket.recv(MESSAGE_BYTES)
            except OSError as error:
                raise WriterDiedError(self._how_it_ended()) from error
            if not raw:
                raise WriterDiedError(self._how_it_ended())
            answer: dict[str, Any] = json.loads(raw)
            return answer

    def close(self) -> None:
        """Close the connection and wait for the writer to exit; unfinished work is dropped.

        One that waits for storage that hangs cannot be killed; it ends as soon as the storage answers.
        """
        self._socket.close()
        try:
            self._process.wait(_LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_LIMIT_S)

    def abandon(self) -> None:
        """Kill the writer without waiting for its end; ``close`` waits."""
        self._process.kill()

    def has_gone(self) -> bool:
        """Return whether an abandoned writer has ended; if so, its resources are released."""
        if self._process.poll() is None:
            return False
        self._socket.close()
        return True

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_LIMIT_S)
        return f"the process that writes checkpoints has ended (status {self._process.returncode})"
