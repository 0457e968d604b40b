"""The HTTP server of a node agent (``elasticflow node``). Every route needs the token.

The token is in ``ELASTICFLOW_NODE_TOKEN``, or in the file that ``ELASTICFLOW_NODE_TOKEN_FILE`` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import signal
import socket
import struct
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from elasticflow_airflow.engines.cluster.agent_card import AgentCard, only_agent
from elasticflow_airflow.engines.cluster.job_folder import node_of
from elasticflow_airflow.engines.cluster.messages import (
    EnvironmentAnswer,
    EnvironmentRequest,
    Introduction,
    Probe,
    Pull,
    PullAnswer,
    Push,
    PushAnswer,
    Recall,
    RecallAnswer,
    StacksRequest,
)
from elasticflow_airflow.engines.cluster.node_agent import LOOK_S, EarlierRequestError, NodeAgent
from elasticflow_airflow.engines.cluster.stuck_supervisors import LeaseWatchdog
from elasticflow_airflow.engines.local.machine.layout import NodeLayout, detect_nodes
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.local.machine.slots import default_lock_dir

TOKEN_ENV = "ELASTICFLOW_NODE_TOKEN"  # noqa: S105  (its name)
LONGEST_WAIT_S = 5.0
TOGETHER_S = 0.25
"""For so long what nobody waits for is collected before it is told, or in calm times as long as the service waits:
each answer costs the service time."""
LARGEST_BODY_BYTES = 256 << 20
_OWNER_LOOK_S = 0.2
_SIOCGIFADDR = 0x8915


def create_app(agent: NodeAgent, token: str) -> FastAPI:
    """Return the application. Errors: 401 without the token, 409 for a request that came too late, 413, 422, 507."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Gate, token=token)

    @app.get("/introduction")
    def introduction() -> Introduction:
        return agent.introduce()

    @app.post("/probe", status_code=204)
    def probe(probe: Probe) -> None:
        with _as_http():
            agent.probe(probe)

    @app.post("/push")
    def push(push: Push) -> PushAnswer:
        with _as_http():
            return agent.push(push)

    @app.post("/pull")
    async def pull(pull: Pull, request: Request) -> PullAnswer:
        begun_s = time.monotonic()
        while True:
            with _as_http():
                answer = await asyncio.to_thread(agent.pull, pull)
            waited_s = time.monotonic() - begun_s
            is_over = waited_s >= min(pull.wait_s, LONGEST_WAIT_S)
            news = answer.files or answer.version != pull.version
            is_urgent = bool(news) and agent.is_urgent(answer, pull.version)
            is_enough = news and waited_s >= TOGETHER_S and not agent.is_calm
            if is_urgent or is_enough or is_over or await request.is_disconnected():
                return answer
            slept_s = 0.0
            while slept_s < min(agent.look_s, pull.wait_s - waited_s):  # which an order makes shorter
                await asyncio.sleep(LOOK_S)
                slept_s += LOOK_S

    @app.post("/recall")
    def recall(recall: Recall) -> RecallAnswer:
        with _as_http():
            return agent.recall(recall)

    @app.post("/stacks")
    def stacks(asked: StacksRequest) -> dict[str, str]:
        with _as_http():
            return agent.stacks(asked.trainers)

    @app.post("/environment")
    def environment(asked: EnvironmentRequest) -> EnvironmentAnswer:
        return agent.prepare_environment(asked)

    @app.put("/code/{path:path}")
    async def code(path: str, request: Request) -> Response:
        with _as_http():
            await _unpack(request.stream(), agent.root, path, request.headers.get("x-digest", ""))
        return Response(status_code=204)

    return app


