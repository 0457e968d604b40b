"""The calls for jobs, code and the service itself.

All calls are idempotent (a repeated submit attaches), so a client may repeat any of them while the service is
unavailable, also at another replica, which reads the same database.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from elasticflow_airflow.api import (
    IDEMPOTENCY_HEADER,
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
from elasticflow_airflow.api.diagnosis import Diagnosis
from elasticflow_airflow.client.calls.call import Call, Param, job_path, list_reader, reader, service_method
from elasticflow_airflow.client.snapshot import Snapshot

_SUBMIT_TIMEOUT_S = 30.0
"""The service may wait for a verdict before it answers a submit."""
_NOT_ASKED: dict[str, Any] = {"secret_env": True, "command": {"args_shown"}}
"""Fields of a submission that a dry run or forecast does not need."""
_ADDED_TO_SUBMISSION: dict[str, Any] = {"on_past_deadline": "on_miss"}
"""Fields of a submission that the first version did not have, with their defaults as they are sent."""
_ADDED_TO_COMMAND: dict[str, Any] = {"args_shown": None, "requirements": []}
_UPLOAD_TIMEOUT_S = 120.0
_DOCTOR_TIMEOUT_S = 90.0
"""Long, because the check calls an interpreter and the name service, either of which may be slow."""

_read_statuses = list_reader(JobStatus)
_read_events = list_reader(Event)


class JobCalls:
    """Builds each of these calls from the arguments of its method."""

    @service_method
    def health(self) -> Call[Health]:
        """Return the health of the service and the state of its slots."""
        return Call(method="GET", path="/v1/health", read=reader(Health))

    @service_method
    def version(self) -> Call[dict[str, str]]:
        """Return the service's version (``version``), API version (``api``), and clock (``at``, UTC seconds)."""
        return Call(method="GET", path="/v1/version", read=lambda r: dict(r.json()))

    @service_method
    def doctor(self) -> Call[Diagnosis]:
        """Have the service check itself and its machine."""
        return Call(method="GET", path="/v1/doctor", read=reader(Diagnosis), timeout_s=_DOCTOR_TIMEOUT_S)

    @service_method
    def has_snapshot(self, sha256: str) -> Call[bool]:
        """Whether the service already has this code."""
        return Call(method="GET", path=f"/v1/snapshots/{sha256}", read=lambda _: True, missing=lambda _: False)

    @service_method
    def _send_snapshot(self, snapshot: Snapshot) -> Call[None]:
        return Call(
            method="PUT",
            path=f"/v1/snapshots/{snapshot.sha256}",
            read=lambda _: None,
            body=snapshot.tar,
            content_type="application/x-tar",
            timeout_s=_UPLOAD_TIMEOUT_S,
        )

    @service_method
    def submit(self, submission: JobSubmission) -> Call[Attachment]:
        """Submit, or attach to the live job or unacknowledged success of the same specification.

        May be repeated, also at another replica, if the answer was lost: the job and the claim are the same, whichever
        request arrives first.
        """
        return Call(
            method="PUT",
            path=job_path(submission.identity.job_id),
            read=reader(Attachment),
            headers={IDEMPOTENCY_HEADER: uuid.uuid4().hex},
            body=_with_secrets(submission),
            timeout_s=_SUBMIT_TIMEOUT_S,
        )

    @service_method
    def dry_run(self, submission: JobSubmission) -> Call[DryRun]:
        """Return the decision that admission control would make now; nothing is submitted, and no secret is sent."""
        message = _without_news(submission.model_dump(mode="json", exclude=_NOT_ASKED))
        return Call(
            method="PUT",
            path=job_path(submission.identity.job_id),
            read=reader(DryRun),
            params={"dry_run": "true"},
            body=json.dumps(message).encode(),
            timeout_s=_SUBMIT_TIMEOUT_S,
        )

    @service_method
    def forecast(self, hours: float = 24.0, planned: Sequence[PlannedRun] = ()) -> Call[ForecastAnswer]:
        """Forecast everything that is due in the next hours, including planned runs, and the slots that are missing.

        No secret is sent.
        """
        request = ForecastRequest(hours=hours, planned=list(planned))
        message = request.model_dump(mode="json", exclude={"planned": {"__all__": {"submission": _NOT_ASKED}}})
        for run in message["planned"]:
            _without_news(run["submission"])
        body = json.dumps(message).encode()
        read = reader(ForecastAnswer)
        return Call(method="POST", path="/v1/forecast", read=read, body=body, timeout_s=_SUBMIT_TIMEOUT_S)

    @service_method
    def attach(self, job_id: str, lease_s: float | None = None) -> Call[Attachment]:
        """Take a new claim on the current incarnation. Raises JobNotFound."""
        body = AttachRequest(lease_s=lease_s).model_dump_json().encode()
        return Call(method="POST", path=f"{job_path(job_id)}/attach", read=reader(Attachment), body=body)

    @service_method
    def status(self, job_id: str) -> Call[JobStatus]:
        """Everything about one job. Raises JobNotFound."""
        return Call(method="GET", path=job_path(job_id), read=reader(JobStatus))

    @service_method
    def list_jobs(
        self,
        state: str | None = None,
        dag_id: str | Sequence[str] | None = None,
        live: bool | None = None,
        limit: int | None = None,
        *,
        namespace: str | None = None,
        run_id: str | None = None,
        task_id: str | None = None,
        map_index: int | None = None,
        text: str | None = None,
        cursor: str | None = None,
    ) -> Call[list[JobStatus]]:
        """List jobs that match all filters, newest first: at most ``limit`` (default 100, maximum 1,000).

        Each word of ``text`` must occur in the job's id, DAG, task, run or state; an older service ignores it.
        The page starts after ``cursor``, the ``cursor`` of the previous page's last job.
        """
        wanted: dict[str, Param | None] = {
            "state": state,
            "dag_id": dag_id if dag_id is None or isinstance(dag_id, str) else tuple(dag_id),
            "live": None if live is None else str(live).lower(),
            "limit": limit,
            "namespace": namespace,
            "run_id": run_id,
            "task_id": task_id,
            "map_index": map_index,
            "text": text,
            "cursor": cursor,
        }
        params = {name: value for name, value in wanted.items() if value is not None}
        return Call(method="GET", path="/v1/jobs", params=params, read=_read_statuses)

    @service_method
    def amend(self, job_id: str, request: AmendRequest) -> Call[AmendAnswer]:
        """Change a job's deadline or value, if that can be promised. Raises StaleClaim, JobNotFound."""
        body = request.model_dump_json().encode()
        return Call(method="PATCH", path=job_path(job_id), read=reader(AmendAnswer), body=body)

    @service_method
    def drain(self, node_id: str, until_at: float | None) -> Call[Drain]:
        """Announce when a node goes away (UTC seconds); its workers are moved before. None: it stays after all."""
        body = DrainRequest(until_at=until_at).model_dump_json().encode()
        path = f"/v1/nodes/{quote(node_id, safe='')}/drain"
        return Call(method="PUT", path=path, read=reader(Drain), body=body)

    @service_method
    def cancel(self, job_id: str, claim: int, reason: str = "") -> Call[JobStatus]:
        """Cancel a job. Raises StaleClaim if a newer attempt owns it, or JobNotFound."""
        return _claimed("cancel", job_id, claim, reason)

    @service_method
    def acknowledge(self, job_id: str, claim: int, reason: str = "") -> Call[JobStatus]:
        """Confirm that Airflow recorded the success: the next submit trains again. Raises StaleClaim, JobNotFound."""
        return _claimed("acknowledge", job_id, claim, reason)

    @service_method
    def renew(self, job_id: str, claim: int, reason: str = "") -> Call[JobStatus]:
        """Renew the job's lease and return its status. Raises StaleClaim, JobNotFound."""
        return _claimed("lease", job_id, claim, reason)

    @service_method
    def events(self, job_id: str, after: int = 0, limit: int = 500) -> Call[list[Event]]:
        """Read a job's events with an id greater than ``after``, oldest first."""
        params: dict[str, Param] = {"after": after, "limit": limit}
        return Call(method="GET", path=f"{job_path(job_id)}/events", params=params, read=_read_events)

    @service_method
    def read_log(
        self, job_id: str, log_name: str, offset: int = 0, limit: int = 65536, incarnation: int | None = None
    ) -> Call[LogPiece]:
        """Read a worker's log from a byte offset."""
        params: dict[str, Param] = {"offset": offset, "limit": limit}
        if incarnation is not None:
            params["incarnation"] = incarnation
        path = f"{job_path(job_id)}/logs/{quote(log_name, safe='')}"
        return Call(method="GET", path=path, params=params, read=reader(LogPiece))


def _claimed(verb: str, job_id: str, claim: int, reason: str) -> Call[JobStatus]:
    body = ClaimRequest(claim=claim, reason=reason).model_dump_json().encode()
    return Call(method="POST", path=f"{job_path(job_id)}/{verb}", read=reader(JobStatus), body=body)


def _without_news(message: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that were added after the first version and have their default: an older service refuses them."""
    for part, added in ((message, _ADDED_TO_SUBMISSION), (message["command"], _ADDED_TO_COMMAND)):
        for name, default in added.items():
            if name in part and part[name] == default:
                del part[name]
    return message


def _with_secrets(submission: JobSubmission) -> bytes:
    message = _without_news(submission.model_dump(mode="json", exclude={"secret_env"}))
    # Pydantic masks secrets when it dumps; only this body carries them.
    message["secret_env"] = {name: value.get_secret_value() for name, value in submission.secret_env.items()}
    return json.dumps(message).encode()
