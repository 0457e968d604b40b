"""The daemon's life: one service per state directory, where it listens, what it logs, and when it leaves.

Puts the parts together; holds no rule of theirs.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn

from elasticflow_airflow import __version__
from elasticflow_airflow.engines.port import Engine
from elasticflow_airflow.service.api import ServiceParts, Traffic, build_app
from elasticflow_airflow.service.autoscaling import CapacityDesk
from elasticflow_airflow.service.candidates import CandidateDesk, verify_by_manifest
from elasticflow_airflow.service.chronicle import Chronicle, write_to_log
from elasticflow_airflow.service.feeding import CalendarDesk
from elasticflow_airflow.service.forecasting import ForecastDesk
from elasticflow_airflow.service.insight import InsightDesk
from elasticflow_airflow.service.insight_routes import InsightDesks
from elasticflow_airflow.service.jobs import JobDesk
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.reconcile import Reconciler
from elasticflow_airflow.service.secrets import SecretBox
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.snapshots import Snapshots
from elasticflow_airflow.service.store import Store
from elasticflow_airflow.service.traces import traces_from_environment
from elasticflow_airflow.service.whatif import WhatIfDesk

SOCKET_PATH_LIMIT = 107
_IDLE_LOOK_S = 0.5
_FAKE_NODES = (1, 4)

log = structlog.get_logger()


class CannotServeError(Exception):
    """The service cannot start; the message says what to do."""


@contextmanager
def lock_state_dir(state_dir: Path) -> Iterator[bool]:
    """Hold the state directory's lock for life; yields False when another service holds it.

    Raises CannotServeError when the directory cannot be used.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / "service.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotServeError(
            f"the state directory {state_dir} cannot be used: {error}. Choose another with ELASTICFLOW_STATE_DIR."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def serve(settings: ServiceSettings, *, embedded: bool) -> None:
    """Run the service until it is told to leave, or (embedded) until it has been idle for long enough.

    The caller holds the lock. Raises CannotServeError, with what to do.
    """
    token, metrics_token = _token_for(settings, embedded), _metrics_token(settings)
    listener, where = _listen(settings, embedded)
    try:
        started_at, engine, notifier = time.time(), open_engine(settings), Notifier()
        parts, reconciler, candidates = assemble(settings, engine, notifier)
        store, traffic = parts.store, parts.traffic
        server = _OrderlyServer(
            uvicorn.Config(
                build_app(parts, token, metrics_token),
                log_config=None,
                access_log=False,
                lifespan="off",
                ssl_certfile=settings.tls_cert if not embedded else None,
                ssl_keyfile=settings.tls_key if not embedded else None,
                timeout_graceful_shutdown=3,
            )
        )
        _write_card(settings.state_dir, where, started_at)
        log.info("service started", version=__version__, endpoint=where, engine=engine.name, pid=os.getpid())
        traces = traces_from_environment()
        chronicle = Chronicle(store, notifier, [write_to_log, *([] if traces is None else [traces])])
        chronicle.start()
        loop = threading.Thread(target=reconciler.run, name="reconcile", daemon=True)
        loop.start()
        if embedded:
            threading.Thread(
                target=_leave_when_idle, args=(server, store, traffic, settings.idle_exit_s), name="idle", daemon=True
            ).start()
        server.run(sockets=[listener])
        reconciler.stop()
        loop.join(settings.grace_s)
        candidates.close()
        chronicle.close()
        if traces is not None:
            traces.close()
        engine.close()
        store.close()
        log.info("service stopped; workers go on")
    finally:
        listener.close()
        if settings.host is None or embedded:
            (settings.state_dir / "service.sock").unlink(missing_ok=True)


