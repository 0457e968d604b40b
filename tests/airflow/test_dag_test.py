"""Whole DAGs by ``dag.test()`` on the real embedded service, whose engine is the fake one: seconds, and no torch.

The one unmarked module with a metadata database: the first run costs some ten seconds, each further one little.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pendulum
import pytest
from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference, task
from airflow.sdk.definitions.deadline import VariableInterval

from elasticflow_airflow.api import State
from elasticflow_airflow.client import ElasticFlowClient
from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.waiting.leased_jobs import lease_renewer

CURVE = {1: 20.0, 2: 36.0, 4: 64.0}


def train(task_id: str = "train", *, fake: dict | None = None, **changes) -> ElasticTrainOperator:
    arguments = {"steps": 60, "global_batch_size": 8, "deadline": timedelta(minutes=20), "scaling_curve": CURVE}
    env = {"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE, **(fake or {})})}
    return ElasticTrainOperator(task_id=task_id, script="train.py", env=env, **{**arguments, **changes})


def jobs(client: ElasticFlowClient, dag: DAG) -> dict[str, object]:
    return {job.identity.task_id: job for job in client.list_jobs(dag_id=dag.dag_id)}


@pytest.mark.slow
def test_two_trainings_are_in_flight_at_once_and_return_their_results(run_dag, new_dag, client, capsys):
    with new_dag() as dag:

        @task
        def extract():
            return {"rows": 321}

        @task
        def publish(one, two):
            assert one["steps"] == 60
            assert two["steps"] == 41  # 321 rows in batches of 8: the last one is short
            assert one["met"] is True
            assert Path(one["checkpoint_path"]).is_absolute()
            json.dumps([one, two])

        one = train("one")
        two = train("two", steps=None, samples="{{ ti.xcom_pull('extract')['rows'] }}", deadline_of="publish")
        extract() >> [one, two]
        publish(one.output, two.output)
    assert run_dag(dag).state == "success"
    found = jobs(client, dag)
    assert set(found) == {"one", "two"}
    for job in found.values():
        assert job.state is State.SUCCEEDED
        assert job.acknowledged
    first, second = sorted(found.values(), key=lambda job: job.submitted_at)
    assert second.submitted_at < first.result.finished_at
    said = capsys.readouterr().out
    assert "task 'publish' must end by" in said
    assert "minus what comes after" in said
    admitted = [line for line in said.splitlines() if "· admitted" in line]
    assert len(admitted) == len(set(admitted)) >= 2
    assert "acknowledged" in said
    assert lease_renewer().kept() == []


def test_a_hopeless_deadline_fails_at_once_and_says_what_would_do(run_dag, new_dag, client, capsys):
    with new_dag() as dag:
        train(steps=100_000, deadline=timedelta(minutes=2), retries=3, retry_delay=timedelta(0))
    run = run_dag(dag)
    assert run.state == "failed"
    assert [ti.try_number for ti in run.get_task_instances()] == [1]
    said = capsys.readouterr().out
    assert "earliest feasible deadline:" in said
    assert "what you can do:" in said
    assert jobs(client, dag)["train"].state is State.REJECTED


@pytest.mark.slow
def test_clearing_a_success_trains_again_with_its_own_incarnation(run_dag, new_dag, client):
    with new_dag() as dag:
        train()
    run_after = pendulum.now("UTC")
    for incarnation in (1, 2):
        assert run_dag(dag, logical_date=run_after, run_after=run_after).state == "success"
        job = jobs(client, dag)["train"]
        assert (job.incarnation, job.acknowledged) == (incarnation, True)


def test_a_retry_attaches_to_the_live_job(run_dag, new_dag, client, monkeypatch, capsys):
    """The worker breaks once, in the middle: the second try goes on with the same training."""
    from elasticflow_airflow.waiting.worker_wait import JobWatch

    look = JobWatch.look
    broken: list[str] = []

    def break_once(self):
        if not broken:
            broken.append("once")
            raise RuntimeError("the worker's network is gone")
        return look(self)

    monkeypatch.setattr(JobWatch, "look", break_once)
    with new_dag() as dag:
        train(retries=1, retry_delay=timedelta(0), steps=100)
    run = run_dag(dag)
    assert run.state == "success"
    assert [ti.try_number for ti in run.get_task_instances()] == [2]
    job = jobs(client, dag)["train"]
    assert (job.incarnation, job.claim) == (1, 2)
    assert f"attached to job {job.job_id}" in capsys.readouterr().out


async def tell() -> None:
    """A deadline alert's callback."""


@pytest.mark.slow
def test_a_deadline_from_an_alert_whose_interval_is_a_variable(run_dag, new_dag, client, monkeypatch, capsys):
    """dag.test() ends with an error when the DAG has an alert (seen in 3.3.2): it is taken off, and still counts."""
    alert = DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=VariableInterval("slo_s"),
        callback=AsyncCallback(tell),
        name="slo",
    )
    for value in ("1200", None):
        with new_dag(deadline=alert) as dag:
            train(deadline=None, deadline_of="train")
        dag.deadline = None
        monkeypatch.delenv("AIRFLOW_VAR_SLO_S", raising=False)
        if value is not None:
            monkeypatch.setenv("AIRFLOW_VAR_SLO_S", value)
        assert run_dag(dag).state == ("failed" if value is None else "success")
        said = capsys.readouterr().out
        if value is None:
            assert "takes its interval from the Variable 'slo_s', which is not defined" in said
        else:
            assert "'slo': when the run was due, as queued + 20 min" in said
            assert jobs(client, dag)["train"].verdict.decision == "admitted"


