"""Adds the versions of the service and its API to every answer, so that a client can report a mismatch."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_HEADER, API_VERSION, VERSION_HEADER

_MARKS = [(API_HEADER.lower().encode(), API_VERSION.encode()), (VERSION_HEADER.lower().encode(), __version__.encode())]


class VersionMark:
    """Middleware that adds the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its answer."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_MARKS]}
            await send(message)

        await self._app(scope, receive, marked if scope["type"] == "http" else send)
