"""The supervisor's side of the fork server: asks for agents, hears of their pids and ends. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticflow_airflow.runtime.shim import PARENT_ENV

_MAX_MESSAGE = 4096


class ForkServer:
    """One per supervisor; it ends with it. ``pids`` and ``exit_codes`` are by worker id, as far as heard."""

    def __init__(self, python: str, env: Mapping[str, str], cwd: Path, output: int) -> None:
        """Start it, from the main thread: its life is tied to the thread that spawns it."""
        self.pids: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}
        self.warm = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "elasticflow_airflow.runtime.forkserver", str(theirs.fileno())],
                env={**env, PARENT_ENV: str(os.getpid())},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._asked: list[str] = []

    @property
    def pid(self) -> int:
        """Pid of the server."""
        return self._process.pid

    def ask(self, worker_id: str, arguments: Sequence[str], env: Mapping[str, str], output: int) -> None:
        """Ask for an agent; the request waits in the socket until the imports are done."""
        request = {"worker_id": worker_id, "arguments": list(arguments), "env": dict(env)}
        self._asked.append(worker_id)
        # A server that has died already shows in poll(), with the exit status that tells more.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [json.dumps(request).encode()], [output])

    def poll(self) -> None:
        """Take in what the server has said; when it died, its agents died with it."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while message := self._channel.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT):
                answer = json.loads(message)
                if "warm" in answer:
                    self.warm = True
                    continue
                known = self.pids if "pid" in answer else self.exit_codes
                known[answer["worker_id"]] = answer.get("pid", answer.get("exit_code"))
        code = self._process.poll()
        if code is not None:
            self.warm = True  # As warm as it will ever be: nobody should wait for it.
            for worker_id in self._asked:
                # Agents got SIGKILL from the kernel; without an agent, the server's own end is what there is to tell.
                self.exit_codes.setdefault(worker_id, -9 if worker_id in self.pids else code or 1)

    def kill(self) -> None:
        """End it, and every agent with it."""
        self._process.kill()

    def close(self) -> None:
        """All agents have ended: hang up and wait for its end."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
