"""What kills, outages and lost processes do to a task and its job, in front of a scripted service.

The same paths with real components: ``tests/airflow/stack``.
"""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pendulum
import pytest
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowTaskTimeout,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskDeferred,
)
from support import elastic_tasks
from support.elastic_tasks import Store, success

from elasticflow_airflow.api import State
from elasticflow_airflow.operators import elastic_train
from elasticflow_airflow.task import acknowledging
from elasticflow_airflow.triggers import ElasticFlowJobTrigger

context_of = partial(elastic_tasks.context_of, state="running")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    monkeypatch.setattr(elastic_train, "_ANSWER_WITHIN_S", 0.0)
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__POLL_INTERVAL_S", "0.01")
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__INLINE_WAIT_S", "0")


def strike(task):
    """What Airflow's SIGTERM handler does: it calls on_kill and returns, and execute() goes on."""
    threading.Thread(target=task.on_kill).run()


# -- kills -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["failed", "success", "skipped", "removed", "restarting", None])
@pytest.mark.parametrize("map_index", [-1, 3])
def test_a_users_kill_cancels_the_job_and_never_ends_as_a_success(service, make_status, make_task, state, map_index):
    """Airflow lets execute() go on after SIGTERM (PR 73395): it must not return, even if the job succeeds meanwhile."""
    service.statuses = [make_status(), success(make_status)]
    task = make_task(deferrable=False)
    service.on_call = lambda verb: strike(task) if verb == "lease" else None
    with pytest.raises(AirflowException, match="the task was killed"):
        task.execute(context_of(task, state=state, map_index=map_index))
    assert len(service.did("cancel")) == 1


@pytest.mark.parametrize("state", ["running", "queued", "scheduled", "up_for_retry", "up_for_reschedule", "deferred"])
@pytest.mark.parametrize("deferrable", [True, False])
def test_a_worker_that_is_shut_down_leaves_the_job_and_no_retry(service, make_status, make_task, state, deferrable):
    """The same SIGTERM as a user's: a deploy or an eviction. Airflow wants the task, so it goes on elsewhere."""
    service.statuses = [make_status(), success(make_status)]
    task = make_task(deferrable=deferrable)
    service.on_call = lambda verb: strike(task) if verb == "lease" else None
    with pytest.raises(AirflowRescheduleException) as rescheduled:
        task.execute(context_of(task, state=state))
    assert rescheduled.value.reschedule_date > pendulum.now("UTC")  # not at once: trap of a quick second half
    assert not service.did("cancel")


def test_where_airflow_cannot_be_asked_the_job_and_the_retry_are_kept(service, make_status, make_task):
    """Its API server restarts, and the supervisor ends the task. A user's wish, if it was one, stands recorded."""
    service.statuses = [make_status(), make_status()]
    task = make_task(deferrable=False)
    service.on_call = lambda verb: strike(task) if verb == "lease" else None
    with pytest.raises(AirflowRescheduleException):
        task.execute(context_of(task, state=RuntimeError("the API server does not answer")))
    assert not service.did("cancel")


def test_a_kill_before_the_submission_submits_nothing(service, make_task):
    task = make_task()
    service.on_call = lambda verb: strike(task) if verb == "snapshot" else None
    with pytest.raises(AirflowException, match="killed before its job was submitted"):
        task.execute(context_of(task, state="failed"))
    assert not service.did("submit")


def test_a_kill_while_the_submission_is_answered_cancels_its_job(service, make_task):
    task = make_task()
    killed = []

    def kill(verb):
        if verb == "submit" and not killed:
            killed.append(threading.Thread(target=task.on_kill))
            killed[0].start()

    service.on_call = kill
    with pytest.raises(AirflowException, match="killed"):
        task.execute(context_of(task, state="failed"))
    killed[0].join()
    assert service.did("cancel")
    assert {body["claim"] for body in service.did("cancel")} == {1}


