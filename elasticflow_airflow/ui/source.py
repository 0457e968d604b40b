"""Calls the service on behalf of the page, through Airflow's connection, whose token never reaches the browser.

Many browsers poll the same few resources, so a response may be shared for a short time; ``visibility`` decides what
each user may see of it. The threads that wait here are Airflow's, and a hanging service must not block them all: only a
few requests run at once, and further ones fail. Knows nothing about users.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx

from elasticflow_airflow.client import ElasticFlowError, Endpoint
from elasticflow_airflow.client.async_client import AsyncElasticFlowClient
from elasticflow_airflow.client.calls.call import Call
from elasticflow_airflow.client.calls.exchange import Attempt, read_answer, unreachable
from elasticflow_airflow.client.errors import IncompatibleService, ServiceUnavailable
from elasticflow_airflow.hooks import Address

T = TypeVar("T")

_LOOKUP_S = 20.0
"""How long a connection is cached, in seconds; a changed one takes effect within this time."""
_CONNECT_S, _TIMEOUT_S = 3.0, 20.0
_BRIEF_S = 5.0
"""Answers that are shared for at most so long, in seconds, are out of date once something has happened."""
_AT_ONCE = 8
_QUEUE_S = 2.0
_AWAY_S = 2.0
"""How long, in seconds, further calls fail at once after the service did not answer one."""
_SHARED_AT_MOST = 200


class NotStarted(ServiceUnavailable):
    """There is no connection, so the embedded service is used, but none runs on this machine."""


@dataclass(slots=True)
class _Shared:
    lock: threading.Lock = field(default_factory=threading.Lock)
    answer: Any = None
    failure: ServiceUnavailable | None = None
    until: float = -1.0
    for_s: float = 0.0


class Source:
    """Runs calls against the service of a connection. Thread-safe.

    ``look_up`` returns the address and is called again every 20 s. Raises the errors of ``client.errors``.
    """

    def __init__(
        self,
        look_up: Callable[[], Address],
        *,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.BaseTransport | None = None,
        async_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._look_up, self._clock = look_up, clock
        self._transport, self._async_transport = transport, async_transport
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self._address: Address | None = None
        self._http: httpx.Client | None = None
        self._looked_up = 0.0
        self._shared: dict[object, _Shared] = {}

    @property
    def namespace(self) -> str:
        """The namespace of this Airflow's jobs."""
        return self._connect()[0].namespace

    def ask(self, call: Call[T]) -> T:
        """Run a call once at each replica until one answers, without retries: the page polls again by itself."""
        address, http = self._connect()
        limits = address.endpoint.timeout(max(_TIMEOUT_S, call.timeout_s or 0.0), connect_s=_CONNECT_S)
        attempt = Attempt(address.endpoint, _away)
        if not self._room.acquire(timeout=_QUEUE_S):
            raise _busy()
        try:
            for replica in attempt:
                with attempt:
                    response = http.request(
                        call.method,
                        replica.base_url + call.path,
                        params=dict(call.params),
                        content=call.body,
                        headers={} if call.body is None else {"Content-Type": call.content_type},
                        timeout=limits,
                    )
                    return _read(call, response, replica)
        finally:
            self._room.release()
        raise attempt.failure()

    def share(self, call: Call[T], for_s: float) -> T:
        """Like ``ask``, but may return a response to another caller that is not older than ``for_s`` seconds."""
        self._connect()  # A changed connection clears the shared responses.
        key = (call.method, call.path, tuple(call.params.items()), call.body)
        with self._lock:
            if len(self._shared) > _SHARED_AT_MOST:
                now = self._clock()
                self._shared = {k: one for k, one in self._shared.items() if one.until > now}
            shared = self._shared.setdefault(key, _Shared())
        if not shared.lock.acquire(timeout=_QUEUE_S + _CONNECT_S):  # One caller asks, the others wait for its response.
            raise _busy()
        try:
            if self._clock() >= shared.until:
                try:
                    shared.answer, shared.failure = self.ask(call), None
                    shared.until, shared.for_s = self._clock() + for_s, for_s
                except ServiceUnavailable as error:
                    shared.failure, shared.until = error, self._clock() + _AWAY_S
            if shared.failure is not None:
                raise shared.failure
            answer: T = shared.answer
            return answer
        finally:
            shared.lock.release()

    def follower(self) -> AsyncElasticFlowClient:
        """Return a client that follows the service's events, without retries; the caller closes it."""
        address, _ = self._connect()
        endpoint = replace(address.endpoint, embedded_state_dir=None)  # Else it would start an embedded service again.
        return AsyncElasticFlowClient(endpoint, retry_for_s=0.0, transport=self._async_transport)

    def outdate(self) -> None:
        """Ask anew for what is shared for a few seconds only, since something has happened."""
        with self._lock:
            for shared in self._shared.values():
                if shared.for_s <= _BRIEF_S:
                    shared.until = -1.0

    def forget(self) -> None:
        """Drop the shared responses, which are out of date after a change."""
        with self._lock:
            self._shared.clear()

    def _connect(self) -> tuple[Address, httpx.Client]:
        with self._lock:
            now = self._clock()
            if self._http is not None and self._address is not None and now - self._looked_up < _LOOKUP_S:
                return self._address, self._http
            address = self._look_up()
            if self._http is None or address != self._address:
                # Do not close the previous client: other threads may be using it. It is freed with its last user.
                self._http = address.endpoint.open_client(_TIMEOUT_S, self._transport)
                self._shared.clear()
            self._address, self._looked_up = address, now
            return address, self._http


def _busy() -> ServiceUnavailable:
    return ServiceUnavailable("the service takes long to answer", "it is asked again by itself", "away")


def _read(call: Call[T], response: httpx.Response, endpoint: Endpoint) -> T:
    if response.status_code in (404, 405) and call.missing is None and not _is_problem(response):
        raise IncompatibleService(
            f"{endpoint} does not know {call.method} {call.path}",
            "it is of another version: install the same elasticflow-airflow for Airflow and for the service",
            "version",
        )
    return read_answer(call, response, endpoint)


def _is_problem(response: httpx.Response) -> bool:
    """Whether the service itself reports that something is missing, rather than having no such route."""
    try:
        body = response.json()
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("error") not in (None, "http")


def _away(error: httpx.TransportError, endpoint: Endpoint) -> ElasticFlowError:
    state_dir = endpoint.embedded_state_dir
    if state_dir is not None and endpoint.socket_path is not None and not endpoint.socket_path.exists():
        return NotStarted(
            "No ElasticFlow service runs on this machine yet",
            "it starts with the first training task; to use one elsewhere, add the connection elasticflow_default",
            "not_started",
        )
    return unreachable(error, endpoint)
