"""The async client, for triggers: the same calls as the blocking client, plus the event stream."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState

from elasticflow_airflow.api import Event
from elasticflow_airflow.client.calls.call import AsyncCaller, Call
from elasticflow_airflow.client.calls.exchange import Attempt, read_answer
from elasticflow_airflow.client.calls.service_calls import ServiceClient
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import raise_for_answer
from elasticflow_airflow.client.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_STREAM_SILENCE_S = 45.0
"""The service sends a comment every 15 s; after three missing ones the stream is considered dead."""


class AsyncElasticFlowClient(ServiceClient, AsyncCaller):
    """The async counterpart of :class:`~elasticflow_airflow.client.ElasticFlowClient`: same arguments, same errors."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retry_for_s: float = 60.0,
        timeout_s: float = 10.0,
        on_away: Callable[[str], None] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(endpoint, retry_for_s=retry_for_s, timeout_s=timeout_s, on_away=on_away)
        self._http = endpoint.open_async_client(timeout_s, transport)

    async def __aenter__(self) -> AsyncElasticFlowClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def upload_snapshot(self, snapshot: Snapshot) -> bool:
        """Upload the code unless the service already has it; return whether it was uploaded."""
        if await self.has_snapshot(snapshot.sha256):
            return False
        await self._send_snapshot(snapshot)
        return True

    async def stream_events(
        self, job_id: str | None = None, after: int | None = 0, *, on_open: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Event]:
        """Yield events as they happen, indefinitely; a broken stream is resumed after the last event.

        ``after`` is an event's id; None: only what happens from now on. ``on_open`` is called whenever the stream is
        open, at first and again. Raises ServiceUnavailable if the service does not answer for ``retry_for_s`` seconds.
        """
        while True:
            # Each reconnect starts a new retry period, so an outage after a working stream counts from its own start.
            lines: httpx.Response = await self._retrying()(self._open_stream, job_id, after)
            on_open()
            try:
                async for event in _parse_events(lines):
                    after = max(after or 0, event.event_id)
                    yield event
            except httpx.TransportError as error:
                log.info("the stream of events broke (%s); going on after event %s", error, after)
            finally:
                await lines.aclose()
            await asyncio.sleep(0.2)  # avoid a tight loop with a server that closes at once

    async def _open_stream(self, job_id: str | None, after: int | None) -> httpx.Response:
        params: dict[str, str | int] = {"from_now": "true"} if after is None else {"after": after}
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        if job_id is not None:
            params["job_id"] = job_id
        attempt = Attempt(self.endpoint)
        for replica in attempt:
            request = self._http.build_request(
                "GET",
                f"{replica.base_url}/v1/events",
                params=params,
                headers=headers,
                timeout=self.endpoint.timeout(self._timeout_s, read_s=_STREAM_SILENCE_S),
            )
            with attempt:
                response = await self._http.send(request, stream=True)
                if response.status_code >= 400:
                    await response.aread()
                    raise_for_answer(response, str(replica))
                return response
        raise attempt.failure()

    @staticmethod
    def _method_of(
        build: Callable[Concatenate[Any, P], Call[T]],
    ) -> Callable[Concatenate[AsyncElasticFlowClient, P], Coroutine[Any, Any, T]]:
        @functools.wraps(build)
        async def method(self: AsyncElasticFlowClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self._run(build(self, *args, **kwargs))

        return method

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(**self._retry_rules(), before_sleep=self._while_away)

    async def _run(self, call: Call[T]) -> T:
        answer: T = await self._retrying()(self._exchange, call)
        return answer

    async def _exchange(self, call: Call[T]) -> T:
        attempt, options = Attempt(self.endpoint), self._options_of(call)
        for replica in attempt:
            with attempt:
                response = await self._http.request(call.method, replica.base_url + call.path, **options)
                return read_answer(call, response, replica)
        raise attempt.failure()

    async def _while_away(self, state: RetryCallState) -> None:
        self._report_outage(state)
        if self.endpoint.embedded_state_dir is not None:
            await asyncio.to_thread(self._start_again, self.endpoint.embedded_state_dir)


async def _parse_events(response: httpx.Response) -> AsyncIterator[Event]:
    """Parse server-sent events: ``data:`` lines up to an empty line form one message; comments are dropped."""
    data: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data), extra="ignore")
            data = []
