"""The routes of ``elasticflow_airflow.insight``: what the pages ask. All rules are in the desks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Path, Query

from elasticflow_airflow.insight import ClusterHistory, ClusterNow, JobStory, RunOfTask
from elasticflow_airflow.service.insight import InsightDesk
from elasticflow_airflow.service.refusal import Refusal

if TYPE_CHECKING:
    from elasticflow_airflow.service.api import ServiceParts

JobId = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,119}$")]
Moment = Annotated[float | None, Query(allow_inf_nan=False, ge=0, lt=1e11)]


def add_insight(app: FastAPI, parts: ServiceParts) -> None:
    """Add the routes."""

    def desk() -> InsightDesk:
        if parts.insight is None:
            raise Refusal(501, "no_insight", "this service tells nothing but the status of jobs", "ask for the job")
        return parts.insight

    @app.get("/v1/cluster")
    def cluster() -> ClusterNow:
        """The cluster now: every slot, and all live jobs, each with why it has its size or waits."""
        return desk().cluster()

    @app.get("/v1/cluster/history")
    def history(
        from_at: Moment = None,
        until_at: Moment = None,
        count: Annotated[int, Query(alias="parts", ge=1, le=1000)] = 96,
    ) -> ClusterHistory:
        """What was, what is planned, and what was asked for between two moments: at most 31 days."""
        return desk().history(from_at, until_at, count)

    @app.get("/v1/jobs/{job_id}/story")
    def story(job_id: JobId, incarnation: Annotated[int | None, Query(ge=1, lt=1 << 31)] = None) -> JobStory:
        """Everything about one incarnation of a job; by default the current one."""
        return desk().story(job_id, incarnation)

    @app.get("/v1/jobs/{job_id}/runs")
    def runs(job_id: JobId, limit: Annotated[int, Query(ge=1, le=50)] = 10) -> list[RunOfTask]:
        """A run and the last others of the same recurring task, newest first."""
        return desk().runs(job_id, limit)
