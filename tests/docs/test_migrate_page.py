"""A team's torchrun script becomes a task with a deadline by changing the operator only: both DAGs really run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = "how-to/migrate.md"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_the_operator_changes(newcomer: Any, block: Callable[..., str]) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
    before, operator = block(PAGE, "run: before"), block(PAGE, "run: after")
    head, train = operator.split("train = ")
    begin, end = before.index("    train = BashOperator("), before.index("    @task")
    indented = "".join(f"    {line}" for line in f"train = {train}".splitlines(keepends=True))
    after = head + before[:begin] + indented + "\n" + before[end:]
    after = after.replace("from airflow.providers.standard.operators.bash import BashOperator\n", "")
    assert "torchrun" in before
    assert "torchrun" not in after

    shutil.copy(ROOT / "docs/examples/train_existing.py", newcomer.folder / "dags/training")
    weights = []
    for name, dag in (("before", before), ("after", after)):
        models = newcomer.folder / f"models-{name}"
        models.mkdir()
        # One file: it is the same DAG, before and after.
        (newcomer.folder / "dags/news.py").write_text(dag.replace('"/data/models"', repr(str(models))))
        output = newcomer.run("python dags/news.py")
        assert "published" in output, output[-8000:]
        weights.append(torch.load(models / "news.pt", weights_only=True))
    assert "before its deadline" in output, output[-8000:]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
