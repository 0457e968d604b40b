"""A connection pool that the async clients of one event loop share; a triggerer has a client for each deferred task.

Each client sends a request only every few seconds. A connection of its own would either be closed by then and have to
be reopened each time, or be one of a thousand that both sides keep open.
"""

from __future__ import annotations

import asyncio
import urllib.request
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from elasticflow_airflow.client.endpoint import Endpoint

_MOST = 16
"""Maximum number of connections; further requests wait for one. httpx scans all connections twice for each request."""

_Key = tuple[str, tuple[str, ...], Path | None, bool | str]


@dataclass(slots=True, eq=False)
class _Pool:
    transport: httpx.AsyncHTTPTransport
    turns: asyncio.Semaphore
    """Requests queue here for a connection, because httpx would scan its whole queue with each request."""
    has_replicas: bool
    """Whether the connections lead to several replicas of the service."""
    clients: int = 0
    silences: Counter[bytes] = field(default_factory=Counter)
    """How often each replica could not be reached or did not answer in time, by host and port."""
    broken: bool = False
    """A connection failed: the next client gets a new pool, which reads the certificates again."""


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, _Pool]] = weakref.WeakKeyDictionary()


def shared_transport(endpoint: Endpoint) -> httpx.AsyncBaseTransport | None:
    """Return a transport over the running loop's shared connections to a service; None if a proxy must be used.

    Each transport is for one client, which closes it.
    """
    if endpoint.trust_env and urllib.request.getproxies():
        return None  # httpx uses proxies from the environment only with its own transports
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = (endpoint.base_url, endpoint.other_urls, endpoint.socket_path, endpoint.verify)
    pool = pools.get(key)
    if pool is None or pool.broken:
        pool = pools[key] = _Pool(
            endpoint.open_async_transport(_MOST), asyncio.Semaphore(_MOST), bool(endpoint.other_urls)
        )
    pool.clients += 1
    return _SharedTransport(pool)


class _SharedTransport(httpx.AsyncBaseTransport):
    """One client's handle on a pool; closing the last handle closes the pool."""

    def __init__(self, pool: _Pool) -> None:
        self._pool, self._is_open = pool, True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        # No timeout for waiting in the pool: the requests ahead have timeouts of their own.
        limits = {**request.extensions.get("timeout", {}), "pool": None}
        request.extensions = {**request.extensions, "timeout": limits}
        pool, replica = self._pool, request.url.netloc
        silences = pool.silences[replica]
        async with pool.turns:
            if pool.has_replicas and pool.silences[replica] > silences:
                # Otherwise a thousand requests would wait for it one after the other, while another could answer.
                raise httpx.ConnectError("it did not answer others that were asked before", request=request)
            try:
                return await pool.transport.handle_async_request(request)
            except httpx.TransportError as error:
                if isinstance(error, httpx.TimeoutException | httpx.ConnectError):
                    pool.silences[replica] += 1
                pool.broken = True
                raise

    async def aclose(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._pool.clients -= 1
        if not self._pool.clients:
            self._pool.broken = True
            await self._pool.transport.aclose()