def test_execution_timeout_of_a_waiting_worker_cancels_the_job(service, make_status, make_task):
    """Airflow raises the timeout anywhere, and calls on_kill then; its state is running, and yet the job must end."""
    task = make_task(deferrable=False, execution_timeout=timedelta(minutes=1))
    service.on_call = lambda verb: raise_(AirflowTaskTimeout("timed out")) if verb == "lease" else None
    try:
        task.execute(context_of(task))
    except AirflowTaskTimeout:
        task.on_kill()
    assert [body["reason"] for body in service.did("cancel")] == ["execution_timeout (0:01:00) is over"]


def raise_(error):
    raise error


def test_airflow_may_copy_the_operator(make_task):
    assert copy.deepcopy(make_task()).task_id == "train"


# -- owners ------------------------------------------------------------------------------------------------------


def test_the_same_try_run_twice_gets_a_claim_of_its_own(service, make_task):
    """A scheduler that dies may leave a task process behind while a new one starts: its kill is stale by then."""
    store, first, second = Store(), make_task(), make_task()
    for task in (first, second):
        with pytest.raises(TaskDeferred):
            task.execute(context_of(task, store, state="failed"))
    strike(first)
    strike(second)
    assert [body["claim"] for body in service.did("cancel")] == [1, 2]  # the first is answered by 409
    assert [body["claim"] for body in service.did("lease")] == [1, 2]


def test_an_airflow_that_remembers_nothing_now_costs_no_training(service, make_status, make_task):
    """Its API server restarts, or a new attempt has replaced this one: the job's id follows from the task."""
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse

    class Refusing(Store):
        def set(self, key, value):
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 404}))

    service.statuses = [make_status(), success(make_status)]
    task = make_task(deferrable=False)
    assert task.execute(context_of(task, Refusing()))["steps"] == 10


def test_a_retry_that_finds_its_job_finished_returns_it_without_deferring(service, make_status, make_task):
    """The job ended while nobody looked (58490): look before deferring."""
    service.statuses = [success(make_status)]
    service.claim = 1
    task = make_task(retries=1)
    assert task.execute(context_of(task, try_number=2))["steps"] == 10


@pytest.mark.parametrize(("max_tries", "acknowledged"), [(0, 0), (1, 1)])
def test_a_clear_after_a_success_that_was_never_acknowledged_trains_anew(
    service, make_status, make_task, max_tries, acknowledged
):
    """Whoever would have acknowledged it was ended too soon, or found no service; a mere retry returns the result."""
    service.statuses = [success(make_status)]
    store = Store()
    for attempt, allowed in ((1, 0), (2, max_tries)):
        task = make_task(deferrable=False)
        assert task.execute(context_of(task, store, try_number=attempt, max_tries=allowed))["steps"] == 10
    said = [verb for _, verb, _ in service.calls if verb in ("submit", "acknowledge")]
    assert said == ["submit", *["acknowledge"] * acknowledged, "submit"]
    assert [body["claim"] for body in service.did("acknowledge")] == [1] * acknowledged


@pytest.mark.parametrize(("max_tries", "asked"), [(3, "attach"), (4, "submit")])
def test_a_retry_after_a_recorded_success_trains_no_second_time_and_a_clear_does(
    service, make_status, make_task, max_tries, asked
):
    """Airflow's scheduler, killed or late, wrote "failed" over the success that its API server had recorded."""
    service.statuses = [success(make_status).model_copy(update={"acknowledged": True})]
    store = Store()
    for attempt, allowed in ((1, 3), (2, max_tries)):
        task = make_task(deferrable=False)
        assert task.execute(context_of(task, store, try_number=attempt, max_tries=allowed))["steps"] == 10
    said = [verb for _, verb, _ in service.calls if verb in ("submit", "attach", "acknowledge")]
    assert said == ["submit", asked]


def test_a_retry_of_a_try_that_acknowledged_after_airflow_had_given_it_up_trains_no_second_time(
    service, make_status, make_task
):
    """Its supervisor was killed; it lived on for some seconds, and Airflow took nothing more from it."""
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse

    class GivenUp(Store):
        def set(self, key, value):
            if value["returned"]:
                raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 409}))
            super().set(key, value)

    service.statuses = [success(make_status).model_copy(update={"acknowledged": True})]
    store = GivenUp()
    for attempt in (1, 2):
        task = make_task(deferrable=False)
        assert task.execute(context_of(task, store, try_number=attempt, max_tries=3))["steps"] == 10
    assert [verb for _, verb, _ in service.calls if verb in ("submit", "attach")] == ["submit", "attach"]


