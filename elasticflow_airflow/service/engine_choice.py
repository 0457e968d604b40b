"""Opens the engine that the settings name. Engines are imported on demand."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr
from sqlalchemy import make_url

from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.engines.port import Engine, EngineError
from elasticflow_airflow.service.settings import ServiceSettings

if TYPE_CHECKING:
    from elasticflow_airflow.engines.cluster.cluster_nodes import Leadership

FIRST_FENCE = 2**62
"""Nodes know a leader by this number plus its epoch: above the start, in nanoseconds, of every service without one."""
_FAKE_NODES = (1, 4)
"""Nodes and slots per node of the fake engine, unless the settings say otherwise."""


def open_engine(settings: ServiceSettings, leadership: Leadership | None = None) -> Engine:
    """Create the engine; with ``leadership`` that of one of several services, which goes on where the last one ended.

    Raises EngineError when it cannot be used, with one sentence that says what to do.
    """
    try:
        match settings.engine:
            case "fake":
                return _open_fake(settings)
            case "cluster":
                return _open_cluster(settings, leadership)
            case "ray":
                return _open_ray(settings, leadership)
            case "local":
                return _open_local(settings)
    except ValueError as error:
        raise EngineError(str(error)) from error
    except OSError as error:
        raise EngineError(f"the engine cannot use {settings.state_dir}: {error}. Free space there.") from error


def _open_fake(settings: ServiceSettings) -> Engine:
    from elasticflow_airflow.engines.fake.engine import FakeEngine, fake_nodes

    nodes, slots = settings.node_shape() or (_FAKE_NODES[0], settings.slots or _FAKE_NODES[1])
    return FakeEngine(
        fake_nodes(nodes, slots), settings.state_dir / "jobs", state_file=settings.state_dir / "fake-engine.json"
    )


def _open_local(settings: ServiceSettings) -> Engine:
    from elasticflow_airflow.engines.local import LocalEngine, detect_nodes
    from elasticflow_airflow.engines.local.workers.warm_pool import WarmPool

    layout = detect_nodes(slots=settings.slots, virtual_nodes=settings.virtual_nodes)
    modules = settings.warm_modules()
    pool = None if modules is None else WarmPool(modules, settings.state_dir.resolve() / "pool")
    return LocalEngine(settings.state_dir, layout, settings.slot_lock_dir, pool=pool)


def _open_cluster(settings: ServiceSettings, leadership: Leadership | None) -> Engine:
    from elasticflow_airflow.engines.cluster.cluster_engine import open_cluster_engine

    urls = settings.node_urls()
    shared_dir, token = _shared(settings, {"ELASTICFLOW_NODES": urls})
    root, wait_s = _place(settings, leadership)
    return open_cluster_engine(
        root, shared_dir, urls, token, leadership=leadership, suspicion_s=settings.suspicion_s, wait_s=wait_s
    )


def _open_ray(settings: ServiceSettings, leadership: Leadership | None) -> Engine:
    from elasticflow_airflow.engines.ray.messages import AgentSettings, ClientSettings
    from elasticflow_airflow.engines.ray.ray_engine import open_ray_engine

    shared_dir, token = _shared(settings, {})
    agent = AgentSettings(
        token=SecretStr(token),
        folder=settings.node_folder,
        namespace=settings.ray_namespace,
        shared_dir=shared_dir,
        port=settings.node_port,
        notice_file=settings.node_notice_file,
        reserved=settings.ray_reserved,
        warm_imports=settings.warm_modules(),
        slot_lock_dir=settings.slot_lock_dir,
        owner=_owner(settings, leadership),
    )
    client = ClientSettings(
        address=settings.ray_address,
        slots=settings.slots,
        allow_insecure=settings.ray_allow_insecure,
        agent=agent,
    )
    root, wait_s = _place(settings, leadership, longest_s=60.0)
    return open_ray_engine(root, client, leadership=leadership, suspicion_s=settings.suspicion_s, wait_s=wait_s)


def _place(settings: ServiceSettings, leadership: Leadership | None, longest_s: float = 20.0) -> tuple[Path, float]:
    """Return the folder of the engine, and for how long it waits for nodes. Raises OSError.

    What an earlier leadership has left is of no use: others have decided since.
    """
    if leadership is None:
        return settings.state_dir, longest_s
    leading = settings.state_dir / "leading"
    if leading.is_dir():
        for earlier in leading.iterdir():
            remove(earlier)
    root = leading / str(leadership.fencing.epoch() - FIRST_FENCE)
    root.mkdir(mode=0o700, parents=True)
    return root, longest_s


def _owner(settings: ServiceSettings, leadership: Leadership | None) -> str:
    """Return for people who uses the nodes; services that replace each other are one owner."""
    if leadership is None:
        return f"on {socket.gethostname()} in {settings.state_dir}"
    url = make_url(settings.store_url())
    return f"with the database {url.database} on {url.host or url.query.get('host', 'this machine')}"


def _shared(settings: ServiceSettings, needed: Mapping[str, object]) -> tuple[str, str]:
    """Return the storage and the token that service and agents share. Raises EngineError that names what is missing."""
    shared_dir, token = settings.shared_dir, settings.read_node_token()
    needed = {
        **needed,
        "ELASTICFLOW_SHARED_DIR": shared_dir,
        "ELASTICFLOW_NODE_TOKEN or ELASTICFLOW_NODE_TOKEN_FILE": token,
    }
    missing = ", ".join(name for name, value in needed.items() if not value)
    if missing or shared_dir is None or token is None:
        raise EngineError(f"ELASTICFLOW_ENGINE={settings.engine} needs {missing}, too: set it for the service")
    return shared_dir, token
