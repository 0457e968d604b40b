"""Finds the embedded service of this machine, or starts it, once per state directory.

The service is a daemon in its own session, so that it outlives the task that started it. If several processes start one
at the same time, the service's own file lock decides: the others exit quietly, and all clients connect to the winner.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx
from pydantic import ValidationError

from elasticflow_airflow.api import API_VERSION, Health, ServiceCard
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import EmbeddedStartError, IncompatibleService, NotRunning
from elasticflow_airflow.times import duration

SOCKET_PATH_LIMIT: Final = 107
"""Maximum length in bytes of a Unix socket's path on Linux (108 with the terminating zero)."""

EMBEDDED_START_LIMIT_S: Final = 30.0
_HEALTH_TIMEOUT_S: Final = 5.0
_RESTART_PAUSE_S: Final = 0.5
_LOG_TAIL_BYTES: Final = 4000
_CANNOT_SERVE: Final = (1, 2)
_REASON: Final = "elasticflow: "
"""Prefix of the service's last log line when it exits with one of these statuses, after which waiting is pointless."""
_LEAST_DISK_BYTES: Final = 1 << 20
_UNIX: Final = "unix:"
_STARTS_IT: Final = "a training task starts it, or `elasticflow submit`"

_PASSED_NAMES: Final = frozenset(
    {
        "CONDA_PREFIX",
        "HOME",
        "HOSTNAME",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "LANG",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NO_PROXY",
        "PATH",
        "PYTHONPATH",
        "PYTHONDONTWRITEBYTECODE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TEMP",
        "TMP",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    }
)
_PASSED_PREFIXES: Final = ("CUDA_", "ELASTICFLOW_", "LC_", "NCCL_", "NVIDIA_", "OTEL_", "RAY_", "XDG_")
# Airflow's own configuration (AIRFLOW__*, AIRFLOW_CONN_*) holds secrets and is not passed on.

_started: list[subprocess.Popen[bytes]] = []
"""Services that this process started; kept so that one that exits is reaped and does not remain a zombie."""


def default_state_dir() -> Path:
    """Return the default state directory of the embedded service.

    ``ELASTICFLOW_STATE_DIR``, else ``elasticflow`` under ``AIRFLOW_HOME``, else ``~/.elasticflow``.
    """
    if named := os.environ.get("ELASTICFLOW_STATE_DIR"):
        return Path(named).expanduser()
    if home := os.environ.get("AIRFLOW_HOME"):
        return Path(home).expanduser() / "elasticflow"
    return Path.home() / ".elasticflow"


def embedded_endpoint(state_dir: Path) -> Endpoint:
    """Return the address of a state directory's embedded service.

    Raises EmbeddedStartError if its socket path is too long.
    """
    state_dir = state_dir.expanduser().absolute()
    socket = state_dir / "service.sock"
    length = len(os.fsencode(socket))
    if length > SOCKET_PATH_LIMIT:
        raise EmbeddedStartError(
            f"the socket path {socket} has {length} bytes, and a Unix socket takes at most {SOCKET_PATH_LIMIT}",
            "choose a shorter state directory: [elasticflow] state_dir in airflow.cfg, or ELASTICFLOW_STATE_DIR",
            "socket_path_too_long",
        )
    return Endpoint(socket_path=socket, embedded_state_dir=state_dir)


def ensure_service(
    state_dir: Path | None = None,
    settings_env: Mapping[str, str] | None = None,
    *,
    limit_s: float = EMBEDDED_START_LIMIT_S,
) -> Endpoint:
    """Return the address of the embedded service, starting it first if none answers.

    ``settings_env`` holds further ``ELASTICFLOW_*`` settings for a service that has to be started. If the directory
    belongs to a service of ``elasticflow serve`` that did not end cleanly, no other is started in its place; this waits
    for it instead.

    Raises EmbeddedStartError, quoting the end of the service's log, if no service answers within ``limit_s`` seconds,
    and IncompatibleService if a service of another API version runs there.
    """
    endpoint = embedded_endpoint(state_dir if state_dir is not None else default_state_dir())
    if _answers(endpoint):
        return endpoint
    directory = endpoint.embedded_state_dir
    assert directory is not None  # embedded_endpoint always sets it
    _make_private(directory)
    end = time.monotonic() + limit_s
    process: subprocess.Popen[bytes] | None = None
    next_start = 0.0
    log_from = 0
    while time.monotonic() < end:
        if process is not None and process.poll() in _CANNOT_SERVE:
            _say_why_not(directory, log_from)
        served = _served(directory)
        if served is not None and not served.endpoint.startswith(_UNIX):
            raise _replaces(directory, served)
        may_start = served is None and time.monotonic() >= next_start
        if may_start and (process is None or process.poll() is not None):
            # Our process has exited: another holds the lock, or is just exiting. If none answers soon, start again.
            process, log_from = _start(directory, settings_env or {})
            next_start = time.monotonic() + _RESTART_PAUSE_S
        if _answers(endpoint):
            return endpoint
        time.sleep(0.05)
    served = _served(directory)
    if served is not None:
        raise _replaces(directory, served)
    raise EmbeddedStartError(
        f"the embedded elasticflow service did not answer on {endpoint.socket_path} within {duration(limit_s)}",
        f"the end of {directory / 'service.log'} says: {_tail(directory / 'service.log')}",
        "embedded_start",
    )


