"""``GET /v1/capacity``: which nodes are not needed, and how many more are wanted."""

from __future__ import annotations

from fastapi import FastAPI

from elasticflow_airflow.api.insight import CapacityAnswer
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import Hours
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.refusal import Refusal, declared
from elasticflow_airflow.service.requests.capacity_service import GAUGES_HOURS


def add_capacity(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the route."""

    @app.get("/v1/capacity", responses=declared(501))
    @lanes.planning
    def report(
        hours: Hours = GAUGES_HOURS,
    ) -> CapacityAnswer:
        """Which nodes nobody needs in the next hours, or how many more are wanted, and by whom. Nothing is changed."""
        if parts.capacity is None:
            raise Refusal(501, "no_forecasts", "this service answers no questions about what would be", "")
        return parts.capacity.capacity(hours)
