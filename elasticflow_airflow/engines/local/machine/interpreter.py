"""Checks that a training interpreter exists and has torch, once per interpreter and modification time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from elasticflow_airflow.engines.port import EngineError

_CHECK = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else 3)"
_LIMIT_S = 60.0


class InterpreterCheck:
    """Caches the interpreters that passed the check, by path and modification time."""

    def __init__(self) -> None:
        self._good: set[tuple[str, int]] = set()

    def check(self, python: str, env: Mapping[str, str]) -> None:
        """Raise EngineError when workers cannot be started with this interpreter."""
        path = Path(python)
        if not path.is_absolute() or not path.is_file():
            raise EngineError(
                f"python={python!r} is not there. Give the absolute path of an interpreter that has torch, "
                "or leave python= out to use the service's."
            )
        if not os.access(path, os.X_OK):
            raise EngineError(f"python={python!r} may not be executed by uid {os.getuid()}: chmod +x it")
        key = (python, path.stat().st_mtime_ns)
        if key in self._good:
            return
        try:
            found = subprocess.run(
                [python, "-c", _CHECK], env=dict(env), capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"python={python!r} does not run: {error}") from error
        if found.returncode == 3:
            raise EngineError(
                f"the interpreter {python} has no torch. Install it there ({python} -m pip install torch), "
                "or set python= to an interpreter that has it."
            )
        if found.returncode != 0:
            last = found.stderr.strip().splitlines()[-1:] or [f"exit code {found.returncode}"]
            raise EngineError(f"python={python!r} does not work as a Python interpreter: {last[0]}")
        self._good.add(key)
