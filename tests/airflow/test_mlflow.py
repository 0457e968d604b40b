"""The example that registers a model in MLflow, as the operator calls it, against a local store."""

from __future__ import annotations

import importlib.util
import json
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.sdk.bases.operator import ExecutorSafeguard
from support.elastic_tasks import Store, context_of

from elasticflow_airflow.api import JobResult, State
from elasticflow_airflow.operators import ElasticTrainOperator

EXAMPLE = Path(__file__).parents[2] / "docs/examples/register_in_mlflow.py"


@pytest.fixture
def mlflow(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # no database for a test
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")


@pytest.fixture
def register():
    spec = importlib.util.spec_from_file_location("register_in_mlflow", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.register


def test_a_success_becomes_one_version_however_often_it_is_promoted(
    mlflow, register, service, make_status, tmp_path, monkeypatch
):
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.bin").write_bytes(b"weights")
    (tmp_path / "train.py").write_text("")
    with DAG("nightly", schedule=None) as dag:
        dag.fileloc = str(tmp_path / "dag.py")
        task = ElasticTrainOperator(
            task_id="train", script="train.py", steps=10, global_batch_size=8, deadline=timedelta(hours=1),
            deferrable=False, on_promote=register,
        )  # fmt: skip

    def promote(digest):
        result = JobResult(
            steps=10, final_loss=0.25, checkpoint_path=str(checkpoint), checkpoint_digest=digest, met=True,
            metrics={"accuracy": 0.9, "note": "text is no metric"},
        )  # fmt: skip
        service.statuses = [make_status(State.SUCCEEDED, step=10, result=result)]
        return task.execute(context_of(task, Store()))

    first = promote("d1")
    assert first["promoted"]["model"] == "nightly.train"
    json.dumps(first)
    assert promote("d1")["promoted"] == first["promoted"]
    assert promote("d2")["promoted"]["version"] != first["promoted"]["version"]
    client = mlflow.MlflowClient()
    versions = client.search_model_versions("name='nightly.train'")
    assert sorted(version.tags["digest"] for version in versions) == ["d1", "d2"]
    run = client.get_run(next(version for version in versions if version.tags["digest"] == "d1").run_id)
    assert (run.data.metrics["accuracy"], run.data.metrics["final_loss"]) == (0.9, 0.25)
    assert [one.path for one in client.list_artifacts(run.info.run_id, "checkpoint")] == ["checkpoint/model.bin"]
