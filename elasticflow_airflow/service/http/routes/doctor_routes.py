"""Checks the machine of the service: what training needs, and what is known to slow it down or break it.

``look_at_machine`` works without a running service; ``GET /v1/doctor`` adds checks that need one. Every check says what
to do. Does not import torch: the training interpreter is run to find out what it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_VERSION
from elasticflow_airflow.api.diagnosis import Diagnosis, Finding, ok, plural, problem, warning
from elasticflow_airflow.engines.port import EngineError, EngineNode
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.views import UNREADABLE

_GIB = 2**30
_DISK_PROBLEM_BYTES, _DISK_WARNING_BYTES = _GIB, 10 * _GIB
_MEMORY_A_SLOT_BYTES = _GIB
_SHM = "/dev/shm"  # noqa: S108 - this folder itself is checked
_SHM_BYTES = _GIB // 2
_FILES = 4096
_SLOW_LOOKUP_S, _LOOKUP_LIMIT_S = 1.0, 12.0
_TOKEN_CHARACTERS = 20
_INTERPRETER_LIMIT_S = 20.0
_RECENT_JOBS, _INTERPRETERS = 100, 3
_SHARED_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse")
_ASK_INTERPRETER = """
import importlib.util, json, sys
found = {"python": sys.version.split()[0]}
if importlib.util.find_spec("torch"):
    import importlib.metadata
    try:
        found["torch"] = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        found["torch"] = "of an unknown version"
print(json.dumps(found))
"""


def add_doctor(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the route."""

    @app.get("/v1/doctor")
    @lanes.looking
    def doctor() -> Diagnosis:
        """Diagnose the service and its machine; each finding says what to do."""
        findings = [*_running(parts), *look_at_machine(parts.settings)]
        return Diagnosis(at=time.time(), version=__version__, api=API_VERSION, findings=findings)


def _running(parts: ServiceParts) -> list[Finding]:
    named = [look_at_interpreter(python) for python in _named_interpreters(parts)]
    of_nodes = parts.engine().problems() if parts.decides() else []
    others = [said for said in parts.problems() if said not in of_nodes]
    looked = [_loop("; ".join(others)), _slots(parts), _database(parts), _token(parts.settings), *named]
    return [
        *looked,
        *(problem("nodes", said, "see `elasticflow health`, and the log of that machine") for said in of_nodes),
    ]


def look_at_machine(settings: ServiceSettings) -> list[Finding]:
    """Return the findings about this machine for a service with these settings."""
    return [
        look_at_interpreter(sys.executable),
        look_at_state_dir(settings.state_dir),
        look_at_disk(settings.state_dir),
        look_at_memory(settings),
        look_at_shared_memory(),
        look_at_reverse_dns(),
        look_at_open_files(),
    ]


def look_at_interpreter(python: str) -> Finding:
    """Check whether an interpreter that runs training has torch."""
    name = "torch"
    try:
        done = subprocess.run(
            [python, "-c", _ASK_INTERPRETER], capture_output=True, text=True, timeout=_INTERPRETER_LIMIT_S, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return problem(name, f"the interpreter {python} does not run: {error}", "reinstall its environment")
    if "torch" not in found:
        return warning(
            name,
            f"the interpreter {python} (Python {found['python']}) has no torch",
            f"{python} -m pip install torch, or give the tasks python= with an interpreter that has it",
        )
    return ok(name, f"torch {found['torch']} in {python} (Python {found['python']})")


def look_at_state_dir(state_dir: Path) -> Finding:
    """Check whether checkpoints can be written, and on which file system."""
    name = "checkpoints"
    folder = next(path for path in (state_dir / "jobs", state_dir, *state_dir.parents) if path.exists())
    try:
        began_s = time.monotonic()
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"\0" * 2**20)
            file.flush()
            os.fsync(file.fileno())
        took_s = time.monotonic() - began_s
    except OSError as error:
        return problem(
            name,
            f"{folder} cannot be written by uid {os.getuid()}: {error.strerror or error}",
            f"chown {os.getuid()} {folder}, or choose another state directory with ELASTICFLOW_STATE_DIR",
        )
    system = _file_system(folder)
    if system in _SHARED_SYSTEMS:
        return warning(
            name,
            f"{state_dir} is on {system}: its locks, and SQLite on it, are not to be relied upon",
            "keep the state directory on a local disk, and the state in PostgreSQL (ELASTICFLOW_DATABASE_URL)",
        )
    where = str(state_dir) if folder.is_relative_to(state_dir) else f"{state_dir} (to be made in {folder})"
    return ok(name, f"{where} can be written ({system}, 1 MiB to the disk in {took_s * 1000:.0f} ms)")


