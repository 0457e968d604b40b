"""The routes about the owners of jobs. All rules are in ``owner_service``."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import Field

from elasticflow_airflow.api.fields import Name
from elasticflow_airflow.api.owners import MOST_OWNERS, OwnedJobs, OwnersAnswer, OwnersReport, UnownedJob
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import OneJob
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.requests.owner_service import SILENT_S, OwnerService

OWNERS_PATH = "/v1/owners"
"""Airflow calls this all the time, so a call does not mean that the service is needed."""


def add_owners(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""
    owner_service = OwnerService(parts.store, parts.notifier, parts.started_at, parts.job_service.clock)

    @app.get(OWNERS_PATH)
    @lanes.reading
    def owned_jobs(
        namespace: Annotated[Name, Field(min_length=1), Query()],
        after: OneJob | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_OWNERS)] = MOST_OWNERS,
    ) -> OwnedJobs:
        """Live jobs of a namespace with their claims, by id, for Airflow to check against its task instances.

        The next page begins after `next_after`.
        """
        return owner_service.owned(namespace, after or "", limit)

    @app.post(OWNERS_PATH)
    @lanes.changing
    def report_owners(report: OwnersReport) -> OwnersAnswer:
        """Report whether task instances exist, have ended for good, or were deleted.

        Jobs of ended and deleted ones are cancelled if the reported claim is still current. A deletion is accepted only
        from the Airflow that reported before that the task instance exists.
        """
        return owner_service.report(report)

    @app.get("/v1/unowned")
    @lanes.pages
    def unowned_jobs(
        silent_s: Annotated[float, Query(gt=0, le=1e9, allow_inf_nan=False)] = SILENT_S,
    ) -> list[UnownedJob]:
        """Live jobs whose Airflow task is gone, or for which no client has asked for `silent_s` seconds."""
        return owner_service.unowned(silent_s)
