"""What users and machines do to a task, each driven through the REST API of a real Airflow: nothing orphaned, nothing
doubled.

All paths go on at the same time, each in a DAG of its own; a test waits for its own. Checked is the state of the task,
of the job, and in ``test_restarts.py`` of the process table. Where a path is about a defect of Airflow, it says which.
"""

from __future__ import annotations

import signal
from concurrent.futures import Future

import psutil
import pytest
import support.authoring_paths
import support.deadline_paths  # noqa: F401 - both register their paths
from support.airflow_paths import PATHS
from support.airflow_stack import UNSAID, Run, Stack

from elasticflow_airflow.api import JobStatus, State

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1500)]

ON_SQLITE = (
    "success",
    "clear_while_running",
    "clear_while_deferred",
    "clear_after_success",
    "mark_failed",
    "dag_deleted_while_deferred",
    "worker_killed_and_retried",
    "worker_shut_down",
)
"""Where the database matters: two writers meet, rows are deleted under somebody, or an attempt follows another."""

DEFERRED = "Pausing task as DEFERRED"
"""What Airflow writes into a task's log: whoever looks at its state may come too late to see it so."""


# -- ends ----------------------------------------------------------------------------------------------------------


@PATHS.add("train(150, deadline=timedelta(hours=1))")
def success(stack: Stack, dag_id: str) -> None:
    """Deferred, promised, resumed, recorded, and only then acknowledged. The log says what happened meanwhile."""
    run = stack.run(dag_id)
    run.reach("success")
    job = run.acknowledged()
    assert (job.state, job.incarnation, job.step, job.claim) == (State.SUCCEEDED, 1, 150, 1)
    said = run.log(1)
    assert "submitted job" in said
    assert "/150" in said  # a deferred task's log is not silent: the trigger says how far it is
    assert "succeeded: 150 steps" in said
    assert DEFERRED in said


@PATHS.add("blocking(60)")
def success_while_blocking(stack: Stack, dag_id: str) -> None:
    run = stack.run(dag_id)
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.step, job.claim) == (1, 60, 1)


@PATHS.add('train(10**6, fake={"fail_at_step": 30, "failure": "RuntimeError: injected"}, retries=1)')
def failure_and_retry(stack: Stack, dag_id: str) -> None:
    """The training's own failure is the one thing that retries are for: the second try is a second incarnation."""
    run = stack.run(dag_id)
    run.reach("failed")
    job = run.ended(State.FAILED)
    assert (job.incarnation, run.task_now()["try_number"]) == (2, 2)
    assert "RuntimeError: injected" in run.log(1)


@PATHS.add("train(10**7, deadline=timedelta(minutes=1), retries=3)")
def rejected(stack: Stack, dag_id: str) -> None:
    """A promise that cannot be given is not asked for again."""
    run = stack.run(dag_id)
    run.reach("failed")
    assert run.ended(State.REJECTED).incarnation == 1
    assert run.task_now()["try_number"] == 1
    assert "earliest feasible deadline" in run.log(1)


# -- clears --------------------------------------------------------------------------------------------------------


@PATHS.add("blocking(500)")
def clear_while_running(stack: Stack, dag_id: str) -> None:
    """The old process is told so by its heartbeat, seconds later; whatever it does then is of an old claim."""
    run = stack.run(dag_id)
    run.trains()
    run.clear()
    stack.wait("a second claim", lambda: (job := run.job()) and job.claim >= 2)
    run.reach("success")
    job = run.acknowledged()
    assert (job.state, job.step) == (State.SUCCEEDED, 500)
    assert job.incarnation <= 2
    assert len(run.events("succeeded")) == 1


@PATHS.add("train(600)")
def clear_while_deferred(stack: Stack, dag_id: str) -> None:
    """The old trigger's kill may come before the new attempt's submit or after it: the training ends once, rightly.

    Before: the job is cancelled, and the attempt opens the second incarnation, from the first one's checkpoint.
    After: the old claim is stale, and the kill changes nothing.
    """
    run = stack.run(dag_id)
    run.waits_in_triggerer()
    run.clear()
    stack.wait("a second claim", lambda: (job := run.job()) and job.claim >= 2)
    run.reach("success")
    job = run.acknowledged()
    assert (job.state, job.step) == (State.SUCCEEDED, 600)
    assert job.incarnation <= 2
    assert len(run.events("succeeded")) == 1
    assert run.task_now()["try_number"] == 2


@PATHS.add("blocking(40)")
def clear_after_success(stack: Stack, dag_id: str) -> None:
    """An acknowledged success is over: it trains anew, and not from where it was."""
    run = stack.run(dag_id)
    run.reach("success")
    run.acknowledged()
    run.over()
    run.clear()
    stack.wait("a second incarnation", lambda: (job := run.job()) and job.incarnation == 2)
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.step) == (2, 40)
    assert len(run.events("succeeded")) == 2


