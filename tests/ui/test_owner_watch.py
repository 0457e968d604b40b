"""The api-server reports owners as long as the plugin's application lives, at every service that jobs may run at."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from elasticflow_airflow import hooks
from elasticflow_airflow.client import Endpoint, ServiceUnavailable


@pytest.fixture
def owner_watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with connections and services that a test scripts."""
    from elasticflow_airflow.owners import owner_watch as module

    @contextmanager
    def session():
        yield SimpleNamespace(get_bind=lambda: SimpleNamespace(engine=sa.create_engine("sqlite://")))

    class Hook:
        conn_type, default_conn_name = "elasticflow", "elasticflow_default"

        def __init__(self, conn_id: str) -> None:
            self.conn_id = conn_id

        def endpoint(self, *, start: bool) -> Endpoint:
            assert not start
            return Endpoint(base_url="http://same" if self.conn_id in "ab" else f"http://{self.conn_id}")

        namespace = "default"

    monkeypatch.setattr(module, "create_session", session)
    monkeypatch.setattr(hooks, "ElasticFlowHook", Hook)
    monkeypatch.setattr(module.Connections, "read", lambda self, session: {"a", "b", "away", "there"})
    return module


def test_each_service_is_told_once_and_one_that_is_away_keeps_no_other_from_it(owner_watch, monkeypatch, caplog):
    told: list[str] = []

    def report(client, namespace, airflow, find):
        told.append(client.endpoint.base_url)
        if "away" in client.endpoint.base_url:
            raise ServiceUnavailable("it is away")
        return []

    monkeypatch.setattr(owner_watch, "report_owners", report)
    watch = owner_watch.OwnerWatch(10.0)
    watch.look()
    watch.look()
    assert sorted(told) == sorted(["http://same", "http://away", "http://there"] * 2)
    assert caplog.text.count("it is away") == 1, "said once"


def test_a_service_that_a_new_connection_names_is_told_at_the_next_look(owner_watch, monkeypatch):
    told, opened = [], []
    monkeypatch.setattr(owner_watch, "report_owners", lambda client, *_: told.append(client.endpoint.base_url) or [])
    real = hooks.ElasticFlowHook.endpoint
    monkeypatch.setattr(
        hooks.ElasticFlowHook,
        "endpoint",
        lambda self, **given: opened.append(self.conn_id) or real(self, **given),
    )
    named = {"there"}
    monkeypatch.setattr(owner_watch.Connections, "read", lambda self, session: set(named))
    watch = owner_watch.OwnerWatch(10.0)
    watch.look()
    named.add("new")
    watch.look()
    named.remove("there")
    watch.look()
    assert told == ["http://there", "http://new", "http://there", "http://new"]
    assert opened == ["there", "new"], "a secrets backend is not asked each time"


@pytest.mark.parametrize("interval", ["0.01", "0", "soon"])
def test_it_lives_as_long_as_airflows_application(owner_watch, monkeypatch, interval):
    """Airflow enters the lifespans of the applications that plugins bring with its own."""
    from airflow.api_fastapi.app import lifespan
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from elasticflow_airflow.plugin import ElasticFlowPlugin

    looked = threading.Event()
    monkeypatch.setattr(owner_watch.OwnerWatch, "look", lambda self: looked.set())
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__OWNERS_INTERVAL_S", interval)
    outer = FastAPI(lifespan=lifespan)
    for one in ElasticFlowPlugin().fastapi_apps:
        outer.mount(one["url_prefix"], one["app"])
    with TestClient(outer):
        running = [thread for thread in threading.enumerate() if thread.name == "elasticflow-owners"]
        assert bool(running) is (interval != "0")
        assert interval != "0.01" or looked.wait(20)
    for thread in running:
        thread.join(20)
        assert not thread.is_alive()