def for_looking(endpoint: Endpoint) -> Endpoint:
    """Return the same address for read-only use: an embedded service must already run, and clients do not restart it.

    Raises NotRunning, with a hint on how to proceed, or IncompatibleService if a service of another API version runs
    there.
    """
    directory = endpoint.embedded_state_dir
    if directory is None or _answers(endpoint):
        return replace(endpoint, embedded_state_dir=None)
    card, served = ServiceCard.read(directory), _served(directory)
    if served is not None:
        raise NotRunning(*did_not_end(directory, served))
    if card is None:
        raise NotRunning(f"no service has ever run in {directory}", f"{_STARTS_IT}; or name another one")
    raise NotRunning(
        f"no service runs in {directory} now; {_how_it_ended(card)}",
        f"{_STARTS_IT}; to look at what it knows: `elasticflow serve --state-dir {directory}`",
    )


def _how_it_ended(card: ServiceCard) -> str:
    """Describe how an embedded service ended, or one of ``elasticflow serve`` that ended cleanly."""
    which = "the last one" if card.embedded else "the last one, of `elasticflow serve`,"
    if card.ended_at is None:
        return f"{which} was killed"
    if card.idle:
        return f"{which} has left, as it had been idle for long"
    return f"{which} was told to stop" if card.idle is False or not card.embedded else f"{which} has ended"


def _served(directory: Path) -> ServiceCard | None:
    card = ServiceCard.read(directory)
    return card if card is not None and card.is_expected else None


def _replaces(directory: Path, served: ServiceCard) -> EmbeddedStartError:
    return EmbeddedStartError(*did_not_end(directory, served), "served_elsewhere")


def did_not_end(directory: Path, served: ServiceCard) -> tuple[str, str]:
    """Return message and hint for a directory of ``elasticflow serve``, where no embedded service may be started.

    An embedded service would have other settings.
    """
    which = f"host {served.host}, pid {served.pid}, at {served.endpoint}"
    message = f"{directory} belongs to a service that was started with `elasticflow serve` ({which})"
    if served.endpoint.startswith(_UNIX):
        message += " and does not answer"
        hint = "it was killed, or hangs: start it again"
    else:
        hint = (
            f"use it: by ELASTICFLOW_URL={served.endpoint}, or the Airflow connection; if it was killed, start it again"
        )
    return message, f"{hint}; to go on with an embedded one instead, remove {directory / 'service.json'}"


def _say_why_not(directory: Path, log_from: int) -> None:
    """Raise EmbeddedStartError with the reason that the service wrote to its log before it exited, if there is one."""
    said = _tail(directory / "service.log", log_from)
    reasons = [line.removeprefix(_REASON) for line in said.splitlines() if line.startswith(_REASON)]
    if reasons:
        hint = f"then try again; {directory / 'service.log'} holds its log"
        raise EmbeddedStartError(
            f"the embedded elasticflow service cannot start: {' '.join(reasons)}", hint, "embedded_start"
        )
    if shutil.disk_usage(directory).free < _LEAST_DISK_BYTES:
        raise _unusable(directory, "its disk is full")


def _answers(endpoint: Endpoint) -> bool:
    """Whether a service answers at the endpoint. Raises IncompatibleService for another API version."""
    if endpoint.socket_path is None or not endpoint.socket_path.exists():
        return False
    try:
        with endpoint.open_client(_HEALTH_TIMEOUT_S) as http:
            response = http.get("/v1/health")
    except httpx.TransportError:
        return False
    if response.status_code != 200:
        return False
    try:
        health = Health.model_validate_json(response.content, extra="ignore")
    except ValidationError as error:
        raise _other_version(endpoint, "unknown") from error
    if health.api != API_VERSION:
        raise _other_version(endpoint, health.version)
    return True


def _other_version(endpoint: Endpoint, version: str) -> IncompatibleService:
    return IncompatibleService(
        f"{endpoint} is of another version ({version})",
        "let its jobs end, stop it (its pid is in service.json), and try again",
        "version",
    )


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(directory, os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(directory, str(error)) from error
    if not writable:
        raise _unusable(directory, "no permission to write")


def _unusable(directory: Path, why: str) -> EmbeddedStartError:
    return EmbeddedStartError(
        f"the state directory {directory} cannot be used: {why}",
        "choose another: [elasticflow] state_dir in airflow.cfg, or ELASTICFLOW_STATE_DIR",
        "state_dir",
    )


def _start(directory: Path, settings_env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a service; return its process and the log offset at which its output begins."""
    environment = {
        name: value for name, value in os.environ.items() if name in _PASSED_NAMES or name.startswith(_PASSED_PREFIXES)
    }
    environment.pop("OTEL_SERVICE_NAME", None)  # it names Airflow
    environment.update(settings_env)
    _started[:] = [process for process in _started if process.poll() is None]
    try:
        with open(directory / "service.log", "ab", opener=_open_private) as log:
            log_from = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "elasticflow_airflow.service", "--embedded", "--state-dir", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,  # not the caller's folder, whose modules would come first on sys.path
                env=environment,
                start_new_session=True,  # Airflow kills a task's process group
            )
    except OSError as error:
        raise _unusable(directory, str(error)) from error
    _started.append(process)
    return process, log_from


def _open_private(path: str, flags: int) -> int:
    """Open a file so that only its owner may read it, even if it existed with wider permissions."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _tail(path: Path, log_from: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(log_from, file.tell() - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(empty)"
    except OSError as error:
        return f"(cannot be read: {error})"