def look_at_disk(state_dir: Path) -> Finding:
    """Check the free disk space for checkpoints and snapshots."""
    name = "disk"
    folder = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    usage = shutil.disk_usage(folder)
    said = f"{_size(usage.free)} of {_size(usage.total)} free for {state_dir}"
    remedy = "free space there, or move the state directory; old checkpoints are in its folder jobs/"
    if usage.free < _DISK_PROBLEM_BYTES:
        return problem(name, said, remedy)
    if usage.free < _DISK_WARNING_BYTES:
        return warning(name, said, remedy)
    return ok(name, said)


def look_at_memory(settings: ServiceSettings) -> Finding:
    """Check the free main memory against the need of one worker per slot."""
    name = "memory"
    free = _available_memory()
    if free is None:
        return warning(name, "how much memory is free cannot be told: /proc/meminfo cannot be read", "mount /proc")
    shape = settings.node_shape()
    slots = shape[0] * shape[1] if shape else settings.slots or min(os.cpu_count() or 1, 4)
    said = f"{_size(free)} free for {slots} slots"
    if free < slots * _MEMORY_A_SLOT_BYTES:
        remedy = "torch takes about 1 GiB a worker before any model: give fewer slots (ELASTICFLOW_SLOTS), or memory"
        return warning(name, said, remedy)
    return ok(name, said)


def look_at_shared_memory() -> Finding:
    """Check /dev/shm, through which data loaders and gangs on one machine exchange tensors."""
    name = "shared memory"
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return warning(name, f"{_SHM} cannot be used: {error}", "mount a tmpfs there")
    if usage.total < _SHM_BYTES:
        remedy = "shm_size: 1gb (compose), --shm-size (docker), an emptyDir of medium Memory (Kubernetes)"
        return warning(name, f"{_SHM} has {_size(usage.total)} in all, too little for data loaders", remedy)
    return ok(name, f"{_size(usage.free)} of {_size(usage.total)} free in {_SHM}")


def look_at_reverse_dns() -> Finding:
    """Check how long reverse DNS of this machine takes: torch.distributed uses it at every start of a gang."""
    name = "reverse DNS"
    took_s: list[float] = []
    addresses = _own_addresses()

    def ask() -> None:
        began_s = time.monotonic()
        for address in addresses:
            # Only the time counts: a missing name is an answer, too.
            with contextlib.suppress(socket.gaierror):
                socket.getnameinfo((address, 0), 0)
        took_s.append(time.monotonic() - began_s)

    thread = threading.Thread(target=ask, name="reverse-dns", daemon=True)
    thread.start()
    thread.join(_LOOKUP_LIMIT_S)
    asked = ", ".join(addresses)
    remedy = (
        f"write a line with {asked} and {socket.gethostname()} into /etc/hosts: every start of workers waits for it"
    )
    if not took_s:
        return problem(name, f"the name of {asked} was not told within {_LOOKUP_LIMIT_S:.0f} s", remedy)
    if took_s[0] > _SLOW_LOOKUP_S:
        return warning(name, f"the name of {asked} took {took_s[0]:.1f} s", remedy)
    return ok(name, f"the name of {asked} took {took_s[0] * 1000:.0f} ms")


def look_at_open_files() -> Finding:
    """Check how many files a process may open: each worker has pipes, sockets and data files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"a process may open {soft} files"
    if soft < _FILES:
        return warning("open files", said, "ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit")
    return ok("open files", said)


def _named_interpreters(parts: ServiceParts) -> list[str]:
    """Return the interpreters that recent tasks named with ``python=``, except the service's own."""
    with parts.store.read() as reader:
        recent = reader.list_current(state=None, dag_id=None, live=None, limit=_RECENT_JOBS)
    named = set()
    for _, row in recent:
        with contextlib.suppress(*UNREADABLE):
            named.add(row.submission.command.python or sys.executable)
    return sorted(named - {sys.executable})[:_INTERPRETERS]


def _loop(said: str) -> Finding:
    if said:
        return problem("scheduler", f"it reports: {said}", "look at the end of the service's log")
    return ok("scheduler", "its last pass succeeded")