@pytest.mark.parametrize("max_tries", [0, 1])
def test_a_task_that_failed_with_its_result_gets_it_again_when_it_is_cleared(
    service, make_status, make_task, max_tries
):
    """The registry was away: whoever clears the task the next morning wants the model registered, not trained."""
    service.statuses = [success(make_status)]
    store, registered = Store(), []

    def register(checkpoint_path, result):
        if not registered.append(checkpoint_path) and len(registered) == 1:
            raise ConnectionError("no registry")

    task = make_task(deferrable=False, on_promote=register)
    with pytest.raises(ConnectionError, match="no registry"):
        task.execute(context_of(task, store))
    task = make_task(deferrable=False, on_promote=register)
    assert task.execute(context_of(task, store, try_number=2, max_tries=max_tries))["steps"] == 10
    assert [verb for _, verb, _ in service.calls if verb in ("submit", "acknowledge")] == ["submit", "submit"]
    assert len(registered) == 2


# -- outages -----------------------------------------------------------------------------------------------------


def test_a_service_that_is_away_at_the_start_costs_no_retry(service, make_task, monkeypatch):
    service.away = 10**6
    task, store = make_task(), Store()
    with pytest.raises(AirflowRescheduleException):
        task.execute(context_of(task, store))
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__SERVICE_AWAY_S", "0")
    with pytest.raises(AirflowException, match="does not answer"):  # the limit counts from the first look
        task.execute(context_of(task, store))
    monkeypatch.delenv("AIRFLOW__ELASTICFLOW__SERVICE_AWAY_S")
    service.away = 0
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, store))


def test_a_service_that_leaves_after_the_submission_is_waited_for(service, make_status, make_task):
    service.statuses = [make_status(last_event_id=3)]

    def leave(verb):
        service.away = 1 if verb == "submit" else 0

    service.on_call = leave
    task = make_task()
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task))


@pytest.mark.parametrize("outcome", ["ended", "gone"])
def test_a_job_that_the_service_has_forgotten_is_submitted_again(service, make_status, make_task, outcome):
    task, store = make_task(), Store()
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, store))
    service.known = None
    event = {"job_id": service.statuses[0].job_id, "claim": 1, "outcome": outcome}
    resumed = make_task()
    with pytest.raises(TaskDeferred):
        resumed.execute_complete(context_of(resumed, store), event)
    assert len(service.did("submit")) == 2


def test_a_job_cancelled_because_nobody_could_ask_for_it_is_submitted_again(service, make_status, make_task):
    """The triggerer was away for longer than lease and grace: that is no failure of the training."""
    task, store = make_task(), Store()
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, store))
    service.statuses = [make_status(State.CANCELLED, orphaned=True, state_reason="nobody has asked")]
    service.on_call = lambda verb: service.statuses.__setitem__(0, make_status()) if verb == "submit" else None
    resumed = make_task()
    event = {"job_id": service.known.job_id, "claim": 1, "outcome": "ended"}
    service.known = service.statuses[0]
    with pytest.raises(TaskDeferred):
        resumed.execute_complete(context_of(resumed, store), event)
    assert len(service.did("submit")) == 2
    service.on_call = None
    service.known = service.statuses[0] = make_status(State.CANCELLED, state_reason="cancelled by ops")
    with pytest.raises(AirflowFailException, match="cancelled by ops"):
        resumed.execute_complete(context_of(resumed, store), {**event, "claim": 2})


def test_a_service_that_is_away_when_the_trigger_has_fired_is_waited_for(service, make_status, make_task):
    task = make_task()
    service.away = 10**6
    with pytest.raises(TaskDeferred):
        task.execute_complete(context_of(task), {"job_id": "j", "claim": 1, "outcome": "ended"})


