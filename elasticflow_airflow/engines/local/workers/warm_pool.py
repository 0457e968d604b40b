"""The warm pool: processes that have imported torch and the configured modules in advance.

A job that starts from the pool saves its import time, at its start and at every change of its workers. One process
(``zygote.py`` of the runtime) serves all jobs with the same interpreter and the same values of the variables that
imports may read. It lives as long as the engine that started it; its forks outlive it. Part of the local engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEEP = 3
"""Maximum number of processes in the pool; the least recently used one is ended first."""
_MATTERS = (
    *("PYTHON", "LD_", "OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "CUDA_", "TORCH", "PYTORCH_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "USE_", "HOME", "XDG_", "TZ", "LC_", "LANG"),
)
"""Prefixes of variables that imports may read; all others can be set later, by the job."""
_SET_LATER = frozenset({"CUDA_VISIBLE_DEVICES", "HF_TOKEN"})
"""Read only when a device or the hub is first used."""

Key = tuple[str, int, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Zygote:
    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> None:
        """Hang up, kill the process and wait for its end: it only imports, so it can be killed at any time."""
        self.control.close()
        self.process.kill()
        self.process.wait()


class WarmPool:
    """Hands out fork servers. ``modules`` are imported in advance, besides torch; ``folder`` holds the logs.

    Not thread-safe: the engine's lock guards it.
    """

    def __init__(self, modules: Sequence[str], folder: Path) -> None:
        self._modules, self._folder = tuple(modules), folder
        own = {name.partition(".")[0].upper() + "_" for name in modules}
        self._matters = (*_MATTERS, *sorted(own))
        self._zygotes: dict[Key, _Zygote] = {}

    def warm(self, python: str, env: Mapping[str, str]) -> None:
        """Start a process for this interpreter and environment, if there is none yet."""
        self._zygote(self._key(python, env), env)

    def take(self, python: str, env: Mapping[str, str], secrets: Iterable[str] = ()) -> socket.socket | None:
        """Return a channel to a fork server of the pool (see ``forking.py``); None when the pool cannot provide one.

        ``env`` is the workers' environment without secrets, of which only the names matter here.
        """
        if any(self._is_read_by_imports(name) for name in secrets):
            return None
        zygote = self._zygote(self._key(python, env), env)
        if zygote is None:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(zygote.control, [b"fork"], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                ours.close()  # It has just died, or hangs: the supervisor does the imports itself.
                return None
        return ours

    def close(self) -> None:
        """End the processes of the pool; their forks continue."""
        for zygote in self._zygotes.values():
            zygote.end()
        self._zygotes.clear()

    def _zygote(self, key: Key, env: Mapping[str, str]) -> _Zygote | None:
        for known in [k for k, zygote in self._zygotes.items() if zygote.process.poll() is not None]:
            self._zygotes.pop(known).end()
        zygote = self._zygotes.pop(key, None)
        if zygote is None:
            try:
                zygote = self._start(key[0], env)
            except OSError:
                return None  # Jobs start without a pool, too, and then report what is wrong with the interpreter.
        self._zygotes[key] = zygote  # the newest last
        while len(self._zygotes) > KEEP:
            self._zygotes.pop(next(iter(self._zygotes))).end()
        return zygote

    def _start(self, python: str, env: Mapping[str, str]) -> _Zygote:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = {name: value for name, value in env.items() if name not in _SET_LATER}
        with theirs, (self._folder / "pool.log").open("ab") as log:
            try:
                process = subprocess.Popen(
                    [python, "-m", "elasticflow_airflow.runtime.process.zygote", str(theirs.fileno()), *self._modules],
                    # The variable that marks leftover processes of workers.
                    env={**plain, "ELASTICFLOW_CORES": "", "CUDA_VISIBLE_DEVICES": ""},
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        return _Zygote(process, ours)

    def _key(self, python: str, env: Mapping[str, str]) -> Key:
        stamp = 0
        with contextlib.suppress(OSError):
            stamp = os.stat(python).st_mtime_ns
        matters = {name: value for name, value in env.items() if self._is_read_by_imports(name)}
        return python, stamp, tuple(sorted(matters.items()))

    def _is_read_by_imports(self, name: str) -> bool:
        return name.startswith(self._matters) and name not in _SET_LATER
