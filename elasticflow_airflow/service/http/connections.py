"""Limits the cost of a connection: the size of a request's head, and the time for a request to arrive.

A client that sends half a request is refused and disconnected after seconds, so that no number of such clients blocks
others. A client that keeps sending, over however slow a network, is served. Knows HTTP, but nothing of the routes.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from elasticflow_airflow.api import Problem

HEAD_LIMIT_BYTES = 64 * 1024
"""For the request line with all headers."""
HEAD_LIMIT_S = 10.0
BODY_LIMIT_S = 10.0
"""A body may take this long, ..."""
BODY_LEAST_BYTES_PER_S = 500
"""... and one second more for each this many bytes received."""
_LINGER_S = 5.0
"""How long a client refused before it has sent everything may read the answer; what it still sends is dropped."""
_LATE_S = 1.0
_PIECE_BYTES = 4096

_WHY = {
    400: ("http", "this is no HTTP request", "speak HTTP/1.1"),
    408: ("timeout", "the request did not come in time", "send it as a whole, or go on sending"),
    431: (
        "headers_too_large",
        f"address and headers are longer than {HEAD_LIMIT_BYTES} bytes together",
        "send less in them: ask several times with fewer arguments",
    ),
}
STATUSES = tuple(_WHY)
"""The statuses with which any request may be refused before its route is known."""


class BoundedConnection(H11Protocol):
    """One client connection; uvicorn creates one instance for each."""

    _timer: asyncio.TimerHandle | None = None
    _waits_since_s = 0.0
    _came_bytes = 0
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        """Start to wait for a request."""
        super().connection_made(transport)
        self._wait_anew()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a closed connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received data, in pieces while it belongs to a head: h11 limits all data that it gets at once."""
        if self._refused:
            return
        before = self.conn.their_state
        self._came_bytes += len(data)
        at = 0
        while at < len(data) and not self._refused and not self.transport.is_closing():
            end = at + _PIECE_BYTES if self.conn.their_state is h11.IDLE else len(data)
            super().data_received(data[at:end])
            at = end
        if self.conn.their_state is not before:
            self._came_bytes = len(data)
            self._wait_anew()
        elif self._timer is None:
            self._wait_anew()

    def on_response_complete(self) -> None:
        """Wait for the next request, or give a client that has not sent all of its request time to read the answer."""
        lingers = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        self._came_bytes = len(self.conn.trailing_data[0])
        if lingers:
            self._linger()
        else:
            self._wait_anew()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse an invalid request; uvicorn's own answer is the same for everything that h11 refuses."""
        self._refuse(getattr(sys.exc_info()[1], "error_status_hint", 400))

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait_anew(self) -> None:
        """Restart the timer for the data that should come next, if any should."""
        self._stop_waiting()
        self._waits_since_s = self.loop.time()
        if self._limit_s() is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._limit_s() or 0.0, self._look, self.loop.time())

    def _limit_s(self) -> float | None:
        """Return how long to wait for the missing data (seconds); None if none is missing."""
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            return HEAD_LIMIT_S
        if self.conn.their_state is h11.SEND_BODY:
            return BODY_LIMIT_S + self._came_bytes / BODY_LEAST_BYTES_PER_S
        return None

    def _look(self, armed_at_s: float) -> None:
        """Refuse when the time is up, unless the delay has another reason."""
        self._timer = None
        limit_s, now_s = self._limit_s(), self.loop.time()
        if limit_s is None or self.transport.is_closing():
            return
        if self.flow.read_paused or (self.cycle is not None and self.cycle.waiting_for_100_continue):
            self._waits_since_s = now_s  # The client waits for us.
        left_s = self._waits_since_s + limit_s - now_s
        if left_s <= 0 and now_s - armed_at_s > limit_s + _LATE_S:
            left_s = _LATE_S  # This event loop was blocked: data that arrived meanwhile was not read yet.
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._look, now_s)
        elif self.conn.their_state is h11.IDLE and not self._came_bytes:
            self.transport.close()  # The client has sent nothing.
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- refusing ------------------------------------------------------------------------------------------------

    def _refuse(self, status: int) -> None:
        """Send the refusal, unless another answer has begun, and accept no more data."""
        self._refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error, message, hint = _WHY.get(status, _WHY[400])
            body = Problem(error=error, message=message, hint=hint).model_dump_json().encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        """Close the connection after a moment: closing it while data still arrives would lose the answer."""
        self._stop_waiting()
        transport: Any = self.transport
        if self._refused and transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, transport.close)
