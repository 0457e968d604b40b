"""Every call of the HTTP API as a value: what to send, and how to read the answer.

The sync and the async client run the same values, so the two cannot differ. All calls are idempotent (a repeated
submit attaches), which is why a client may repeat any of them while the service is away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter

from elasticflow_airflow.client.snapshot import Snapshot
from elasticflow_airflow.diagnosis import Diagnosis
from elasticflow_airflow.wire import (
    AmendAnswer,
    AmendRequest,
    Attachment,
    AttachRequest,
    ClaimRequest,
    Drain,
    DrainRequest,
    DryRun,
    Event,
    ForecastAnswer,
    ForecastRequest,
    Health,
    JobStatus,
    JobSubmission,
    LogPiece,
    PlannedRun,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Param = str | int | float | tuple[str, ...]
"""Of a query; several texts stand for the parameter given several times."""

_SUBMIT_TIMEOUT_S = 30.0
"""The service may wait for a verdict before it answers a submit."""
_NOT_ASKED: dict[str, Any] = {"secret_env": True, "command": {"args_shown"}}
"""What a question about a submission need not say."""
_UPLOAD_TIMEOUT_S = 120.0
_DOCTOR_TIMEOUT_S = 90.0
"""It asks an interpreter and the name service, either of which may be what is slow."""

_STATUSES = TypeAdapter(list[JobStatus])
_EVENTS = TypeAdapter(list[Event])


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request and the reader of its answer. ``missing`` is read for 404 where that is an answer, not an error."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, Param] = field(default_factory=dict)
    body: bytes | None = field(default=None, repr=False)
    content_type: str = "application/json"
    timeout_s: float | None = None
    missing: Callable[[httpx.Response], T] | None = None


def health() -> Call[Health]:
    """Ask how the service is, and what its slots do."""
    return Call(method="GET", path="/v1/health", read=reader(Health))


def version() -> Call[dict[str, str]]:
    """Ask for the service's version, API version and clock."""
    return Call(method="GET", path="/v1/version", read=lambda r: dict(r.json()))


def doctor() -> Call[Diagnosis]:
    """Have the service look over itself and its machine."""
    return Call(method="GET", path="/v1/doctor", read=reader(Diagnosis), timeout_s=_DOCTOR_TIMEOUT_S)


def has_snapshot(sha256: str) -> Call[bool]:
    """Ask whether the service has this code already."""
    return Call(method="GET", path=f"/v1/snapshots/{sha256}", read=lambda _: True, missing=lambda _: False)


def upload_snapshot(snapshot: Snapshot) -> Call[None]:
    """Send the code."""
    return Call(
        method="PUT",
        path=f"/v1/snapshots/{snapshot.sha256}",
        read=lambda _: None,
        body=snapshot.tar,
        content_type="application/x-tar",
        timeout_s=_UPLOAD_TIMEOUT_S,
    )


def submit(submission: JobSubmission) -> Call[Attachment]:
    """Submit, or attach to the live job or unacknowledged success of the same specification."""
    return Call(
        method="PUT",
        path=job_path(submission.identity.job_id),
        read=reader(Attachment),
        body=_with_secrets(submission),
        timeout_s=_SUBMIT_TIMEOUT_S,
    )


def dry_run(submission: JobSubmission) -> Call[DryRun]:
    """Ask what admission control would say to a submission; nothing is submitted, and no secret is sent."""
    message = _without_news(submission.model_dump(mode="json", exclude=_NOT_ASKED))
    return Call(
        method="PUT",
        path=job_path(submission.identity.job_id),
        read=reader(DryRun),
        params={"dry_run": "true"},
        body=json.dumps(message).encode(),
        timeout_s=_SUBMIT_TIMEOUT_S,
    )


def forecast(hours: float = 24.0, planned: Sequence[PlannedRun] = ()) -> Call[ForecastAnswer]:
    """Ask what will become of everything that is due in the next hours, and of planned runs; no secret is sent."""
    request = ForecastRequest(hours=hours, planned=list(planned))
    message = request.model_dump(mode="json", exclude={"planned": {"__all__": {"submission": _NOT_ASKED}}})
    for run in message["planned"]:
        _without_news(run["submission"])
    body = json.dumps(message).encode()
    return Call(method="POST", path="/v1/forecast", read=reader(ForecastAnswer), body=body, timeout_s=_SUBMIT_TIMEOUT_S)


