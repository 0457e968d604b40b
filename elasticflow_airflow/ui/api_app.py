"""The page's FastAPI application, mounted by the plugin in Airflow's api-server. Imported there only.

Airflow mounts plugin applications without any access control, so each route here declares the access that it requires.
Routes for one job have its DAG in the path, where Airflow's own check expects it, and the job must belong to that DAG.
"""

# No `from __future__ import annotations`: FastAPI would treat the dependencies as query parameters.

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from airflow.models.dag import DagModel
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from airflow.utils.session import create_session
from fastapi import Body, Depends, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel
from sqlalchemy import select
from starlette.types import Lifespan

from elasticflow_airflow import bounds
from elasticflow_airflow.api import AmendAnswer, AmendRequest, Event, JobStatus, LeaderStatus, LogPiece, State
from elasticflow_airflow.api.insight import StackDump, WhatIf, WhatIfRequest
from elasticflow_airflow.client import ElasticFlowError
from elasticflow_airflow.client.attention import needing_attention
from elasticflow_airflow.client.calls.service_calls import calls
from elasticflow_airflow.client.errors import (
    InvalidSubmission,
    JobNotFound,
    RequestRefused,
    ServiceUnavailable,
    StaleClaim,
    Unauthorized,
)
from elasticflow_airflow.exceptions import UnusableConnection
from elasticflow_airflow.ui.airflow_theme import brand_colours
from elasticflow_airflow.ui.assets import CHART_LIBRARY, asset, chart_library_version
from elasticflow_airflow.ui.change_stream import ChangeStream, TooManyStreamsError
from elasticflow_airflow.ui.guard import HeadersGuard, refuse_foreign_pages
from elasticflow_airflow.ui.lateness import latest_finish_at
from elasticflow_airflow.ui.source import Source
from elasticflow_airflow.ui.trace import chrome_trace
from elasticflow_airflow.ui.visibility import VisibilityFilter

_NOW_S, _HISTORY_S, _LONG_HISTORY_S, _FORECAST_S = 1.0, 5.0, 30.0, 20.0
_RECENT = 300
_MOST_JOBS = 1000
_LOOKED_INTO, _LATEST_S = 20, 30.0
_ADDRESS_AT_MOST = 4000
_EVENTS_AT_MOST = 5000
_EVENT_PAGE = 1000
_LONGEST_S = 31 * 86400.0
_LONG_S = 2 * 86400.0

DagId = Annotated[str, Path(min_length=1, max_length=250)]
JobId = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,119}$")]
LogName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,119}$")]
Moment = Annotated[float, Query(ge=0, allow_inf_nan=False)]
Incarnation = Annotated[int | None, Query(ge=1, lt=1 << 31)]

_reads = Depends(requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE))
_reads_logs = Depends(requires_access_dag("GET", DagAccessEntity.TASK_LOGS))
_edits = Depends(requires_access_dag("PUT", DagAccessEntity.TASK_INSTANCE))
_ours = Depends(refuse_foreign_pages)


class CancelRequest(BaseModel):
    """Cancel the job as the page last saw it: with a newer claim the request is stale."""

    claim: int


class JobList(BaseModel):
    """Jobs that the user may see."""

    jobs: list[JobStatus]
    why: dict[str, str]
    """One sentence by job id, of live jobs."""
    next_cursor: str | None
    """Where the next page begins; None: this is the last one."""


