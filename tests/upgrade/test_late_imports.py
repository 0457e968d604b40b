"""What a process of the release before imports late comes from the new one, which has taken the other's place."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import elasticflow_airflow

HERE = Path(__file__).parent
NEW = Path(elasticflow_airflow.__file__).resolve().parent
NAMES = json.loads((HERE.parent / "packaging/public_names.json").read_text())["imported_late_by_running_workers"]
BEFORE_THERE_IS_A_SESSION = ("elasticflow_airflow.runtime.lightning", "elasticflow_airflow.runtime.transformers")
OLD_PROCESS = """
import importlib, os, sys
from pathlib import Path

# An editable installation would come before the path.
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", "") != "editables.redirector"]

import elasticflow_airflow.runtime.bootstrap as bootstrap
from elasticflow_airflow import runtime
import elasticflow_airflow.runtime.session

assert "elasticflow_airflow.runtime.machinery" in sys.modules, "the release before has it"
link, new, begun, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "begun", sys.argv[4:]
link.with_name("next").symlink_to(new)
os.replace(link.with_name("next"), link)
importlib.invalidate_caches()
bootstrap.session_initialised = begun
for name in names:
    module, _, attribute = name.partition(":")
    assert hasattr(importlib.import_module(module), attribute), name
"""


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """The package as workers find it: a link, to the release before."""
    (wheel,) = (HERE / "release_before").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "before")
    found = tmp_path / "path/elasticflow_airflow"
    found.parent.mkdir()
    found.symlink_to(tmp_path / "before/elasticflow_airflow")
    return found


def upgrade_under(link: Path, state: str, *names: str, then: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", OLD_PROCESS + then, str(link), str(NEW), state, *names],
        env={"PYTHONPATH": str(link.parent), "PATH": "/usr/bin:/bin", "HOME": str(link.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_a_worker_that_trains_finds_what_it_asks_for(link: Path) -> None:
    done = upgrade_under(link, "begun", *NAMES)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_store_that_is_opened_late_raises_what_the_session_knows(link: Path) -> None:
    then = """
from elasticflow_airflow.runtime.remote import RemoteStore
import elasticflow_airflow.runtime.manifest as known
assert sys.modules[RemoteStore.__module__].CheckpointError is known.CheckpointError
"""
    done = upgrade_under(link, "begun", then=then)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("module", BEFORE_THERE_IS_A_SESSION)
def test_a_fork_that_has_no_session_yet_imports_all_of_it_anew(link: Path, module: str) -> None:
    library = module.rpartition(".")[2]
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install elasticflow-airflow[{library}]")
    name = "ElasticTrainer" if library == "transformers" else "ElasticStrategy"
    then = """
from elasticflow_airflow.runtime.session import Session
assert runtime.Session is Session
assert Path(sys.modules["elasticflow_airflow.runtime.session"].__file__).resolve().is_relative_to(new)
assert sys.modules["elasticflow_airflow.runtime.session_core"].bootstrap is bootstrap
"""
    done = upgrade_under(link, "prepared", f"{module}:{name}", then=then)
    assert done.returncode == 0, done.stderr[-2000:]
    begun = upgrade_under(link, "begun", f"{module}:{name}")
    assert begun.returncode != 0
