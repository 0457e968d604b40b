"""Whose task has ended or is gone trains on for seconds only, whatever else is away: nothing is left to the lease."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.airflow_paths import PATHS
from support.airflow_stack import Run, Stack

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length, State
from elasticflow_airflow.api.owners import OwnedJob
from elasticflow_airflow.client import ElasticFlowClient, snapshot_folder
from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1500), pytest.mark.xdist_group("owners")]


COUNT = 100
ENDS_WITHIN_S = 30.0
"""From Airflow's word that the owner is gone to the end of the job, as the page promises."""
MANY = PATHS.add_dag(
    "many",
    "from airflow.sdk import BaseOperator",
    "from airflow.triggers.base import StartTriggerArgs",
    "from elasticflow_airflow.api import JobIdentity",
    """class Waits(BaseOperator):
        start_from_trigger = True

        def __init__(self, **arguments):
            super().__init__(**arguments)
            identity = JobIdentity(dag_id="many", run_id="all", task_id=self.task_id)
            self.start_trigger_args = StartTriggerArgs(
                trigger_cls="elasticflow_airflow.triggers.ElasticFlowJobTrigger",
                trigger_kwargs={"job_id": identity.job_id, "claim": 1, "poll_interval_s": 3.0},
                next_method="execute_complete",
            )
    """,
    f"tasks = [Waits(task_id=f'train{{number}}') for number in range({COUNT})]",
)
"""What the operator comes to when it has submitted: without a hundred workers that start for it."""
MARKED = PATHS.add_dag("marked_unseen", 'train(task_id="ended")', 'train(task_id="cleared")', 'train(task_id="stays")')
DELETED = PATHS.add_dag("dag_deleted_unseen", "train()")


def jobs_of(stack: Stack, run: Run) -> list[JobStatus]:
    client = stack.services["elasticflow_default"].client
    return [job for job in client.list_jobs(dag_id=run.dag_id, limit=1000) if job.identity.run_id == run.run_id]


def states_of(stack: Stack, run: Run) -> Counter[str | None]:
    found = stack.do("GET", f"{run._path}/taskInstances", params={"limit": 1000}).json()
    return Counter(one["state"] for one in found["task_instances"])


def test_many_are_killed_at_once_while_the_service_restarts(stack: Stack) -> None:
    """Each trigger's cancel gets through, by itself: the api-server, which would report the others, is away."""
    service, run = stack.services["elasticflow_default"], Run(stack, MANY, "all")
    submit_all(stack, service.client)
    body = {"logical_date": None, "dag_run_id": run.run_id}
    stack.do("POST", f"/api/v2/dags/{MANY}/dagRuns", json=body)
    stack.wait("all are deferred", lambda: states_of(stack, run) == {"deferred": COUNT}, every_s=1.0)
    since = time.time()
    stack.wait(
        "all triggers wait",
        lambda: all((job.heard_at or 0.0) > since for job in owned(service.client, MANY)),
        every_s=1.0,
    )
    service.kill()
    run.mark_run("failed")
    marked_at = time.monotonic()
    assert states_of(stack, run) == {"failed": COUNT}
    stack.kill("api-server")
    try:
        stack.wait("their triggers were told", lambda: triggerer_says(stack, "invoking on_kill") >= COUNT, every_s=1.0)
        service.start()
        stack.wait("all are over", lambda: all(job.state.terminal for job in jobs_of(stack, run)), every_s=1.0)
        print(f"all {COUNT} over {time.monotonic() - marked_at:.1f} s after they were marked")
    finally:
        stack.start("api-server")
    reasons = Counter((job.state, job.state_reason) for job in jobs_of(stack, run))
    assert reasons == {(State.CANCELLED, "the deferred Airflow task was killed"): COUNT}
    run.delete()  # its task instances fill the page of those that the stack watches


def submit_all(stack: Stack, client: ElasticFlowClient) -> None:
    """What the tasks would have submitted."""
    code = snapshot_folder(stack.home / "dags" / "code")
    client.upload_snapshot(code)
    behaviour = json.dumps({"steps_per_s": {"1": 0.1}, "startup_s": 0.5})  # the engine writes down all that it reports
    submissions = [
        JobSubmission(
            identity=JobIdentity(dag_id=MANY, run_id="all", task_id=f"train{number}"),
            command=Command(snapshot=code.sha256, script="train.py", env={BEHAVIOUR_ENV: behaviour}),
            length=Length(steps=10**6),
            global_batch_size=8,
            best_effort=True,
            scaling_curve={1: 0.1},
            max_workers=1,
        )
        for number in range(COUNT)
    ]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(client.submit, submissions))


@pytest.mark.soak
def test_tasks_that_end_while_the_triggerer_is_away(stack: Stack) -> None:
    """Nobody is told of the kill. One that is cleared meanwhile finds its job."""
    run, deleted = stack.run(MARKED), stack.run(DELETED)
    for task_id in ("ended", "cleared", "stays"):
        run.waits_in_triggerer(task_id)
    deleted.waits_in_triggerer()
    client = stack.services["elasticflow_default"].client
    gone = [run.job("ended"), deleted.job()]
    stack.wait(
        "Airflow has said that they are there",
        lambda: all(job.known_to for dag_id in (MARKED, DELETED) for job in owned(client, dag_id)),
    )
    stack.kill("triggerer")
    try:
        run.mark("failed", "ended")
        stack.do("DELETE", f"/api/v2/dags/{DELETED}")
        ended_at = time.monotonic()
        run.clear(["cleared"])
        for job, what in zip(gone, ("has ended (failed)", "was deleted"), strict=True):
            stack.wait(f"{job.job_id} is over", lambda job=job: client.status(job.job_id).state.terminal)
            over = client.status(job.job_id)
            assert (over.state, over.state_reason) == (State.CANCELLED, f"its Airflow task {what}")  # not by its lease
            said_at, over_at = (at_of(client, job, kind) for kind in ("owner_gone", "cancelled"))
            assert 0.0 <= over_at - said_at < ENDS_WITHIN_S  # by the service's own clock, however late Airflow was
            print(f"{job.identity.dag_id}: over after {time.monotonic() - ended_at:.1f} s")
        stack.wait("the cleared one has attached", lambda: run.job("cleared").claim == 2)
    finally:
        stack.start("triggerer")
    for task_id in ("cleared", "stays"):
        run.waits_in_triggerer(task_id)
        job = run.job(task_id)
        assert (job.incarnation, job.state.terminal) == (1, False)
        assert not run.events("owner_gone", task_id)
    run.mark_run("failed")
    for task_id in ("cleared", "stays"):
        run.ended(State.CANCELLED, task_id)


def owned(client: ElasticFlowClient, dag_id: str) -> list[OwnedJob]:
    return [job for job in client.owned_jobs("default").jobs if job.identity.dag_id == dag_id]


def at_of(client: ElasticFlowClient, job: OwnedJob, kind: str) -> float:
    """When something has happened to a job."""
    (event,) = [event for event in client.events(job.job_id) if event.kind == kind]
    return event.at


def triggerer_says(stack: Stack, words: str) -> int:
    """How often the triggerer has said so, in the logs of tasks."""
    logs = stack.home.glob(f"logs/dag_id={MANY}/**/*.trigger.*.log")
    return sum(log.read_text(errors="replace").count(words) for log in logs)