def build_app(source: Source, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Build the application; ``source`` calls the service. Airflow runs ``lifespan`` within its own."""
    app = FastAPI(title="ElasticFlow", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(HeadersGuard)
    _add_errors(app)
    _add_files(app)
    _add_change_stream(app, ChangeStream(source))
    _add_cluster(app, source)
    _add_job(app, source)
    _add_changes(app, source)
    return app


def _readable(user: Any) -> frozenset[str]:
    return frozenset(get_auth_manager().get_authorized_dag_ids(user=user))


def _known_dags() -> frozenset[str]:
    with create_session() as session:
        return frozenset(session.scalars(select(DagModel.dag_id)))


def _editable(user: Any) -> list[str]:
    return sorted(get_auth_manager().get_authorized_dag_ids(user=user, method="PUT"))


def _sight(source: Source, user: Any) -> VisibilityFilter:
    """Return the filter for a user, with the names of live and recent jobs."""
    readable = _readable(user)
    sight = VisibilityFilter(namespace=source.namespace, readable=readable, hidden_dags=_known_dags() - readable)
    recent = source.share(calls.list_jobs(None, None, None, _RECENT), _HISTORY_S)
    return sight.knowing(recent).knowing(source.share(calls.cluster(), _NOW_S).jobs)


def _status(source: Source, dag_id: str, job_id: str) -> JobStatus:
    """Return the job if it belongs to this DAG, since only the path's DAG was authorized. Raises JobNotFound."""
    status = source.ask(calls.status(job_id))
    if status.identity.dag_id != dag_id or status.identity.namespace != source.namespace:
        raise JobNotFound(f"DAG {dag_id!r} has no job {job_id!r}", "look at the list of jobs", "job_not_found")
    return status


def _events(source: Source, job_id: str, after: int = 0) -> list[Event]:
    """Return the events of a job after an event id, up to the maximum for a page."""
    found: list[Event] = []
    while len(found) < _EVENTS_AT_MOST:
        piece = source.ask(calls.events(job_id, after, _EVENT_PAGE))
        found += piece
        if len(piece) < _EVENT_PAGE:
            break
        after = piece[-1].event_id
    return found


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ElasticFlowError)
    def service_says_no(_request: Request, error: ElasticFlowError) -> JSONResponse:
        status = {
            ServiceUnavailable: 503,
            Unauthorized: 502,
            JobNotFound: 404,
            StaleClaim: 409,
            InvalidSubmission: 422,
            RequestRefused: 409,
        }
        code = next((code for kind, code in status.items() if isinstance(error, kind)), 502)
        kind = "token" if isinstance(error, Unauthorized) else error.error or "service"
        return JSONResponse({"error": kind, "message": error.message, "hint": error.hint}, status_code=code)

    @app.exception_handler(UnusableConnection)
    @app.exception_handler(AirflowNotFoundException)
    def no_connection(_request: Request, error: AirflowException) -> JSONResponse:
        hint = "an administrator adds it under Admin, Connections"
        return JSONResponse({"error": "no_connection", "message": str(error), "hint": hint}, status_code=503)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> Response:
        if error.status_code == 401 and request.url.path.rstrip("/").endswith(request.scope.get("root_path", "\0")):
            return HTMLResponse(_SIGN_IN, status_code=401)
        return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)


