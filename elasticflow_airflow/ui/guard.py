"""Protection of the browser: security headers on every response, and no changes from other sites' pages."""

from __future__ import annotations

from fastapi import HTTPException, Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
    " connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
"""Allows content from this Airflow only. Inline styles are allowed because the charting library sets them."""


class HeadersGuard:
    """Adds headers that restrict what the page may do, and that keep browsers from caching responses on jobs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to a response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "same-origin"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, guarded)


def refuse_foreign_pages(request: Request) -> None:
    """Refuse a change requested by another site's page, since the browser may send Airflow's cookie with it (CSRF)."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise HTTPException(403, "changes are taken from this Airflow's own pages only")
