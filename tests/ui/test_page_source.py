"""How the page asks the service: shared answers, and what a service that hangs may cost Airflow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import httpx
import pytest
from support.replicas import Replica, dead

from elasticflow_airflow.client import Endpoint
from elasticflow_airflow.client.calls.service_calls import calls
from elasticflow_airflow.client.errors import IncompatibleService, ServiceUnavailable
from elasticflow_airflow.hooks import Address
from elasticflow_airflow.ui import source as source_module
from elasticflow_airflow.ui.source import NotStarted, Source

VERSION = calls.version()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(serve: Any, clock: Any = None, endpoint: Endpoint | None = None) -> Source:
    address = Address(endpoint or Endpoint(base_url="http://service.test"), "default")
    return Source(lambda: address, clock=clock or Clock(), transport=httpx.MockTransport(serve))


def test_many_readers_share_one_answer_until_it_is_old() -> None:
    asked: list[str] = []
    clock = Clock()

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"version": str(len(asked)), "api": "v1"})

    source = make(serve, clock)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: source.share(VERSION, 1.0)["version"], range(30)))
    assert (set(found), len(asked)) == ({"1"}, 1)
    clock.now = 1.5
    assert source.share(VERSION, 1.0)["version"] == "2"
    source.forget()
    assert source.share(VERSION, 1.0)["version"] == "3"


def test_a_service_that_is_away_is_not_asked_by_everybody() -> None:
    asked: list[str] = []
    clock = Clock()

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ConnectError("refused")

    source = make(serve, clock)
    for _ in range(5):
        with pytest.raises(ServiceUnavailable, match="refused"):
            source.share(VERSION, 1.0)
    assert len(asked) == 1
    clock.now = 10.0
    with pytest.raises(ServiceUnavailable):
        source.share(VERSION, 1.0)
    assert len(asked) == 2


def test_a_service_that_hangs_takes_a_few_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_QUEUE_S", 0.05)
    answer = threading.Event()
    inside: list[int] = []

    def serve(request: httpx.Request) -> httpx.Response:
        inside.append(1)
        answer.wait(30)
        return httpx.Response(200, json={"version": "1", "api": "v1"})

    source = make(serve)
    with ThreadPoolExecutor(12) as pool:
        asking = [pool.submit(source.ask, VERSION) for _ in range(12)]
        refused = [one.exception() for one in islice(as_completed(asking, timeout=30), 4)]
        answer.set()
        assert all(isinstance(error, ServiceUnavailable) for error in refused)
        assert sum(one.exception(30) is None for one in asking) == 8
    assert len(inside) == 8


def test_a_route_that_is_not_there_means_another_version() -> None:
    source = make(lambda _: httpx.Response(404, json={"error": "http", "message": "Not Found", "hint": ""}))
    with pytest.raises(IncompatibleService, match="another version"):
        source.ask(VERSION)


def test_an_embedded_service_that_never_ran_is_no_failure(tmp_path: Any) -> None:
    endpoint = Endpoint(socket_path=tmp_path / "service.sock", embedded_state_dir=tmp_path)

    def serve(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no such file")

    with pytest.raises(NotStarted, match="starts with the first training task"):
        make(serve, endpoint=endpoint).ask(VERSION)


def test_a_changed_connection_is_noticed() -> None:
    clock = Clock()
    where = ["http://one.test"]
    asked: list[str] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(200, json={"version": "1", "api": "v1"})

    source = Source(
        lambda: Address(Endpoint(base_url=where[0]), "default"), clock=clock, transport=httpx.MockTransport(serve)
    )
    source.share(VERSION, 1000.0)
    where[0] = "http://two.test"
    source.share(VERSION, 1000.0)
    clock.now = 30.0
    source.share(VERSION, 1000.0)
    assert asked == ["one.test", "two.test"]


def test_the_next_replica_is_asked() -> None:
    second = Replica(version="2.0")
    with dead() as nobody:
        source = Source(lambda: Address(Endpoint.from_url(f"{nobody},{second.url}"), "default"))
        assert source.ask(VERSION)["version"] == "2.0"
        second.kill()
        with pytest.raises(ServiceUnavailable, match=r"none of the 2 addresses .* \(does not answer: .*; http"):
            source.ask(VERSION)