_SIGN_IN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>ElasticFlow</title>
<body style="font: 16px system-ui; margin: 4rem auto; max-width: 32rem"><h1>Please sign in</h1>
<p>This page shows what you may see in Airflow. <a href="../">Sign in to Airflow</a>, then come back.</p></body></html>
"""


def _add_files(app: FastAPI) -> None:
    @app.get("/")
    def index(_user: GetUserDep, request: Request) -> Response:
        return _file("index.html", request)

    @app.get("/static/{path:path}")
    def static(path: str, _user: GetUserDep, request: Request) -> Response:
        return _file(path, request)


def _file(path: str, request: Request) -> Response:
    found = asset(path)
    if found is None:
        raise HTTPException(404, f"there is no file {path!r}")
    # The library's URL contains its version. Our own files are revalidated each time, and mostly not sent again.
    lasting = path == CHART_LIBRARY and request.query_params.get("v") == chart_library_version()
    headers = {
        "Cache-Control": "private, max-age=31536000, immutable" if lasting else "private, no-cache",
        "ETag": found.etag,
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        packed = {**headers, "Content-Encoding": "gzip"}
        return Response(found.packed, media_type=found.media_type, headers=packed)
    return Response(found.content, media_type=found.media_type, headers=headers)


def _add_change_stream(app: FastAPI, changes: ChangeStream) -> None:
    @app.get("/api/changes")
    async def stream(user: GetUserDep) -> Response:
        try:
            messages = changes.open(user.get_id())
        except TooManyStreamsError:
            raise HTTPException(503, "too many pages are open: this one asks every few seconds instead") from None
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would keep messages back
        return StreamingResponse(messages, media_type="text/event-stream", headers=headers)


def _add_cluster(app: FastAPI, source: Source) -> None:
    @app.get("/api/me")
    def me(_user: GetUserDep) -> dict[str, Any]:
        return {"chart_library": f"static/{CHART_LIBRARY}?v={chart_library_version()}", "brand": brand_colours()}

    @app.get("/api/cluster")
    def cluster(user: GetUserDep) -> dict[str, Any]:
        now = source.share(calls.cluster(), _NOW_S)
        health = source.share(calls.health(), _FORECAST_S)
        sight = _sight(source, user)
        seen = sight.cluster(now)
        return {
            **sight.plain(seen.model_dump(mode="json")),
            "hidden_jobs": len(now.jobs) - len(seen.jobs),
            "may_edit": _editable(user),
            "service": {"problems": sight.problems(health.problems), "leadership": _leadership(health.leadership)},
        }

    @app.get("/api/history")
    def history(
        user: GetUserDep, from_at: Moment, until_at: Moment, parts: Annotated[int, Query(ge=1, le=400)] = 96
    ) -> dict[str, Any]:
        if not 0 < until_at - from_at <= _LONGEST_S:
            raise HTTPException(422, "until_at must be after from_at, by 31 days at most")
        sight = _sight(source, user)
        for_s = _HISTORY_S if until_at - from_at <= _LONG_S else _LONG_HISTORY_S
        found = source.share(calls.history(from_at, until_at, parts), for_s)
        plain: dict[str, Any] = sight.plain(sight.history(found).model_dump(mode="json"))
        return plain

    @app.get("/api/forecast")
    def forecast(user: GetUserDep, hours: Annotated[float, Query(gt=0, le=168)] = 24.0) -> dict[str, Any]:
        sight = _sight(source, user)
        found = source.share(calls.forecast(hours), _FORECAST_S)
        plain: dict[str, Any] = sight.plain(sight.forecast(found).model_dump(mode="json"))
        return plain

    @app.get("/api/attention")
    def attention(user: GetUserDep) -> dict[str, Any]:
        now = source.share(calls.cluster(), _NOW_S)
        sight = _sight(source, user)
        unowned = [one for one in source.share(calls.unowned_jobs(), _HISTORY_S) if sight.sees(one.job.identity)]
        recent = source.share(calls.list_jobs(None, None, None, _RECENT), _HISTORY_S)
        ended = [job for job in recent if job.state.terminal and sight.sees(job.identity)]
        found = needing_attention(sight.cluster(now).jobs, unowned, ended, time.time())
        return {"items": [sight.plain(one.model_dump(mode="json")) for one in found]}

    @app.get("/api/jobs")
    def jobs(
        user: GetUserDep,
        dag_id: Annotated[str | None, Query(max_length=250)] = None,
        run_id: Annotated[str | None, Query(max_length=250)] = None,
        task_id: Annotated[str | None, Query(max_length=250)] = None,
        map_index: Annotated[int | None, Query(ge=-1, lt=1 << 31)] = None,
        live: bool | None = None,
        state: State | None = None,
        text: Annotated[str | None, Query(max_length=bounds.NAME_CHARACTERS, pattern=bounds.SEARCH_PATTERN)] = None,
        cursor: Annotated[str | None, Query(max_length=400)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 300,
    ) -> JobList:
        now = source.share(calls.cluster(), _NOW_S)
        sight = _sight(source, user)
        at_most = min(limit + 1, _MOST_JOBS)  # One more tells whether there is another page.

        def newest(dag_ids: Sequence[str] | None) -> list[JobStatus]:
            call = calls.list_jobs(
                None if state is None else state.value,
                dag_ids,
                live,
                at_most,
                namespace=sight.namespace,
                run_id=run_id,
                task_id=task_id,
                map_index=map_index,
                text=text or None,
                cursor=cursor,
            )
            return source.share(call, _NOW_S)

        found = _newest_seen(sight, dag_id, at_most, newest)
        wanted = found[:limit]
        more = wanted[-1].cursor if len(found) == at_most else None
        answer = JobList(jobs=wanted, why=sight.cluster(now).why, next_cursor=more)
        return JobList.model_validate(sight.plain(answer.model_dump(mode="json")))

    @app.get("/api/latest")
    def latest(user: GetUserDep) -> dict[str, float]:
        seen = _sight(source, user).cluster(source.share(calls.cluster(), _NOW_S))
        return _latest(source, seen.jobs)


def _leadership(known: LeaderStatus | None) -> dict[str, Any] | None:
    """Return who decides among several services, without their addresses; None for a service that is the only one."""
    if known is None:
        return None
    hosts = [replica.host for replica in known.replicas]
    names = {
        replica.replica_id: replica.host if hosts.count(replica.host) == 1 and replica.host else replica.replica_id[:8]
        for replica in known.replicas
    }
    replicas = [
        {"name": names[one.replica_id], **one.model_dump(include={"silent_s", "is_gone"})} for one in known.replicas
    ]
    told = known.model_dump(include={"epoch", "elected_at", "change", "failed_over_at"})
    leader = None if known.leader is None else names.get(known.leader, known.leader[:8])
    return {**told, "leader": leader, "replicas": replicas}


def _newest_seen(
    sight: VisibilityFilter, dag_id: str | None, limit: int, newest: Callable[[Sequence[str] | None], list[JobStatus]]
) -> list[JobStatus]:
    """Return the newest visible jobs. ``newest`` requests at most ``limit`` jobs of some DAGs; None: of all DAGs."""
    if dag_id is not None and dag_id not in sight.readable:
        return []
    found = newest(None if dag_id is None else [dag_id])
    seen = [job for job in found if sight.sees(job.identity)]
    if len(seen) == len(found) or len(found) < limit:
        return seen
    # Hidden jobs fill the page, so request the jobs of the DAGs that the user may read.
    found = [job for dag_ids in _portions(sorted(sight.readable)) for job in newest(dag_ids)]
    found.sort(key=lambda job: (-job.submitted_at, job.job_id))
    return [job for job in found if sight.sees(job.identity)][:limit]


def _portions(dag_ids: list[str]) -> Iterator[list[str]]:
    """Yield the DAGs in portions, each short enough for a URL that proxies accept."""
    portion: list[str] = []
    length = 0
    for dag_id in dag_ids:
        here = len("&dag_id=") + len(quote(dag_id, safe=""))
        if portion and length + here > _ADDRESS_AT_MOST:
            yield portion
            portion, length = [], 0
        portion.append(dag_id)
        length += here
    if portion:
        yield portion


def _latest(source: Source, jobs: list[JobStatus]) -> dict[str, float]:
    """Return by when running jobs will have finished with 95 % probability, by job id, if it can be estimated.

    Of many jobs, only those that are due first: each costs a request to the service.
    """
    running = [job for job in jobs if job.workers and job.projected_finish_at is not None]
    running.sort(key=lambda job: job.deadline_at or float("inf"))
    found: dict[str, float] = {}
    for job in running[:_LOOKED_INTO]:
        try:
            story = source.share(calls.story(job.job_id), _LATEST_S)
        except JobNotFound:
            continue  # the job was removed meanwhile
        if (at := latest_finish_at(story, time.time())) is not None:
            found[job.job_id] = at
    return found


def _add_job(app: FastAPI, source: Source) -> None:
    job = "/api/dags/{dag_id}/jobs/{job_id}"

    @app.get(f"{job}/story", dependencies=[_reads])
    def story(dag_id: DagId, job_id: JobId, user: GetUserDep, incarnation: Incarnation = None) -> dict[str, Any]:
        _status(source, dag_id, job_id)
        found = source.ask(calls.story(job_id, incarnation))
        sight = _sight(source, user).knowing([found.status])
        plain: dict[str, Any] = sight.plain(sight.story(found).model_dump(mode="json"))
        return {**plain, "latest_at": latest_finish_at(found, time.time()), "may_edit": _may_edit(user, dag_id)}

    @app.get(f"{job}/events", dependencies=[_reads])
    def events(
        dag_id: DagId, job_id: JobId, user: GetUserDep, after: Annotated[int, Query(ge=0, lt=1 << 62)] = 0
    ) -> list[dict[str, Any]]:
        sight = _sight(source, user).knowing([_status(source, dag_id, job_id)])
        return [sight.plain(event.model_dump(mode="json")) for event in _events(source, job_id, after)]

    @app.get(f"{job}/runs", dependencies=[_reads])
    def runs(dag_id: DagId, job_id: JobId, limit: Annotated[int, Query(ge=1, le=50)] = 10) -> list[dict[str, Any]]:
        _status(source, dag_id, job_id)
        return [run.model_dump(mode="json") for run in source.share(calls.runs(job_id, limit), _HISTORY_S)]

    @app.get(f"{job}/logs/{{log_name}}", dependencies=[_reads_logs])
    def log(
        dag_id: DagId,
        job_id: JobId,
        log_name: LogName,
        offset: Annotated[int, Query(ge=0, lt=1 << 62)] = 0,
        limit: Annotated[int, Query(ge=1, le=1 << 20)] = 1 << 16,
        incarnation: Incarnation = None,
    ) -> LogPiece:
        _status(source, dag_id, job_id)
        try:
            return source.ask(calls.read_log(job_id, log_name, offset, limit, incarnation))
        except JobNotFound as error:
            if error.error != "log_not_found":
                raise
            return LogPiece(text="", start_offset=offset, next_offset=offset, end_of_file=True)  # not yet, or no more

    @app.get(f"{job}/trace.json", dependencies=[_reads])
    def trace(dag_id: DagId, job_id: JobId, user: GetUserDep, incarnation: Incarnation = None) -> Response:
        _status(source, dag_id, job_id)
        found = source.ask(calls.story(job_id, incarnation))
        of_it = [e for e in _events(source, job_id) if e.incarnation in (None, found.status.incarnation)]
        made = _sight(source, user).knowing([found.status]).plain(chrome_trace(found, of_it, time.time()))
        name = f'attachment; filename="{job_id}-{found.status.incarnation}.trace.json"'
        return JSONResponse(made, headers={"Content-Disposition": name})


def _may_edit(user: Any, dag_id: str) -> bool:
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    return get_auth_manager().is_authorized_dag(
        method="PUT", access_entity=DagAccessEntity.TASK_INSTANCE, details=details, user=user
    )


def _add_changes(app: FastAPI, source: Source) -> None:
    job = "/api/dags/{dag_id}/jobs/{job_id}"

    @app.post(f"{job}/cancel", dependencies=[_ours, _edits])
    def cancel(dag_id: DagId, job_id: JobId, user: GetUserDep, request: CancelRequest) -> JobStatus:
        _status(source, dag_id, job_id)
        reason = f"cancelled by {user.get_name()} on the ElasticFlow page"
        answer = source.ask(calls.cancel(job_id, request.claim, reason))
        source.forget()
        return JobStatus.model_validate(_sight(source, user).plain(answer.model_dump(mode="json")))

    @app.patch(job, dependencies=[_ours, _edits])
    def amend(dag_id: DagId, job_id: JobId, user: GetUserDep, request: AmendRequest) -> AmendAnswer:
        _status(source, dag_id, job_id)
        answer = source.ask(calls.amend(job_id, request))
        source.forget()
        return AmendAnswer.model_validate(_sight(source, user).plain(answer.model_dump(mode="json")))

    @app.post(f"{job}/stacks", dependencies=[_ours, _reads_logs])
    def stacks(dag_id: DagId, job_id: JobId) -> StackDump:
        _status(source, dag_id, job_id)
        return source.ask(calls.stacks(job_id))

    @app.post("/api/what-if", dependencies=[_ours])
    def what_if(user: GetUserDep, request: Annotated[WhatIfRequest, Body()]) -> WhatIf:
        sight = _sight(source, user)
        for change in request.changes:
            status = source.ask(calls.status(change.job_id))
            if not sight.sees(status.identity):
                raise JobNotFound(f"there is no job {change.job_id!r}", "look at the list of jobs", "job_not_found")
        answer = sight.what_if(source.ask(calls.what_if(request)))
        return WhatIf.model_validate(sight.plain(answer.model_dump(mode="json")))
