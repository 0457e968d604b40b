"""How DAGs are written, run by ``dag.test()`` on the embedded service with its fake engine."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.sdk import DAG, Asset, setup, task, task_group, teardown

from elasticflow_airflow.api import State
from elasticflow_airflow.client import ElasticFlowClient
from elasticflow_airflow.operators import ElasticTrainOperator, ElasticTrainSensor
from elasticflow_airflow.retry_policies import ElasticFlowRetryPolicy
from elasticflow_airflow.waiting.leased_jobs import lease_renewer

CURVE = {1: 20.0, 2: 36.0, 4: 64.0}
SLOW_CURVE = {1: 0.05, 2: 0.1, 4: 0.2}
"""As declared, 60 steps take at least five minutes; the fake engine does them in seconds all the same."""
FAKE = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE})}
COMMON = {
    "script": "train.py",
    "steps": 60,
    "global_batch_size": 8,
    "deadline": timedelta(minutes=20),
    "scaling_curve": CURVE,
    "env": FAKE,
}


def jobs(client: ElasticFlowClient, dag: DAG) -> dict[tuple[str, int], object]:
    return {(job.identity.task_id, job.identity.map_index): job for job in client.list_jobs(dag_id=dag.dag_id)}


def states(run) -> dict[tuple[str, int], str]:
    return {(ti.task_id, ti.map_index): str(ti.state) for ti in run.get_task_instances()}


@pytest.mark.slow
def test_a_function_decides_what_is_trained(run_dag, new_dag, client, tmp_path):
    calls = tmp_path / "calls"
    with new_dag(params={"lr": 0.1}) as dag:

        @task
        def extract():
            return {"path": "/data/today", "rows": 321}

        @task.elastic_train(**{**COMMON, "steps": None, "global_batch_size": None})
        def finetune(data, params, run_id):
            with calls.open("a") as file:
                file.write("called\n")
            assert run_id
            return {
                "script_args": ["--data", data["path"], "--lr", params["lr"], "{{ ds_nodash | default('none') }}"],
                "samples": data["rows"],
                "epochs": 2,
                "global_batch_size": 8,
            }

        @task.elastic_train(**COMMON)
        def fixed():
            return ["--fold", 3]

        @task
        def publish(result):
            assert result["steps"] == 82
            assert Path(result["checkpoint_path"]).is_absolute()

        fixed()
        publish(finetune(extract()))
    run = run_dag(dag)
    assert set(states(run).values()) == {"success"}
    assert calls.read_text() == "called\n"  # once, however often the task was rescheduled
    assert {key: job.total_steps for key, job in jobs(client, dag).items()} == {("finetune", -1): 82, ("fixed", -1): 60}


@pytest.mark.slow
def test_what_a_function_may_not_return_is_said(run_dag, new_dag, client, capsys):
    with new_dag() as dag:

        @task.elastic_train(**COMMON)
        def number():
            return 7

        @task.elastic_train(**COMMON)
        def too_much():
            return {"elasticflow_conn_id": "other", "retries": 3}

        @task.elastic_train(**COMMON)
        def wrong():
            return {"epochs": 2}

        number()
        too_much()
        wrong()
    assert set(states(run_dag(dag)).values()) == {"failed"}
    said = capsys.readouterr().out
    assert "number() returned 7, a int: return the list of the script's arguments" in said
    assert "too_much() returned elasticflow_conn_id, retries: a function may decide" in said
    assert "steps=60 stands beside epochs=2" in said
    assert jobs(client, dag) == {}


@pytest.mark.slow
def test_tasks_are_mapped_within_groups_and_each_has_its_own_job(run_dag, new_dag, client):
    with new_dag(params={"fold_steps": 40}) as dag:

        @task
        def folds():
            return [{"script_args": ["--fold", str(n)], "steps": 20 + n} for n in range(2)]

        @task_group
        def training():
            partial = {name: value for name, value in COMMON.items() if name not in ("steps", "deadline")}
            ElasticTrainOperator.partial(task_id="lr", **{**partial, "steps": "{{ params.fold_steps }}"}).expand(
                deadline=[timedelta(minutes=30), "{{ (dag_run.run_after + macros.timedelta(hours=1)).isoformat() }}"]
            )
            trained = ElasticTrainOperator.partial(
                task_id="fold", deadline=timedelta(minutes=30), **partial
            ).expand_kwargs(folds())

            @task.elastic_train(**COMMON)
            def sized(size):
                return {"script_args": ["--size", size]}

            sized.expand(size=[1, 2])

            @task
            def best(results):
                assert sorted(one["steps"] for one in results) == [20, 21]

            best(trained.output)

        training()
    run = run_dag(dag)
    assert set(states(run).values()) == {"success"}
    found = jobs(client, dag)
    assert {key: job.total_steps for key, job in found.items()} == {
        ("training.lr", 0): 40, ("training.lr", 1): 40, ("training.fold", 0): 20, ("training.fold", 1): 21,
        ("training.sized", 0): 60, ("training.sized", 1): 60,
    }  # fmt: skip
    assert len({job.job_id for job in found.values()}) == 6
    assert all(job.acknowledged for job in found.values())


@pytest.mark.slow
def test_what_happens_when_it_cannot_be_promised_is_the_authors_choice(run_dag, new_dag, client, capsys):
    slow = {**COMMON, "scaling_curve": SLOW_CURVE}
    with new_dag() as dag:
        early = {**slow, "deadline": timedelta(minutes=3)}
        ElasticTrainOperator(task_id="fail", **early, on_reject="fail")
        ElasticTrainOperator(task_id="best_effort", **early, on_reject="best_effort")
        ElasticTrainOperator(
            task_id="renegotiate", **early, on_reject="renegotiate", latest_deadline=timedelta(minutes=50)
        )
        ElasticTrainOperator(task_id="late", **early, on_reject="late", latest_deadline=timedelta(minutes=90))
        ElasticTrainOperator(task_id="too_late", **early, on_reject="renegotiate", latest_deadline=timedelta(minutes=4))
    found = states(run_dag(dag))
    assert found == {
        ("fail", -1): "failed", ("best_effort", -1): "success", ("renegotiate", -1): "success",
        ("late", -1): "success", ("too_late", -1): "failed",
    }  # fmt: skip
    decided = {task_id: job.verdict.decision for (task_id, _), job in jobs(client, dag).items()}
    assert decided == {
        "fail": "rejected", "best_effort": "best_effort", "renegotiate": "renegotiated", "late": "renegotiated",
        "too_late": "rejected",
    }  # fmt: skip
    assert "earliest feasible deadline:" in capsys.readouterr().out


@pytest.mark.slow
def test_waiting_for_capacity(run_dag, new_dag, client):
    """Alone each of them fits, together they do not: the second waits until the first has ended."""
    lasting = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": {1: 3, 2: 6, 4: 12}})}  # the second comes meanwhile
    with new_dag() as dag:
        for name in ("one", "two"):
            ElasticTrainOperator(
                task_id=name,
                **{**COMMON, "scaling_curve": SLOW_CURVE, "deadline": timedelta(seconds=420), "env": lasting},
                on_reject="wait",
            )
    assert set(states(run_dag(dag)).values()) == {"success"}
    found = jobs(client, dag).values()
    assert {job.verdict.decision for job in found} == {"admitted"}
    waited = [event.kind for job in found for event in client.events(job.job_id) if event.kind == State.WAITING.value]
    assert len(waited) == 1


@pytest.mark.slow
def test_a_training_that_may_miss_its_deadline_is_told_while_it_runs(run_dag, new_dag, client):
    told: list[dict] = []

    def give_up(context):
        told.append(context["elasticflow"])
        job = client.status(context["elasticflow"]["job_id"])
        client.cancel(job.job_id, job.claim, "we shall not wait for that")

    with new_dag() as dag:
        # It was said to be much faster than it is.
        slow = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": {1: 4, 2: 5, 4: 6}})}
        ElasticTrainOperator(
            task_id="train",
            **{**COMMON, "env": slow, "steps": 600, "deadline": timedelta(seconds=60)},
            on_at_risk=give_up,
        )
    assert states(run_dag(dag)) == {("train", -1): "failed"}
    (one,) = told
    assert one["at_risk"] is True
    assert "may miss its deadline" in one["message"]
    assert jobs(client, dag)["train", -1].state is State.CANCELLED


@pytest.mark.slow
def test_a_model_goes_from_dag_to_dag_as_an_asset(run_dag, new_dag, client):
    model = Asset("bert-nightly")
    promoted = []

    def register(result, checkpoint_path, dag_run):
        promoted.append((checkpoint_path, dag_run.run_id, result["checkpoint_digest"]))
        return f"models:/bert/{len(promoted)}"

    with new_dag() as producer:
        ElasticTrainOperator(task_id="train", **COMMON, outlets=[model], on_promote=register)
    run = run_dag(producer)
    assert run.state == "success"
    (ti,) = run.get_task_instances()
    assert f"dag_id={producer.dag_id}&run_id=" in ti.xcom_pull(task_ids="train", key="_link_ElasticFlowJobLink")
    first = jobs(client, producer)["train", -1]
    assert promoted == [(first.result.checkpoint_path, run.run_id, first.result.checkpoint_digest)]
    with new_dag(schedule=[model]) as consumer:
        ElasticTrainOperator(
            task_id="refine",
            **COMMON,
            inlets=[model],
            init_from="{{ inlet_events.for_asset(name='bert-nightly')[-1].extra['checkpoint_path'] }}",
        )
    assert run_dag(consumer).state == "success"
    refined = jobs(client, consumer)["refine", -1]
    assert client.story(refined.job_id).submission["init_from"] == first.result.checkpoint_path


@pytest.mark.slow
def test_a_sensor_waits_for_a_training_of_the_same_run(run_dag, new_dag, client):
    with new_dag() as dag:
        ElasticTrainOperator(task_id="train", **{**COMMON, "steps": 100})
        ElasticTrainSensor(task_id="end", external_task_id="train")
        ElasticTrainSensor(task_id="checkpoint", external_task_id="train", until="checkpoint")
        ElasticTrainSensor(task_id="alarm", external_task_id="train", until="at_risk")
    run = run_dag(dag)
    assert states(run) == {
        ("train", -1): "success", ("end", -1): "success", ("checkpoint", -1): "success", ("alarm", -1): "skipped",
    }  # fmt: skip
    assert jobs(client, dag)["train", -1].claim == 1  # nobody else took one

    with new_dag() as other:
        found = ElasticTrainSensor(
            task_id="newest", external_dag_id=dag.dag_id, external_task_id="train", external_run_id="latest"
        )
        by_id = ElasticTrainSensor(
            task_id="by_id", job_id=jobs(client, dag)["train", -1].job_id, deferrable=False, mode="poke"
        )

        @task
        def use(*results):
            assert {one["steps"] for one in results} == {100}
            assert all(Path(one["checkpoint_path"]).is_absolute() for one in results)

        use(found.output, by_id.output)
    assert set(states(run_dag(other)).values()) == {"success"}


@pytest.mark.slow
def test_a_sensor_fails_with_what_it_waits_for(run_dag, new_dag, capsys):
    with new_dag() as dag:
        broken = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE, "fail_at_step": 5, "failure": "KeyError: 3"})}
        ElasticTrainOperator(task_id="train", **{**COMMON, "env": broken})
        ElasticTrainSensor(task_id="success", external_task_id="train")
        ElasticTrainSensor(task_id="any_end", external_task_id="train", until="ended")
        ElasticTrainSensor(task_id="soft", external_task_id="train", soft_fail=True)
    assert states(run_dag(dag)) == {
        ("train", -1): "failed", ("success", -1): "failed", ("any_end", -1): "success", ("soft", -1): "skipped",
    }  # fmt: skip
    assert "KeyError: 3" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_failure_twice_ends_the_retries(run_dag, new_dag, client):
    broken = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE, "fail_at_step": 5, "failure": "KeyError: 3"})}
    with new_dag() as dag:
        ElasticTrainOperator(
            task_id="train",
            **{**COMMON, "env": broken},
            retries=9,
            retry_delay=timedelta(hours=1),
            retry_policy=ElasticFlowRetryPolicy(failed_delay=timedelta(0)),
        )
    run = run_dag(dag)
    assert [ti.try_number for ti in run.get_task_instances()] == [2]
    assert jobs(client, dag)["train", -1].incarnation == 2


@pytest.mark.slow
def test_a_teardown_runs_whatever_becomes_of_the_training(run_dag, new_dag, tmp_path):
    scratch = tmp_path / "scratch"
    with new_dag() as dag:

        @setup
        def make_room():
            scratch.mkdir()

        @teardown
        def clear_away():
            scratch.rmdir()

        broken = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE, "fail_at_step": 5})}
        room, clear = make_room(), clear_away()
        room >> ElasticTrainOperator(task_id="train", **{**COMMON, "env": broken}) >> clear
        room >> clear
    assert states(run_dag(dag)) == {
        ("make_room", -1): "success", ("train", -1): "failed", ("clear_away", -1): "success",
    }  # fmt: skip
    assert not scratch.exists()
    assert lease_renewer().kept() == []
