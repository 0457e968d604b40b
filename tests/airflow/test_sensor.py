"""The sensor in front of a scripted service: what it takes for what, and that it only looks."""

from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowNotFoundException,
    AirflowSkipException,
    TaskDeferred,
)
from support.elastic_tasks import Store, context_of, success
from support.quiet_service import QuietService

from elasticflow_airflow.api import Event, JobIdentity, State
from elasticflow_airflow.client import AsyncElasticFlowClient, ElasticFlowClient, Endpoint, RequestRefused, Unauthorized
from elasticflow_airflow.exceptions import ServiceAway, ServiceRefused
from elasticflow_airflow.operators import ElasticTrainSensor
from elasticflow_airflow.sensor_trigger import ElasticFlowSensorTrigger
from elasticflow_airflow.task.arguments import ArgumentError
from elasticflow_airflow.waiting.sensing import judge


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)


def make(**changes):
    with DAG("weekly", schedule=None):
        arguments = {"external_dag_id": "daily", "external_task_id": "train", "external_run_id": "run1", **changes}
        return ElasticTrainSensor(task_id="wait", **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"external_task_id": None}, "exactly one of external_task_id= .* and job_id="),
        ({"job_id": "j"}, "exactly one of"),
        ({"job_id": "j", "external_task_id": None}, "external_dag_id='daily' beside job_id='j'"),
        ({"until": "never"}, "until='never' is none of 'succeeded', 'ended', 'checkpoint', 'at_risk'"),
        ({"external_task_id": 3}, "external_task_id=3 must be a str"),
        ({"external_map_index": -2}, "external_map_index=-2 must be a map index"),
        ({"deferrable": "no"}, "deferrable='no' must be True or False"),
        ({"poke_interval": -1}, "poke_interval"),
    ],
)
def test_refused_at_parse(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)


CHECKPOINT = Event(
    event_id=3, job_id="j", at=1.0, kind="checkpoint", reason="the checkpoint of step 4 counts",
    data={"step": 4, "digest": "d", "checkpoint_path": "/c/4"},
)  # fmt: skip


def test_what_a_look_comes_to(make_status):
    running, at_risk = make_status(), make_status(at_risk=True)
    done, failed = success(make_status), make_status(State.FAILED, failure="ZeroDivisionError")
    cases = [
        ("succeeded", None, "waiting"), ("succeeded", running, "waiting"), ("succeeded", done, "there"),
        ("succeeded", failed, "failed"), ("succeeded", make_status(State.REJECTED), "failed"),
        ("ended", running, "waiting"), ("ended", failed, "there"), ("ended", done, "there"),
        ("at_risk", running, "waiting"), ("at_risk", at_risk, "there"), ("at_risk", done, "over"),
        ("at_risk", failed, "over"), ("checkpoint", running, "waiting"), ("checkpoint", done, "there"),
        ("checkpoint", failed, "failed"),
    ]  # fmt: skip
    for until, status, outcome in cases:
        assert judge(until, status).outcome == outcome, (until, status)
    seen = judge("checkpoint", running, [CHECKPOINT])
    assert (seen.outcome, seen.checkpoint["checkpoint_path"], seen.checkpoint["step"]) == ("there", "/c/4", 4)
    assert "ZeroDivisionError" in judge("succeeded", failed).why


async def test_defers_and_goes_on_from_the_event(service, make_status):
    service.known = service.statuses[0]
    task = make(timeout=90, poke_interval=timedelta(seconds=2))
    context = context_of(task)
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context)
    trigger = deferred.value.trigger
    assert deferred.value.timeout == timedelta(seconds=90)
    assert trigger.job_id == JobIdentity(dag_id="daily", run_id="run1", task_id="train").job_id
    path, arguments = trigger.serialize()
    assert path == "elasticflow_airflow.sensor_trigger.ElasticFlowSensorTrigger"
    assert type(trigger)(**arguments).serialize() == trigger.serialize()
    assert (arguments["poll_interval_s"], arguments["min_deferral_s"]) == (2.0, 15.0)
    trigger.poll_interval_s = trigger.min_deferral_s = 0.0
    looks = iter([0, 0, 1])

    def end(verb):
        if verb == "status" and next(looks, 1):
            service.statuses = [success(make_status)]

    service.on_call, service.away = end, 2
    fired = await anext(trigger.run())
    assert fired.payload["outcome"] == "there"
    result = task.execute_complete(context, fired.payload)
    assert (result["checkpoint_path"], result["steps"], result["state"]) == ("/c", 10, "succeeded")
    assert {verb for _, verb, _ in service.calls} == {"status"}  # it only looks