def test_a_missing_xcom_is_named_before_anything_is_submitted(run_dag, new_dag, client, capsys):
    with new_dag() as dag:

        @task
        def extract():
            return None

        extract() >> train(steps=None, samples="{{ ti.xcom_pull('extract') }}")
    assert run_dag(dag).state == "failed"
    assert "samples rendered to 'None': the upstream task 'extract' returned nothing" in capsys.readouterr().out
    assert jobs(client, dag) == {}


@pytest.mark.slow
def test_a_training_that_fails_shows_its_last_lines(run_dag, new_dag, client, capsys):
    with new_dag() as dag:
        train(fake={"fail_at_step": 5, "failure": "RuntimeError: the loss fell off"})
    assert run_dag(dag).state == "failed"
    said = capsys.readouterr().out
    assert "RuntimeError: the loss fell off" in said
    assert jobs(client, dag)["train"].state is State.FAILED


def test_a_task_that_fails_for_good_leaves_no_job_running(run_dag, new_dag, client, monkeypatch):
    from elasticflow_airflow.waiting.worker_wait import JobWatch

    def broken(self):
        raise RuntimeError("the worker is broken")

    monkeypatch.setattr(JobWatch, "look", broken)
    with new_dag() as dag:
        train(steps=100_000, deadline=None, best_effort=True)
    assert run_dag(dag).state == "failed"
    assert wait_until_ended(client, dag).state is State.CANCELLED
    assert lease_renewer().kept() == []


SOME_MOMENTS = ("while it waits", "twice, before the answer")
WHEN_INTERRUPTED = {
    "while it waits": "",
    "before the answer to the submission": (
        "import os, signal, time\n"
        "from elasticflow_airflow.client import ElasticFlowClient\n"
        "submit = ElasticFlowClient.submit\n"
        "def slow(client, submission):\n"
        "    attachment = submit(client, submission)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.5)\n"
        "    return attachment\n"
        "if submit.__name__ != 'slow':\n"  # the DAG file is read more than once
        "    ElasticFlowClient.submit = slow\n"
    ),
    "twice, before the answer": (
        "import os, signal, time\n"
        "from elasticflow_airflow.client import ElasticFlowClient\n"
        "submit = ElasticFlowClient.submit\n"
        "def slow(client, submission):\n"
        "    attachment = submit(client, submission)\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.5)\n"
        "    return attachment\n"
        "if submit.__name__ != 'slow':\n"
        "    ElasticFlowClient.submit = slow\n"
    ),
    "right after the answer": (
        "import os, signal\n"
        "from elasticflow_airflow.waiting.task_memory import TaskMemory\n"
        "TaskMemory.save = lambda self, store: os.kill(os.getpid(), signal.SIGINT)\n"
    ),
}


@pytest.mark.parametrize(
    "when",
    [pytest.param(when, marks=[] if when in SOME_MOMENTS else pytest.mark.soak) for when in WHEN_INTERRUPTED],
)
@pytest.mark.slow
def test_ctrl_c_cancels(airflow_db, airflow_home, client, tmp_path, when):
    (tmp_path / "train.py").write_text("")
    name = f"interrupted_{list(WHEN_INTERRUPTED).index(when)}"
    program = airflow_home / "dags" / f"{name}.py"
    program.write_text(
        "from airflow.sdk import DAG\n"
        "from elasticflow_airflow.operators import ElasticTrainOperator\n"
        f"with DAG('{name}', schedule=None) as dag:\n"
        f"    ElasticTrainOperator(task_id='train', script={str(tmp_path / 'train.py')!r}, steps=10**6,\n"
        f"        global_batch_size=8, best_effort=True, scaling_curve={CURVE!r})\n"
        f"{WHEN_INTERRUPTED[when]}"
        "if __name__ == '__main__':\n"
        "    dag.test()\n"
    )
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(program)], stdout=file, stderr=subprocess.STDOUT, env=os.environ, cwd=tmp_path
        )
    try:
        end = time.monotonic() + 240
        while when == "while it waits" and not client.list_jobs(dag_id=name):
            assert process.poll() is None, output.read_text()[-3000:]
            assert time.monotonic() < end, output.read_text()[-3000:]
            time.sleep(0.1)
        if when == "while it waits":
            process.send_signal(signal.SIGINT)
        process.wait(240)
    finally:
        process.kill()
        process.wait(10)
        program.unlink()
    (job,) = client.list_jobs(dag_id=name)
    assert job.state is State.CANCELLED, output.read_text()[-3000:]


def wait_until_ended(client: ElasticFlowClient, dag: DAG):
    end = time.monotonic() + 20
    while not (job := jobs(client, dag)["train"]).state.terminal:
        assert time.monotonic() < end, job
        time.sleep(0.05)
    return job