class _Gate:
    """Refuses a request before its body is read: without the token, or with a body that is too large."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            await JSONResponse({"detail": "this node has another token"}, 401)(scope, receive, send)
        elif not length.isdigit() or int(length) > LARGEST_BODY_BYTES or b"transfer-encoding" in headers:
            await JSONResponse({"detail": "the request is too large, or does not say how large"}, 413)(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)


@contextlib.contextmanager
def _as_http() -> Iterator[None]:
    try:
        yield
    except EarlierRequestError as error:
        raise HTTPException(409, str(error)) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    except OSError as error:
        raise HTTPException(507, f"the node cannot write: {error}") from error


async def _unpack(stream: AsyncIterator[bytes], root: Path, path: str, digest: str) -> None:
    """Unpack a tar with code below ``root``. Raises ValueError when it is not what ``digest`` says, and OSError."""
    parts = PurePosixPath(path).parts
    if len(parts) != 2 or parts[0] != "snapshots" or not parts[1].isalnum():
        raise ValueError(f"{path!r} is not a folder for code")
    target = root / path
    if target.is_dir():
        return
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as name:
        tar_file, folder = Path(name) / "code.tar", Path(name) / "code"
        with tar_file.open("wb") as file:
            async for block in stream:
                await asyncio.to_thread(file.write, block)
        await asyncio.to_thread(_extract, tar_file, folder)
        if await asyncio.to_thread(tree_digest, folder) != digest:
            raise ValueError(f"the code {path} arrived damaged")
        with contextlib.suppress(OSError):  # Another request was faster.
            folder.rename(target)


def _extract(tar_file: Path, folder: Path) -> None:
    try:
        with tarfile.open(tar_file, "r:") as tar:
            tar.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise ValueError(f"no acceptable tar: {error}") from error


def tree_digest(folder: Path) -> str:
    """Return a digest of the relative paths and contents of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address. Raises ValueError when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # It has no address.
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    if address.startswith("127."):
        return "lo"
    raise ValueError(
        f"no network interface of this machine has the address {address}: name one with --interface, or another address"
    )


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token that service and nodes share. Raises ValueError when there is none."""
    path = environ.get(f"{TOKEN_ENV}_FILE")
    token = Path(path).read_text().strip() if path else environ.get(TOKEN_ENV, "")
    if not token:
        raise ValueError(f"a node needs the token of its service: set {TOKEN_ENV}, or {TOKEN_ENV}_FILE to its file")
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of an agent (see ``elasticflow node --help``)."""

    state_dir: Path
    shared_dir: Path | str
    listen: str
    node_id: str = field(default_factory=socket.gethostname)
    slots: int | None = None
    address: str | None = None
    interface: str | None = None
    slot_lock_dir: Path | None = None
    warm_imports: tuple[str, ...] | None = None
    notice_file: Path | None = None
    """Announces that the machine goes away (see ``elasticflow node --help``)."""
    own_cpus: bool = False
    """Others on this machine have other CPUs: their slots are not ours."""
    ends_with: ProcessId | None = None
    """With the end of this process everything on the node ends, workers included."""
    fingerprint: str = ""
    """See :class:`AgentCard`."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The address to listen on. Raises ValueError."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"--listen {self.listen!r} is no HOST:PORT")
        return host, int(port)

    def nodes(self) -> list[NodeLayout]:
        """Return the nodes to offer, named and reachable as the options say. Raises ValueError."""
        address = self.address or self.host_and_port[0]
        if address == "0.0.0.0":  # noqa: S104  (refused)
            raise ValueError("say with --address where the other nodes reach this one")
        if node_of(f"g000001-{self.node_id}") is None:
            raise ValueError(f"--node-id {self.node_id!r}: use letters, digits, dots and dashes")
        interface = self.interface or interface_of(address)
        (found,) = detect_nodes(slots=self.slots)
        if self.own_cpus and found.device == "cpu":
            own = (replace(slot, lock_name=f"{self.node_id}-{slot.lock_name}") for slot in found.slots)
            found = replace(found, slots=tuple(own))
        return [replace(found, node_id=self.node_id, address=address, interface=interface)]


def run_agent(options: AgentOptions, token: str) -> int:
    """Run until SIGTERM and return the exit status; supervisors and their workers go on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(only_agent(options.state_dir))
            listener = stack.enter_context(socket.create_server(options.host_and_port, backlog=64))
            agent = NodeAgent(
                options.state_dir,
                options.shared_dir,
                options.nodes(),
                options.slot_lock_dir or default_lock_dir(),
                {name: value for name, value in os.environ.items() if not name.startswith(TOKEN_ENV)},
                token,
                options.warm_imports,
                options.notice_file,
            )
            stack.callback(agent.close)
            host, port = listener.getsockname()[:2]
            AgentCard(ProcessId.current(), f"http://{host}:{port}", options.fingerprint).write(options.state_dir)
        except (ValueError, OSError) as error:
            sys.stderr.write(f"the node agent cannot start: {error}\n")
            return 2
        LeaseWatchdog(agent.running).start()
        if options.ends_with is not None:
            threading.Thread(target=_end_with, args=(options.ends_with, agent), name="owner", daemon=True).start()
        sys.stdout.write(f"node {options.node_id} listens on {host}:{port}\n")
        sys.stdout.flush()
        config = uvicorn.Config(create_app(agent, token), log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _end_with(owner: ProcessId, agent: NodeAgent) -> None:
    """End everything here at once when the process is gone for which the node is held."""
    while owner.is_alive():
        time.sleep(_OWNER_LOOK_S)
    logging.getLogger("elasticflow.node").warning("the actor that holds this node is gone: everything ends")
    agent.kill_everything()
    os.kill(os.getpid(), signal.SIGKILL)
