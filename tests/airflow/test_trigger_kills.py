"""A killed deferred task: Airflow's runner cancels its trigger again each second, and the job is cancelled anyhow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.jobs.triggerer_job_runner import TriggerRunner
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from elasticflow_airflow.client import AsyncElasticFlowClient, Endpoint
from elasticflow_airflow.triggers import ElasticFlowJobTrigger
from elasticflow_airflow.waiting import cancelling

USER_ACTION = "user-action"
MANY = 50


def trigger(number: int = 0, **changes: Any) -> ElasticFlowJobTrigger:
    arguments = {"job_id": f"j{number}", "claim": 1, "poll_interval_s": 0.01, "min_deferral_s": 0.0}
    return ElasticFlowJobTrigger(**{**arguments, **changes})


class Runner:
    """Airflow's runner with triggers that run in it, and a supervisor that wants them gone."""

    def __init__(self, *waiting: ElasticFlowJobTrigger) -> None:
        self.runner = TriggerRunner()
        for number, one in enumerate(waiting):
            self.runner.triggers[number] = {"task": None, "is_watcher": False, "name": one.job_id, "events": 0}
            self.runner.triggers[number]["task"] = asyncio.create_task(self.runner.run_trigger(number, one))

    async def end(self, message: str = USER_ACTION, pause_s: float = 0.01) -> None:
        """Cancel all until none is left, as often as Airflow's runner does in its time."""
        tasks = [details["task"] for details in self.runner.triggers.values()]
        async with asyncio.timeout(20):
            while left := [task for task in tasks if not task.done()]:
                for task in left:
                    task.cancel(message)
                await asyncio.sleep(pause_s)


async def settled() -> None:
    """Wait for what goes on after the triggers."""
    async with asyncio.timeout(20):
        while left := cancelling.under_way():
            await asyncio.wait(left)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def slow(monkeypatch):
    """The service takes longer to answer a cancel than Airflow waits until it cancels again."""
    post = AsyncElasticFlowClient.cancel

    async def slowly(self, *arguments):
        await asyncio.sleep(0.1)
        return await post(self, *arguments)

    monkeypatch.setattr(AsyncElasticFlowClient, "cancel", slowly)


async def test_many_that_are_killed_at_once_cancel_each_its_job(service, slow):
    service.claim = 1
    runner = Runner(*map(trigger, range(MANY)))
    await until(lambda: len(service.did("lease")) >= MANY)
    await runner.end()
    await settled()
    cancelled = [path for path in service.paths if path.endswith("/cancel")]
    assert sorted(cancelled) == sorted(f"/v1/jobs/j{number}/cancel" for number in range(MANY))


async def test_the_cancel_goes_by_the_client_that_waited(service, slow, monkeypatch):
    service.claim = 1
    opened = []
    open_client = Endpoint.open_async_client

    def count(self, *arguments):
        opened.append(self)
        return open_client(self, *arguments)

    monkeypatch.setattr(Endpoint, "open_async_client", count)
    runner = Runner(trigger())
    await until(lambda: service.did("lease"))
    await runner.end()
    await settled()
    assert len(service.did("cancel")) == 1
    assert len(opened) == 1


async def test_a_cancel_that_does_not_get_through_is_logged_and_tried_again(service, monkeypatch, capsys):
    """The trigger has ended by then, as Airflow waits for no service."""
    service.claim = 1
    monkeypatch.setattr("elasticflow_airflow.waiting.retrying_client._RETRY_FOR_S", 0.0)
    monkeypatch.setattr(cancelling, "_PAUSE_S", 0.05)
    runner = Runner(trigger())
    await until(lambda: service.did("lease"))
    service.away = 10
    await runner.end()
    assert not service.did("cancel")
    await settled()
    assert len(service.did("cancel")) == 1
    said = capsys.readouterr().out
    assert "job j0 is not cancelled yet after 3 tries" in said
    assert "job j0 cancelled" in said


async def test_killed_before_airflow_comes_to_on_kill(service, slow, monkeypatch):
    """Its log may take longer than the second until the next cancel, which then meets no on_kill."""
    service.claim = 1
    monkeypatch.setattr(ElasticFlowJobTrigger, "on_kill", lambda _: asyncio.sleep(0))
    runner = Runner(trigger())
    await until(lambda: service.did("lease"))
    await runner.end()
    await settled()
    assert len(service.did("cancel")) == 1


@pytest.mark.parametrize(("state", "cancels"), [("deferred", 0), ("failed", 2), (None, 2)])
async def test_triggers_that_another_triggerer_took_over_leave_their_jobs_alone(service, monkeypatch, state, cancels):
    """Airflow takes them away here just as if the tasks had been ended; it is asked which it was, once for all."""
    service.claim, asked = 1, []
    states = {} if state is None else {"run1": {"train": state, "mapped_3": state}}

    def get_task_states(**question):
        asked.append((question["dag_id"], question["run_ids"], question["task_ids"]))
        return states

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(get_task_states))
    waiting = [trigger(0), trigger(1)]
    for one, task_id, index in zip(waiting, ("train", "mapped"), (-1, 3), strict=True):
        one.task_instance = SimpleNamespace(
            id=task_id, dag_id="daily", run_id="run1", task_id=task_id, map_index=index, try_number=1, task=None,
            context_carrier=None,
        )  # fmt: skip
    runner = Runner(*waiting)
    await until(lambda: len(service.did("lease")) >= 2)
    await runner.end()
    await settled()
    assert len(service.did("cancel")) == cancels
    assert asked == [("daily", ["run1"], ["mapped", "train"])]


@pytest.mark.parametrize("message", ["EOF - shutting down", None])
async def test_a_triggerer_that_leaves_cancels_nothing(service, message):
    service.claim = 1
    runner = Runner(trigger())
    await until(lambda: service.did("lease"))
    await runner.end(message)
    await settled()
    assert not service.did("cancel")
