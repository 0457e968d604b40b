"""A trigger fires once Airflow's scheduler has surely read the report of the worker that deferred, if one can tell."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial

import httpx
import pytest

from elasticflow_airflow.waiting import scheduler_rounds
from elasticflow_airflow.waiting.scheduler_rounds import SchedulerRounds, health_url, held_back

DEFERRED_AT = 1_000_000.0


@pytest.fixture
def health(monkeypatch):
    """Answer with one heartbeat after the other, the last one for ever; returns what was asked."""

    def answer(*heartbeats: float | httpx.Response | None) -> list[httpx.Request]:
        asked: list[httpx.Request] = []

        def reply(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            told = heartbeats[min(len(asked), len(heartbeats)) - 1]
            if isinstance(told, httpx.Response):
                return told
            heartbeat = None if told is None else datetime.fromtimestamp(told, UTC).isoformat()
            return httpx.Response(200, json={"scheduler": {"latest_scheduler_heartbeat": heartbeat}})

        http = partial(httpx.AsyncClient, transport=httpx.MockTransport(reply))
        monkeypatch.setattr(scheduler_rounds.httpx, "AsyncClient", http)
        monkeypatch.setattr(scheduler_rounds, "_LOOK_EVERY_S", 0.0)
        return asked

    return answer


@pytest.mark.parametrize(
    ("heartbeats", "looks"),
    [
        ([DEFERRED_AT - 5, DEFERRED_AT + 1, DEFERRED_AT + 6, DEFERRED_AT + 6, DEFERRED_AT + 11], 5),
        ([DEFERRED_AT + 600, DEFERRED_AT + 605], 2),  # of a trigger that another triggerer has begun
        ([None], 1),  # no scheduler has ever run
        ([DEFERRED_AT + 6, httpx.Response(503), DEFERRED_AT + 11], 2),
        ([httpx.Response(200, text="<html>")], 1),
        ([httpx.Response(200, json={"scheduler": None})], 1),
    ],
)
async def test_two_heartbeats_after_the_worker_has_left_are_a_round(health, heartbeats, looks):
    asked = health(*heartbeats)
    await asyncio.wait_for(SchedulerRounds("http://airflow/health").wait(DEFERRED_AT), 10)
    assert len(asked) == looks


async def test_a_scheduler_that_stands_still_is_not_waited_for_for_ever(health, monkeypatch):
    health(DEFERRED_AT - 5)
    monkeypatch.setattr(scheduler_rounds, "_LIMIT_S", 0.05)
    await asyncio.wait_for(SchedulerRounds("http://airflow/health").wait(DEFERRED_AT), 10)


async def test_all_triggers_look_together(health, monkeypatch):
    asked = health(DEFERRED_AT)
    monkeypatch.setattr(scheduler_rounds, "_LOOK_EVERY_S", 60.0)
    rounds = SchedulerRounds("http://airflow/health")
    assert await asyncio.gather(*(rounds._look() for _ in range(100))) == [DEFERRED_AT] * 100
    assert len(asked) == 1


async def test_what_ends_soon_is_held_back_until_then(health):
    now = time.time()
    asked = health(now, now, now + 5, now + 5, now + 10)
    async with held_back(0.001):
        assert not asked
    assert len(asked) == 5
    async with held_back(0.0):  # as tests have it
        pass
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("base_url", "server", "url"),
    [
        ("", "", "http://localhost:8080"),
        ("https://airflow.example.org/prod", "", "https://airflow.example.org/prod"),
        ("https://airflow.example.org", "http://api-server:8080/execution/", "http://api-server:8080"),
    ],
)
def test_it_asks_where_workers_find_the_api_server(monkeypatch, base_url, server, url):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base_url)
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", server)
    assert health_url() == f"{url}/api/v2/monitor/health"
