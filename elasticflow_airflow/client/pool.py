"""Connections that the async clients of one event loop share: a triggerer has a client for each deferred task.

Each of them asks every few seconds only. A connection of its own would have been closed by then and be opened anew each
time, or be one of a thousand that both sides keep open.
"""

from __future__ import annotations

import asyncio
import urllib.request
import weakref
from dataclasses import dataclass
from pathlib import Path

import httpx

from elasticflow_airflow.client.endpoint import Endpoint

_MOST = 16
"""So many connections at once; further questions wait for one of them. Each question costs httpx a look at all of them,
twice over."""
_IDLE_S = 4.0
"""The service closes a connection that is idle for five seconds: it must not be tried just then."""

_Key = tuple[str, Path | None, bool | str]


@dataclass(slots=True, eq=False)
class _Pool:
    transport: httpx.AsyncHTTPTransport
    turns: asyncio.Semaphore
    """Who waits for a connection waits here: httpx would look at all who wait with each question."""
    clients: int = 0
    broken: bool = False
    """A connection failed: the next client gets a new pool, with certificates that are read again."""


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, _Pool]] = weakref.WeakKeyDictionary()


def shared_transport(endpoint: Endpoint) -> httpx.AsyncBaseTransport | None:
    """A transport over the connections of the running loop to a service; None where a proxy is to be asked.

    Give it to one client, whose end ends it.
    """
    if endpoint.trust_env and urllib.request.getproxies():
        return None  # httpx asks proxies of the environment only with transports of its own
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = (endpoint.base_url, endpoint.socket_path, endpoint.verify)
    pool = pools.get(key)
    if pool is None or pool.broken:
        pool = pools[key] = _Pool(endpoint.open_async_transport(_MOST, _IDLE_S), asyncio.Semaphore(_MOST))
    pool.clients += 1
    return _SharedTransport(pool)


class _SharedTransport(httpx.AsyncBaseTransport):
    """One client's part of a pool, which is closed with the last of them."""

    def __init__(self, pool: _Pool) -> None:
        self._pool, self._is_open = pool, True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        # To wait for a connection is no failure: each question before has a limit of its own.
        limits = {**request.extensions.get("timeout", {}), "pool": None}
        request.extensions = {**request.extensions, "timeout": limits}
        try:
            async with self._pool.turns:
                return await self._pool.transport.handle_async_request(request)
        except httpx.TransportError:
            self._pool.broken = True
            raise

    async def aclose(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._pool.clients -= 1
        if not self._pool.clients:
            self._pool.broken = True
            await self._pool.transport.aclose()
