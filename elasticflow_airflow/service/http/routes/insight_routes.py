"""The routes of ``elasticflow_airflow.api.insight``, used by the pages. All rules are in the services."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import FastAPI, Query

from elasticflow_airflow.api.insight import (
    CalendarAnswer,
    CalendarRequest,
    CapacityAnswer,
    ClusterHistory,
    ClusterNow,
    JobStory,
    RunOfTask,
    StackDump,
    WhatIf,
    WhatIfRequest,
)
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import Hours, Incarnation, JobId, Moment
from elasticflow_airflow.service.http.parts import InsightServices, ServiceParts
from elasticflow_airflow.service.refusal import Refusal, declared
from elasticflow_airflow.service.requests.capacity_service import GAUGES_HOURS


def add_insight(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""

    def services() -> InsightServices:
        if parts.insight is None:
            raise Refusal(501, "no_insight", "this service tells nothing but the status of jobs", "ask for the job")
        return parts.insight

    @app.get("/v1/cluster", responses=declared(501))
    @lanes.pages
    def cluster() -> ClusterNow:
        """Current state of the cluster: slots with their holders, live jobs with why they have their size or wait."""
        return services().insight.cluster()

    @app.get("/v1/cluster/history", responses=declared(501))
    @lanes.pages
    def history(
        from_at: Moment | None = None,
        until_at: Moment | None = None,
        count: Annotated[int, Query(alias="parts", ge=1, le=1000)] = 96,
    ) -> ClusterHistory:
        """Past and planned allocations, and the submissions, between two times at most 31 days apart.

        By default from 24 hours ago until 24 hours ahead. `parts`: number of equal intervals of the sums.
        `complete: false`: some were left out.
        """
        return services().insight.history(from_at, until_at, count)

    @app.get("/v1/jobs/{job_id}/story", responses=declared(404, 501))
    @lanes.pages
    def story(job_id: JobId, incarnation: Incarnation | None = None) -> JobStory:
        """One incarnation of a job (default: the current one): submission, allocations, samples, checkpoints."""
        return services().insight.story(job_id, incarnation)

    @app.get("/v1/jobs/{job_id}/runs", responses=declared(404, 501))
    @lanes.pages
    def runs(job_id: JobId, limit: Annotated[int, Query(ge=1, le=50)] = 10) -> list[RunOfTask]:
        """This run and the most recent other runs of the same task, newest first."""
        return services().insight.runs(job_id, limit)

    @app.post("/v1/what-if", responses=declared(404, 409, 501))
    @lanes.what_if
    def what_if(request: WhatIfRequest) -> WhatIf:
        """Forecast with other deadlines, or with more or fewer nodes, beside the current one. Changes nothing.

        What takes more than some seconds to compute is refused (422, `too_large`): send fewer changes.
        """
        return services().what_if.ask(request)

    @app.post("/v1/calendar", responses=declared(501))
    @lanes.pages
    def feed(request: CalendarRequest) -> CalendarAnswer:
        """Set when the next runs of recurring tasks are due; replaces the due times of the tasks named.

        With `whole`, the list is complete: due times of other tasks of that namespace are deleted.
        """
        return services().calendar.feed(request)

    @app.post("/v1/jobs/{job_id}/stacks", responses=declared(404))
    @lanes.looking
    def stacks(job_id: JobId) -> StackDump:
        """Stack traces of all threads of each live worker, by worker id. May take several seconds."""
        parts.job_service.status(job_id)
        at = time.time()
        try:
            return StackDump(job_id=job_id, at=at, stacks=dict(parts.engine().stacks(job_id)))
        except EngineError as error:
            raise Refusal(503, "no_stacks", str(error), "ask again in a moment") from error

    @app.get("/v1/capacity", responses=declared(501))
    @lanes.planning
    def report(hours: Hours = GAUGES_HOURS) -> CapacityAnswer:
        """Nodes that no job needs in the next `hours`, or how many more are needed, by which jobs. Changes nothing."""
        if parts.capacity is None:
            raise Refusal(501, "no_forecasts", "this service answers no questions about what would be", "")
        return parts.capacity.capacity(hours)
