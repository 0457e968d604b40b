"""Mapped training tasks: what is refused when the DAG is read, and that the DAG can be serialized all the same."""

from __future__ import annotations

import json
import warnings
from datetime import UTC, datetime, timedelta

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from elasticflow_airflow.notifications import ElasticFlowNotifier
from elasticflow_airflow.operators import ElasticTrainOperator, ElasticTrainSensor, elastic_train_task
from elasticflow_airflow.retry_policies import ElasticFlowRetryPolicy
from elasticflow_airflow.task.arguments import ArgumentError

GOOD = {"task_id": "train", "script": "train.py", "global_batch_size": 8}


@pytest.mark.parametrize(
    ("partial", "expand", "words"),
    [
        ({"best_effort": True, "min_workers": 3}, {"steps": [1]}, "^min_workers=3 must be a power of two"),
        ({"best_effort": True, "on_miss": "shrug"}, {"steps": [1]}, "^on_miss='shrug' is none of"),
        ({"best_effort": True}, {"steps": [10, 0]}, "^mapped task 1: steps=0 must be a whole number"),
        ({}, {"steps": [10]}, "^mapped task 0: neither deadline=, deadline_of= nor best_effort"),
        ({"best_effort": True, "epochs": 2}, {"steps": [10]}, "^mapped task 0: steps=10 stands beside epochs=2"),
        ({"deadline": "07:30"}, {"script_args": ["--a"]}, "^mapped task 0: script_args='--a' is one string"),
        ({}, {"deadline": ["07:30", "25:00"]}, "^mapped task 1: deadline='25:00' is no time of day"),
    ],
)
def test_refused_when_the_dag_is_read(partial, expand, words):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with DAG("d", schedule=None), pytest.raises(ValueError, match=words):
            ElasticTrainOperator.partial(**GOOD, **partial).expand(**expand)


def test_refused_in_a_list_of_dicts():
    with DAG("d", schedule=None), pytest.raises(ArgumentError, match=r"^mapped task 1: steps=10 stands beside epochs"):
        ElasticTrainOperator.partial(**GOOD, best_effort=True).expand_kwargs([{"steps": 3}, {"steps": 10, "epochs": 3}])


@pytest.mark.parametrize(
    ("kind", "partial", "tasks", "words"),
    [
        (ElasticTrainOperator, {}, [{"steps": 3}, {"step": 10}], "^mapped task 1: .* no argument 'step': did you mean"),
        (ElasticTrainOperator, {}, [{"frobnicate": 1}], "^mapped task 0: ElasticTrainOperator has no argument 'frob"),
        (ElasticTrainOperator, {}, [{3: 1}], "^mapped task 0: ElasticTrainOperator has no argument 3"),
        (ElasticTrainOperator, {"steps": 3}, [{"steps": 4}], "^mapped task 0: 'steps' is given twice, to partial"),
        (ElasticTrainOperator, {}, [{"steps": 4, "task_id": "a"}], "^mapped task 0: 'task_id' is given twice"),
        (ElasticTrainOperator, {}, [{"steps": 4, "retries": 3}], "^mapped task 0: 'retries' is the same for all"),
        (ElasticTrainSensor, {}, [{"job": "x"}], "^mapped task 0: .* 'job': did you mean 'job_id'"),
        (ElasticTrainSensor, {"until": "ended"}, [{"job_id": "x", "until": "ended"}], "'until' is given twice"),
    ],
)
def test_names_that_airflow_refuses_only_when_they_run_are_refused_when_the_dag_is_read(kind, partial, tasks, words):
    common = {**GOOD, "best_effort": True} if kind is ElasticTrainOperator else {"task_id": "wait"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with DAG("d", schedule=None), pytest.raises(ArgumentError, match=words):
            kind.partial(**common, **partial).expand_kwargs(tasks)


def fine_tune(size, rate=0.1):
    return [str(size), str(rate)]


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([{"size": 3}, {"sise": 10}], r"^mapped task 1: fine_tune\(\) has no argument 'sise': did you mean 'size'"),
        ([{"frobnicate": 1}], r"^mapped task 0: fine_tune\(\) has no argument 'frobnicate'; it has size, rate$"),
        ([{"size": 1, "rate": 0.2}], "^mapped task 0: 'rate' is given twice, to partial"),
    ],
)
def test_a_function_is_refused_names_that_it_does_not_have(tasks, words):
    with DAG("d", schedule=None):
        decorated = elastic_train_task(**GOOD, best_effort=True)(fine_tune).partial(rate=0.2)
        with pytest.raises(ArgumentError, match=words):
            decorated.expand_kwargs(tasks)


