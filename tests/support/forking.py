"""Workers that are forked from a process that has imported torch: a start takes milliseconds in place of seconds.

As the warm pool of the local engine does it. One server for each set of imports lives as long as the tests do.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, NoReturn

from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV

ALWAYS = ("torch", "torch._dynamo", "torch.utils.data", "elasticflow_airflow.runtime.session")
TRANSFORMERS = ("transformers.trainer", "transformers.models.bert.modeling_bert")
_LOOK_EVERY_S = 0.02
_START_LIMIT_S = 120.0


class ForkedWorker:
    """A worker, with what tests use of :class:`subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    @property
    def returncode(self) -> int | None:
        return self._server.exit_codes.get(self.pid)

    def poll(self) -> int | None:
        """Its exit status; None: it runs."""
        self._server.listen(0.0)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            self._server.listen(1.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks."""

    _known: dict[tuple[str, ...], ForkServer] = {}  # noqa: RUF012  (one for all)

    def __init__(self, imports: tuple[str, ...]) -> None:
        self.exit_codes: dict[int, int] = {}
        self._started: list[int] = []
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forking", *imports],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._process.kill)

    @classmethod
    def of(cls, *imports: str) -> ForkServer:
        """The fork server that has imported these as well."""
        if imports not in cls._known:
            cls._known[imports] = cls((*ALWAYS, *imports))
        return cls._known[imports]

    def start(self, env: dict[str, str], log: Path) -> ForkedWorker:
        """Start a worker with exactly this environment, whose output is added to a file."""
        stdin: IO[bytes] = self._process.stdin  # type: ignore[assignment]  # it is a pipe
        stdin.write(json.dumps({"env": env, "log": str(log)}).encode() + b"\n")
        stdin.flush()
        end_s = time.monotonic() + _START_LIMIT_S
        while not self._started:
            assert time.monotonic() < end_s, "the fork server does not answer"
            self.listen(1.0)
        return ForkedWorker(self, self._started.pop())

    def listen(self, limit_s: float) -> None:
        """Take in what has been said; wait so long for something."""
        said: Any = self._process.stdout
        while select.select([said], [], [], limit_s)[0]:
            more = os.read(said.fileno(), 65536)
            assert more, f"the fork server has ended: {self._process.wait()}"
            *lines, self._rest = (self._rest + more).split(b"\n")
            for line in lines:
                word, pid, *code = line.split()
                if word == b"started":
                    self.exit_codes.pop(int(pid), None)  # of somebody else, long ago
                    self._started.append(int(pid))
                else:
                    self.exit_codes[int(pid)] = int(code[0])
            limit_s = 0.0


def serve() -> None:
    """Import, then fork for each line of standard input, until it ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # the collector would touch, and thereby copy, what the forks share
    fork = multiprocessing.get_context("fork")
    children: dict[int, Any] = {}
    requests = b""
    while True:
        if select.select([0], [], [], _LOOK_EVERY_S if children else None)[0]:
            more = os.read(0, 65536)
            if not more:
                break
            *lines, requests = (requests + more).split(b"\n")
            for line in lines:
                child = fork.Process(target=_work, kwargs=json.loads(line))
                child.start()
                assert child.pid is not None  # it was started
                children[child.pid] = child
                _say(f"started {child.pid}")
        for pid in [pid for pid, child in children.items() if child.exitcode is not None]:
            _say(f"ended {pid} {children.pop(pid).exitcode}")
    for child in children.values():
        child.kill()


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def _work(env: dict[str, str], log: str) -> NoReturn:
    """Be ``python -m elasticflow_airflow.runtime.bootstrap`` with this environment."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update({**env, PARENT_ENV: str(os.getppid())})
    from elasticflow_airflow.runtime import bootstrap

    code = bootstrap.main()
    if bootstrap.leave_abruptly:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    serve()
