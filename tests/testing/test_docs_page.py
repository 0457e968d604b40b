"""The page on testing, followed to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "test-your-dags.md"
COPIED = re.compile(r"^<!-- copy: (\S+) -->\n```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.airflow
@pytest.mark.slow
def test_what_the_page_shows_works(tmp_path, run_pytest):
    found = dict(COPIED.findall(PAGE.read_text()))
    assert set(found) == {"pyproject.toml", "dags/daily.py", "tests/test_daily.py"}
    for name, text in found.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    (tmp_path / "project" / "dags" / "train.py").write_text("no interpreter ever reads this\n")
    assert "4 passed" in run_pytest(tmp_path / "project").stdout


def test_every_argument_and_every_field_is_on_the_page():
    import dataclasses
    import inspect

    from elasticflow_airflow.testing import RunDag, SimulatedTraining

    text = PAGE.read_text()
    for name in inspect.signature(RunDag.__call__).parameters:
        assert name in ("self", "dag", "logical_date", "options") or f"`{name}`" in text or f"`{name}=`" in text, name
    for field in dataclasses.fields(SimulatedTraining):
        assert field.name in text or field.name == "steps_per_s", field.name
