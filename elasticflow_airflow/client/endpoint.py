"""The addresses and credentials of a service. A value object: it opens no connection by itself."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httpx

from elasticflow_airflow.client.errors import ElasticFlowError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DIRECT: dict[str, None] = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}
"""Mounts of an HTTP client that keep this machine's own addresses from a proxy."""
MOST_ADDRESSES: Final = 16
_FORMS: Final = "http://host:port, https://host:port or unix:///path"
_CONNECT_S: Final = 3.0
"""Time limit for connecting to one of several replicas, in seconds: another one may answer meanwhile."""
_IDLE_S: Final = 4.0
"""Less than the five seconds after which the service closes an idle connection, so as not to use a closing one."""
_LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=_IDLE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a service: a Unix socket, or base URLs with a token.

    ``other_urls`` are the base URLs of further replicas of the same service; clients ask them if the one at
    ``base_url`` cannot help.
    ``verify`` is False, True or the path of a CA bundle. ``embedded_state_dir`` marks the embedded service of this
    machine, which a client restarts if it is gone. ``named_by`` is the argument that selected the address; messages
    append it to the address.
    """

    base_url: str = "http://elasticflow"
    other_urls: tuple[str, ...] = ()
    socket_path: Path | None = None
    token: str | None = field(default=None, repr=False)
    verify: bool | str = True
    embedded_state_dir: Path | None = None
    named_by: str = field(default="", compare=False)

    @classmethod
    def from_url(cls, url: str, *, token: str | None = None, verify: bool | str = True) -> Endpoint:
        """Parse ``unix:///path/to/service.sock``, ``http://host:port`` or ``https://host:port/prefix``.

        Several ``http://host:port``, separated by commas, are the replicas of one service. Raises ElasticFlowError.
        """
        entries = [entry.strip() for entry in url.split(",")]
        if len(entries) == 1 or (entries[0].startswith("unix:") and not any("://" in entry for entry in entries[1:])):
            parts = urlsplit(url)
            if parts.scheme == "unix":
                path = parts.netloc + parts.path
                if not path:
                    raise ElasticFlowError(f"{url!r} names no socket", "write unix:///path/to/service.sock")
                return cls(socket_path=Path(path), token=token)
            _check_address(url, parts)
            return cls(base_url=url.rstrip("/"), token=token, verify=verify)
        first, *others = _replica_urls(entries)
        return cls(base_url=first, other_urls=tuple(others), token=token, verify=verify)

    def __str__(self) -> str:
        """Return the service's name for messages."""
        where = ", ".join((self.base_url, *self.other_urls)) if self.socket_path is None else self.socket_path
        return f"the elasticflow service at {where}{f' ({self.named_by})' if self.named_by else ''}"

    @property
    def replicas(self) -> tuple[Endpoint, ...]:
        """The endpoint of each address alone, in the order in which they were given."""
        if not self.other_urls:
            return (self,)
        return tuple(replace(self, base_url=url, other_urls=()) for url in (self.base_url, *self.other_urls))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    @property
    def trust_env(self) -> bool:
        """Whether to use proxies from the environment; never for this machine's own addresses."""
        urls = (self.base_url, *self.other_urls)
        return self.socket_path is None and any(urlsplit(url).hostname not in _LOOPBACK for url in urls)

    @property
    def _tls(self) -> bool | ssl.SSLContext:
        if not any(url.startswith("https:") for url in (self.base_url, *self.other_urls)):
            return False  # nothing to verify, and a context costs tens of milliseconds
        if isinstance(self.verify, str):
            return ssl.create_default_context(cafile=self.verify)
        return self.verify

    def timeout(self, limit_s: float, *, read_s: float | None = None, connect_s: float | None = None) -> httpx.Timeout:
        """Return the time limits of a request to one address, in seconds.

        ``read_s`` and ``connect_s`` replace ``limit_s`` for these two. If there are several addresses, connecting to
        one may take 3 s at most.
        """
        connect_s = limit_s if connect_s is None else connect_s
        if self.other_urls:
            connect_s = min(connect_s, _CONNECT_S)
        return httpx.Timeout(limit_s, read=limit_s if read_s is None else read_s, connect=connect_s)

    def _options(self, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of both HTTP clients."""
        return {
            "base_url": self.base_url,
            "headers": self.headers,
            "timeout": timeout_s,
            "verify": self._tls,
            "trust_env": self.trust_env,
            "limits": _LIMITS,
            "mounts": _DIRECT if self.other_urls and self.trust_env else None,
        }

    def open_client(self, timeout_s: float, transport: httpx.BaseTransport | None = None) -> httpx.Client:
        """Create a sync HTTP client for this address."""
        if transport is None and self.socket_path is not None:
            transport = httpx.HTTPTransport(uds=str(self.socket_path), verify=False, limits=_LIMITS)
        return httpx.Client(transport=transport, **self._options(timeout_s))

    def open_async_client(
        self, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> httpx.AsyncClient:
        """Create an async HTTP client for this address."""
        if transport is None and self.socket_path is not None:
            transport = httpx.AsyncHTTPTransport(uds=str(self.socket_path), verify=False, limits=_LIMITS)
        return httpx.AsyncClient(transport=transport, **self._options(timeout_s))

    def open_async_transport(self, connections: int) -> httpx.AsyncHTTPTransport:
        """Create a transport that several async clients can share; it has up to ``connections`` connections."""
        return httpx.AsyncHTTPTransport(
            uds=None if self.socket_path is None else str(self.socket_path),
            verify=self._tls,
            trust_env=self.trust_env,
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_IDLE_S
            ),
        )


def _check_address(url: str, parts: SplitResult) -> None:
    """Refuse what is no ``http`` or ``https`` address. Raises ElasticFlowError, without a password that is in it."""
    shown = url.replace(parts.password, "***") if parts.password else url
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        is_address = False
    if not is_address:
        raise ElasticFlowError(f"{shown!r} is no address of a service", f"write {_FORMS}")


def _replica_urls(entries: list[str]) -> list[str]:
    """Check the addresses of several replicas, and return their base URLs. Raises ElasticFlowError."""
    if len(entries) > MOST_ADDRESSES:
        raise ElasticFlowError(
            f"{len(entries)} addresses are given, and a client takes at most {MOST_ADDRESSES}",
            "give some of the replicas, or the one address of a balancer in front of them",
        )
    urls: dict[tuple[str, str | None, int], str] = {}
    for number, entry in enumerate(entries, 1):
        if not entry:
            raise ElasticFlowError(
                f"address {number} of {len(entries)} is empty",
                "write one comma between two addresses, and none at the end",
            )
        parts = urlsplit(entry)
        if parts.scheme == "unix":
            raise ElasticFlowError(
                f"{entry!r} is a socket of this machine, and stands among several addresses",
                "give a socket alone, or every replica as http://host:port",
            )
        _check_address(entry, parts)
        where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise ElasticFlowError(
                f"the address {where} has a user or a password in it",
                "leave it out: all replicas have one token, which is given apart from their addresses",
            )
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ElasticFlowError(
                f"the address {entry!r} has more than a host and a port, and is one of several",
                f"write {where}, or give the one address of a proxy that has the path",
            )
        key = (parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme])
        if key in urls:
            raise ElasticFlowError(f"the address {where} is given twice", "give each replica once")
        urls[key] = where
    return list(urls.values())