def look_at_slots(settings: ServiceSettings) -> Finding:
    """Check the slots that a service with these settings would offer, if none is running."""
    if settings.engine == "ray":
        said = f"the machines of the Ray cluster at {settings.ray_address} are only seen by a service that runs"
        return warning("slots", said, "start the service, and ask again")
    try:
        return _offered(_would_offer(settings), settings.engine)
    except EngineError as error:
        return problem("slots", f"{error}", "look at that machine: is its agent running, with the same token?")
    except (OSError, ValueError) as error:
        return problem("slots", f"{error}", "correct ELASTICFLOW_SLOTS, ELASTICFLOW_VIRTUAL_NODES, or what is named")


def _would_offer(settings: ServiceSettings) -> Sequence[EngineNode]:
    if settings.engine == "fake":
        from elasticflow_airflow.engines.fake.engine import fake_nodes

        shape = settings.node_shape()
        if shape is not None:
            return fake_nodes(*shape)
        return fake_nodes() if settings.slots is None else fake_nodes(slots=settings.slots)
    if settings.engine == "cluster":
        from elasticflow_airflow.engines.cluster.cluster_engine import look_at_agents

        return look_at_agents(settings.node_urls(), settings.read_node_token() or "")
    from elasticflow_airflow.engines.local.machine.layout import detect_nodes
    from elasticflow_airflow.engines.local.machine.slots import default_lock_dir
    from elasticflow_airflow.engines.local.node_manager import look_at_nodes

    layout = detect_nodes(slots=settings.slots, virtual_nodes=settings.virtual_nodes)
    return look_at_nodes(layout, settings.slot_lock_dir or default_lock_dir(), settings.state_dir.resolve())


def _slots(parts: ServiceParts) -> Finding:
    if not parts.decides():
        return ok("slots", "this replica follows: the one that decides knows the nodes (see `elasticflow health`)")
    return _offered(parts.nodes(), parts.engine_name)


def _offered(nodes: Sequence[EngineNode], engine: str) -> Finding:
    slots = sum(node.slots for node in nodes)
    busy = sum(len(node.busy) for node in nodes)
    if not slots:
        remedy = "are ELASTICFLOW_SLOTS and ELASTICFLOW_VIRTUAL_NODES right? The log names errors of the engine"
        return problem("slots", f"the engine {engine} offers no slot", remedy)
    kinds = ", ".join(sorted({node.device_type for node in nodes}))
    said = f"{plural(slots, 'slot')} ({kinds}) on {plural(len(nodes), 'node')}"
    if busy == slots:
        return warning(
            "slots", f"{said}, all of them busy with something else", "which process holds them? see `health`"
        )
    return ok("slots", f"{said}{f', {busy} of them busy with something else' if busy else ''}")


def _database(parts: ServiceParts) -> Finding:
    began_s = time.monotonic()
    with parts.store.read() as reader:
        live = reader.live_count()
    took_s = time.monotonic() - began_s
    said = f"{parts.store.engine.dialect.name} answered in {took_s * 1000:.0f} ms, {live} live jobs"
    if took_s > 1.0:
        return warning("database", said, "every decision waits for it: bring it nearer, or give it a faster disk")
    return ok("database", said)


def _token(settings: ServiceSettings) -> Finding:
    if settings.host is None:
        return ok("token", "none is needed: the socket lets in its owner alone")
    token = settings.read_token() or ""
    if len(token) < _TOKEN_CHARACTERS:
        remedy = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        return warning("token", f"it has {len(token)} characters only", remedy)
    return ok("token", f"{len(token)} characters{', over TLS' if settings.tls_cert else ''}")


def _own_addresses() -> list[str]:
    """Return the addresses of this machine at which workers rendezvous."""
    found = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Nothing is sent: this only selects the address to use.
            found.append(probe.getsockname()[0])
        except OSError:
            return found  # There is only the loopback network.
    return list(dict.fromkeys(found))


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    free = values.get("MemAvailable")
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    if free is None or limit is None or used is None:
        return free
    return min(free, max(0, limit - used))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None  # Another version of cgroups, or no limit ("max").


def _file_system(path: Path) -> str:
    """Return the file system type of a path, as the kernel names it."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "an unknown file system"
    real = path.resolve()
    fitting = [(where, kind) for where, kind in mounts if real.is_relative_to(where.replace("\\040", " "))]
    return max(fitting, key=lambda mount: len(mount[0]))[1] if fitting else "an unknown file system"


def _size(number: float) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB / 10 else f"{number / 2**20:.0f} MiB"
