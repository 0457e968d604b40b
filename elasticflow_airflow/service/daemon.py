"""The life cycle of the daemon: one service per state directory, where it listens, and when it exits.

Assembles the parts; contains none of their rules.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import structlog
import uvicorn

from elasticflow_airflow import __version__
from elasticflow_airflow.api import ServiceCard
from elasticflow_airflow.api.service_card import LOCK_FILE
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.connections import HEAD_LIMIT_BYTES, BoundedConnection
from elasticflow_airflow.service.http.parts import ServiceParts, Traffic
from elasticflow_airflow.service.leadership.shared_key import OtherKeyError
from elasticflow_airflow.service.office import Office, open_office
from elasticflow_airflow.service.secrets import SecretError
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.open_store import CANNOT_OPEN, refuse_emptied, why_not
from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.telemetry.event_log_follower import EventLogFollower, Listener, write_to_log
from elasticflow_airflow.service.telemetry.traces import traces_from_environment

SOCKET_PATH_LIMIT = 107
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_IDLE_LOOK_S = 0.5
_SWITCH_S = 0.001
"""The loop may compute for seconds when many jobs come; other threads then get their turn five times as often."""
_COLLECT = (50_000, 20, 50)
"""Plans are many small objects without cycles: garbage collection runs less often, so that nothing waits for it."""

log = structlog.get_logger()


class CannotServeError(Exception):
    """The service cannot start; the message says what to do."""


@contextmanager
def lock_state_dir(state_dir: Path) -> Iterator[bool]:
    """Hold the state directory's lock during the block; yields False when another service holds it.

    Raises CannotServeError when the directory cannot be used.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """Run the service until a signal ends it or, if embedded, until it has been idle for long enough.

    The caller holds the lock. Raises CannotServeError, which says what to do.
    """
    told_to_stop = _note_signals()
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(*_COLLECT)
    gc.freeze()
    if "throughput_error" in settings.model_fields_set:
        log.warning(
            "ELASTICFLOW_THROUGHPUT_ERROR is set: it is only what is assumed of tasks without past runs, no longer a"
            " margin on every speed; how surely promises are kept is ELASTICFLOW_CONFIDENCE",
            throughput_error=settings.throughput_error,
            confidence=settings.confidence,
        )
    token, metrics_token = _token_for(settings, embedded), _metrics_token(settings)
    _check_secret_keys(settings)
    listener, where = _listen(settings, embedded)
    started_at, idle = time.time(), threading.Event()
    try:
        card = _write_card(settings.state_dir, where, started_at, embedded=embedded)
        with _explained(settings):
            refuse_emptied(settings.store_url(), settings.state_dir)
            office = open_office(settings, card, told_to_stop.is_set)
        try:
            lost = _serve(settings, office, (token, metrics_token), (listener, where), told_to_stop, idle, embedded)
        finally:
            office.close()
            office.parts.store.close()
        log.info("service stopped; workers go on")
        if lost:
            raise CannotServeError(lost[0])
    finally:
        _note_end(settings.state_dir, started_at, idle=idle.is_set())
        listener.close()
        if settings.host is None or embedded:
            (settings.state_dir / "service.sock").unlink(missing_ok=True)


def _serve(
    settings: ServiceSettings,
    office: Office,
    tokens: tuple[str | None, str | None],
    listening: tuple[socket.socket, str],
    told_to_stop: threading.Event,
    idle: threading.Event,
    embedded: bool,
) -> list[str]:
    """Answer requests until it is told to stop; returns why it had to end, if it had to."""
    parts, (listener, where) = office.parts, listening
    with _explained(settings):
        traces = traces_from_environment()
        listeners: list[Listener] = [write_to_log, *([] if traces is None else [traces])]
        follower = EventLogFollower(parts.store, parts.notifier, listeners, parts.decides)
    parts.snapshots.remove_leftovers()
    _share_code(parts, settings)
    server = _OrderlyServer(
        uvicorn.Config(
            build_app(parts, *tokens),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=BoundedConnection,
            h11_max_incomplete_event_size=HEAD_LIMIT_BYTES,
            ws="none",
            ssl_certfile=settings.tls_cert if not embedded else None,
            ssl_keyfile=settings.tls_key if not embedded else None,
            timeout_graceful_shutdown=3,
        )
    )
    lost: list[str] = []

    def leave(reason: str) -> None:
        lost.append(reason)
        server.should_exit = True

    office.leave = leave
    _pass_signals_to(server, told_to_stop, office.step_down)
    log.info("service started", version=__version__, endpoint=where, engine=settings.engine, pid=os.getpid())
    follower.start()
    if embedded:
        threading.Thread(
            target=_leave_when_idle,
            args=(server, parts.store, parts.traffic, settings.idle_exit_s, idle),
            name="idle",
            daemon=True,
        ).start()
    server.run(sockets=[listener])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    office.close()
    follower.close()
    if traces is not None:
        traces.close()
    return lost


