"""The routes about the service itself: whether it runs, can answer, and is well."""

from __future__ import annotations

import os
import time

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_VERSION, Health
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.refusal import Refusal, declared
from elasticflow_airflow.service.store.views import slot_statuses


def add_health(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Liveness probe: 200 `ok` while the process runs. Needs no token."""
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses=declared(503))
    async def readyz() -> str:
        """Readiness probe: 200 `ok`; 503 while a replica cannot reach its database. Needs no token.

        Leader and followers are both ready. A service on SQLite is always ready.
        """
        if parts.replicas is not None and parts.replicas.leadership.problem:
            raise Refusal(503, "database", "the service cannot use its database now", "it is tried again by itself")
        return "ok"

    @app.get("/v1/version")
    async def version() -> dict[str, str]:
        """Versions of the service and of the API, and the service's clock (`at`, Unix seconds as a string)."""
        return {"version": __version__, "api": API_VERSION, "at": f"{time.time():.3f}"}

    @app.get("/v1/health")
    @lanes.reading
    def health() -> Health:
        """Health of the service: `ok`, or `degraded` and its problems; and who holds which slot."""
        problems = parts.problems()
        with parts.store.read() as reader:
            live = reader.live_count()
            slots = slot_statuses(parts.nodes(), reader)
        return Health(
            status="degraded" if problems else "ok",
            version=__version__,
            engine=parts.engine_name,
            pid=os.getpid(),
            started_at=parts.started_at,
            state_dir=str(parts.settings.state_dir),
            live_jobs=live,
            slots=slots,
            problems=problems,
            role=None if parts.replicas is None else parts.replicas.role,
            leadership=None if parts.replicas is None else parts.replicas.status(),
        )