async def test_waits_for_a_job_that_is_not_there_yet(service, make_status, capsys):
    task = make(until="checkpoint")
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task))
    trigger = deferred.value.trigger
    trigger.poll_interval_s = trigger.min_deferral_s = 0.0
    looks = iter([0, 1])

    def appear(verb):
        if verb == "status" and next(looks, 1):
            service.known, service.events = service.statuses[0], [CHECKPOINT]

    service.on_call = appear
    fired = await anext(trigger.run())
    assert fired.payload["checkpoint"]["checkpoint_path"] == "/c/4"
    assert task.execute_complete(context_of(task), fired.payload)["step"] == 4
    assert "not there yet" in capsys.readouterr().out


async def test_the_latest_run_is_found_behind_any_number_of_other_jobs(service, tmp_path, monkeypatch):
    quiet = QuietService(tmp_path)
    mine = [JobIdentity(dag_id="daily", run_id=run, task_id="train") for run in ("old", "new")]
    others = [JobIdentity(dag_id="daily", run_id="new", task_id="fold", map_index=n) for n in range(150)]
    foreign = JobIdentity(namespace="elsewhere", dag_id="daily", run_id="new", task_id="train")
    quiet.add(*mine, *others, foreign, state="succeeded", terminal=True)
    monkeypatch.setattr(type(service), "__call__", lambda self, request: quiet(request))
    try:
        task = make(external_run_id="latest", deferrable=False)
        found = task.poke(context_of(task)).xcom_value
        assert found["job_id"] == mine[1].job_id
        trigger = ElasticFlowSensorTrigger(
            "succeeded", dag_id="daily", task_id="train", poll_interval_s=0.0, min_deferral_s=0.0, service_away_s=0.0
        )
        fired = await anext(trigger.run())
        assert fired.payload["status"]["job_id"] == mine[1].job_id
    finally:
        quiet.close()


def test_ends_in_the_first_look_without_a_triggerer(service, make_status):
    service.known = service.statuses[0] = success(make_status)
    assert make().execute(context_of(make()))["met"] is True


def test_fails_skips_and_says_why(service, make_status):
    service.known = service.statuses[0] = make_status(State.FAILED, failure="rank 1: KeyError")
    for changes, kind, words in (
        ({}, AirflowFailException, "rank 1: KeyError; it was waited for until it is succeeded"),
        ({"soft_fail": True}, AirflowSkipException, "soft_fail"),
        ({"until": "at_risk"}, AirflowSkipException, "without being at risk"),
    ):
        task = make(**changes)
        with pytest.raises(kind, match=words):
            task.execute(context_of(task))


async def test_a_service_that_refuses_ends_it(service, make_status, monkeypatch):
    service.known = service.statuses[0]
    task = make()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task))

    def denied(call, response, endpoint):
        raise Unauthorized("the token is wrong")

    def refused(call, response, endpoint):
        raise RequestRefused("no such question")

    trigger = deferred.value.trigger
    trigger.poll_interval_s = trigger.min_deferral_s = 0.0
    monkeypatch.setattr("elasticflow_airflow.client.async_client.read_answer", refused)
    fired = await anext(trigger.run())
    assert fired.payload["outcome"] == "error"
    with pytest.raises(AirflowException, match="no such question"):
        task.execute_complete(context_of(task), fired.payload)
    monkeypatch.setattr("elasticflow_airflow.client.sync_client.read_answer", denied)
    with pytest.raises(ServiceRefused, match="the token is wrong"):
        task.execute(context_of(task))


async def test_a_service_that_is_away_is_waited_for_and_not_for_ever(service, make_status, monkeypatch):
    monkeypatch.setattr("elasticflow_airflow.hooks.ElasticFlowHook.client", impatient)
    service.away = 10**6
    task = make()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task))
    trigger = deferred.value.trigger
    assert trigger.service_away_s == 3600.0
    trigger.poll_interval_s = trigger.min_deferral_s = trigger.service_away_s = 0.0
    fired = await anext(trigger.run())
    assert fired.payload["outcome"] == "away"
    with pytest.raises(ServiceAway, match="it has been away for"):
        task.execute_complete(context_of(task), fired.payload)


