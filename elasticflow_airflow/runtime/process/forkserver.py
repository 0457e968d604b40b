"""A process that has imported torch and forks torchrun agents on request: one import for all workers of a supervisor.

The supervisor runs it as ``python -m elasticflow_airflow.runtime.process.forkserver FD``, where FD is one end of a Unix
socket pair; or a process of the warm pool (``zygote.py``), which has done the imports for many, forks it. Each request
is one JSON message with the descriptor of the worker's output. Each answer is one JSON message: ``{"warm"}`` (the pid)
when the imports are done, ``{"worker_id", "pid"}`` when a worker's agent was forked, ``{"worker_id", "exit_code"}``
when it ended. A fork of the pool first gets ``{"env", "cwd"}``, with the descriptor for its own output.

It may do nothing but import: a process that has run a parallel operation or touched CUDA must not be forked. May
import torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV, die_with_parent

MAX_MESSAGE = 128 * 1024
MORE = (
    "torch.utils.data",
    "elasticflow_airflow.runtime.session",
    "torch._dynamo",  # Every optimizer imports it at its first step, which takes a second.
)
"""Imported only while no agent is requested. They start no threads and do not read the worker's environment."""


_PR_SET_CHILD_SUBREAPER = 36
_END_LIMIT_S = 10.0


def main(descriptor: int) -> int:
    """Import, then serve until the supervisor hangs up."""
    die_with_parent(int(os.environ[PARENT_ENV]))
    channel = socket.socket(fileno=descriptor)
    import_everything()
    _import_more_while_idle(channel)
    # Keeps imported objects shared between the forks: the collector would touch, and thereby copy, all of them.
    gc.freeze()
    return _serve(channel)


def serve_adopted(channel: socket.socket) -> int:
    """Serve a supervisor that is not the parent: its end of the channel closes when it dies, for any reason.

    Processes that the workers leave behind become children of this process, not of the supervisor, and are killed here.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1)
    if not message:
        return 0
    setup = json.loads(message)
    for number in (1, 2):
        os.dup2(descriptors[0], number)
    os.close(descriptors[0])
    os.environ.clear()
    os.environ.update(setup["env"])
    os.chdir(setup["cwd"])
    exit_code = _serve(channel)
    _end_children()
    return exit_code


def _serve(channel: socket.socket) -> int:
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, str] = {}
    _send(channel, {"warm": os.getpid()})
    while True:
        ready, _, _ = select.select([channel.fileno(), read_end], [], [])
        if read_end in ready:
            os.read(read_end, 1024)
            _report_ended(channel, children)
        if channel.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1)
            if not message:
                return 0
            request = json.loads(message)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                _become_agent(request, descriptors[0], (channel.fileno(), read_end, write_end))
            os.close(descriptors[0])
            children[pid] = request["worker_id"]
            _send(channel, {"worker_id": request["worker_id"], "pid": pid})


def import_everything() -> None:
    """Import the modules that all agents and trainers need."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.multiprocessing.errors
    import torch.distributed.run  # noqa: F401

    import elasticflow_airflow.runtime.agent
    import elasticflow_airflow.runtime.bootstrap
    import elasticflow_airflow.runtime.rendezvous  # noqa: F401


def _import_more_while_idle(channel: socket.socket) -> None:
    """Import what nearly every script needs, until a request arrives: the previous generation may still be saving."""
    for name in MORE:
        ready, _, _ = select.select([channel.fileno()], [], [], 0)
        if ready:
            return
        importlib.import_module(name)


def _report_ended(channel: socket.socket, children: dict[int, str]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        worker_id = children.pop(pid, None)  # None: a process that a worker left behind
        if worker_id is not None:
            _send(channel, {"worker_id": worker_id, "exit_code": os.waitstatus_to_exitcode(status)})


def _end_children() -> None:
    """Kill the agents, and the processes orphaned by that, until none are left."""
    end_s = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < end_s:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)  # our own child, which only we wait for: the pid is still its own
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    # A peer that has hung up is detected at the next read, which ends everything.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(json.dumps(message).encode())


def _become_agent(request: dict[str, Any], output: int, private: tuple[int, ...]) -> NoReturn:
    """Turn the fork into what a freshly started ``python -m elasticflow_airflow.runtime.agent`` would be."""
    exit_code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in (output, *private):
            os.close(descriptor)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(request["env"])
        os.environ[PARENT_ENV] = str(os.getppid())
        from elasticflow_airflow.runtime import agent

        sys.argv = ["torchrun", *request["arguments"]]
        exit_code = agent.main(request["arguments"])
    except BaseException:  # noqa: BLE001  (a fork must never return into the server's loop)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
