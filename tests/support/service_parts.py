"""The parts of a service in this process, as its routes take them."""

from __future__ import annotations

from functools import partial
from typing import Any

from elasticflow_airflow.service.decisions.session_settings import trained_with
from elasticflow_airflow.service.http.parts import ServiceParts, Traffic
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.requests.insight_service import InsightService


def parts_of(world: Any, **more: Any) -> ServiceParts:
    """Those of a world; ``more`` replaces some or adds services."""
    parts: dict[str, Any] = {
        "store": world.store,
        "notifier": Notifier(),
        "snapshots": world.snapshots,
        "engine": lambda: world.engine,
        "engine_name": world.engine.name,
        "job_service": world.job_service,
        "settings": world.settings,
        "nodes": lambda: world.reconciler.nodes,
        "problems": lambda: world.reconciler.problems,
        "traffic": Traffic(),
        "started_at": world.now_s,
    }
    return ServiceParts(**{**parts, **more})


def insight_of(world: Any) -> InsightService:
    """The service that tells about jobs and the cluster."""
    return InsightService(
        world.store,
        world.reconciler.foresee,
        lambda: world.reconciler.nodes,
        partial(trained_with, settings=world.settings, snapshots=world.snapshots, files=world.engine.files),
        clock=world.clock,
    )
