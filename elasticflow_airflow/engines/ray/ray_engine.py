"""Opens the engine over the machines of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from elasticflow_airflow.engines.cluster.cluster_engine import engine_over
from elasticflow_airflow.engines.cluster.cluster_nodes import SUSPICION_S, ClusterNodes, Leadership
from elasticflow_airflow.engines.cluster.shared_storage import SharedStorage
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.files.records import FileRecords
from elasticflow_airflow.engines.port import EngineError, EngineNode
from elasticflow_airflow.engines.ray.messages import ClientSettings, WantedNodes
from elasticflow_airflow.engines.ray.ray_directory import RayDirectory

_DRAINED_S = 10.0
"""So long after nothing more is planned on a node, nothing is being started there either."""


def open_ray_engine(
    state_dir: Path,
    client: ClientSettings,
    *,
    leadership: Leadership | None = None,
    suspicion_s: float = SUSPICION_S,
    wait_s: float = 60.0,
    log_segment_bytes: int = worker_logs.SEGMENT_BYTES,
    log_segments: int = worker_logs.KEEP_SEGMENTS,
) -> TorchrunEngine:
    """Return the engine over the nodes of a Ray cluster, once the agent of one has answered.

    ``wait_s``: how long that may take, in seconds. ``leadership``: of one of several services, as for
    ``open_cluster_engine``. Raises EngineError.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError("Ray is not installed here: pip install 'elasticflow-airflow[ray]', of the cluster's version")

    def connected(storage: SharedStorage) -> RayNodes:
        return RayNodes(state_dir.resolve(), client, storage, suspicion_s=suspicion_s, leadership=leadership)

    log_limits = (log_segment_bytes, log_segments)
    return engine_over("ray", state_dir, client.agent.shared_dir, connected, wait_s, log_limits, leadership)


class RayNodes(ClusterNodes):
    """The machines of a Ray cluster: Ray says where they are, the rest is between the service and the agents."""

    def __init__(
        self,
        state_dir: Path,
        client: ClientSettings,
        storage: SharedStorage,
        *,
        suspicion_s: float = SUSPICION_S,
        leadership: Leadership | None = None,
    ) -> None:
        token = client.agent.token.get_secret_value()
        super().__init__(state_dir, storage, token, suspicion_s=suspicion_s, leadership=leadership)
        self._unneeded_since: dict[str, float] = {}
        self._released: frozenset[str] = frozenset()
        records = FileRecords(state_dir) if leadership is None else leadership.records
        self._directory = RayDirectory(client, state_dir, records, self._moved, self.fencing)

    def _moved(self, addresses: Mapping[str, str]) -> None:
        self.set_addresses({node: url for node, url in addresses.items() if node not in self._released})

    def wait_for_nodes(self, limit_s: float) -> None:
        """Wait until the agent of a node has answered. Raises EngineError that says why when none has.

        Ray's own client takes seconds to connect: where agents answer that are known from before, nobody waits for it.
        """
        if self._directory.knows_from_before:
            with contextlib.suppress(EngineError):  # They have moved, or are gone.
                super().wait_for_nodes(min(limit_s, self._suspicion_s))
                return
        self._directory.wait(limit_s)
        super().wait_for_nodes(limit_s)

    def inventory(self, has_gang: Callable[[str], bool]) -> tuple[EngineNode, ...]:
        """Return the nodes that answer, and when they go away, by a notice on the machine or as Ray says."""
        ends = {**self._unneeded_since, **self._directory.draining}
        return tuple(
            replace(node, leaving_at=node.leaves_at(ends.get(node.node_id))) for node in super().inventory(has_gang)
        )

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """Have Ray's autoscaler keep ``count`` nodes. Those not needed are drained, and released once they are empty.

        Released ones are used again when they are needed again before Ray has removed them.
        """
        now = time.time()
        self._unneeded_since = {node: self._unneeded_since.get(node, now) for node in unneeded}
        empty = {
            node
            for node, since in self._unneeded_since.items()
            if now - since > _DRAINED_S and self.is_empty(node) and node not in self._released
        }
        self._released = self._released.intersection(unneeded) | empty
        self.forget(empty)
        self._directory.want(WantedNodes(count=count, released=self._released))

    def problems(self) -> list[str]:
        """Return why nodes, or the cluster, cannot be used."""
        return [*self._directory.problems, *super().problems()]

    def let_go(self) -> None:
        """Leave Ray and close the connections; actors, agents and workers go on."""
        self._directory.close()
        super().let_go()
