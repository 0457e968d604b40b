"""One warm pool for the engines and node agents of all tests of a process: it imports torch once for all of them.

What is forked is what the pool of a user's engine forks. What depends on workers that import for themselves, the
default, is tested on benches without a pool.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elasticflow_airflow.engines.local.inherited_variables import worker_environment
from elasticflow_airflow.engines.local.workers.warm_pool import Key, WarmPool, _Zygote

LENT_ENV = "SHARED_POOL_FD"
LENT_FOR_ENV = "SHARED_POOL_KEY"
"""Where a node agent finds the channel to the process that forks for it, and for which environment it does."""


class SharedPool(WarmPool):
    """Outlives its engines; for the tests' own interpreter only. Every engine's path to the package is the same one."""

    def take(self, python: str, env: Mapping[str, str], secrets: Iterable[str] = ()) -> socket.socket | None:
        return super().take(python, env, secrets) if _serves(python, env) else None

    def close(self) -> None:
        """It is shared: what it has imported serves the next engine. Its processes end with this one."""

    def lend(self, threads: Mapping[str, str]) -> tuple[socket.socket, str]:
        """Return the channel to a process that forks for a node agent, and for which environment it does.

        ``threads``: what limits the threads of the agent's workers.
        """
        env = worker_environment(os.environ, {}, "") | threads
        key = self._key(sys.executable, env)
        zygote = self._zygote(key, env)
        assert zygote is not None  # the interpreter is there
        return zygote.control, json.dumps(key)

    def _start(self, python: str, env: Mapping[str, str]) -> _Zygote:
        return super()._start(python, {name: value for name, value in env.items() if name != "PYTHONPATH"})

    def _key(self, python: str, env: Mapping[str, str]) -> Key:
        return super()._key(python, {name: value for name, value in env.items() if name != "PYTHONPATH"})


class LentPool(SharedPool):
    """The pool of a node agent: one process of the tests' pool."""

    def __init__(self, modules: Sequence[str], folder: Path) -> None:
        super().__init__(modules, folder)
        self._control = socket.socket(fileno=int(os.environ.pop(LENT_ENV)))
        self._of = os.environ.pop(LENT_FOR_ENV)

    def warm(self, python: str, env: Mapping[str, str]) -> None:
        """It is."""

    def take(self, python: str, env: Mapping[str, str], secrets: Iterable[str] = ()) -> socket.socket | None:
        known = _serves(python, env) and json.dumps(self._key(python, env)) == self._of
        if not known or any(self._is_read_by_imports(name) for name in secrets):
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                ours.close()
                return None
        return ours


def _serves(python: str, env: Mapping[str, str]) -> bool:
    return python == sys.executable and ":" not in env.get("PYTHONPATH", "")


@functools.cache
def shared_pool() -> SharedPool:
    """Return the pool of this process."""
    folder = tempfile.mkdtemp(prefix="ef-pool-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SharedPool((), Path(folder))


def run_agent() -> None:
    """Be ``elasticflow node``, with what was lent."""
    from elasticflow_airflow.cli.main import main
    from elasticflow_airflow.engines.cluster import node_agent

    node_agent.WarmPool = LentPool  # type: ignore[misc]  # that of the tests
    main()


if __name__ == "__main__":
    run_agent()