# -- marks ---------------------------------------------------------------------------------------------------------

BOTH = ('train(task_id="waits")', 'blocking(task_id="blocks")')


def both_train(stack: Stack, dag_id: str):
    """A run with one task in the triggerer and one in a worker, whose jobs train."""
    run = stack.run(dag_id)
    run.trains("blocks")
    run.waits_in_triggerer("waits")
    assert run.task_now("blocks")["state"] == "running"
    return run


@PATHS.add(*BOTH)
def mark_failed(stack: Stack, dag_id: str) -> None:
    run = both_train(stack, dag_id)
    for task_id in ("waits", "blocks"):
        run.mark("failed", task_id)
    for task_id in ("waits", "blocks"):
        assert run.ended(State.CANCELLED, task_id).incarnation == 1
        assert run.task_now(task_id)["state"] == "failed"


@PATHS.add(*BOTH)
def mark_success(stack: Stack, dag_id: str) -> None:
    """Nobody waits for the job any more: it is cancelled, and its result is nobody's."""
    run = both_train(stack, dag_id)
    for task_id in ("waits", "blocks"):
        run.mark("success", task_id)
    for task_id in ("waits", "blocks"):
        job = run.ended(State.CANCELLED, task_id)
        assert not job.acknowledged
        assert run.task_now(task_id)["state"] == "success"


@PATHS.add(*BOTH)
def dag_run_failed(stack: Stack, dag_id: str) -> None:
    run = both_train(stack, dag_id)
    run.mark_run("failed")
    for task_id in ("waits", "blocks"):
        run.ended(State.CANCELLED, task_id)


@PATHS.add(*BOTH)
def dag_run_deleted(stack: Stack, dag_id: str) -> None:
    """Airflow deletes ended runs only; the processes and triggers of one that was just ended find no row any more."""
    run = both_train(stack, dag_id)
    run.mark_run("failed")
    run.delete()
    for task_id in ("waits", "blocks"):
        run.ended(State.CANCELLED, task_id)


@PATHS.add("train()")
def dag_deleted_while_deferred(stack: Stack, dag_id: str) -> None:
    run = stack.run(dag_id)
    run.waits_in_triggerer()
    stack.do("DELETE", f"/api/v2/dags/{dag_id}")
    run.ended(State.CANCELLED)


# -- timeouts ------------------------------------------------------------------------------------------------------


@PATHS.add("blocking(execution_timeout=timedelta(seconds=15))")
def execution_timeout_while_running(stack: Stack, dag_id: str) -> None:
    run = stack.run(dag_id)
    run.reach("failed")
    assert "execution_timeout (0:00:15) is over" in run.ended(State.CANCELLED).state_reason


@PATHS.add("train(execution_timeout=timedelta(seconds=25))")
def execution_timeout_while_deferred(stack: Stack, dag_id: str) -> None:
    """Airflow applies it to no deferral (67227), and kills nobody when a deferral times out (72128)."""
    run = stack.run(dag_id)
    run.reach("failed")
    assert "execution_timeout (0:00:25) is over" in run.ended(State.CANCELLED).state_reason
    assert DEFERRED in run.log(1)


# -- machines ------------------------------------------------------------------------------------------------------


@PATHS.add("blocking(600)")
def worker_shut_down(stack: Stack, dag_id: str) -> None:
    """SIGTERM to the worker: Airflow forwards it, lets execute() go on, and takes its return for a success (73395).

    The task has no retries, and needs none: it goes on in another worker, with the same training.
    """
    run = stack.run(dag_id)
    run.trains()
    _, supervisor = run.processes()
    supervisor.send_signal(signal.SIGTERM)
    run.reach("up_for_reschedule")
    assert not run.task_now()["end_date"] or run.job().state is State.RUNNING
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.step) == (1, 600)
    assert job.claim == 2
    assert run.task_now()["try_number"] == 1


@PATHS.add("blocking(400, retries=1)")
def worker_killed_and_retried(stack: Stack, dag_id: str) -> None:
    """kill -9 of the task's process: the retry attaches to the same training."""
    run = stack.run(dag_id)
    run.trains()
    runner, _ = run.processes()
    runner.kill()
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.step, job.claim) == (1, 400, 2)
    assert run.task_now()["try_number"] == 2


