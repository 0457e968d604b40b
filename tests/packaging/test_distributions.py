"""Wheel, sdist and editable install give the same imports, and never a top-level package that is not ours to take."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

USERS_PROGRAM = """
import sys
import operators, dags
assert operators.WHOSE == dags.WHOSE == "the user's", operators.__file__
import elasticflow_airflow.operators, elasticflow_airflow.scheduler_core.model.values
from elasticflow_airflow.operators import ElasticTrainOperator
assert ElasticTrainOperator.__module__.startswith("elasticflow_airflow.operators"), ElasticTrainOperator.__module__
print(elasticflow_airflow.operators.__file__)
"""


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist()}


def test_the_wheel_installs_one_top_level_package(wheel: Path) -> None:
    top = {name.split("/")[0] for name in contents(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"elasticflow_airflow"}


def test_the_wheel_holds_what_is_not_python(wheel: Path) -> None:
    names = contents(wheel)
    assert "elasticflow_airflow/py.typed" in names
    assert any(name.startswith("elasticflow_airflow/service/store/migrations/versions/") for name in names)
    assert "elasticflow_airflow/operators/elastic_train.py" in names
    assert "elasticflow_airflow/scheduler_core/scheduler.py" in names


def test_the_sdist_builds_the_same_wheel(wheel: Path, wheel_of_sdist: Path) -> None:
    assert contents(wheel) == contents(wheel_of_sdist)


@pytest.fixture
def users_project(tmp_path: Path) -> Path:
    """A project as Airflow users have it: folders ``operators/`` and ``dags/`` of their own."""
    project = tmp_path / "project"
    for name in ("operators", "dags"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text('WHOSE = "the user\'s"\n')
    return project


def run_users_program(python: Path, project: Path) -> Path:
    done = subprocess.run([str(python), "-c", USERS_PROGRAM], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


def venv_beside_ours(where: Path) -> Path:
    """A fresh environment that sees our dependencies, but not our own editable install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(where)], check=True)
    ours = Path(next(p for p in sys.path if p.endswith("site-packages")))
    links = next((where / "lib").iterdir()) / "site-packages"
    for entry in ours.iterdir():
        if "elasticflow" not in entry.name and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    return where / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])  # the sdist's is the same wheel
def test_beside_a_users_own_operators(
    kind: str, users_project: Path, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = venv_beside_ours(tmp_path / "venv")
    what = ["--editable", str(source)] if kind == "editable" else [str(request.getfixturevalue(kind))]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*install, *what],
        check=True,
        capture_output=True,
    )
    found = run_users_program(python, users_project)
    inside = source if kind == "editable" else tmp_path / "venv"
    assert found.resolve().is_relative_to(inside.resolve())
