"""Open pages hear that something has happened, and nothing else: how often, how many, for how long, and from whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.scripted_cluster import ScriptedCluster

CHANGED = "event: changed\ndata:\n\n"


@pytest.fixture
def stream_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with shorter times."""
    from elasticflow_airflow.ui import change_stream

    monkeypatch.setattr(change_stream, "_TOGETHER_S", 0.2)
    monkeypatch.setattr(change_stream, "_AGAIN_S", 0.1)
    monkeypatch.setattr(change_stream, "STREAM_S", 5.0)
    return change_stream


@pytest.fixture
def changes(stream_module: Any, source: Any) -> Any:
    return stream_module.ChangeStream(source)


async def opened(changes: Any, cluster: ScriptedCluster, user: str = "ann") -> AsyncIterator[str]:
    """A page's stream, once the service's events are followed."""
    messages = changes.open(user)
    assert await anext(messages) == "retry: 500\n\n"
    await until(lambda: bool(cluster.followed))
    await asyncio.sleep(0.1)
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
    pages = [await opened(changes, cluster, user) for user in ("ann", "bob")]
    cluster.happened += 1
    assert [await soon(anext(page)) for page in pages] == [CHANGED, CHANGED]
    assert cluster.followed == ["http://service.test:8321/v1/events?from_now=true"]


async def test_what_happens_together_is_one_message(changes: Any, cluster: ScriptedCluster) -> None:
    page = await opened(changes, cluster)
    cluster.happened += 1
    assert await soon(anext(page)) == CHANGED
    cluster.happened += 500
    assert await soon(anext(page)) == CHANGED
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(page), 0.5)


async def test_what_was_asked_before_is_asked_again(changes: Any, cluster: ScriptedCluster, source: Any) -> None:
    from elasticflow_airflow.client.calls.service_calls import calls

    page = await opened(changes, cluster)
    source.share(calls.cluster(), 60.0)
    cluster.happened += 1
    await soon(anext(page))
    source.share(calls.cluster(), 60.0)
    assert [path for _, path, _ in cluster.asked].count("/v1/cluster") == 2


async def test_a_stream_ends_so_that_the_next_one_is_authorized(
    changes: Any, cluster: ScriptedCluster, stream_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "STREAM_S", 0.3)
    assert [message async for message in changes.open("ann")] == ["retry: 500\n\n"]
    assert not changes._pages
    assert not changes._of_user


async def test_a_user_has_so_many_streams_and_gets_them_back(
    changes: Any, cluster: ScriptedCluster, stream_module: Any
) -> None:
    pages = [await opened(changes, cluster) for _ in range(stream_module.MOST_STREAMS_OF_A_USER)]
    with pytest.raises(stream_module.TooManyStreamsError):
        changes.open("ann")
    await opened(changes, cluster, "bob")
    await pages[0].aclose()  # type: ignore[attr-defined]  # an async generator
    await opened(changes, cluster)


async def test_a_service_that_comes_back_is_followed_again(changes: Any, cluster: ScriptedCluster) -> None:
    page = await opened(changes, cluster)
    cluster.away = True
    await asyncio.sleep(0.5)
    followed, cluster.away = len(cluster.followed), False
    await until(lambda: len(cluster.followed) > followed)
    await asyncio.sleep(0.1)
    cluster.happened += 1
    assert await soon(anext(page)) == CHANGED


def test_the_route_streams_to_who_is_signed_in_and_refuses_what_is_too_much(
    browse: Any, stream_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "STREAM_S", 0.2)
    answer = browse("viewer").get("api/changes")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == "retry: 500\n\n"
    monkeypatch.setattr(stream_module, "MOST_STREAMS", 0)
    refused = browse("viewer").get("api/changes")
    assert refused.status_code == 503
    assert "asks every few seconds" in refused.json()["detail"]
