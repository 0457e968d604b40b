"""The page about retraining, followed for two days: the second starts from the weights of the first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from elasticflow_airflow.client import ElasticFlowClient

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.airflow
def test_the_second_run_starts_from_the_weights_of_the_first(run_dag, embedded_service, tmp_path):
    page = (DOCS / "how-to/retrain-from-yesterday.md").read_text()
    source = re.search(r"<!-- run: dag -->\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert source
    (tmp_path / "training").mkdir()
    shutil.copy(DOCS / "examples/train_digits.py", tmp_path / "training")
    scope = {"__name__": "news_daily"}
    exec(compile(source[1], "news_daily.py", "exec"), scope)
    dag = scope["dag"]
    dag.fileloc = str(tmp_path / "news_daily.py")
    # The engine of this test models the training: it needs to be told how long an epoch is, and how fast.
    modelled = {"samples": 600, "env": {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": {1: 40.0, 2: 70.0, 4: 120.0}})}}
    for name, value in modelled.items():
        setattr(dag.get_task("train"), name, value)
        dag.get_task("train")._given[name] = value

    for _day in range(2):
        assert run_dag(dag).state == "success"
    with ElasticFlowClient(embedded_service) as client:
        second, first = client.list_jobs(dag_id="news_daily")
        said = [[e.reason for e in client.events(job.job_id) if e.kind == "initialised"] for job in (first, second)]
    shown = re.findall(r"^initialised  (.*)", page, re.MULTILINE)
    assert said[0] == [shown[0]]
    assert first.result is not None
    assert said[1] == [f"starts from the weights of {first.result.checkpoint_path}"]
    assert shown[1].startswith("starts from the weights of /")
