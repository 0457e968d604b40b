"""Limits the size of request bodies, before anything reads them."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT_BYTES = 4 << 20
LIMITS_BYTES = {"/v1/calendar": 8 << 20}
"""The limits of routes that accept more, such as the due runs of a whole Airflow."""
_OWN_LIMIT = "/v1/snapshots/"
"""Uploads are written to disk as they arrive, and are limited there."""


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
