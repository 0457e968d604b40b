"""Serves the API of a simulated cluster on a Unix socket, from a thread, and detects polling clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticflow_airflow.client import Endpoint

_START_LIMIT_S = 20.0
_BLOCKED_LOOKS = 2


class LookCounter:
    """Reports every poll of a job by HTTP, except those of the thread that only keeps leases alive."""

    def __init__(self, app: ASGIApp, looked_at: Callable[[str, str, int], None]) -> None:
        self._app, self._looked_at = app, looked_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report a poll, and pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts = str(scope["path"]).strip("/").split("/")
        if scope["method"] == "GET" and len(parts) == 3 and parts[1] == "jobs":
            await run_in_threadpool(self._looked_at, "GET", parts[2], _BLOCKED_LOOKS + 1)
        elif scope["method"] == "POST" and len(parts) == 4 and parts[3] == "lease":
            body = await _read(receive)
            if "dag.test() is alive" not in str(_json(body).get("reason", "")):
                await run_in_threadpool(self._looked_at, "POST", parts[2], _BLOCKED_LOOKS)
            receive = _again(body)
        await self._app(scope, receive, send)


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _again(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive


def _json(body: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Server:
    """Serves an application on a Unix socket, from a thread."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        config = uvicorn.Config(
            app,
            uds=str(endpoint.socket_path),
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="asyncio",
            log_level="warning",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="elasticflow-simulated", daemon=True)
        self._thread.start()
        end_s = time.monotonic() + _START_LIMIT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end_s:
                raise RuntimeError(f"the simulated service could not listen on {endpoint.socket_path}")
            time.sleep(0.002)

    def close(self) -> None:
        """Finish pending requests, and stop."""
        self._server.should_exit = True
        self._thread.join(_START_LIMIT_S)
