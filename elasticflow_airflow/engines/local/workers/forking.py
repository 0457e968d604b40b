"""Supervisor's side of the fork server: requests agents, receives their pids and exits. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticflow_airflow.engines.local.machine.processes import ProcessId, cpu_seconds
from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV

_MAX_MESSAGE = 4096
_CLOSE_LIMIT_S = 10.0


class ForkServer:
    """A supervisor's fork server, which ends with it. ``pids`` and ``exit_codes`` are by worker id, as far as received.

    ``adopted`` is a channel to a server provided by the warm pool. Such a server is not our child, so its exit status
    is unknown; it ends when our end of the channel closes. One that ends before it was ``warm`` is ``useless``: no
    agent should be requested from it.
    """

    def __init__(
        self, python: str, env: Mapping[str, str], cwd: Path, output: int, adopted: socket.socket | None = None
    ) -> None:
        """Start the server. Call this in the main thread: the server's life is tied to the thread that spawns it."""
        self.pids: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}
        self.warm = self.useless = False
        self._asked: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._identity: ProcessId | None = None
        if adopted is not None:
            self._channel = adopted
            self._send({"env": dict(env), "cwd": str(cwd)}, output)
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "elasticflow_airflow.runtime.process.forkserver", str(theirs.fileno())],
                env={**env, PARENT_ENV: str(os.getpid())},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def is_adopted(self) -> bool:
        """Whether the server is from the warm pool."""
        return self._process is None

    @property
    def pid(self) -> int | None:
        """Pid of the server; None while unknown."""
        if self._process is not None:
            return self._process.pid
        return None if self._identity is None else self._identity.pid

    @property
    def cpu_s(self) -> float:
        """CPU time of the server so far, in seconds; 0 while its pid is unknown."""
        return 0.0 if self.pid is None else cpu_seconds(self.pid)

    def ask(self, worker_id: str, arguments: Sequence[str], env: Mapping[str, str], output: int) -> None:
        """Request an agent; the request waits in the socket until the imports are done."""
        self._asked.append(worker_id)
        self._send({"worker_id": worker_id, "arguments": list(arguments), "env": dict(env)}, output)

    def poll(self) -> None:
        """Process the server's messages. When the server has died, its agents have died with it."""
        hung_up = self._take_in()
        code = self._process.poll() if self._process is not None else (-9 if hung_up else None)
        if code is not None:
            self.useless = self.is_adopted and not self.warm
            self.warm = True  # It will never get warmer: callers should not wait for it.
            for worker_id in self._asked:
                # The kernel killed the agents (SIGKILL). For workers without one, report the server's exit code.
                self.exit_codes.setdefault(worker_id, -9 if worker_id in self.pids else code or 1)

    def kill(self) -> None:
        """Kill the server, and every agent with it."""
        if self._process is not None:
            self._process.kill()
        elif self._identity is not None:
            self._identity.kill()
        else:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and wait for the server's end. All agents must have ended."""
        if self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            return
        # It ends the workers' leftover processes and then itself.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        end_s = time.monotonic() + _CLOSE_LIMIT_S
        while self._identity is not None and self._identity.is_alive() and time.monotonic() < end_s:
            select.select([], [], [], 0.01)
        self.kill()
        self._channel.close()

    def _take_in(self) -> bool:
        """Read all pending messages; return True when the other side has hung up."""
        while True:
            try:
                message = self._channel.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            if not message:
                return True
            answer = json.loads(message)
            if "warm" in answer:
                self.warm = True
                self._identity = ProcessId.of(answer["warm"])
                continue
            known = self.pids if "pid" in answer else self.exit_codes
            known[answer["worker_id"]] = answer.get("pid", answer.get("exit_code"))

    def _send(self, message: Mapping[str, object], descriptor: int) -> None:
        # A dead server is detected by poll(), whose exit status is more informative.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [json.dumps(message).encode()], [descriptor])
