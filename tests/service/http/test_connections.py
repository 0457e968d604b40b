"""Connections that cost more than an honest one, over raw sockets to a real service: on TCP and on the Unix socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from elasticflow_airflow.service.http import connections
from elasticflow_airflow.service.http.middleware import BODY_LIMIT_BYTES, LIMITS_BYTES

TOKEN = "a-long-token"
LIMIT_S = 30.0

Connect = Callable[[], socket.socket]


@pytest.fixture(params=["tcp", "unix"])
def connect(request: pytest.FixtureRequest, shared_daemons: Any) -> Connect:
    """Make connections to a service, one on either kind of socket."""
    if request.param == "unix":
        path = str(shared_daemons.embedded("unix").socket_path)

        def over_unix() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            return connection

        return over_unix
    known = shared_daemons.__dict__.setdefault("served_for_connections", None) or shared_daemons.served(TOKEN)
    shared_daemons.served_for_connections = known
    port = int(known.base_url.rpartition(":")[2])
    return lambda: socket.create_connection(("127.0.0.1", port))


def answer_to(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of what comes, until the service closes the connection."""
    connection.settimeout(LIMIT_S)
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def until(connection: socket.socket, wanted: bytes) -> bytes:
    """What comes until it ends with what is wanted: head and body may come apart."""
    data = b""
    while not data.endswith(wanted):
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def head(method: str = "POST", path: str = "/v1/forecast", **headers: object) -> bytes:
    fields = {"Host": "service", "Authorization": f"Bearer {TOKEN}", "Connection": "close", **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.mark.parametrize("size", [70_000, 1_000_000])
def test_headers_that_are_too_long_are_refused(connect, size):
    with connect() as connection:
        connection.sendall(head("GET", "/v1/version", X_Long="x" * size))
        status, problem = answer_to(connection)
    assert (status, problem["error"]) == (431, "headers_too_large")
    assert problem["hint"]


def test_headers_and_addresses_that_never_end_are_refused(connect):
    for begin, more in ((head("GET", "/v1/version")[:-2], b"X-More: more\r\n"), (b"GET /", b"a" * 1000)):
        with connect() as connection:
            connection.sendall(begin + more * (70_000 // len(more)))
            assert answer_to(connection)[0] == 431


def test_headers_within_the_limit_are_taken(connect):
    with connect() as connection:
        connection.sendall(head("GET", "/v1/version", X_Long="x" * 60_000))
        assert answer_to(connection)[0] == 200


def test_what_is_no_request_is_a_problem(connect):
    with connect() as connection:
        connection.sendall(b"\x16\x03\x01 this is TLS, perhaps\r\n\r\n")
        status, problem = answer_to(connection)
    assert (status, problem["error"]) == (400, "http")


@pytest.mark.parametrize(("path", "limit"), [("/v1/forecast", BODY_LIMIT_BYTES), *LIMITS_BYTES.items()])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(connect, announced, path, limit):
    size = limit + 1
    with connect() as connection:
        if announced:  # It is refused before any of it is sent.
            connection.sendall(head(path=path, Content_Length=size))
        else:
            connection.sendall(
                head(path=path, Transfer_Encoding="chunked") + f"{size:x}\r\n".encode() + b" " * size + b"\r\n"
            )
        status, problem = answer_to(connection)
    assert status == 413
    assert f"larger than {limit} bytes" in problem["message"]


@pytest.mark.parametrize("connect", ["tcp"], indirect=True)
def test_half_of_a_body_beside_no_token_is_not_waited_for(connect):
    with connect() as connection:
        connection.sendall(head(Authorization="", Content_Length=1000) + b"abc")
        assert answer_to(connection)[0] == 401


@pytest.mark.slow
def test_half_sent_requests_end_after_seconds_and_keep_nobody_out(connect):
    """Slowly, as many as the machine lets them: none gets more time by a byte now and then."""
    halves = [
        b"",
        b"GET /v1/ver",
        head()[:-2],
        head(Content_Length=100) + b'{"ho',
        head(Transfer_Encoding="chunked") + b'5\r\n{"ho',
        head("PUT", f"/v1/snapshots/{'0' * 64}", Content_Length=100_000) + b"x" * 100,
    ]
    waiting = [(half, connect()) for half in halves for _ in range(20)]
    began = time.monotonic()
    for half, connection in waiting:
        connection.sendall(half)
    with connect() as honest:
        honest.sendall(head("GET", "/v1/version"))
        assert answer_to(honest)[0] == 200
    for half, connection in waiting:
        connection.settimeout(LIMIT_S)
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
        assert data.startswith(b"HTTP/1.1 408 ") == bool(half), (half, data)
        connection.close()
    assert time.monotonic() - began < 12 * connections.HEAD_LIMIT_S


# -- the limits themselves, with shorter times -------------------------------------------------------------------


@contextmanager
def echoing(folder: Path) -> Iterator[Connect]:
    """A server that answers with the length of what it was sent."""

    async def answer(request: Request) -> PlainTextResponse:
        size = 0
        async for piece in request.stream():
            size += len(piece)
        return PlainTextResponse(str(size))

    path = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    config = uvicorn.Config(
        Starlette(routes=[Route("/", answer, methods=["POST"])]),
        http=connections.BoundedConnection,
        log_config=None,
        lifespan="off",
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(LIMIT_S)
        while not server.started:
            time.sleep(0.01)
        connection.connect(str(path))
        return connection

    yield connect
    server.should_exit = True
    thread.join(LIMIT_S)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_LIMIT_S", 0.4)
    monkeypatch.setattr(connections, "BODY_LIMIT_S", 0.4)
    monkeypatch.setattr(connections, "BODY_LEAST_BYTES_PER_S", 1000)
    monkeypatch.setattr(connections, "_LATE_S", 5.0)


def test_an_upload_that_makes_progress_may_take_longer_than_the_limit(short_limits, tmp_path):
    with echoing(tmp_path) as connect, connect() as connection:
        connection.sendall(head(path="/", Content_Length=10_000))
        for _ in range(10):
            connection.sendall(b"x" * 1000)
            time.sleep(0.15)  # Not for luck: so slow it is.
        until(connection, b"\r\n\r\n10000")


def test_a_byte_now_and_then_is_no_progress(short_limits, tmp_path):
    with echoing(tmp_path) as connect, connect() as connection:
        connection.sendall(head(path="/", Content_Length=10_000))
        connection.setblocking(False)
        end, data = time.monotonic() + LIMIT_S, b""
        while not data and time.monotonic() < end:
            connection.send(b"x")
            time.sleep(0.05)
            try:
                data = connection.recv(1 << 16)
            except BlockingIOError:
                continue
        assert data.startswith(b"HTTP/1.1 408")


def test_requests_one_after_the_other_and_at_once_are_answered(short_limits, monkeypatch, tmp_path):
    """Each has its time of its own; what came with the request before counts for its own."""
    monkeypatch.setattr(connections, "HEAD_LIMIT_S", 1.2)
    one = head(path="/", Content_Length=3, Connection="keep-alive") + b"abc"
    with echoing(tmp_path) as connect, connect() as connection:
        for _ in range(3):
            connection.sendall(one)
            until(connection, b"\r\n\r\n3")
            time.sleep(0.5)
        connection.sendall(one * 5)
        answers = b""
        while answers.count(b"\r\n\r\n3") < 5:
            answers += connection.recv(1 << 16)
        connection.sendall(one[:40])
        status, problem = answer_to(connection)
        assert (status, problem["error"]) == (408, "timeout")


def test_a_client_that_waits_for_its_turn_to_send_is_told_to(short_limits, tmp_path):
    with echoing(tmp_path) as connect, connect() as connection:
        connection.sendall(head(path="/", Content_Length=3, Expect="100-continue"))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        connection.sendall(b"abc")
        until(connection, b"\r\n\r\n3")
