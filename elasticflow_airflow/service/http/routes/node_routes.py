"""The routes about nodes. All rules are in ``job_service``."""

from __future__ import annotations

from fastapi import FastAPI

from elasticflow_airflow.api import Drain, DrainRequest
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import NodeId
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.refusal import Refusal, declared


def add_nodes(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""

    @app.put("/v1/nodes/{node_id}/drain", responses=declared(404))
    @lanes.changing
    def drain(node_id: NodeId, request: DrainRequest) -> Drain:
        """Drain a node: its workers move elsewhere before `until_at`.

        `null` cancels the drain, and uses again what was avoided of the node.
        """
        known = sorted(node.node_id for node in parts.nodes())
        if node_id not in known:
            raise Refusal(404, "node_not_found", f"there is no node {node_id!r}", f"nodes are: {', '.join(known)}")
        parts.job_service.drain(node_id, request.until_at)
        return Drain(node_id=node_id, until_at=request.until_at)
