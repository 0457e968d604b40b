"""Opens the engine over several machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.engines.cluster.cluster_nodes import SUSPICION_S, ClusterNodes
from elasticflow_airflow.engines.cluster.messages import introduction_of
from elasticflow_airflow.engines.job_files import JobFolders
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.node_manager import offer
from elasticflow_airflow.engines.port import EngineError, EngineNode


def open_cluster_engine(
    state_dir: Path,
    shared_dir: Path,
    urls: Sequence[str],
    token: str,
    *,
    suspicion_s: float = SUSPICION_S,
    wait_s: float = 20.0,
    log_segment_bytes: int = worker_logs.SEGMENT_BYTES,
    log_segments: int = worker_logs.KEEP_SEGMENTS,
) -> TorchrunEngine:
    """Return the engine over the node agents at ``urls``, once some have answered and share ``shared_dir``.

    ``wait_s``: how long the others get; they may come later. ``suspicion_s``: after how long without an answer a node
    is given up, in seconds. Raises EngineError.
    """

    def connected() -> ClusterNodes:
        nodes = ClusterNodes(state_dir.resolve(), shared_dir, token, suspicion_s=suspicion_s)
        nodes.set_addresses({url: url for url in urls})
        return nodes

    logs = {"log_segment_bytes": log_segment_bytes, "log_segments": log_segments}
    return engine_over("cluster", state_dir, shared_dir, connected, wait_s, **logs)


def engine_over(
    name: str, state_dir: Path, shared_dir: Path, connected: Callable[[], ClusterNodes], wait_s: float, **logs: int
) -> TorchrunEngine:
    """Return the engine over the nodes that ``connected`` makes, once some have answered. Raises EngineError.

    ``logs``: ``log_segment_bytes`` and ``log_segments`` of the engine.
    """
    state_dir = state_dir.resolve()
    try:
        nodes = connected()
    except OSError as error:
        raise EngineError(f"the service cannot write to the shared folder {shared_dir}: {error}") from error
    try:
        nodes.wait_for_nodes(wait_s)
        return TorchrunEngine(name, state_dir, nodes, ClusterFolders(state_dir, shared_dir, nodes), **logs)
    except BaseException:
        nodes.let_go()
        raise


def look_at_agents(urls: Sequence[str], token: str) -> list[EngineNode]:
    """Return the nodes of agents, without taking them over from a service that uses them. Raises EngineError."""
    found = []
    for url in urls:
        try:
            answer = httpx.get(
                f"{url}/introduction", headers={"Authorization": f"Bearer {token}"}, timeout=5.0, trust_env=False
            )
            if answer.is_error:
                raise EngineError(f"the node at {url} answers with status {answer.status_code}: {answer.text[:200]}")
            found += [offer(node, [], "", lambda _: True) for node in introduction_of(answer.json()).facts.nodes]
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"the node at {url} does not answer: {error or type(error).__name__}") from error
    return found


class ClusterFolders(JobFolders):
    """The service's copy of the job folders; the checkpoints are where all nodes reach them."""

    def __init__(self, state_dir: Path, shared_dir: Path, nodes: ClusterNodes) -> None:
        super().__init__(state_dir / "jobs")
        self._state_dir, self._shared_dir, self._nodes = state_dir, shared_dir.resolve(), nodes

    def prepare(self, job_id: str, incarnation: int) -> None:
        """Create the folder of an incarnation, and the one for its checkpoints."""
        folder = self.folder(job_id, incarnation)
        job_folder.make_incarnation(self._state_dir, str(folder.relative_to(self._state_dir)), self._shared_dir)

    def discard(self, job_id: str, incarnation: int) -> None:
        """Delete everything except the checkpoints, here and on the nodes."""
        folder = self.folder(job_id, incarnation)
        self._nodes.discard(folder)
        super().discard(job_id, incarnation)