@PATHS.add("blocking(150, retries=1, retry_delay=timedelta(seconds=60))")
def job_ended_before_the_retry(stack: Stack, dag_id: str) -> None:
    """The remote job is finished when the retry starts (58490): it is looked at before anything is submitted."""
    run = stack.run(dag_id)
    run.trains()
    runner, _ = run.processes()
    runner.kill()
    assert not run.ended(State.SUCCEEDED).acknowledged
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.claim) == (1, 2)
    assert run.task_now()["try_number"] == 2


@PATHS.add("blocking()")
def worker_killed_for_good(stack: Stack, dag_id: str) -> None:
    """Nobody is left to cancel: Airflow itself says that its task has failed, and the lease need not run out."""
    job = killed_for_good(stack.run(dag_id))
    assert (job.orphaned, job.state_reason) == (False, "its Airflow task has ended (failed)")


@PATHS.add(f"""blocking(elasticflow_conn_id='{{{{ "{UNSAID}" }}}}')""")
def worker_killed_unsaid(stack: Stack, dag_id: str) -> None:
    """Airflow cannot say so to a service that only a template names: the lease is the last resort.

    The job is suspended with a checkpoint, and cancelled later.
    """
    run = stack.run(dag_id)
    job = killed_for_good(run)
    assert job.orphaned
    assert "no client has polled the job" in job.state_reason
    assert [e.kind for e in run.events("parked")] == ["parked"]


def killed_for_good(run: Run) -> JobStatus:
    """The end of a job whose task's process was killed, and that has no retries."""
    run.trains()
    runner, _ = run.processes()
    runner.kill()
    run.reach("failed")
    return run.ended(State.CANCELLED)


@PATHS.add("blocking(400, retries=1)")
def machine_of_the_worker_lost(stack: Stack, dag_id: str) -> None:
    """Worker and supervisor vanish without a word: Airflow notices by the missing heartbeat, the retry attaches."""
    run = stack.run(dag_id)
    run.trains()
    for process in run.processes():
        process.kill()
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.step) == (1, 400)
    assert run.task_now()["try_number"] == 2


@PATHS.add(
    'train(600, task_id="waits", elasticflow_conn_id="embedded")',
    'blocking(600, task_id="blocks", elasticflow_conn_id="embedded", retries=1)',
)
def embedded_service_killed(stack: Stack, dag_id: str) -> None:
    """With a task's process, even: it is started again by whoever needs it first, and finds its jobs training.

    It was started by a task, whose process group Airflow kills; it lives in a session of its own.
    """
    run = both_train(stack, dag_id)
    runner, _ = run.processes("blocks")
    service = psutil.Process(stack.services["embedded"].embedded_pid())
    for process in (service, runner):  # at once: who lives on starts it again, and may then be done in no time
        process.kill()
    for task_id, claims in (("waits", 1), ("blocks", 2)):
        run.reach("success", task_id)
        job = run.acknowledged(task_id)
        assert (job.incarnation, job.step, job.claim) == (1, 600, claims)
        assert run.task_now(task_id)["try_number"] == claims


@PATHS.add('train(800, elasticflow_conn_id="local", scaling_curve={1: 15.0}, env={})')
def node_lost(stack: Stack, dag_id: str) -> None:
    """Real torchrun processes, killed with their supervisor, as when a machine goes: no retry of the task is spent."""
    run = stack.run(dag_id)
    run.trains(beyond=40)
    victims = stack.trainers()
    assert victims
    for process in victims:
        process.kill()
    run.reach("success")
    job = run.acknowledged()
    assert (job.incarnation, job.step, job.claim) == (1, 800, 1)
    assert job.generation >= 2
    assert run.task_now()["try_number"] == 1
    stack.wait("no training process is left", lambda: not stack.trainers(), 60)


# -- the tests -----------------------------------------------------------------------------------------------------


def selected(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The paths that this session asks for, by the name of the test that asks."""
    items = [item for item in request.session.items if getattr(item, "originalname", None) == test]
    return [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]  # parametrized


@pytest.fixture(scope="module")
def walked(usual_stack: Stack, request: pytest.FixtureRequest) -> dict[str, Future[None]]:
    return PATHS.start(usual_stack, selected(request, "test_path"))


@pytest.fixture(scope="module")
def walked_on_sqlite(sqlite_stack: Stack, request: pytest.FixtureRequest) -> dict[str, Future[None]]:
    return PATHS.start(sqlite_stack, selected(request, "test_path_on_sqlite"))


@pytest.mark.parametrize("name", list(PATHS.functions))
def test_path(walked: dict[str, Future[None]], name: str) -> None:
    walked[name].result()


@pytest.mark.soak
@pytest.mark.parametrize("name", ON_SQLITE)
def test_path_on_sqlite(walked_on_sqlite: dict[str, Future[None]], name: str) -> None:
    walked_on_sqlite[name].result()
