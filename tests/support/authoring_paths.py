"""Paths about what DAG authors write: callbacks of deferred tasks, promotion, the sensor, mapped tasks, pools."""

from __future__ import annotations

from elasticflow_airflow.api import JobStatus, State
from support.airflow_paths import PATHS
from support.airflow_stack import Run, Stack

_FLAKY = "lambda result, ti: {'tried': ti.try_number} if ti.try_number > 1 else 1 / 0"


@PATHS.add(
    'train(6000, fake={"steps_per_s": {1: 3.0}}, deadline=timedelta(minutes=20),'
    ' on_at_risk=lambda context: print("TOLD", context["elasticflow"]["message"]))'
)
def told_while_deferred(stack: Stack, dag_id: str) -> None:
    """A deferred task is resumed to call ``on_at_risk``, and waits on; that is no end, and spends no retry.

    It was said to make 10 steps/s, so that 6000 fit, and makes three.
    """
    run = stack.run(dag_id)
    run.reach("deferred")
    stack.wait("somebody is told", lambda: "TOLD Training" in run.log(1), every_s=2.0)
    run.reach("deferred")
    said = run.log(1)
    assert said.count("TOLD Training") == 1
    assert "may miss its deadline" in said
    assert (run.task_now()["try_number"], run.trains().claim) == (1, 1)
    run.mark("failed")
    run.ended(State.CANCELLED)


@PATHS.add(f"train(60, deadline=timedelta(hours=1), on_promote={_FLAKY}, retries=1)")
def promoted_by_the_second_try(stack: Stack, dag_id: str) -> None:
    """A registry that was down costs a retry of the task, and no second training."""
    run = stack.run(dag_id)
    run.reach("success")
    job = run.acknowledged()
    assert (job.state, job.incarnation, job.claim) == (State.SUCCEEDED, 1, 2)
    assert run.task_now()["try_number"] == 2
    assert "ZeroDivisionError" in run.log(1)
    assert "on_promote: {'tried': 2}" in run.log(2)
    path = f"/api/v2/dags/{dag_id}/dagRuns/{run.run_id}/taskInstances/train/links"
    address = stack.do("GET", path).json()["extra_links"]["ElasticFlow job"]
    assert f"/plugin/elasticflow/elasticflow/?dag_id={dag_id}&run_id=" in address


@PATHS.add(
    "train(150, deadline=timedelta(hours=1))",
    'ElasticTrainSensor(task_id="end", external_task_id="train")',
    'ElasticTrainSensor(task_id="alarm", external_task_id="train", until="at_risk")',
    'ElasticTrainSensor(task_id="newest", external_task_id="train", external_run_id="latest",'
    ' until="checkpoint", deferrable=False, mode="reschedule")',
)
def sensed(stack: Stack, dag_id: str) -> None:
    """Sensors wait in the triggerer, or between two looks; none takes a claim."""
    run = stack.run(dag_id)
    for task_id, state in (("train", "success"), ("end", "success"), ("alarm", "skipped"), ("newest", "success")):
        run.reach(state, task_id)
    assert run.acknowledged().claim == 1


@PATHS.add("train(pool='elasticflow_one')", "train(task_id='other', pool='elasticflow_one')")
def pool_of_one_slot(stack: Stack, dag_id: str) -> None:
    """Deferred tasks leave their slot of the pool: the second training is not kept waiting by the first."""
    stack.ask("POST", "/api/v2/pools", json={"name": "elasticflow_one", "slots": 1, "include_deferred": False})
    run = stack.run(dag_id)
    for task_id in ("train", "other"):
        run.reach("deferred", task_id)
    for task_id in ("train", "other"):
        run.mark("failed", task_id)
        run.ended(State.CANCELLED, task_id)


@PATHS.add(
    "model = train(task_id='model')",
    "common = {name: getattr(model, name) for name in ('script', 'env', 'scaling_curve')}",
    "ElasticTrainOperator.partial(task_id='fold', global_batch_size=8, deadline=timedelta(hours=1), max_workers=1,"
    " **common).expand(steps=[120, 130])",
    "from airflow.sdk import task",
    "@task.elastic_train(global_batch_size=8, best_effort=True, max_workers=1, **common)",
    "def sized(size):",
    "    return {'steps': size, 'script_args': ['--size', size]}",
    "sized.expand(size=[125])",
)
def mapped(stack: Stack, dag_id: str) -> None:
    """Mapped tasks defer and resume each for itself, with a job of its own; so do functions that decide."""
    run = stack.run(dag_id)
    stack.wait("all are trained", lambda: len([job for job in found(stack, run) if job.acknowledged]) == 3)
    steps = {(job.identity.task_id, job.identity.map_index): job.step for job in found(stack, run)}
    assert steps.items() >= {("fold", 0): 120, ("fold", 1): 130, ("sized", 0): 125}.items()
    run.mark("failed", "model")
    run.ended(State.CANCELLED, "model")


def found(stack: Stack, run: Run) -> list[JobStatus]:
    """The jobs of a run."""
    jobs = (job for service in stack.services.values() for job in service.jobs)
    return [job for job in jobs if (job.identity.dag_id, job.identity.run_id) == (run.dag_id, run.run_id)]
