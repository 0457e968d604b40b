"""What another try cannot help spends no retries, in a task, a trigger and a sensor alike; what may pass does not."""

from __future__ import annotations

from functools import partial

import httpx
import pytest
from airflow.sdk import DAG, BaseHook, Connection
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException, TaskDeferred
from support.elastic_tasks import context_of

from elasticflow_airflow.api import API_HEADER
from elasticflow_airflow.client import Endpoint
from elasticflow_airflow.exceptions import MissingConnection, ServiceAway, ServiceRefused, UnusableConnection
from elasticflow_airflow.operators import ElasticTrainSensor

WRONG_TOKEN = httpx.Response(401, json={"error": "unauthorized", "message": "it does not know this token"})
OTHER_VERSION = httpx.Response(200, json={}, headers={API_HEADER: "v9"})
PAGE = httpx.Response(200, text="<html>", headers={"content-type": "text/html"})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)


def sensor(**changes):
    with DAG("weekly", schedule=None):
        return ElasticTrainSensor(task_id="wait", job_id="j", **changes)


@pytest.fixture
def answering(monkeypatch):
    """Have a connection whose service, or whatever is at its address, gives one answer to everything."""

    def answer(response: httpx.Response) -> None:
        mock = httpx.MockTransport(lambda _: response)
        opened, opened_async = Endpoint.open_client, Endpoint.open_async_client
        monkeypatch.setattr(Endpoint, "open_client", lambda self, timeout_s, _=None: opened(self, timeout_s, mock))
        monkeypatch.setattr(
            Endpoint, "open_async_client", lambda self, timeout_s, _=None: opened_async(self, timeout_s, mock)
        )

    return answer


@pytest.fixture
def connected(monkeypatch):
    """Have a connection, as Airflow would find it in a worker and in a triggerer; None: there is none."""

    def connect(**fields):
        def find(_cls, conn_id):
            if not fields:
                raise AirflowNotFoundException(f"The conn_id `{conn_id}` isn't defined")
            return Connection(**{"conn_id": conn_id, "conn_type": "elasticflow", **fields})

        async def afind(cls, conn_id):
            return find(cls, conn_id)

        monkeypatch.setattr(BaseHook, "get_connection", classmethod(find))
        monkeypatch.setattr(BaseHook, "aget_connection", classmethod(afind))

    return connect


@pytest.mark.parametrize(("answer", "words"), [(WRONG_TOKEN, "this token"), (OTHER_VERSION, "which speaks API v9")])
@pytest.mark.parametrize("kind", ["train", "sense"])
def test_a_service_that_refuses_fails_a_task_without_a_retry(make_task, connected, answering, answer, words, kind):
    connected(host="gpus")
    answering(answer)
    task = make_task(retries=3) if kind == "train" else sensor(retries=3)
    with pytest.raises(ServiceRefused, match=words) as failed:
        task.execute(context_of(task))
    assert isinstance(failed.value, AirflowFailException)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({}, MissingConnection, "'prod' is not defined"),
        ({"conn_type": "http", "host": "gpus"}, UnusableConnection, "of type 'http'"),
        ({"host": "ftp://gpus"}, UnusableConnection, "'ftp://gpus' is no address"),
        ({"host": "gpus", "extra": '{"timeout_s": -1}'}, UnusableConnection, "timeout_s=-1"),
    ],
)
@pytest.mark.parametrize("task_kind", ["train", "sense", "resumed"])
def test_a_connection_that_is_missing_or_wrong_fails_a_task_without_a_retry(
    make_task, connected, fields, kind, words, task_kind
):
    connected(**fields)
    common = {"elasticflow_conn_id": "prod", "retries": 3}
    task = sensor(**common) if task_kind == "sense" else make_task(**common)
    event = {"job_id": "j", "claim": 1, "outcome": "ended"}
    run = partial(task.execute_complete, event=event) if task_kind == "resumed" else task.execute
    with pytest.raises(kind, match=words) as failed:
        run(context_of(task))
    assert isinstance(failed.value, AirflowFailException)


@pytest.mark.parametrize(
    ("answer", "kind"), [(WRONG_TOKEN, ServiceRefused), (OTHER_VERSION, ServiceRefused), (PAGE, ServiceAway)]
)
async def test_a_trigger_waits_while_it_may_pass_and_then_says_which_it_was(
    service, make_task, make_status, connected, monkeypatch, answer, kind
):
    """While a job trains, a token may be changed, and a service upgraded: that is no failure yet."""
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__INLINE_WAIT_S", "0")
    task = make_task()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task))
    waiting = [deferred.value.trigger]
    service.known = make_status()
    sensing = sensor()
    with pytest.raises(TaskDeferred) as deferred:
        sensing.execute(context_of(sensing))
    waiting.append(deferred.value.trigger)
    monkeypatch.setattr(httpx.AsyncClient, "request", replying(answer))
    for owner, trigger in zip((task, sensing), waiting, strict=True):
        _, arguments = trigger.serialize()
        at_once = dict.fromkeys(("poll_interval_s", "min_deferral_s", "service_away_s"), 0.0)
        event = (await anext(type(trigger)(**{**arguments, **at_once}).run())).payload
        with pytest.raises(kind) as failed:
            owner.execute_complete(context_of(owner), event)
        assert isinstance(failed.value, AirflowFailException) == (kind is ServiceRefused)


def replying(answer):
    async def request(_self, method, path, **_given):
        return httpx.Response(
            answer.status_code,
            content=answer.content,
            headers=answer.headers,
            request=httpx.Request(method, "http://x" + path),
        )

    return request
