"""A process of the warm pool: it has imported torch and the configured modules, and forks fork servers on request.

The engine runs it as ``python -m elasticflow_airflow.runtime.process.zygote FD MODULE...``, where FD is one end of a
Unix socket pair; it exits when the engine hangs up. Each request is one message with a descriptor: one end of another
socket pair, on which the fork becomes a fork server (see ``forkserver.py``) for the holder of the other end. From then
on the fork is independent of this process and outlives it.

It may do nothing but import, as explained there. If packages were installed since the imports, it exits instead of
serving old code. May import torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from typing import NoReturn

from elasticflow_airflow.runtime.process import forkserver

logger = logging.getLogger(__name__)
EXIT_STALE = 4


def main(descriptor: int, modules: Iterable[str]) -> int:
    """Import, then fork on request until the engine hangs up."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    control = socket.socket(fileno=descriptor)
    _leave_on_hang_up(control)
    stamp = _packages()
    forkserver.import_everything()
    for name in (*forkserver.MORE, *modules):
        _try_import(name)
    gc.collect()
    # Keeps imported objects shared between the forks: the collector would touch, and thereby copy, all of them.
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    logger.info("warm: %d modules, %d threads", len(sys.modules), threads)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) & ~os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the fork servers: the kernel may reap them.
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, forkserver.MAX_MESSAGE, 1)
        if not message:
            return 0
        if _packages() != stamp:
            logger.info("packages were installed or removed since the imports: leaving")
            return EXIT_STALE
        if os.fork() == 0:
            _become_fork_server(control, descriptors[0])
        os.close(descriptors[0])


def _leave_on_hang_up(control: socket.socket) -> None:
    """Exit at once when the engine is gone, even during the imports, which take long and would be useless then."""

    def look(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                os._exit(0)

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    look()


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (any error: the job's own import will show it to its user)
        logger.warning("%s cannot be imported ahead: %s", name, "".join(traceback.format_exception_only(error)).strip())


def _packages() -> dict[str, int]:
    """Return when a package was last installed in or removed from each package folder, by path."""
    folders = [path for path in sys.path if os.path.basename(path).endswith("-packages") and os.path.isdir(path)]
    return {path: os.stat(path).st_mtime_ns for path in folders}


def _become_fork_server(control: socket.socket, descriptor: int) -> NoReturn:
    exit_code = 1
    try:
        control.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        exit_code = forkserver.serve_adopted(socket.socket(fileno=descriptor))
    except BaseException:  # noqa: BLE001  (a fork must never return into the loop of its parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