@pytest.mark.parametrize("answered", [False, True])
def test_each_poke_waits_for_a_service_that_is_away_and_not_for_ever(service, make_status, monkeypatch, answered):
    monkeypatch.setattr("elasticflow_airflow.hooks.ElasticFlowHook.client", impatient)
    service.known, store = service.statuses[0], Store()
    task = make(deferrable=False, mode="reschedule")

    def poke(try_number=1):
        return task.poke(context_of(task, store, try_number=try_number)).is_done

    if answered:
        assert poke() is False
    service.away = 10**6
    assert poke() is False
    store["elasticflow"]["away_since"] -= 3500.0
    assert poke() is False  # each poke may be a process of its own, and the time counts on
    store["elasticflow"]["away_since"] -= 3700.0
    with pytest.raises(ServiceAway):
        poke()
    assert poke(try_number=2) is False  # another try waits anew
    service.away, service.statuses = 0, [success(make_status)]
    assert poke(try_number=2) is True
    assert store["elasticflow"]["away_since"] is None


def test_a_poke_waits_out_what_may_pass_once_the_service_has_answered(service, make_status, monkeypatch):
    service.known, store = service.statuses[0], Store()
    task = make(deferrable=False)
    context = context_of(task, store)
    assert task.poke(context).is_done is False
    for name, passing in (
        ("elasticflow_airflow.client.sync_client.read_answer", Unauthorized("the token is wrong")),
        ("elasticflow_airflow.hooks.ElasticFlowHook.client", AirflowNotFoundException("The conn_id isn't defined")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, raising(passing))
            assert task.poke(context).is_done is False
            with pytest.raises(AirflowException, match=str(passing)):
                task.poke(context_of(task))  # nothing was ever heard of it: it is wrong, and nobody waits for that
    service.statuses = [success(make_status)]
    assert task.poke(context).is_done is True


def test_under_dag_test_a_service_that_is_not_there_is_said_at_once(service, monkeypatch):
    monkeypatch.setattr("elasticflow_airflow.hooks.ElasticFlowHook.client", impatient)
    service.away, task = 10**6, make()
    with pytest.raises(ServiceAway):
        task.poke(context_of(task, dag_test=True))


async def test_the_trigger_reads_the_connection_again_until_it_fits(service, make_status, monkeypatch):
    service.known, service.statuses = service.statuses[0], [success(make_status)]
    opened = iter([AirflowNotFoundException("The conn_id isn't defined"), "old token", "new token"])

    async def open_client(self, *, retry_for_s):
        found = next(opened)
        if isinstance(found, Exception):
            raise found
        return AsyncElasticFlowClient(Endpoint(base_url="http://127.0.0.1:1", token=found), retry_for_s=0.0)

    def check(call, response, endpoint):
        if endpoint.token == "old token":
            raise Unauthorized("the token is wrong")
        return call.read(response)

    monkeypatch.setattr("elasticflow_airflow.hooks.ElasticFlowHook.async_client", open_client)
    monkeypatch.setattr("elasticflow_airflow.client.async_client.read_answer", check)
    trigger = ElasticFlowSensorTrigger("succeeded", job_id="j", poll_interval_s=0.0, min_deferral_s=0.0)
    fired = await anext(trigger.run())
    assert fired.payload["outcome"] == "there"
    service.away = 10**6
    task = make()
    assert task.execute_complete(context_of(task), fired.payload)["state"] == "succeeded"  # it need not ask any more


def raising(error):
    def call(*_, **__):
        raise error

    return call


def impatient(self, **_):
    return ElasticFlowClient(Endpoint(base_url="http://127.0.0.1:1"), retry_for_s=0.0)


def test_a_template_that_renders_none_is_named():
    task = make(external_run_id="{{ ti.xcom_pull('pick') }}")
    task.external_run_id = "None"
    with pytest.raises(AirflowFailException, match="external_run_id rendered to 'None': the upstream task 'pick'"):
        task.execute(context_of(task))


def test_a_task_that_the_dag_does_not_have_is_refused_when_it_is_read():
    with DAG("d", schedule=None) as dag:
        EmptyOperator(task_id="train")
        ElasticTrainSensor(task_id="good", external_task_id="train")
        ElasticTrainSensor(task_id="elsewhere", external_dag_id="other", external_task_id="gone")
        ElasticTrainSensor(task_id="late", external_task_id="{{ params.task }}")
        dag.resolve_template_files()
        ElasticTrainSensor(task_id="bad", external_task_id="trian")
    with pytest.raises(ArgumentError, match=r"external_task_id='trian' is no task of DAG 'd' \(it has .*train\)"):
        dag.resolve_template_files()
