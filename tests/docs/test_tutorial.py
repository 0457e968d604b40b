"""The tutorial, followed to the letter: its script and its DAG, in a new Airflow home."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "tutorial/first-dag.md"
PAGE_TEXT = (ROOT / "docs" / PAGE).read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_dag(newcomer: Any, block: Callable[..., str]) -> None:
    (newcomer.folder / "dags/training/train_digits.py").write_text(block(PAGE, "file: examples/train_digits.py"))
    alone = newcomer.run("python dags/training/train_digits.py")
    assert (newcomer.folder / "elasticflow-checkpoints").is_dir(), alone

    dag = block(PAGE, "run: dag")
    (newcomer.folder / "dags/first_dag.py").write_text(dag)
    output = newcomer.run("python dags/first_dag.py")
    assert re.search(r"loss \d\.\d+, deadline met: True", output), output[-8000:]

    (newcomer.folder / "dags/first_dag.py").write_text(dag.replace("epochs=60,", "epochs=200000,"))
    output = newcomer.run("python dags/first_dag.py")
    assert "earliest feasible deadline" in output, output[-8000:]
    assert "deadline met" not in output

    output = newcomer.run(re.findall(r"^```bash\n(elasticflow.*?)^```", PAGE_TEXT, re.DOTALL | re.MULTILINE)[0])
    assert "no such jobs" not in output
    assert "submitted; its" in output  # of the first run or the second


def test_what_was_typed_is_on_the_page(tutorial_home: str) -> None:
    for command in (tutorial_home, "airflow db migrate", "python dags/first_dag.py"):
        assert f"\n{command}\n" in PAGE_TEXT


def test_the_script_on_the_page_is_the_example(block: Callable[..., str]) -> None:
    assert block(PAGE, "file: examples/train_digits.py") == (ROOT / "docs/examples/train_digits.py").read_text()
