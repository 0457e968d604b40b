"""Opens the engine that the settings name. Engines are imported on demand."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pydantic import SecretStr

from elasticflow_airflow.engines.port import Engine, EngineError
from elasticflow_airflow.service.settings import ServiceSettings

_FAKE_NODES = (1, 4)
"""Nodes and slots per node of the fake engine, unless the settings say otherwise."""


def open_engine(settings: ServiceSettings) -> Engine:
    """Create the engine. Raises EngineError when it cannot be used, with one sentence that says what to do."""
    try:
        match settings.engine:
            case "fake":
                return _open_fake(settings)
            case "cluster":
                return _open_cluster(settings)
            case "ray":
                return _open_ray(settings)
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

    layout = detect_nodes(slots=settings.slots, virtual_nodes=settings.virtual_nodes)
    return LocalEngine(settings.state_dir, layout, settings.slot_lock_dir, warm_imports=settings.warm_modules())


def _open_cluster(settings: ServiceSettings) -> Engine:
    from elasticflow_airflow.engines.cluster.cluster_engine import open_cluster_engine

    urls = settings.node_urls()
    shared_dir, token = _shared(settings, {"ELASTICFLOW_NODES": urls})
    return open_cluster_engine(settings.state_dir, shared_dir, urls, token, suspicion_s=settings.suspicion_s)


def _open_ray(settings: ServiceSettings) -> Engine:
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
        owner=f"on {socket.gethostname()} in {settings.state_dir}",
    )
    client = ClientSettings(
        address=settings.ray_address,
        slots=settings.slots,
        allow_insecure=settings.ray_allow_insecure,
        agent=agent,
    )
    return open_ray_engine(settings.state_dir, client, suspicion_s=settings.suspicion_s)


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
