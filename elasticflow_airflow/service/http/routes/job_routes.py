"""The routes about jobs and forecasts. All rules are in the services.

A request that waits for a verdict or for a job's status holds no thread: all of these are looked up together.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, TypeAdapter

from elasticflow_airflow.api import (
    AmendAnswer,
    AmendRequest,
    Attachment,
    AttachRequest,
    ClaimRequest,
    DryRun,
    ForecastAnswer,
    ForecastRequest,
    JobStatus,
    JobSubmission,
    State,
)
from elasticflow_airflow.api.fields import Name
from elasticflow_airflow.service.http.batching import Batcher, Watch
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import IdempotencyKey, JobId, MapIndex, Names, SearchText
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.refusal import Refusal, declared
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.store.views import amend_answer_of

_NEW_INCARNATION: dict[int | str, dict[str, Any]] = {201: {"model": Attachment, "description": "A new incarnation"}}
_LIST: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {
            "Link": {
                "description": 'Where there are more: the next page, as rel="next" (RFC 8288)',
                "schema": {"type": "string"},
            }
        }
    }
}

_JOBS = TypeAdapter(list[JobStatus])
_CURSOR = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,16})?),([A-Za-z0-9_.~-]{1,300})")


def add_jobs(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""
    job_service, wait_s = parts.job_service, parts.settings.verdict_wait_s
    statuses = Batcher("statuses", job_service.statuses)
    renewals = Batcher("renewals", job_service.renew_all)
    verdicts = Watch("verdicts", parts.notifier, job_service.decided)
    answers = Watch("amendments", parts.notifier, job_service.answered)

    @app.put("/v1/jobs/{job_id}", response_model=Attachment | DryRun, responses=_NEW_INCARNATION | declared(409, 501))
    async def submit(
        job_id: JobId, submission: JobSubmission, dry_run: bool = False, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Submit a job (201), or attach to it (200) if it is live, or has an unacknowledged success, and is equal.

        Waits up to 10 s for the verdict (`ELASTICFLOW_VERDICT_WAIT_S`); until then, its `decision` is `undecided`. With
        `dry_run`, only returns the verdict.
        """
        if dry_run:
            forecasts = _forecasts(parts)
            return _json(await lanes.planning.run(partial(forecasts.dry_run, job_id, submission)))
        submitted = await lanes.changing.run(partial(job_service.submit, job_id, submission, idempotency_key))
        answer = None
        if submitted.amendment_id is not None:
            answer = await answers.wait(submitted.amendment_id, wait_s)
        await verdicts.wait((job_id, submitted.incarnation), wait_s)
        attachment = submitted.attachment(await statuses.ask(job_id), answer)
        return _json(attachment, 201 if attachment.created else 200)

    @app.post("/v1/jobs/{job_id}/attach", responses=declared(404))
    @lanes.changing
    def attach(job_id: JobId, request: AttachRequest) -> Attachment:
        """Take over a job without submitting it: returns a new claim, and makes earlier ones stale."""
        return job_service.attach(job_id, request.lease_s)

    @app.get("/v1/jobs", response_model=list[JobStatus], responses=_LIST)
    @lanes.reading
    def list_jobs(
        request: Request,
        state: State | None = None,
        dag_id: Names = None,
        live: bool | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        namespace: Name | None = None,
        run_id: Name | None = None,
        task_id: Name | None = None,
        map_index: MapIndex | None = None,
        text: SearchText | None = None,
        cursor: Annotated[str | None, Query(max_length=400)] = None,
    ) -> Response:
        """List the jobs that match all filters, newest first.

        Repeat `dag_id` to match any of several DAGs. `text`: up to ten words, each of which must occur in the id, DAG,
        task, run or state of a job. Large pages are slower. If a page is full, the header `Link` (`rel="next"`) has the
        address of the next one.
        """
        given = {"namespace": namespace, "run_id": run_id, "task_id": task_id, "map_index": map_index}
        shared = {part: value for part, value in given.items() if value is not None}
        after = None if cursor is None else _read_cursor(cursor)
        wanted = None if state is None else state.value
        found = job_service.list_jobs(wanted, dag_id, live, limit, shared, after, text)
        response = Response(_JOBS.dump_json(found), media_type="application/json")
        if len(found) == limit:
            page = request.url.include_query_params(cursor=found[-1].cursor)
            response.headers["Link"] = f'<{page.path}?{page.query}>; rel="next"'
        return response

    @app.get("/v1/jobs/{job_id}", response_model=JobStatus, responses=declared(404))
    async def status(job_id: JobId) -> Response:
        """Status of a job: state, verdict, progress, result."""
        return _json(await statuses.ask(job_id))

    @app.patch("/v1/jobs/{job_id}", response_model=AmendAnswer, responses=declared(404, 409))
    async def amend(job_id: JobId, request: AmendRequest) -> Response:
        """Change a job's deadline or value. Needs its claim.

        If it cannot be promised, the answer is 200 with `accepted: false` and `earliest_deadline_at`. Of a job that has
        failed, was rejected or cancelled, it changes the next attempt.
        """
        amendment_id = await lanes.changing.run(partial(job_service.amend, job_id, request))
        answer = await answers.wait(amendment_id, wait_s)
        if answer is None:
            raise Refusal(503, "no_answer_yet", "the scheduler has not answered yet", "ask again in a moment")
        return _json(amend_answer_of(answer, await statuses.ask(job_id)))

    @app.post("/v1/jobs/{job_id}/cancel", responses=declared(404, 409))
    @lanes.changing
    def cancel(job_id: JobId, request: ClaimRequest) -> JobStatus:
        """Request that a job is cancelled. Needs its claim.

        Returns at once; the job is `cancelled` when its workers have saved and left. Does nothing to a job that has
        ended.
        """
        return job_service.cancel(job_id, request.claim, request.reason)

    @app.post("/v1/jobs/{job_id}/acknowledge", responses=declared(404, 409))
    @lanes.changing
    def acknowledge(job_id: JobId, request: ClaimRequest) -> JobStatus:
        """Confirm that the caller has recorded the success, so that the next submit trains again. Needs its claim."""
        return job_service.acknowledge(job_id, request.claim)

    @app.post("/v1/jobs/{job_id}/lease", response_model=JobStatus, responses=declared(404, 409))
    async def lease(job_id: JobId, request: ClaimRequest) -> Response:
        """Renew a job's lease and return its status. Needs its claim.

        Poll with this call: without it, the job is parked after `lease_s` and cancelled after another `orphan_s`.
        """
        return _json(await renewals.ask((job_id, request.claim)))

    @app.post("/v1/forecast", responses=declared(501))
    @lanes.planning
    def forecast(request: ForecastRequest) -> ForecastAnswer:
        """Forecast of all deadlines in the next `hours`: live jobs, expected runs, and `planned` runs."""
        return _forecasts(parts).forecast(request.hours, request.planned)


def _forecasts(parts: ServiceParts) -> ForecastService:
    if parts.forecasts is None:
        raise Refusal(501, "no_forecasts", "this service answers no questions about what would be", "submit the job")
    return parts.forecasts


def _json(answer: BaseModel, status_code: int = 200) -> Response:
    return Response(answer.model_dump_json(), status_code, media_type="application/json")


def _read_cursor(cursor: str) -> tuple[float, str]:
    """Parse a ``JobStatus.cursor``, the end of a page: submission time, then id. Raises Refusal 422."""
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise Refusal(422, "invalid", "cursor: it is none of this service", "take it from the Link of a page, as it is")
    return float(found[1]), found[2]
