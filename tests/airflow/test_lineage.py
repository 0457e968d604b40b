"""What OpenLineage's provider makes of an elastic task, with the real package."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from airflow.sdk import DAG, Asset
from airflow.sdk.api.datamodels._generated import TaskInstanceState

from elasticflow_airflow.operators import ElasticTrainOperator

RESULT = {"job_id": "j", "checkpoint_path": "/models/i1/c9", "checkpoint_digest": "d1", "steps": 9, "met": True}


@pytest.fixture
def extract():
    """Ask as the provider's listener does."""
    manager = pytest.importorskip(
        "airflow.providers.openlineage.extractors.manager",
        reason="apache-airflow-providers-openlineage is not installed",
    ).ExtractorManager()

    def ask(task, state):
        return manager.extract_metadata(
            dagrun=SimpleNamespace(run_id="r"), task=task, task_instance_state=state, task_instance=SimpleNamespace()
        )

    return ask


def make(**changes):
    with DAG("d", schedule=None):
        return ElasticTrainOperator(
            task_id="train", script="t.py", steps=9, global_batch_size=8, best_effort=True, **changes
        )


def named(datasets):
    return {(one.namespace, one.name) for one in datasets}


def test_a_success_names_what_was_read_and_the_weights_that_were_written(extract):
    task = make(
        inlets=[Asset("s3://lake/reviews")], outlets=[Asset("bert"), Asset("s3://m/b")], init_from="/models/i0/c3"
    )
    started = extract(task, TaskInstanceState.RUNNING)
    assert named(started.inputs) == {("s3://lake", "reviews"), ("file", "/models/i0/c3")}
    assert named(started.outputs) == {("s3://m", "b")}
    task._result = dict(RESULT)
    done = extract(task, TaskInstanceState.SUCCESS)
    assert named(done.inputs) == named(started.inputs)
    assert named(done.outputs) == {("s3://m", "b"), ("file", "/models/i1/c9")}
    assert done.outputs[-1].facets["version"].datasetVersion == "d1"
    assert (done.run_facets["elasticflow"].job_id, done.run_facets["elasticflow"].met) == ("j", True)


def test_a_failure_wrote_nothing(extract):
    task = make(init_from="latest")
    failed = extract(task, TaskInstanceState.FAILED)
    assert (failed.inputs, failed.outputs, failed.run_facets) == ([], [], {})


def test_the_facets_can_be_sent(extract):
    from openlineage.client.serde import Serde

    task = make()
    task._result = {**RESULT, "checkpoint_path": "s3://models/i1/c9"}
    facet = extract(task, TaskInstanceState.SUCCESS).run_facets["elasticflow"]
    assert '"steps": 9' in Serde.to_json(facet)


def test_nobody_needs_openlineage():
    """Its provider alone asks; an operator without it is complete."""
    assert callable(make().get_openlineage_facets_on_start)