def test_a_trigger_that_breaks_costs_no_retry(service, make_task):
    store = Store()
    task = make_task()
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, store))
    for _ in range(3):
        resumed = make_task()
        with pytest.raises(TaskDeferred):
            resumed.resume_execution("__fail__", {"error": "Trigger failure"}, context_of(resumed, store))
    last = make_task()
    with pytest.raises(TaskDeferralError):
        last.resume_execution("__fail__", {"error": "Trigger failure"}, context_of(last, store))
    acknowledging.on_task_instance_failed(
        previous_state=None, task_instance=SimpleNamespace(task=last, state="failed"), error=None
    )
    assert len(service.did("cancel")) == 1  # the listener knows the job of a task that was only resumed


def test_a_deferral_that_timed_out_cancels_the_job_though_airflow_kills_nobody(service, make_task):
    """Airflow calls no on_kill then (72128), and applies execution_timeout to no deferral by itself (67227)."""
    task, store = make_task(execution_timeout=timedelta(hours=2)), Store()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task, store))
    assert timedelta(minutes=119) < deferred.value.timeout <= timedelta(hours=2)
    store["elasticflow"]["since"] -= 3600
    resumed = make_task(execution_timeout=timedelta(hours=2))
    event = {"job_id": service.known.job_id, "claim": 1, "outcome": "ended"}
    with pytest.raises(TaskDeferred) as again:
        resumed.execute_complete(context_of(resumed, store), event)
    assert again.value.timeout <= timedelta(hours=1)  # a second deferral gets what is left
    with pytest.raises(TaskDeferralTimeout):
        resumed.resume_execution("__fail__", {"error": "Trigger timeout"}, context_of(resumed, store))
    assert len(service.did("cancel")) == 1


# -- the trigger -------------------------------------------------------------------------------------------------


def trigger(**changes):
    return ElasticFlowJobTrigger(**{"job_id": "j", "claim": 1, "poll_interval_s": 0.01, "min_deferral_s": 0, **changes})


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"error": "unauthorized", "message": "wrong token"}),
        (500, {"error": "internal", "message": "disk full"}),
        (502, {}),
        (404, None),  # a page of a proxy
    ],
)
async def test_what_may_pass_is_waited_for_in_the_triggerer(service, make_status, monkeypatch, status, body):
    """A trigger that raises fails its task and spends a retry: a token that changes or a full disk must not."""
    import httpx

    from elasticflow_airflow import hooks

    answers = [httpx.Response(status, json=body) if body is not None else httpx.Response(status, text="<html>")]
    service.claim = 1
    service.statuses = [success(make_status)]
    scripted = hooks.ElasticFlowHook.async_client

    async def client(self, *, retry_for_s):
        made = await scripted(self, retry_for_s=0)
        exchange = made._http.request

        async def request(*args, **kwargs):
            if answers:
                answer = answers.pop()
                answer.request = httpx.Request(*args[:2])
                return answer
            return await exchange(*args, **kwargs)

        monkeypatch.setattr(made._http, "request", request)
        return made

    monkeypatch.setattr(hooks.ElasticFlowHook, "async_client", client)
    event = await anext(trigger().run())
    assert event.payload["outcome"] == "ended"


async def test_a_connection_that_cannot_be_read_now_is_waited_for(service, make_status, monkeypatch):
    """The triggerer's supervisor asks the API server for the connection: that may be restarting (48183)."""
    from elasticflow_airflow import hooks

    service.claim = 1
    service.statuses = [success(make_status)]
    scripted, tries = hooks.ElasticFlowHook.async_client, []

    async def client(self, *, retry_for_s):
        tries.append(retry_for_s)
        if len(tries) < 3:
            raise AirflowException("API_SERVER_ERROR")
        return await scripted(self, retry_for_s=retry_for_s)

    monkeypatch.setattr(hooks.ElasticFlowHook, "async_client", client)
    event = await anext(trigger().run())
    assert event.payload["outcome"] == "ended"


async def test_a_quick_end_is_held_back(service, make_status, monkeypatch):
    """Airflow fails a task whose trigger fires before the executor's report of the first half is read (71580)."""
    from elasticflow_airflow import triggers

    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(triggers.asyncio, "sleep", sleep)
    service.claim = 1
    service.statuses = [success(make_status)]
    await anext(trigger(min_deferral_s=15.0).run())
    assert 10 < max(slept) <= 15