def _without_news(message: dict[str, Any]) -> dict[str, Any]:
    """A submission without what was added since the first version and says nothing: an older service refuses it."""
    if message.get("on_past_deadline") == "on_miss":
        del message["on_past_deadline"]
    if message["command"].get("args_shown", ()) is None:
        del message["command"]["args_shown"]
    return message


def _with_secrets(submission: JobSubmission) -> bytes:
    message = _without_news(submission.model_dump(mode="json", exclude={"secret_env"}))
    # Pydantic masks secrets when it dumps; only this body carries them.
    message["secret_env"] = {name: value.get_secret_value() for name, value in submission.secret_env.items()}
    return json.dumps(message).encode()


def attach(job_id: str, lease_s: float | None = None) -> Call[Attachment]:
    """Take a new claim on the current incarnation of a job."""
    body = AttachRequest(lease_s=lease_s).model_dump_json().encode()
    return Call(method="POST", path=f"{job_path(job_id)}/attach", read=reader(Attachment), body=body)


def status(job_id: str) -> Call[JobStatus]:
    """Ask for everything about one job."""
    return Call(method="GET", path=job_path(job_id), read=reader(JobStatus))


def list_jobs(
    state: str | None = None,
    dag_id: str | Sequence[str] | None = None,
    live: bool | None = None,
    limit: int | None = None,
    *,
    namespace: str | None = None,
    run_id: str | None = None,
    task_id: str | None = None,
    map_index: int | None = None,
    cursor: str | None = None,
) -> Call[list[JobStatus]]:
    """List jobs, newest first; after the one with this ``cursor``."""
    wanted: dict[str, Param | None] = {
        "state": state,
        "dag_id": dag_id if dag_id is None or isinstance(dag_id, str) else tuple(dag_id),
        "live": None if live is None else str(live).lower(),
        "limit": limit,
        "namespace": namespace,
        "run_id": run_id,
        "task_id": task_id,
        "map_index": map_index,
        "cursor": cursor,
    }
    params = {name: value for name, value in wanted.items() if value is not None}
    return Call(
        method="GET",
        path="/v1/jobs",
        params=params,
        read=lambda response: _STATUSES.validate_json(response.content, extra="ignore"),
    )


def amend(job_id: str, request: AmendRequest) -> Call[AmendAnswer]:
    """Change a job's deadline or value, if that can be promised."""
    body = request.model_dump_json().encode()
    return Call(method="PATCH", path=job_path(job_id), read=reader(AmendAnswer), body=body)


def drain(node_id: str, until_at: float | None) -> Call[Drain]:
    """Say when a node goes away (UTC seconds), or with None that it stays after all."""
    body = DrainRequest(until_at=until_at).model_dump_json().encode()
    path = f"/v1/nodes/{quote(node_id, safe='')}/drain"
    return Call(method="PUT", path=path, read=reader(Drain), body=body)


def claimed(verb: str, job_id: str, claim: int, reason: str = "") -> Call[JobStatus]:
    """``cancel``, ``acknowledge`` or ``lease`` a job with a claim."""
    body = ClaimRequest(claim=claim, reason=reason).model_dump_json().encode()
    return Call(method="POST", path=f"{job_path(job_id)}/{verb}", read=reader(JobStatus), body=body)


def events(job_id: str, after: int = 0, limit: int = 500) -> Call[list[Event]]:
    """Read a job's events with an id greater than ``after``, oldest first."""
    params: dict[str, Param] = {"after": after, "limit": limit}
    return Call(
        method="GET",
        path=f"{job_path(job_id)}/events",
        params=params,
        read=lambda response: _EVENTS.validate_json(response.content, extra="ignore"),
    )


def read_log(
    job_id: str, log_name: str, offset: int = 0, limit: int = 65536, incarnation: int | None = None
) -> Call[LogPiece]:
    """Read a worker's log from a byte offset on."""
    params: dict[str, Param] = {"offset": offset, "limit": limit}
    if incarnation is not None:
        params["incarnation"] = incarnation
    path = f"{job_path(job_id)}/logs/{quote(log_name, safe='')}"
    return Call(method="GET", path=path, params=params, read=reader(LogPiece))


def job_path(job_id: str) -> str:
    """Path of a job."""
    return f"/v1/jobs/{quote(job_id, safe='')}"


def reader(model: type[M]) -> Callable[[httpx.Response], M]:
    """Read an answer as one value; what a newer service adds is left out."""
    return lambda response: model.model_validate_json(response.content, extra="ignore")