def assemble(
    settings: ServiceSettings,
    engine: Engine,
    notifier: Notifier,
    *,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> tuple[ServiceParts, Reconciler, CandidateDesk]:
    """Put the service together around an engine, for the daemon and for whoever has a clock of his own.

    The caller runs the loop, and closes the candidate desk, the engine and the store.
    """
    store = Store(settings.store_url(), clock=clock)
    snapshots = Snapshots(
        settings.state_dir / "snapshots",
        max_bytes=settings.snapshot_max_bytes,
        max_files=settings.snapshot_max_files,
    )
    secrets = SecretBox(settings.state_dir / "secret.key")
    candidates = CandidateDesk(verify_by_manifest, notifier.wake)
    reconciler = Reconciler(
        store, engine, settings, notifier, snapshots, secrets, candidates, clock=clock, monotonic=monotonic
    )
    forecasts = ForecastDesk(store, settings, reconciler.copy_scheduler, lambda: reconciler.device_type, clock=clock)
    parts = ServiceParts(
        store=store,
        notifier=notifier,
        snapshots=snapshots,
        engine=engine,
        desk=JobDesk(
            store,
            notifier,
            snapshots,
            secrets,
            settings,
            slots=lambda: sum(node.slots for node in reconciler.nodes),
            clock=clock,
        ),
        settings=settings,
        nodes=lambda: reconciler.nodes,
        problem=lambda: reconciler.problem,
        traffic=Traffic(),
        started_at=clock(),
        forecasts=forecasts,
        insight=InsightDesks(
            InsightDesk(store, reconciler.foresee, lambda: reconciler.nodes, clock=clock),
            WhatIfDesk(forecasts),
            CalendarDesk(store, settings, reconciler.hear_of_runs, clock=clock),
        ),
        capacity=CapacityDesk(forecasts),
    )
    return parts, reconciler, candidates


class _OrderlyServer(uvicorn.Server):
    """Stops at SIGTERM or SIGINT and returns: uvicorn's own raises the signal again, before anything is put away."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ask the server to exit at the first signal, at once at the second SIGINT."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def open_engine(settings: ServiceSettings) -> Engine:
    """The engine that the settings name. Raises CannotServeError."""
    if settings.engine == "fake":
        from elasticflow_airflow.engines.fake import FakeEngine, fake_nodes

        nodes, slots = settings.node_shape() or (_FAKE_NODES[0], settings.slots or _FAKE_NODES[1])
        return FakeEngine(fake_nodes(nodes, slots), state_file=settings.state_dir / "fake-engine.json")
    from elasticflow_airflow.engines.local import LocalEngine, detect_nodes
    from elasticflow_airflow.engines.port import EngineError

    try:
        layout = detect_nodes(slots=settings.slots, virtual_nodes=settings.virtual_nodes)
        warm = settings.warm_modules()
        return LocalEngine(settings.state_dir, layout, settings.slot_lock_dir, warm_imports=warm)
    except (ValueError, EngineError) as error:
        raise CannotServeError(str(error)) from error


def set_up_logging(level: str) -> None:
    """One line an event, to standard error, with the time in UTC. An embedded service's goes to ``service.log``."""
    order = ("debug", "info", "warning", "error")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(10 * (order.index(level) + 1)),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _token_for(settings: ServiceSettings, embedded: bool) -> str | None:
    if embedded or settings.host is None:
        return None
    try:
        token = settings.read_token()
    except ValueError as error:
        raise CannotServeError(str(error)) from error
    if token is None:
        raise CannotServeError(
            "serving on TCP needs a token: set ELASTICFLOW_TOKEN, or ELASTICFLOW_TOKEN_FILE to a file that holds one."
            " Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return token


def _metrics_token(settings: ServiceSettings) -> str | None:
    try:
        return settings.read_metrics_token()
    except ValueError as error:
        raise CannotServeError(str(error)) from error


def _listen(settings: ServiceSettings, embedded: bool) -> tuple[socket.socket, str]:
    if settings.host is not None and not embedded:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise CannotServeError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another --host or --port."
            ) from error
        scheme = "https" if settings.tls_cert else "http"
        return listener, f"{scheme}://{settings.host}:{listener.getsockname()[1]}"
    path = settings.state_dir / "service.sock"
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_LIMIT:
        raise CannotServeError(
            f"the socket path {path} has {length} bytes, and a Unix socket takes at most {SOCKET_PATH_LIMIT}: choose a "
            "shorter state directory ([elasticflow] state_dir in airflow.cfg, or ELASTICFLOW_STATE_DIR)"
        )
    path.unlink(missing_ok=True)  # Ours: we hold the lock, so whoever made it is gone.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise CannotServeError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return listener, f"unix://{path}"


def _write_card(state_dir: Path, where: str, started_at: float) -> None:
    """``service.json``: who serves this directory, for people and scripts."""
    card = {"pid": os.getpid(), "started_at": started_at, "version": __version__, "endpoint": where}
    temporary = state_dir / f".service.json.{os.getpid()}"
    temporary.write_text(json.dumps(card, indent=1))
    os.replace(temporary, state_dir / "service.json")


def _leave_when_idle(server: uvicorn.Server, store: Store, traffic: Traffic, idle_exit_s: float) -> None:
    busy_at = time.monotonic()
    while not server.should_exit:
        time.sleep(_IDLE_LOOK_S)
        now = time.monotonic()
        if traffic.under_way:
            busy_at = now
        elif now - max(busy_at, traffic.last_monotonic_s) > idle_exit_s:
            with store.read() as reader:
                live = reader.live_count()
            if live:
                busy_at = now
            else:
                log.info("idle: the service leaves; the next task that needs it starts it again")
                server.should_exit = True
