"""What every request passes through: the versions, the count of requests, the token, and the limit of its body."""

from __future__ import annotations

import hmac
import math
import time

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_HEADER, API_VERSION, VERSION_HEADER, Problem
from elasticflow_airflow.service.http.parts import Traffic
from elasticflow_airflow.service.http.routes.owner_routes import OWNERS_PATH
from elasticflow_airflow.service.refusal import Refusal

BODY_LIMIT_BYTES = 4 << 20
LIMITS_BYTES = {"/v1/calendar": 8 << 20}
"""The limits of routes that accept more, such as the due runs of a whole Airflow."""
OPEN_PATHS = ("/healthz", "/readyz")
"""Routes without a token."""
_OWN_LIMIT = "/v1/snapshots/"
"""Uploads are written to disk as they arrive, and are limited there."""
_MARKS = [(API_HEADER.lower().encode(), API_VERSION.encode()), (VERSION_HEADER.lower().encode(), __version__.encode())]


class VersionMark:
    """Adds the versions of the service and its API to every answer, so that a client can report a mismatch."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its answer."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_MARKS]}
            await send(message)

        await self._app(scope, receive, marked if scope["type"] == "http" else send)


class TrafficCounter:
    """Records when the service is idle."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request as in progress until it ends."""
        if scope["type"] != "http" or scope["path"] == OWNERS_PATH:
            await self._app(scope, receive, send)
            return
        self._traffic.under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._traffic.under_way -= 1
            self._traffic.last_monotonic_s = time.monotonic()


class TokenGuard:
    """Refuses requests without the token (RFC 6750), which is compared in constant time."""

    def __init__(self, app: ASGIApp, token: str | None, metrics_token: str | None = None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._for_metrics = None if metrics_token is None else f"Bearer {metrics_token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "http" and self._expected is not None and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected) and not self._may_read_metrics(scope["path"], given):
                what = "wrong" if given else "missing"
                refusal = Refusal(
                    401, "unauthorized", f"the token is {what}", "send Authorization: Bearer <the service's token>"
                )
                response = problem_response(refusal)
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may_read_metrics(self, path: str, given: bytes) -> bool:
        return path == "/metrics" and self._for_metrics is not None and hmac.compare_digest(given, self._for_metrics)


class BodyLimit:
    """Answers 413 when a body is too large. Raised where the body is read, so that the route ends as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count the bytes of its body."""
        if scope["type"] != "http" or scope["path"].startswith(_OWN_LIMIT):
            await self._app(scope, receive, send)
            return
        limit = LIMITS_BYTES.get(scope["path"], BODY_LIMIT_BYTES)
        announced = dict(scope["headers"]).get(b"content-length", b"")
        too_large = announced.isdigit() and int(announced[:20]) > limit
        came = 0

        async def counted() -> Message:
            nonlocal came
            message: Message = {} if too_large else await receive()
            came += len(message.get("body", b""))
            if too_large or came > limit:
                raise HTTPException(413, f"the request is larger than {limit} bytes: send less at once")
            return message

        await self._app(scope, counted, send)


def problem_response(refusal: Refusal) -> JSONResponse:
    """Return the answer to a request that is refused."""
    body = Problem(error=refusal.error, message=refusal.message, hint=refusal.hint)
    response = JSONResponse(body.model_dump(), status_code=refusal.status)
    if refusal.retry_after_s is not None:
        response.headers["Retry-After"] = str(math.ceil(refusal.retry_after_s))
    return response
