"""Replicas of a service as real HTTP servers, which tests start and kill: what is behind them is a list they share."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_HEADER, API_VERSION, VERSION_HEADER, Event, Health, Problem
from elasticflow_airflow.api.diagnosis import Diagnosis, ok

NO_LEADER = Problem(error="no_leader", message="another replica takes over", hint="ask again in a moment")


@dataclass
class Database:
    """What all replicas answer from."""

    jobs: dict[str, Any] = field(default_factory=dict)
    new_job: Any = None
    """What becomes of any job that is submitted."""
    claims: int = 0
    events: list[Event] = field(default_factory=list)


@dataclass
class Replica:
    """A server on a port. ``behave`` may answer a request in place of the database, or end its connection."""

    database: Database = field(default_factory=Database)
    version: str = __version__
    api: str = API_VERSION
    behave: Callable[[Any], tuple[int, Any] | None] = lambda _: None
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._open: set[socket.socket] = set()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # or headers and body are two packets, and the second waits for an acknowledgement

            def setup(self) -> None:
                super().setup()
                replica._open.add(self.connection)

            def finish(self) -> None:
                replica._open.discard(self.connection)
                super().finish()

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (OSError, ValueError):  # the test has killed this replica, or its client has left
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                replica.asked.append(f"{self.command} {self.path}")
                status, value = replica.behave(self) or replica.answer(self)
                content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                marks = {API_HEADER: replica.api, VERSION_HEADER: replica.version, **replica.headers}
                for name, text in {**marks, "Content-Length": str(len(content))}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kill(self) -> None:
        """End the server and all its connections, as the death of its process does."""
        self._server.shutdown()
        self._server.server_close()
        for one in list(self._open):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended by itself
        self._thread.join()

    def answer(self, request: Any) -> tuple[int, Any]:
        path, _, query = request.path.partition("?")
        parts = path.strip("/").split("/")
        if path == "/v1/version":
            return 200, {"version": self.version, "api": self.api, "at": str(time.time())}
        if path == "/v1/health":
            health = Health(
                status="ok",
                version=self.version,
                engine="fake",
                pid=1,
                started_at=self.started_at,
                state_dir="/var",
                live_jobs=0,
            )
            return 200, health.model_dump_json()
        if path == "/v1/doctor":
            found = Diagnosis(at=0.0, version=self.version, api=self.api, findings=[ok("slots", "4 slots")])
            return 200, found.model_dump_json()
        if path == "/v1/jobs":
            return 200, list(self.database.jobs.values())
        if parts[-1] == "events":
            after = int(httpx.QueryParams(query)["after"])
            return 200, [event.model_dump() for event in self.database.events if event.event_id > after][:3]
        if parts[-1] == "wrong":
            return 404, Problem(error="job_not_found", message="no job 'wrong'").model_dump()
        if request.command == "PUT":
            created = parts[-1] not in self.database.jobs
            job = self.database.jobs.setdefault(parts[-1], self.database.new_job)
            self.database.claims += 1
            return 200, {"job": job, "claim": self.database.claims, "created": created}
        if parts[-1] not in self.database.jobs:
            return 404, Problem(error="job_not_found", message="no such job").model_dump()
        return 200, self.database.jobs[parts[-1]]


@contextmanager
def dead() -> Iterator[str]:
    """Return the address of nobody: the port is bound, so that no other process takes it, and refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
