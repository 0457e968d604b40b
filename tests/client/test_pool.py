"""Async clients of one loop share their connections; who fails begins with new ones, and the last one closes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from elasticflow_airflow.client import AsyncElasticFlowClient, Endpoint, ServiceUnavailable
from elasticflow_airflow.client.pool import shared_transport

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{"api": "v1"}'


@dataclass
class Server:
    """A server that answers everything with its version, and counts connections."""

    port: int = 0
    opened: int = 0
    answers: bool = True
    open_now: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(base_url=f"http://127.0.0.1:{self.port}")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open_now.add(writer)
        try:
            while self.answers and await reader.readuntil(b"\r\n\r\n"):
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.open_now.discard(writer)
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    counting = Server()
    listening = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    counting.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield counting


def client(server: Server) -> AsyncElasticFlowClient:
    return AsyncElasticFlowClient(server.endpoint, retry_for_s=0.0, transport=shared_transport(server.endpoint))


async def test_a_hundred_clients_ask_over_one_connection_and_the_last_closes_it(server):
    clients = [client(server) for _ in range(100)]
    for one in clients:
        assert (await one.version())["api"] == "v1"
    assert server.opened == 1
    for one in clients[1:]:
        await one.aclose()
        await one.aclose()  # which changes nothing
    assert (await clients[0].version())["api"] == "v1"
    assert server.opened == 1
    await clients[0].aclose()
    async with asyncio.timeout(5):
        while server.open_now:
            await asyncio.sleep(0.01)


async def test_all_at_once_wait_for_a_connection_and_none_fails(server):
    clients = [client(server) for _ in range(300)]
    found = await asyncio.gather(*(one.version() for one in clients))
    assert len(found) == 300
    assert server.opened < 100  # 16 at once; one that broke is replaced
    for one in clients:
        await one.aclose()


async def test_a_client_after_a_failure_begins_with_new_connections(server):
    before = client(server)
    await before.version()
    server.answers = False
    await before.version()  # the server closes the connection after this answer ...
    with pytest.raises(ServiceUnavailable):  # ... and answers on no new one
        await before.version()
    server.answers = True
    after = client(server)
    assert (await after.version())["api"] == "v1"
    assert after._http._transport._pool is not before._http._transport._pool
    for one in (before, after):
        await one.aclose()


async def test_another_loop_has_connections_of_its_own(server):
    first = client(server)
    await first.version()

    def elsewhere() -> None:
        async def ask() -> None:
            async with client(server) as second:
                await second.version()

        asyncio.run(ask())

    await asyncio.to_thread(elsewhere)
    assert server.opened == 2
    await first.aclose()


async def test_where_a_proxy_is_to_be_asked_nothing_is_shared(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert shared_transport(Endpoint(base_url="https://gpus.example.org")) is None
    assert shared_transport(Endpoint(base_url="http://127.0.0.1:8321")) is not None
