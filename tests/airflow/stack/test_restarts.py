"""Each part of the machinery is killed or restarted in turn while the same two trainings go on: neither notices.

The tests of this file are the stages of one journey and run in this order. At its end the process table counts. Where
the server of the databases is killed, too, the journey is a long one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest
from support.airflow_paths import PATHS
from support.airflow_stack import LEASE_S, Run, Stack, command_line

from elasticflow_airflow.api import State

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1500), pytest.mark.xdist_group("restarts")]

TRAVELLERS = PATHS.add_dag(
    "travellers",
    'train(task_id="waits", fake={"in_place": False})',
    'blocking(task_id="blocks")',
)
ENDS = PATHS.add_dag("ends_after_a_restart", "train(100)")
STARTS = PATHS.add_dag("starts_while_the_service_is_away", "train(100)")
TASKS = ("waits", "blocks")


@dataclass
class Journey:
    """Two trainings under way, how far each was at the last stage, and whether that failed."""

    run: Run
    steps: dict[str, int]
    failed: bool = False

    def goes_on(self) -> None:
        """Wait until both have trained on; neither was ended, doubled or begun anew."""
        self.run.stack.wait("both train on", self._further)

    def _further(self) -> bool:
        for task_id in TASKS:
            job = self.run.job(task_id)
            assert job is not None
            assert not job.state.terminal, f"{task_id}: {job.state}, {job.state_reason}"
            assert job.incarnation == 1
            if job.step <= self.steps[task_id] or job.state is not State.RUNNING:
                return False
        self.steps = {task_id: self.run.job(task_id).step for task_id in TASKS}  # type: ignore[union-attr]
        return True


@pytest.fixture(scope="module", params=["usual", pytest.param("sqlite", marks=pytest.mark.soak)])
def stack(request: pytest.FixtureRequest) -> Stack:
    found: Stack = request.getfixturevalue(f"{request.param}_stack")
    return found


@pytest.fixture(scope="module")
def journey(stack: Stack) -> Iterator[Journey]:
    run = stack.run(TRAVELLERS)
    for task_id in TASKS:
        run.trains(task_id)
    run.waits_in_triggerer("waits")
    return Journey(run, dict.fromkeys(TASKS, 0))


@pytest.fixture(autouse=True)
def stage(request: pytest.FixtureRequest, journey: Journey) -> Iterator[None]:
    """Who was lost at one stage reaches no later one: those fail without waiting for it."""
    if journey.failed:
        pytest.fail("an earlier stage of the journey failed")
    before = request.session.testsfailed
    yield
    journey.failed = request.session.testsfailed > before


def healthy(stack: Stack, part: str) -> None:
    """Wait until Airflow says that a component works again."""

    def well() -> bool:
        try:
            return bool(stack.ask("GET", "/api/v2/monitor/health").json()[part]["status"] == "healthy")
        except (httpx.HTTPError, ValueError):
            return False

    stack.wait(f"the {part} is healthy", well)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_triggerer_restarts(stack: Stack, journey: Journey, number: signal.Signals) -> None:
    """No on_kill, and cleanup() does nothing: the next triggerer goes on where this one was, with its claim."""
    claim = journey.run.job("waits").claim
    stack.kill("triggerer", number)
    stack.start("triggerer")
    stack.wait("its lease is renewed", renewed(journey.run, "waits"))
    journey.goes_on()
    assert journey.run.job("waits").claim == claim
    assert journey.run.task("waits")["state"] == "deferred"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_service_restarts(stack: Stack, journey: Journey, number: signal.Signals) -> None:
    stack.services["elasticflow_default"].kill(number)
    stack.services["elasticflow_default"].start()
    journey.goes_on()


def test_the_service_is_away_for_longer_than_a_lease(stack: Stack, journey: Journey) -> None:
    """Nobody's lease runs out for want of a service that could renew it; a task that starts meanwhile waits for it."""
    service = stack.services["elasticflow_default"]
    before = {task_id: len(journey.run.events("parked", task_id)) for task_id in TASKS}
    service.kill()
    waits = stack.run(STARTS)
    waits.reach("running")
    gone_at = time.monotonic()
    stack.wait("a lease has passed", lambda: time.monotonic() - gone_at > 1.2 * LEASE_S)
    service.start()
    journey.goes_on()
    for task_id in TASKS:
        assert len(journey.run.events("parked", task_id)) == before[task_id]
    waits.reach("success")
    assert waits.task_now()["try_number"] == 1


