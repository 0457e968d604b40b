"""The HTTP API: routes, error bodies, and the stream of events. All rules are elsewhere.

Over TCP every route needs the token (a Unix socket is protected by its permissions). Only ``/healthz`` and ``/readyz``
are open, and they reveal only that the service is running, and can answer. Error bodies never repeat what was sent.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import structlog
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from elasticflow_airflow import __version__
from elasticflow_airflow.api import (
    API_VERSION,
    Drain,
    DrainRequest,
    Event,
    Health,
    LogPiece,
)
from elasticflow_airflow.bounds import MOST_COUNT, NAME_CHARACTERS, TEXT_CHARACTERS, clean_text
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.service.http.forwarding import Forwarding
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.middleware import (
    BodyLimit,
    TokenGuard,
    TrafficCounter,
    VersionMark,
    problem_response,
)
from elasticflow_airflow.service.http.parameters import (
    ByteOffset,
    EventId,
    Incarnation,
    JobId,
    LogName,
    NodeId,
    OneJob,
    Sha256,
)
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.http.routes.doctor_routes import add_doctor
from elasticflow_airflow.service.http.routes.insight_routes import add_insight
from elasticflow_airflow.service.http.routes.job_routes import add_jobs
from elasticflow_airflow.service.http.routes.metrics_routes import add_metrics
from elasticflow_airflow.service.http.routes.owner_routes import add_owners
from elasticflow_airflow.service.http.validation_messages import in_our_words
from elasticflow_airflow.service.job_files.log_pieces import read_piece
from elasticflow_airflow.service.job_files.snapshots import SnapshotRefusedError
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.refusal import Refusal, declared, no_such_job
from elasticflow_airflow.service.secrets import SecretError, hidden_values
from elasticflow_airflow.service.store.store import DATABASE_AWAY
from elasticflow_airflow.service.store.tables import IncarnationRow
from elasticflow_airflow.service.store.views import UNREADABLE, event_of, slot_statuses

log = structlog.get_logger(__name__)

_KEEP_ALIVE_S = 15.0
_STREAM_CHUNK = 200
_TAR = {"schema": {"type": "string", "format": "binary"}}
_TAR_BODY = {"requestBody": {"required": True, "content": {"application/x-tar": _TAR}}}
_EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}, "description": "Events"}}
_MOST_WRONG = 10
"""The number of mistakes that a refusal lists."""


def build_app(parts: ServiceParts, token: str | None, metrics_token: str | None = None) -> FastAPI:
    """Build the application. ``token`` None: any client that can open the socket may do everything.

    ``metrics_token`` opens ``/metrics`` and nothing else.
    """
    app = FastAPI(title="elasticflow", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    lanes = Lanes()
    _add_errors(app)
    _add_health(app, parts, lanes)
    _add_snapshots(app, parts, lanes)
    add_jobs(app, parts, lanes)
    _add_nodes(app, parts, lanes)
    _add_events_and_logs(app, parts, lanes)
    add_insight(app, parts, lanes)
    add_owners(app, parts, lanes)
    add_metrics(app, parts, lanes)
    add_doctor(app, parts, lanes)
    app.add_middleware(Forwarding, parts=parts)
    app.add_middleware(BodyLimit)
    app.add_middleware(TokenGuard, token=token, metrics_token=metrics_token)
    app.add_middleware(TrafficCounter, traffic=parts.traffic)
    app.add_middleware(VersionMark)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_request: Request, error: Refusal) -> JSONResponse:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return problem_response(Refusal(422, "invalid", _what_is_wrong(error), "correct the named arguments"))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        response = problem_response(Refusal(error.status_code, "http", str(error.detail)))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = _methods_of(app, request)
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=408)  # Nobody reads this: the connection ended before the whole request was sent.

    @app.exception_handler(SecretError)
    async def no_key(_request: Request, error: SecretError) -> JSONResponse:
        return problem_response(Refusal(500, "secret_key", str(error), "whoever runs the service has to do it"))

    async def database_away(_request: Request, error: Exception) -> JSONResponse:
        # Only the driver's message: the parameters of the statement may be secrets.
        log.warning("the database could not be used", said=str(getattr(error, "orig", None) or error))
        reason = "the service cannot use its database now, and does not know whether this was stored"
        return problem_response(
            Refusal(503, "database", reason, "it is tried again by itself; the service's log says more")
        )

    for kind in DATABASE_AWAY:
        app.add_exception_handler(kind, database_away)

    @app.exception_handler(Exception)
    async def defect(_request: Request, _error: Exception) -> JSONResponse:
        # The server logs the error; its text may contain what was sent.
        reason = "the service failed to answer"
        return problem_response(Refusal(500, "internal", reason, "try again, and look at the end of the service's log"))


def _methods_of(app: FastAPI, request: Request) -> str:
    """Return the allowed methods of a path (RFC 9110, section 10.2.1); Starlette names those of one route only."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    there = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in there for method in route.methods or ()}))


def _what_is_wrong(error: RequestValidationError) -> str:
    """Describe errors without values, which may be secrets. Field names come from the caller, so they are cut, too."""
    found = error.errors()
    wrong = [
        f"{'.'.join(clean_text(str(part), NAME_CHARACTERS) for part in item['loc'] if part != 'body') or 'body'}:"
        f" {clean_text(in_our_words(item), TEXT_CHARACTERS)}"
        for item in found[:_MOST_WRONG]
    ]
    return "; ".join(wrong + [f"and {len(found) - _MOST_WRONG} more"] * (len(found) > _MOST_WRONG))


