"""Open pages hear that something has happened, and nothing else: how often, how many, for how long, and from whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.scripted_cluster import ScriptedCluster

FOLLOWING, AWAY, CHANGED = (f"event: {kind}\ndata:\n\n" for kind in ("following", "away", "changed"))


@pytest.fixture
def stream_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with shorter times."""
    from elasticflow_airflow.ui import change_stream

    for name, value in {"_TOGETHER_S": 0.2, "_SPREAD_S": 0.05, "_OVERLAP_S": 0.1, "_AGAIN_S": 0.1}.items():
        monkeypatch.setattr(change_stream, name, value)
    return change_stream


@pytest.fixture
def changes(stream_module: Any, source: Any) -> Any:
    return stream_module.ChangeStream(source)


async def opened(changes: Any, user: str = "ann") -> AsyncIterator[str]:
    """A page's stream, once the service's events are followed and nothing is new any more."""
    messages = changes.open(user)
    assert await anext(messages) == "retry: 500\n\n"
    assert await soon(anext(messages)) == FOLLOWING
    assert await soon(anext(messages)) == CHANGED, "what may have happened before"
    return messages


async def until(happened: Callable[[], bool]) -> None:
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not happened")


def soon(message: Awaitable[str]) -> Awaitable[str]:
    return asyncio.wait_for(message, 10)


async def test_every_page_hears_of_an_event_over_one_connection(changes: Any, cluster: ScriptedCluster) -> None:
    first = await opened(changes)
    await asyncio.sleep(0.3)
    second = changes.open("bob")
    assert [await soon(anext(second)) for _ in range(2)] == ["retry: 500\n\n", FOLLOWING]
    cluster.happened += 1
    assert [await soon(anext(page)) for page in (first, second)] == [CHANGED, CHANGED]
    assert cluster.followed == ["http://service.test:8321/v1/events?from_now=true"]


async def test_what_happens_together_is_one_message(changes: Any, cluster: ScriptedCluster) -> None:
    page = await opened(changes)
    cluster.happened += 500
    assert await soon(anext(page)) == CHANGED
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(page), 1.0)


async def test_only_what_is_shared_briefly_is_asked_again(changes: Any, cluster: ScriptedCluster, source: Any) -> None:
    from elasticflow_airflow.client.calls.service_calls import calls

    page = await opened(changes)
    for _ in range(2):
        source.share(calls.cluster(), 5.0)
        source.share(calls.health(), 60.0)
        cluster.happened += 1
        await soon(anext(page))
    source.share(calls.cluster(), 5.0)
    source.share(calls.health(), 60.0)
    asked = [path for _, path, _ in cluster.asked]
    assert (asked.count("/v1/cluster"), asked.count("/v1/health")) == (3, 1)


async def test_the_next_stream_tells_what_happened_while_there_was_none(
    changes: Any, cluster: ScriptedCluster, stream_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_OVERLAP_S", 60.0)
    page, other = await opened(changes), await opened(changes, "bob")
    await page.aclose()  # type: ignore[attr-defined]  # an async generator
    await asyncio.sleep(0.3)
    cluster.happened += 1
    await soon(anext(other))
    page = changes.open("ann")
    assert [await soon(anext(page)) for _ in range(3)] == ["retry: 500\n\n", FOLLOWING, CHANGED]


async def test_a_stream_ends_so_that_the_next_one_is_authorized(
    changes: Any, stream_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "STREAM_S", 0.5)
    assert [message async for message in changes.open("ann")] == ["retry: 500\n\n", FOLLOWING, CHANGED]
    assert not changes._pages
    assert not changes._of_user


async def test_a_user_has_so_many_streams_and_gets_them_back(changes: Any, stream_module: Any) -> None:
    pages = [changes.open("ann") for _ in range(stream_module.MOST_STREAMS_OF_A_USER)]
    for page in pages:
        await anext(page)
    with pytest.raises(stream_module.TooManyStreamsError):
        changes.open("ann")
    await anext(changes.open("bob"))
    await pages[0].aclose()
    await anext(changes.open("ann"))


async def test_a_service_that_comes_back_is_followed_again(changes: Any, cluster: ScriptedCluster) -> None:
    """Meanwhile pages are told that they have to ask by themselves; then, that something may have happened."""
    page = await opened(changes)
    cluster.away = True
    assert await soon(anext(page)) == AWAY
    cluster.away = False
    assert [await soon(anext(page)) for _ in range(2)] == [FOLLOWING, CHANGED]
    cluster.happened += 1
    assert await soon(anext(page)) == CHANGED


async def test_a_slow_look_up_of_the_connection_does_not_keep_others_waiting(
    changes: Any, cluster: ScriptedCluster, source: Any
) -> None:
    """Airflow's own routes are served by the same event loop."""
    page = await opened(changes)
    with source._lock:
        cluster.happened += 1
        await asyncio.sleep(0.5)
    assert await soon(anext(page)) == CHANGED


def test_the_route_streams_to_who_is_signed_in_and_refuses_what_is_too_much(
    browse: Any, stream_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "STREAM_S", 0.2)
    answer = browse("viewer").get("api/changes")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("retry: 500\n\n")
    monkeypatch.setattr(stream_module, "MOST_STREAMS", 0)
    refused = browse("viewer").get("api/changes")
    assert refused.status_code == 503
    assert "asks every few seconds" in refused.json()["detail"]
