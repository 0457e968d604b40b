"""A newcomer's machine for pages that are followed to the letter: an Airflow home, and whatever the page starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HOME = "export AIRFLOW_HOME=$PWD/airflow AIRFLOW__CORE__DAGS_FOLDER=$PWD/dags AIRFLOW__CORE__LOAD_EXAMPLES=False"
"""As the tutorial has it."""


def block_of(page: str, what: str, language: str = "python") -> str:
    """The block of a page below ``docs/`` that a comment ``<!-- what -->`` precedes."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"^<!-- {re.escape(what)} -->\n+```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no {language} block after <!-- {what} -->"
    return found[1]


@pytest.fixture(scope="session")
def block() -> Callable[..., str]:
    return block_of


@pytest.fixture(scope="session")
def tutorial_home() -> str:
    return HOME


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Somebody in a folder with a shell."""

    folder: Path

    def run(self, commands: str) -> str:
        """Type commands, in a shell with the tutorial's settings; returns what is shown. They must succeed."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "ELASTICFLOW", "PYTEST"))},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "ELASTICFLOW_SLOTS": "2",
            "ELASTICFLOW_SLOT_LOCK_DIR": str(self.folder / "slots"),
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{HOME}\n{commands}"],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=580,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-12000:]
        return done.stdout


@pytest.fixture(scope="session")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """A folder with the tutorial's Airflow home, migrated; the service that tasks start there is gone at the end."""
    folder = tmp_path_factory.mktemp("newcomer")
    somebody = Newcomer(folder)
    (folder / "dags/training").mkdir(parents=True)
    somebody.run("airflow db migrate")
    yield somebody
    card = folder / "airflow/elasticflow/service.json"
    if card.exists() and psutil.pid_exists(pid := json.loads(card.read_text())["pid"]):
        service = psutil.Process(pid)
        service.send_signal(signal.SIGTERM)
        try:
            service.wait(30)
        except psutil.TimeoutExpired:
            service.kill()
            service.wait(10)
