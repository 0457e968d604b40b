"""``run_dag`` as users have it: in a pytest of its own, twice at once, and nothing is left of either."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
PROJECT = """
[tool.pytest.ini_options]
addopts = ["-p", "elasticflow_airflow.testing", "--strict-markers"]
"""

REJECTED = """
from datetime import timedelta
from airflow.sdk import DAG
from elasticflow_airflow.operators import ElasticTrainOperator

def dag_of(dag_id, deadline):
    common = {"task_id": "train", "script": __file__, "steps": 36_000, "global_batch_size": 8}
    with DAG(dag_id, schedule=None) as dag:
        ElasticTrainOperator(**common, deadline=deadline, scaling_curve={1: 1.0})
    return dag

def test_fine(run_dag):
    assert run_dag(dag_of("fine", timedelta(days=1))).succeeded

def test_hopeless(run_dag):
    result = run_dag(dag_of("hopeless", timedelta(minutes=10)))
    assert result.succeeded, result
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


@pytest.mark.airflow
@pytest.mark.slow
def test_the_cases_of_users_hold_in_two_workers_at_once_and_nothing_is_left(project, tmp_path, run_pytest):
    shutil.copy(HERE / "run_dag_cases.py", project / "test_cases.py")
    done = run_pytest(project, "-n", "2", HOMES_SEEN=str(tmp_path / "homes"))
    assert " passed" in done.stdout
    homes = set((tmp_path / "homes").read_text().split())
    assert len(homes) == 2, "each worker has a home of its own"
    assert not [home for home in homes if Path(home).exists()]
    left = [
        p.info for p in psutil.process_iter(["cmdline"]) if any(h in " ".join(p.info["cmdline"] or ()) for h in homes)
    ]
    assert not left
    assert list((project / ".pytest_cache").rglob("airflow-*.db")), "the next session copies the migrated database"


@pytest.mark.airflow
@pytest.mark.slow
def test_a_test_that_fails_shows_why_a_job_was_rejected(project, run_pytest):
    (project / "test_rejected.py").write_text(REJECTED)
    done = run_pytest(project, "-q", succeeds=False)
    assert "- run of DAG hopeless -" in done.stdout
    assert "earliest feasible deadline" in done.stdout
    assert "rejected: hopeless even with the cluster to itself" in done.stdout
    assert "run of DAG fine" not in done.stdout, "of a test that passed, nothing is shown"


def test_airflow_that_is_imported_first_is_refused_and_the_message_says_where_to_load_the_plugin(project, run_pytest):
    (project / "early.py").write_text("import sys\nsys.modules['airflow.configuration'] = sys\n")
    (project / "test_nothing.py").write_text("def test_nothing(): ...\n")
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    done = run_pytest(project, "-p", "early", "-p", "elasticflow_airflow.testing", succeeds=False, PYTHONPATH=".")
    said = done.stdout + done.stderr
    assert "Airflow was imported before elasticflow_airflow.testing" in said
    assert 'addopts = ["-p", "elasticflow_airflow.testing"]' in said


@pytest.mark.slow
def test_homes_are_where_a_socket_finds_room_however_long_the_folder_for_temporary_files_is(
    project, temporary, run_pytest
):
    (project / "test_short.py").write_text(
        "def test_short(airflow_home):\n    assert len(str(airflow_home / 'local16' / 'service.sock')) <= 107\n"
    )
    long = temporary / ("long" * 25)
    long.mkdir()
    run_pytest(project, TMPDIR=str(long))
    assert not list(long.glob("ef-test-*"))


def test_loading_the_plugin_imports_no_airflow_and_no_torch(project, run_pytest):
    (project / "test_light.py").write_text(
        "import os, sys\n"
        "def test_light(airflow_home):\n"
        "    assert not {'torch', 'airflow.configuration', 'airflow.sdk'} & set(sys.modules)\n"
        "    assert os.environ['AIRFLOW_HOME'] == str(airflow_home)\n"
        "    assert 'AIRFLOW__SECRETS__BACKEND' not in os.environ\n"
        "    assert 'ELASTICFLOW_POLICY' not in os.environ\n"
    )
    run_pytest(project, AIRFLOW__SECRETS__BACKEND="somewhere.Real", ELASTICFLOW_POLICY="fifo", AIRFLOW_HOME="/nowhere")


@pytest.mark.slow
def test_a_home_whose_process_was_killed_is_removed_by_the_next(project, temporary, run_pytest):
    abandoned = temporary / "ef-test-abandoned"
    abandoned.mkdir()
    (abandoned / "in-use.lock").touch()
    (abandoned / "airflow.db").write_text("{}")
    os.utime(abandoned, (1_000_000_000, 1_000_000_000))
    (project / "test_nothing.py").write_text("def test_nothing(airflow_home): ...\n")
    run_pytest(project)
    assert not abandoned.exists()
