"""Opens the engine over several machines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from elasticflow_airflow.engines.cluster.cluster_nodes import SUSPICION_S, ClusterNodes, Leadership
from elasticflow_airflow.engines.cluster.job_files import cluster_files
from elasticflow_airflow.engines.cluster.log_archive import StorageArchive
from elasticflow_airflow.engines.cluster.messages import introduction_of
from elasticflow_airflow.engines.cluster.shared_storage import SharedStorage, open_shared_storage
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.files.records import adopt_files
from elasticflow_airflow.engines.local.node_manager import offer
from elasticflow_airflow.engines.port import EngineError, EngineNode

logger = logging.getLogger("elasticflow.node")


def open_cluster_engine(
    state_dir: Path,
    shared_dir: Path | str,
    urls: Sequence[str],
    token: str,
    *,
    leadership: Leadership | None = None,
    suspicion_s: float = SUSPICION_S,
    wait_s: float = 20.0,
    log_segment_bytes: int = worker_logs.SEGMENT_BYTES,
    log_segments: int = worker_logs.KEEP_SEGMENTS,
) -> TorchrunEngine:
    """Return the engine over the node agents at ``urls``, once some have answered and share ``shared_dir``.

    ``shared_dir``: a folder or an fsspec URL. ``wait_s``: how long the others get; they may come later.
    ``suspicion_s``: after how long without an answer a node is given up, in seconds. ``leadership``: of one of several
    services; ``state_dir`` is then a folder for this leadership alone. Raises EngineError.
    """

    def connected(storage: SharedStorage) -> ClusterNodes:
        nodes = ClusterNodes(state_dir.resolve(), storage, token, suspicion_s=suspicion_s, leadership=leadership)
        nodes.set_addresses({url: url for url in urls})
        return nodes

    log_limits = (log_segment_bytes, log_segments)
    return engine_over("cluster", state_dir, shared_dir, connected, wait_s, log_limits, leadership)


def engine_over(
    name: str,
    state_dir: Path,
    shared_dir: Path | str,
    connected: Callable[[SharedStorage], ClusterNodes],
    wait_s: float,
    log_limits: tuple[int, int],
    leadership: Leadership | None,
) -> TorchrunEngine:
    """Return the engine over the nodes that ``connected`` makes, once some have answered. Raises EngineError.

    ``log_limits``: ``log_segment_bytes`` and ``log_segments`` of the engine.
    """
    state_dir = state_dir.resolve()
    try:
        storage = open_shared_storage(shared_dir)
        nodes = connected(storage)
    except OSError as error:
        raise EngineError(f"the service cannot write to the shared storage {shared_dir}: {error}") from error
    try:
        nodes.wait_for_nodes(wait_s)
        if leadership is not None:
            nodes.log_archive = StorageArchive(state_dir, storage, leadership.code_root.resolve())
            adopted = adopt_files(leadership.code_root.resolve(), leadership.records)
            if adopted:
                logger.info("the records of %d jobs were taken over from files of this service", len(adopted))
        return TorchrunEngine(
            name,
            state_dir,
            nodes,
            cluster_files(state_dir, storage, nodes, nodes.log_archive),
            records=None if leadership is None else leadership.records,
            code_root=None if leadership is None else leadership.code_root,
            log_archive=nodes.log_archive,
            log_segment_bytes=log_limits[0],
            log_segments=log_limits[1],
        )
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