class _OrderlyServer(uvicorn.Server):
    """A server that returns at SIGTERM or SIGINT; uvicorn's own raises the signal again, before anything is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the handlers that are there from the start on."""
        yield


def _note_signals() -> threading.Event:
    """Note SIGTERM and SIGINT in the event that is returned.

    A handler that raised could not end the process surely: Python drops an exception that arises in a callback of a
    weak reference or in a ``__del__``, and one that arises in the event loop leaves it unfit for use.
    """
    told_to_stop = threading.Event()

    def note(number: int, _: object) -> None:
        told_to_stop.set()
        if number == signal.SIGINT:  # Who presses Ctrl-C again does not want to wait.
            signal.signal(number, signal.default_int_handler)

    for number in _STOP_SIGNALS:
        signal.signal(number, note)
    return told_to_stop


def _pass_signals_to(server: uvicorn.Server, told_to_stop: threading.Event, step_down: Callable[[], None]) -> None:
    """Let the server return at the first signal, also one from before, and at once at the second SIGINT.

    Another replica takes over while the last requests are answered.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)
        step_down()

    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    if told_to_stop.is_set():
        server.should_exit = True


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


def _check_secret_keys(settings: ServiceSettings) -> None:
    try:
        settings.read_secret_keys()
    except ValueError as error:
        raise CannotServeError(str(error)) from error


def _share_code(parts: ServiceParts, settings: ServiceSettings) -> None:
    """Store code that an earlier release has kept in the folder only; a disk that fails costs no start."""
    if not parts.store.is_shared:
        return
    with _explained(settings):
        with parts.store.read() as reader:
            in_use = reader.snapshots_in_use()
        try:
            parts.snapshots.share(in_use)
        except OSError as error:
            log.warning("the code of jobs could not be stored in the database", error=str(error))


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
    path.unlink(missing_ok=True)  # We hold the lock, so the service that made it is gone.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise CannotServeError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return listener, f"unix://{path}"


@contextmanager
def _explained(settings: ServiceSettings) -> Iterator[None]:
    """Convert errors that keep database or engine from being used into a CannotServeError with one sentence."""
    try:
        yield
    except (EngineError, OtherKeyError, SecretError) as error:
        raise CannotServeError(str(error)) from error
    except CANNOT_OPEN as error:
        raise CannotServeError(why_not(error, settings.store_url())) from error


def _write_card(state_dir: Path, where: str, started_at: float, *, embedded: bool) -> ServiceCard:
    """Write the card that says which process serves this directory."""
    card = ServiceCard(
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=started_at,
        version=__version__,
        endpoint=where,
        embedded=embedded,
    )
    try:
        card.write(state_dir)
    except OSError as error:
        raise CannotServeError(
            f"the state directory {state_dir} cannot be written: {error.strerror}. Free space there, or choose another"
            " with ELASTICFLOW_STATE_DIR."
        ) from error
    return card


def _note_end(state_dir: Path, started_at: float, *, idle: bool) -> None:
    """Note in the card that the service has ended by itself, so that no client waits for its restart."""
    card = ServiceCard.read(state_dir)
    if card is None or card.started_at != started_at:
        return
    try:
        card.model_copy(update={"ended_at": time.time(), "idle": idle}).write(state_dir)
    except OSError as error:
        log.warning("that the service has ended could not be noted", problem=str(error))


def _leave_when_idle(
    server: uvicorn.Server, store: Store, traffic: Traffic, idle_exit_s: float, idle: threading.Event
) -> None:
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
                idle.set()
                server.should_exit = True
