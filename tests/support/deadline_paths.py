"""Paths about deadlines: a real backfill, deadlines from the DAG and from earlier runs, and the calendar."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

from elasticflow_airflow.api import State
from support.airflow_paths import PATHS
from support.airflow_stack import PATIENCE_S, Run, Stack

DAILY = "schedule='0 5 * * *', start_date=pendulum.datetime(2026, 1, 1, tz='UTC'), catchup=False"
SLOW = 'fake={"steps_per_s": {1: 1.0}}'
"""Much slower than the scaling curve says: 120 steps are promised within 75 s, and take more than 90."""
SOON = "deadline='{{ (ti.start_date + macros.timedelta(seconds=100)).isoformat() }}'"


def airflow(stack: Stack, *words: str, status: int = 0) -> str:
    """Run an ``airflow`` command beside the stack; what it printed."""
    command = [sys.executable, "-m", "airflow", *words]
    said, end_s = "database is locked", time.monotonic() + PATIENCE_S
    while "database is locked" in said and not stack.closing and time.monotonic() < end_s:
        done = subprocess.run(
            command, env=stack.environment, timeout=PATIENCE_S, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
    assert done.returncode == status, f"{words}: status {done.returncode}\n{said[-4000:]}"
    return said


def trigger(stack: Stack, dag_id: str, logical_date: datetime) -> Run:
    """Trigger a DAG with a logical date, by which its runs have an order."""
    body = {"logical_date": logical_date.isoformat()}
    answer = stack.do("POST", f"/api/v2/dags/{dag_id}/dagRuns", json=body)
    return Run(stack, dag_id, str(answer.json()["dag_run_id"]))


def run_of_type(stack: Stack, dag_id: str, kind: str) -> Run:
    """Wait for the first run of a DAG of a type."""

    def there() -> str | None:
        runs = stack.do("GET", f"/api/v2/dags/{dag_id}/dagRuns").json()["dag_runs"]
        return next((run["dag_run_id"] for run in runs if run["run_type"] == kind), None)

    return Run(stack, dag_id, stack.wait(f"a {kind} run of {dag_id}", there))


@PATHS.add(
    "train(30, deadline='07:30')",
    "train(30, task_id='strict', deadline='07:30', on_past_deadline='fail')",
    f"train(120, task_id='finish', {SOON}, {SLOW})",
    f"train(120, task_id='fail', {SOON}, {SLOW}, on_miss='fail')",
    f"train(120, task_id='last', {SOON}, {SLOW}, on_miss='use_last_checkpoint')",
    dag=DAILY + ", end_date=pendulum.datetime(2026, 3, 1, tz='UTC'), is_paused_upon_creation=False",
)
def backfill(stack: Stack, dag_id: str) -> None:
    """``airflow backfill create``: deadlines of that day are long past; deadlines missed while it trains are not.

    The DAG has ended, so that its only run is this one: another would measure the speed, and the late would be refused.
    """
    airflow(
        stack, "backfill", "create", "--dag-id", dag_id, "--from-date", "2026-02-03", "--to-date", "2026-02-03T12:00"
    )
    run = run_of_type(stack, dag_id, "backfill")
    run.reach("success")
    job = run.acknowledged()
    assert (job.best_effort, job.deadline_at, job.step) == (True, None, 30)
    said = run.log(1)
    assert "its first after the run was due at Tue 2026-02-03 05:00 UTC" in said
    assert "ago: training as best effort" in said

    run.reach("failed", "strict")
    assert "is past: it is " in run.log(1, "strict")
    assert "earliest feasible deadline: " in run.log(1, "strict")
    assert "on_past_deadline='best_effort'" in run.log(1, "strict")
    assert run.task_now("strict")["try_number"] == 1

    run.reach("failed", "fail")
    missed = run.ended(State.FAILED, "fail")
    assert missed.verdict.decision == "admitted"
    assert "missed its deadline" in run.log(1, "fail")

    run.reach("success", "last")
    last = run.acknowledged("last")
    assert last.result is not None
    assert last.result.steps < 120
    assert [event.kind for event in run.events("deadline_missed", "last")] == ["deadline_missed"]

    run.reach("success", "finish")
    finished = run.acknowledged("finish")
    assert finished.result is not None
    assert (finished.result.steps, finished.result.met) == (120, False)
    assert "AFTER its deadline" in run.log(1, "finish")


@PATHS.add(
    "train(20, deadline_of='publish', downstream_reserve=timedelta(minutes=7)) >> EmptyOperator(task_id='publish')",
    dag="schedule=None, deadline=ALERT",
)
def deadline_from_alert_and_history(stack: Stack, dag_id: str) -> None:
    """Read by a real worker, with an alert that a real scheduler keeps: first the declared reserve, then the observed.

    ``dag.test()`` cannot show this: it ends with an error when the DAG has a DeadlineAlert.
    """
    before = datetime.now(UTC)
    first = trigger(stack, dag_id, before - timedelta(days=4))
    first.reach("success", "publish")
    said = first.log(1)
    assert "task 'publish' must end by" in said
    assert "deadline alert of the DAG, 'slo': when the run was due, as queued + 2 h" in said
    assert "no earlier run shows how long it takes" in said
    assert "using downstream_reserve (7 min) as declared" in said
    job = first.acknowledged()
    due_s = (before + timedelta(hours=2) - timedelta(minutes=7)).timestamp()
    assert job.deadline_at is not None
    assert 0 <= job.deadline_at - due_s < 300

    first.over()
    for days, runs in ((3, "1 run"), (2, "2 runs")):
        later = trigger(stack, dag_id, before - timedelta(days=days))
        later.reach("success", "publish")
        said = later.log(1)
        assert f"more than the {runs} so far have shown" in said or f"p95 of the last {runs}" in said
        assert "using downstream_reserve" not in said
        later.over()

    last = trigger(stack, dag_id, before - timedelta(days=1))
    last.reach("success", "publish")
    said = last.log(1)
    assert "p95 of the last 3 runs" in said
    assert "from the end of training to the end of task 'publish', queueing included" in said
    assert "minus a margin" in said

    deadline_at = last.acknowledged().deadline_at
    last.over()
    last.clear(("train",))
    stack.wait("it trains anew", lambda: (job := last.job()) and job.incarnation == 2)
    last.reach("success")
    stack.wait("acknowledged again", lambda: (job := last.job()) and job.incarnation == 2 and job.acknowledged)
    again = last.job()
    assert again is not None
    assert again.deadline_at == deadline_at  # a clear does not move it, though more runs are known by now
    assert "p95 of the last 3 runs" in last.log(2)


@PATHS.add("train(20, deadline=timedelta(hours=1), deadline_of='dag_run', downstream_reserve=timedelta(0))")
def history_without_dates(stack: Stack, dag_id: str) -> None:
    """Runs without a logical date, as of assets: the service knows which of them trained, Airflow when they ended."""
    for words in ("no earlier run shows how long it takes", "p95 of the last 1 run", "p95 of the last 2 runs"):
        run = stack.run(dag_id)
        run.reach("success")
        run.acknowledged()
        assert words in run.log(1)
        run.over()


@PATHS.add(
    "train(20, deadline_of='dag_run')",
    "train(20, task_id='unpaused', deadline=timedelta(seconds=1))",
    dag=DAILY + ", is_paused_upon_creation=True",
)
def scheduled(stack: Stack, dag_id: str) -> None:
    """A run that the scheduler makes: its deadline is the next run, which the service's calendar learns of, too.

    The first run after unpausing began long after it was due: what had to end before then trains as best effort.
    """
    stack.do("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": False})
    run = run_of_type(stack, dag_id, "scheduled")
    run.reach("success")
    run.acknowledged()
    assert "the next run of the DAG is due then" in run.log(1)
    run.reach("success", "unpaused")
    assert run.acknowledged("unpaused").deadline_at is None
    assert "it trains as best effort (on_past_deadline='fail' refuses such a run)" in run.log(1, "unpaused")
    now = datetime.now(UTC)
    next_at = now.replace(hour=5, minute=0, second=0, microsecond=0)
    next_at += timedelta(days=1) if next_at <= now else timedelta(0)

    def expected() -> list[float]:
        client = stack.services["elasticflow_default"].client
        items = client.forecast(48).items
        return [item.due_at or 0.0 for item in items if item.kind == "expected" and item.dag_id == dag_id]

    stack.wait("the calendar knows the next runs", lambda: next_at.timestamp() in expected())
    stack.do("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": True})
    said = airflow(stack, "elasticflow", "feed", "--dag", dag_id)
    assert "elasticflow_default: 2 tasks told" in said
    stack.wait("a paused DAG is expected no more", lambda: not expected())
    stack.do("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": False})
    airflow(stack, "elasticflow", "feed", "--dag", dag_id)
    stack.wait("it is again", lambda: next_at.timestamp() in expected())
