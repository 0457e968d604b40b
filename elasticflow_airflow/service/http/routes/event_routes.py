"""The routes about events: those of a job, and the stream of all (server-sent events)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import StreamingResponse

from elasticflow_airflow.api import Event
from elasticflow_airflow.bounds import MOST_COUNT
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import EventId, JobId, OneJob
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.refusal import declared, no_such_job
from elasticflow_airflow.service.store.views import event_of

_KEEP_ALIVE_S = 15.0
_STREAM_CHUNK = 200
_EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}, "description": "Events"}}


def add_events(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""

    def read_events(after: int, job_id: str | None, limit: int) -> list[Event]:
        with parts.store.read() as reader:
            return [event_of(row) for row in reader.events(after, job_id, limit)]

    def last_event_id() -> int:
        with parts.store.read() as reader:
            return reader.last_event_id()

    async def read_later(after: int, job_id: str | None) -> list[Event]:
        return await lanes.streams.run(partial(read_events, after, job_id, _STREAM_CHUNK))

    @app.get("/v1/jobs/{job_id}/events", responses=declared(404))
    @lanes.reading
    def job_events(job_id: JobId, after: EventId = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 200) -> list[Event]:
        """A job's events with an id above `after`, oldest first: what was decided, and why.

        The next page begins after the last `event_id`.
        """
        with parts.store.read() as reader:
            if reader.job(job_id) is None:
                raise no_such_job(job_id)
            return [event_of(row) for row in reader.events(after, job_id, limit)]

    @app.get("/v1/events", response_class=StreamingResponse, responses=_EVENT_STREAM)
    async def stream(
        request: Request, after: EventId | None = None, job_id: OneJob | None = None, from_now: bool = False
    ) -> StreamingResponse:
        """Stream of events (server-sent events): each message has `id`, `event` (the kind) and `data` (an `Event`).

        It begins after the id in the header `Last-Event-ID`, else after `after`; with neither, at the oldest stored
        event, or with `from_now` at the next one.
        """
        last = request.headers.get("last-event-id", "")
        if re.fullmatch(r"[0-9]{1,18}", last):
            start = min(int(last), MOST_COUNT)
        elif from_now and after is None:
            start = await lanes.streams.run(last_event_id)
        else:
            start = after or 0
        return StreamingResponse(
            _event_stream(parts.notifier, read_later, start, job_id, request.is_disconnected),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )


async def _event_stream(
    notifier: Notifier,
    read: Callable[[int, str | None], Awaitable[list[Event]]],
    after: int,
    job_id: str | None,
    gone: Callable[[], Awaitable[bool]],
) -> AsyncIterator[str]:
    """Yield server-sent events: the stored events after id ``after``, then new ones as they come."""
    changed = notifier.subscribe()
    try:
        yield ": open\n"  # sends the headers
        while not await gone():
            changed.clear()
            events = await read(after, job_id)
            for event in events:
                after = event.event_id
                yield f"id: {event.event_id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
            if events:
                continue
            try:
                await asyncio.wait_for(changed.wait(), _KEEP_ALIVE_S)
            except TimeoutError:
                yield ": still here\n\n"
    finally:
        notifier.unsubscribe(changed)