def test_the_api_server_restarts(stack: Stack, journey: Journey) -> None:
    """Tasks and triggers cannot say that they live for a while, nor read a connection.

    (For how long is Airflow's setting: after ``[workers] max_failed_heartbeats`` a task's supervisor ends it.)
    """
    stack.kill("api-server")
    stack.start("api-server")
    healthy(stack, "scheduler")

    def runs() -> bool:
        state = journey.run.task_now("blocks")["state"]
        assert state != "failed"
        return bool(state == "running")

    stack.wait("the task runs", runs)
    journey.goes_on()
    assert journey.run.task_now("waits")["state"] == "deferred"
    assert {journey.run.task_now(task_id)["try_number"] for task_id in TASKS} == {1}


def test_the_scheduler_restarts(stack: Stack, journey: Journey) -> None:
    """The executor dies with it, its workers do not: the new scheduler starts the task again beside the old process.

    Whoever attached last has the claim; the old process is told to end by its heartbeat, and its kill is stale.
    """
    stack.kill("scheduler")
    stack.start("scheduler")
    healthy(stack, "scheduler")
    stack.wait("the task has a new owner", lambda: journey.run.job("blocks").claim >= 2)
    journey.goes_on()
    ends = stack.run(ENDS)
    ends.reach("success")
    assert ends.acknowledged().incarnation == 1


@pytest.mark.soak
def test_the_database_restarts(stack: Stack, journey: Journey) -> None:
    """Airflow's and the service's. Airflow's scheduler may hang for good then: it is started anew, as people would."""
    if stack.database is None:
        pytest.skip("SQLite has no server that could be killed")
    before = {task_id: len(journey.run.events("parked", task_id)) for task_id in TASKS}
    stack.database.stop()
    gone_at = time.monotonic()
    stack.wait("it is away", lambda: time.monotonic() - gone_at > 5.0)
    stack.database.start()
    healthy(stack, "triggerer")
    journey.goes_on()
    for task_id in TASKS:
        assert len(journey.run.events("parked", task_id)) == before[task_id]
    stack.kill("scheduler")
    stack.start("scheduler")
    ends = stack.run(ENDS)
    ends.reach("success")
    assert ends.acknowledged().incarnation == 1


def test_everything_at_once(stack: Stack, journey: Journey) -> None:
    stack.services["elasticflow_default"].kill()
    for component in ("triggerer", "scheduler"):
        stack.kill(component)
    for component in ("triggerer", "scheduler"):
        stack.start(component)
    stack.services["elasticflow_default"].start()
    stack.wait("its lease is renewed", renewed(journey.run, "waits"))
    journey.goes_on()


def test_in_the_end_nothing_is_left(stack: Stack, journey: Journey) -> None:
    """Every job is over, no slot is held, nobody trains, and no task's process is left."""
    stack.wait("the task runs", lambda: journey.run.task("blocks").get("state") == "running")
    stack.wait("its trigger waits", renewed(journey.run, "waits"))
    for task_id in TASKS:
        journey.run.mark("failed", task_id)
    for task_id in TASKS:
        assert journey.run.ended(State.CANCELLED, task_id).incarnation == 1
    for name, service in stack.services.items():
        if service.ours or service.embedded_pid() is not None:
            stack.wait(f"{name} has no live job", lambda s=service: not s.client.list_jobs(live=True))
            held = [slot for slot in service.client.health().slots if slot.job_id is not None]
            assert not held
    assert stack.trainers() == []
    stack.wait("no task is left", lambda: not task_processes(stack))


def renewed(run: Run, task_id: str):
    """A condition: the lease of a task's job has been renewed since now."""
    before = run.job(task_id).lease_expires_at or 0.0

    def later() -> bool:
        job = run.job(task_id)
        return job is not None and (job.lease_expires_at or 0.0) > before

    return later


def task_processes(stack: Stack) -> list[psutil.Process]:
    """Processes that run or supervise a task: Airflow names them so."""
    named = [(p, " ".join(command_line(p))) for p in stack.family()]
    return [p for p, name in named if "LocalExecutor: " in name and "<idle>" not in name]
