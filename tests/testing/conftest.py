"""Pytest in a process of its own, as users run it: in a folder of theirs, with the plugin, without what is ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_LIMIT_S = 900.0

RunPytest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where those processes keep temporary files, homes among them; short, as sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="ef-t-") as folder:
        yield Path(folder)


@pytest.fixture
def run_pytest(temporary: Path) -> RunPytest:
    """Run pytest in a folder; with ``succeeds`` (default) its output is the failure when it does not."""

    def run(folder: Path, *arguments: str, succeeds: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTEST_"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "--show-capture=no", *arguments],
            cwd=folder,
            env={**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(temporary), **env},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        said = done.stdout[-12_000:] + done.stderr[-4_000:]
        assert (done.returncode == 0) is succeeds, said
        return done

    return run
