"""The example project passes its own tests, copied to where a user would have it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "retraining-project"


@pytest.mark.airflow
@pytest.mark.slow
def test_the_example_project_passes_its_own_tests(tmp_path, run_pytest):
    project = tmp_path / "retraining-project"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    done = run_pytest(project)  # where there is no torch, the one that really trains skips
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