def _add_health(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Liveness probe: 200 `ok` while the process runs. Needs no token."""
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses=declared(503))
    async def readyz() -> str:
        """Readiness probe: 200 `ok`; 503 while a replica cannot reach its database. Needs no token.

        Leader and followers are both ready. A service on SQLite is always ready.
        """
        if parts.replicas is not None and parts.replicas.leadership.problem:
            raise Refusal(503, "database", "the service cannot use its database now", "it is tried again by itself")
        return "ok"

    @app.get("/v1/version")
    async def version() -> dict[str, str]:
        """Versions of the service and of the API, and the service's clock (`at`, Unix seconds as a string)."""
        return {"version": __version__, "api": API_VERSION, "at": f"{time.time():.3f}"}

    @app.get("/v1/health")
    @lanes.reading
    def health() -> Health:
        """Health of the service: `ok`, or `degraded` and its problems; and who holds which slot."""
        problems = parts.problems()
        with parts.store.read() as reader:
            live = reader.live_count()
            slots = slot_statuses(parts.nodes(), reader)
        return Health(
            status="degraded" if problems else "ok",
            version=__version__,
            engine=parts.engine_name,
            pid=os.getpid(),
            started_at=parts.started_at,
            state_dir=str(parts.settings.state_dir),
            live_jobs=live,
            slots=slots,
            problems=problems,
            role=None if parts.replicas is None else parts.replicas.role,
            leadership=None if parts.replicas is None else parts.replicas.status(),
        )


def _add_snapshots(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    @app.head("/v1/snapshots/{sha256}", status_code=204, include_in_schema=False)
    @app.get("/v1/snapshots/{sha256}", status_code=204, responses=declared(404))
    @lanes.reading
    def has_snapshot(sha256: Sha256) -> Response:
        """Check whether a code snapshot was uploaded: 204 if so, else 404."""
        if not parts.snapshots.has(sha256):
            raise Refusal(404, "snapshot_missing", f"the code {sha256} was not uploaded", "upload it")
        return Response(status_code=204)

    @app.put("/v1/snapshots/{sha256}", status_code=204, openapi_extra=_TAR_BODY, responses=declared(413, 507))
    async def put_snapshot(sha256: Sha256, request: Request) -> Response:
        """Upload a code snapshot: an uncompressed tar of relative paths.

        `sha256` is the SHA-256 of the tar itself, in lowercase hexadecimal.
        """
        incoming = await run_in_threadpool(parts.snapshots.incoming)
        try:
            size = 0
            with incoming.open("wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    # A tar has headers and padding: twice the limit is enough for any contents within it.
                    if size > 2 * parts.snapshots.max_bytes:
                        raise Refusal(
                            413,
                            "snapshot_too_large",
                            f"the code is larger than {parts.snapshots.max_bytes} bytes",
                            "put the script in a folder of its own, or ignore what it does not need",
                        )
                    await run_in_threadpool(file.write, chunk)
            await lanes.unpacking.run(partial(parts.snapshots.accept, sha256, incoming))
        except SnapshotRefusedError as error:
            status = 413 if error.too_large else 422
            raise Refusal(status, "snapshot_refused", str(error), error.hint) from error
        except OSError as error:
            raise Refusal(
                507,
                "disk",
                f"the code could not be kept: {error.strerror or error}",
                "free space in the state directory",
            ) from error
        finally:
            incoming.unlink(missing_ok=True)
        return Response(status_code=204)


def _add_nodes(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    @app.put("/v1/nodes/{node_id}/drain", responses=declared(404))
    @lanes.changing
    def drain(node_id: NodeId, request: DrainRequest) -> Drain:
        """Drain a node: its workers move elsewhere before `until_at`.

        `null` cancels the drain, and uses again what was avoided of the node.
        """
        known = sorted(node.node_id for node in parts.nodes())
        if node_id not in known:
            raise Refusal(404, "node_not_found", f"there is no node {node_id!r}", f"nodes are: {', '.join(known)}")
        parts.job_service.drain(node_id, request.until_at)
        return Drain(node_id=node_id, until_at=request.until_at)


def _add_events_and_logs(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
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

    @app.get("/v1/jobs/{job_id}/logs/{log_name}", responses=declared(404))
    @lanes.reading
    def log(
        job_id: JobId,
        log_name: LogName,
        offset: ByteOffset = 0,
        limit: Annotated[int, Query(ge=1, le=1 << 20)] = 1 << 16,
        incarnation: Incarnation | None = None,
    ) -> LogPiece:
        """A part of a worker's log from byte `offset`, at most `limit` bytes. The next part begins at `next_offset`.

        Secrets are shown as `***`. Values of `secret_env` are deleted when the job ends: what the script printed of
        them can then no longer be recognized.
        """
        with parts.store.read() as reader:
            job = reader.job(job_id)
            if job is None:
                raise no_such_job(job_id)
            of = incarnation or job.incarnation
            row = reader.incarnation(job_id, of)
        secrets = {} if row is None else _secrets_of(parts, row)
        try:
            return read_piece(partial(parts.engine().read_log, job_id, of, log_name), offset, limit, secrets.values())
        except EngineError as error:
            raise Refusal(503, "log_not_readable", str(error), "ask again in a moment") from error
        except KeyError as error:
            raise Refusal(
                404, "log_not_found", f"job {job_id} has no log {log_name!r}", "its status lists log_names"
            ) from error


def _secrets_of(parts: ServiceParts, row: IncarnationRow) -> dict[str, str]:
    try:
        return hidden_values(parts.job_service.secrets, row.submission, row.secret_env)
    except UNREADABLE as error:
        raise Refusal(
            503,
            "log_not_readable",
            f"what is secret in the log of job {row.job_id} cannot be told: its stored submission cannot be read",
            "read the file in the state directory, or cancel the job and submit it again",
        ) from error


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
