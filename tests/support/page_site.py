"""The page's application over a scripted service, and on a port of its own: for its tests, and for its pictures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from elasticflow_airflow.api import Event
from support.scripted_cluster import ScriptedCluster

if TYPE_CHECKING:
    from elasticflow_airflow.ui.source import Source

TOKEN = "the service's token, which no browser may see"


def airflow_settings(home: Path) -> dict[str, str]:
    """Environment of an Airflow of its own in this folder; to be set before anything imports Airflow."""
    (home / "dags").mkdir()
    return {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }


def scripted_source(cluster: ScriptedCluster) -> Source:
    """Return what asks the scripted service, as the connection's client would."""
    from elasticflow_airflow.client import Endpoint
    from elasticflow_airflow.hooks import Address
    from elasticflow_airflow.ui.source import Source

    def serve(request: httpx.Request) -> httpx.Response:
        if cluster.away:
            raise httpx.ConnectError("refused")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        status, value = cluster.answer(request.method, request.url.path, request.url.params, request.content)
        return httpx.Response(status, content=json.dumps(value))

    async def follow(request: httpx.Request) -> httpx.Response:
        if cluster.away:
            raise httpx.ConnectError("refused")
        cluster.followed.append(str(request.url))
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=_Happenings(cluster))

    endpoint = Endpoint(base_url="http://service.test:8321", token=TOKEN)
    return Source(
        lambda: Address(endpoint, "default"),
        transport=httpx.MockTransport(serve),
        async_transport=httpx.MockTransport(follow),
    )


class _Happenings(httpx.AsyncByteStream):
    """An event of the scripted service each time that something happens, for as long as it is there."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self._cluster = cluster

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = self._cluster.happened
        yield b": open\n"
        while not self._cluster.away:
            for number in range(seen, self._cluster.happened):
                event = Event(event_id=number + 1, job_id="j", at=1.0, kind="admitted", reason="fits")
                yield f"data: {event.model_dump_json()}\n\n".encode()
                seen = number + 1
            await asyncio.sleep(0.02)


def mounted(source: Source) -> Any:
    """Return an application with the page where Airflow mounts it, and without the rest of Airflow's api-server."""
    from fastapi import FastAPI

    from elasticflow_airflow.ui.api_app import build_app

    outer = FastAPI()
    outer.mount("/airflow/elasticflow", build_app(source))
    return outer


@contextmanager
def served(source: Source) -> Iterator[str]:
    """Serve the page on a free port; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(mounted(source), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has ended before it had started"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/airflow/elasticflow/"
    server.should_exit = True
    thread.join(20)
