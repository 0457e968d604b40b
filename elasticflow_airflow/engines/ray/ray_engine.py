"""Opens the engine over the machines of a Ray cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elasticflow_airflow.engines.cluster.cluster_engine import ClusterFolders
from elasticflow_airflow.engines.cluster.cluster_nodes import SUSPICION_S, ClusterNodes
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.port import EngineError, EngineNode
from elasticflow_airflow.engines.ray.messages import AgentSettings, ClientSettings
from elasticflow_airflow.engines.ray.ray_directory import RayDirectory

__all__ = ["AgentSettings", "ClientSettings", "RayNodes", "open_ray_engine"]


def open_ray_engine(
    state_dir: Path,
    client: ClientSettings,
    *,
    suspicion_s: float = SUSPICION_S,
    wait_s: float = 60.0,
    log_segment_bytes: int = worker_logs.SEGMENT_BYTES,
    log_segments: int = worker_logs.KEEP_SEGMENTS,
) -> TorchrunEngine:
    """Return the engine over the nodes of a Ray cluster, once the agent of one has answered.

    ``wait_s``: how long that may take, in seconds. Raises EngineError.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError("Ray is not installed here: pip install 'elasticflow-airflow[ray]', of the cluster's version")
    state_dir, shared_dir = state_dir.resolve(), client.agent.shared_dir
    try:
        nodes = RayNodes(state_dir, client, suspicion_s=suspicion_s)
    except OSError as error:
        raise EngineError(f"the service cannot write to the shared folder {shared_dir}: {error}") from error
    try:
        nodes.wait_for_nodes(wait_s)
        folders = ClusterFolders(state_dir, shared_dir, nodes)
        return TorchrunEngine(
            "ray", state_dir, nodes, folders, log_segment_bytes=log_segment_bytes, log_segments=log_segments
        )
    except BaseException:
        nodes.let_go()
        raise


class RayNodes(ClusterNodes):
    """The machines of a Ray cluster: Ray says where they are, the rest is between the service and the agents."""

    def __init__(self, state_dir: Path, client: ClientSettings, *, suspicion_s: float = SUSPICION_S) -> None:
        token = client.agent.token.get_secret_value()
        super().__init__(state_dir, client.agent.shared_dir, token, suspicion_s=suspicion_s)
        self._directory = RayDirectory(client, state_dir, self._moved)

    def wait_for_nodes(self, limit_s: float) -> None:
        """Wait until the agent of a node has answered. Raises EngineError that says why when none has."""
        self._directory.wait(limit_s)
        super().wait_for_nodes(limit_s)

    def inventory(self, has_gang: Callable[[str], bool]) -> tuple[EngineNode, ...]:
        """Return the nodes that answer, and when they go away, by a notice on the machine or as Ray says."""
        found = []
        for node in super().inventory(has_gang):
            ends = [at for at in (node.leaving_at, self._directory.draining.get(node.node_id)) if at is not None]
            found.append(replace(node, leaving_at=min(ends, default=None)))
        return tuple(found)

    def problems(self) -> list[str]:
        """Return why nodes, or the cluster, cannot be used."""
        return [*self._directory.problems, *super().problems()]

    def let_go(self) -> None:
        """Leave Ray and close the connections; actors, agents and workers go on."""
        self._directory.close()
        super().let_go()

    def _moved(self, addresses: Mapping[str, str]) -> None:
        self.set_addresses(addresses)