def test_a_function_takes_names_that_it_has():
    with DAG("d", schedule=None) as dag:
        plain = elastic_train_task(**GOOD, best_effort=True)(fine_tune)
        mapped = plain.expand_kwargs([{"size": 3}, {"size": 4, "rate": 0.2}])
        plain.override(task_id="wins").partial(rate=0.2).expand_kwargs([{"size": 1, "rate": 0.3}], strict=False)
        plain.override(task_id="later").expand_kwargs(mapped)
        elastic_train_task(**{**GOOD, "task_id": "any"}, best_effort=True)(lambda **given: []).expand_kwargs([{"a": 1}])
    assert set(dag.task_ids) == {"train", "wins", "later", "any"}


def test_each_task_may_have_what_airflow_takes():
    with DAG("d", schedule=None, default_args={"epochs": 3, "retries": 1}):
        begun = ElasticTrainOperator.partial(**GOOD, best_effort=True, value=2.0)
        mapped = begun.expand_kwargs([{"epochs": 2, "params": {"a": 1}}, {"deferrable": False}])
        twice = ElasticTrainOperator.partial(**{**GOOD, "task_id": "twice"}, best_effort=True, epochs=1)
        wins = twice.expand_kwargs([{"epochs": 2, "retries": 5}], strict=False)
    assert mapped.unmap({"epochs": 2}).epochs == 2
    assert (wins.unmap({"epochs": 2, "retries": 5}).epochs, wins.unmap({"retries": 5}).retries) == (2, 5)


def test_what_others_return_and_default_args_are_taken_for_good():
    with DAG("d", schedule=None, default_args={"best_effort": True}):
        upstream = EmptyOperator(task_id="extract")
        ElasticTrainOperator.partial(**GOOD).expand(steps=upstream.output)
        ElasticTrainOperator.partial(**{**GOOD, "task_id": "kwargs"}).expand_kwargs(upstream.output)
        mapped = ElasticTrainOperator.partial(**{**GOOD, "task_id": "curve"}).expand(scaling_curve=upstream.output)
    assert mapped.upstream_task_ids == {"extract"}


@pytest.mark.parametrize(
    ("schedule", "common", "words"),
    [
        ("@daily", {"deadline_of": "nope"}, "deadline_of='nope' is no task downstream of 'train'"),
        ("@daily", {"deadline_of": "extract", "deadline": "07:30"}, r"\(downstream: publish\)"),
        (None, {"deadline_of": "dag_run"}, "deadline_of='dag_run' without deadline="),
    ],
)
def test_a_deadline_of_what_the_dag_does_not_have_is_refused_when_it_is_read(schedule, common, words):
    def parse(**changes):
        with DAG("d", schedule=schedule, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as dag:
            mapped = ElasticTrainOperator.partial(**GOOD, **{**common, **changes}).expand(steps=[1, 2])
            EmptyOperator(task_id="extract") >> mapped >> EmptyOperator(task_id="publish")
        return dag

    with pytest.raises(ValueError, match=words):
        parse().resolve_template_files()
    parse(deadline="07:30", deadline_of="publish").resolve_template_files()


def test_a_dag_with_everything_is_serialized_the_same_at_each_parse():
    def parse():
        with DAG("d", schedule=None) as dag:
            common = {
                "deadline": timedelta(hours=1), "scaling_curve": {1: 2.0}, "downstream_reserve": timedelta(minutes=1),
            }  # fmt: skip
            called = {
                "on_at_risk": [lambda context: None, ElasticFlowNotifier()],
                "on_promote": lambda result: result,
                "on_failure_callback": ElasticFlowNotifier(),
                "retry_policy": ElasticFlowRetryPolicy(),
            }
            mapped = ElasticTrainOperator.partial(**GOOD, **common, **called).expand(steps=[1, 2])
            ElasticTrainOperator(**{**GOOD, "task_id": "one"}, **common, **called, steps=3)
            elastic_train_task(**{**GOOD, "task_id": "fn"}, **common, **called)(lambda size: [size]).expand(size=[1])
            ElasticTrainSensor(task_id="sense", external_task_id="one")
        return dag, mapped

    from airflow.serialization.serialized_objects import DagSerialization

    first, second = (json.dumps(DagSerialization.to_dict(parse()[0]), sort_keys=True, default=str) for _ in range(2))
    assert " at 0x" not in first
    assert first == second
    read = DagSerialization.from_dict(json.loads(first))
    assert set(read.task_ids) == {"train", "one", "fn", "sense"}
    task = parse()[1].unmap({"steps": 2})
    assert task.steps == 2
    assert task.on_promote("x") == "x"
    assert len(task.on_at_risk) == 2
    assert task.scaling_curve == {1: 2.0}
