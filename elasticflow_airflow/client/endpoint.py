"""The address and credentials of a service. A value object: it opens no connection by itself."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from elasticflow_airflow.client.errors import ElasticFlowError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a service: a Unix socket, or a base URL with a token.

    ``verify`` is False, True or the path of a CA bundle. ``embedded_state_dir`` marks the embedded service of this
    machine, which a client restarts if it is gone. ``named_by`` is the argument that selected the address; messages
    append it to the address.
    """

    base_url: str = "http://elasticflow"
    socket_path: Path | None = None
    token: str | None = field(default=None, repr=False)
    verify: bool | str = True
    embedded_state_dir: Path | None = None
    named_by: str = field(default="", compare=False)

    @classmethod
    def from_url(cls, url: str, *, token: str | None = None, verify: bool | str = True) -> Endpoint:
        """Parse ``unix:///path/to/service.sock``, ``http://host:port`` or ``https://host:port/prefix``."""
        parts = urlsplit(url)
        if parts.scheme == "unix":
            path = parts.netloc + parts.path
            if not path:
                raise ElasticFlowError(f"{url!r} names no socket", "write unix:///path/to/service.sock")
            return cls(socket_path=Path(path), token=token)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ElasticFlowError(
                f"{url!r} is no address of a service", "write http://host:port, https://host:port or unix:///path"
            )
        return cls(base_url=url.rstrip("/"), token=token, verify=verify)

    def __str__(self) -> str:
        """Return the service's name for messages."""
        where = self.base_url if self.socket_path is None else self.socket_path
        return f"the elasticflow service at {where}{f' ({self.named_by})' if self.named_by else ''}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    @property
    def trust_env(self) -> bool:
        """Whether to use proxies from the environment; never for this machine's own addresses."""
        return self.socket_path is None and urlsplit(self.base_url).hostname not in _LOOPBACK

    @property
    def _tls(self) -> bool | ssl.SSLContext:
        if not self.base_url.startswith("https:"):
            return False  # nothing to verify, and a context costs tens of milliseconds
        if isinstance(self.verify, str):
            return ssl.create_default_context(cafile=self.verify)
        return self.verify

    def _options(self, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of both HTTP clients."""
        return {
            "base_url": self.base_url,
            "headers": self.headers,
            "timeout": timeout_s,
            "verify": self._tls,
            "trust_env": self.trust_env,
        }

    def open_client(self, timeout_s: float, transport: httpx.BaseTransport | None = None) -> httpx.Client:
        """Create a sync HTTP client for this address."""
        if transport is None and self.socket_path is not None:
            transport = httpx.HTTPTransport(uds=str(self.socket_path), verify=False)
        return httpx.Client(transport=transport, **self._options(timeout_s))

    def open_async_client(
        self, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> httpx.AsyncClient:
        """Create an async HTTP client for this address."""
        if transport is None and self.socket_path is not None:
            transport = httpx.AsyncHTTPTransport(uds=str(self.socket_path), verify=False)
        return httpx.AsyncClient(transport=transport, **self._options(timeout_s))

    def open_async_transport(self, connections: int, idle_s: float) -> httpx.AsyncHTTPTransport:
        """Create a transport that several async clients can share.

        It has up to ``connections`` connections, each closed after ``idle_s`` seconds without use.
        """
        return httpx.AsyncHTTPTransport(
            uds=None if self.socket_path is None else str(self.socket_path),
            verify=self._tls,
            trust_env=self.trust_env,
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=idle_s
            ),
        )
