"""The HTTP API: all of ``routes/``, and the error bodies. All rules are elsewhere.

Over TCP every route needs the token (a Unix socket is protected by its permissions). Only ``/healthz`` and ``/readyz``
are open, and they reveal only that the service is running, and can answer. Error bodies never repeat what was sent.
"""

from __future__ import annotations

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from elasticflow_airflow import __version__
from elasticflow_airflow.bounds import NAME_CHARACTERS, TEXT_CHARACTERS, clean_text
from elasticflow_airflow.service.http.forwarding import Forwarding
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.middleware import (
    BodyLimit,
    TokenGuard,
    TrafficCounter,
    VersionMark,
    problem_response,
)
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.http.routes.doctor_routes import add_doctor
from elasticflow_airflow.service.http.routes.event_routes import add_events
from elasticflow_airflow.service.http.routes.health_routes import add_health
from elasticflow_airflow.service.http.routes.insight_routes import add_insight
from elasticflow_airflow.service.http.routes.job_routes import add_jobs
from elasticflow_airflow.service.http.routes.log_routes import add_logs
from elasticflow_airflow.service.http.routes.metrics_routes import add_metrics
from elasticflow_airflow.service.http.routes.node_routes import add_nodes
from elasticflow_airflow.service.http.routes.owner_routes import add_owners
from elasticflow_airflow.service.http.routes.snapshot_routes import add_snapshots
from elasticflow_airflow.service.http.validation_messages import in_our_words
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.secrets import SecretError
from elasticflow_airflow.service.store.store import DATABASE_AWAY

log = structlog.get_logger(__name__)

_MOST_WRONG = 10
"""The number of mistakes that a refusal lists."""


def build_app(parts: ServiceParts, token: str | None, metrics_token: str | None = None) -> FastAPI:
    """Build the application. ``token`` None: any client that can open the socket may do everything.

    ``metrics_token`` opens ``/metrics`` and nothing else.
    """
    app = FastAPI(title="elasticflow", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    lanes = Lanes()
    _add_errors(app)
    add_health(app, parts, lanes)
    add_snapshots(app, parts, lanes)
    add_jobs(app, parts, lanes)
    add_nodes(app, parts, lanes)
    add_events(app, parts, lanes)
    add_logs(app, parts, lanes)
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
