"""Refusals of the API as one exception: a status, a short code, what was wrong, and what to do."""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.api import Problem

MEANINGS = {
    400: "Malformed HTTP, or a body that cannot be decoded",
    401: "The token is missing or wrong",
    404: "The job, incarnation, log, node or snapshot does not exist",
    408: "The request did not arrive in time",
    409: "The claim is stale, or the state of the job does not allow this",
    413: "The body is too large",
    422: "Malformed JSON, or an unknown, invalid or out-of-range field: the message names it",
    431: "URL and headers are too large",
    500: "The service failed",
    501: "This service does not support that",
    503: "Temporarily unavailable: try again after Retry-After seconds",
    507: "The service's disk is full",
}
"""The meaning of each status of a refusal."""


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route for these refusals; those that every route may give need not be named."""
    return {status: {"model": Problem, "description": MEANINGS[status]} for status in statuses}


class Refusal(Exception):  # noqa: N818  (an answer, not a defect)
    """An error that is answered with a ``Problem`` as the body.

    ``retry_after_s``: after how many seconds the client should ask again (503 only).
    """

    def __init__(
        self, status: int, error: str, message: str, hint: str = "", *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.error, self.message, self.hint = status, error, message, hint
        self.retry_after_s = 1.0 if retry_after_s is None and status == 503 else retry_after_s


def no_such_job(job_id: str) -> Refusal:
    """404."""
    return Refusal(404, "job_not_found", f"there is no job {job_id!r} here", "submit it, or look at `elasticflow jobs`")


def wrong_job_id(job_id: str, made: str) -> Refusal:
    """422: a submission was sent to an id other than the one of its identity."""
    return Refusal(
        422,
        "wrong_job_id",
        f"the submission's identity makes the id {made!r}, not {job_id!r}",
        "send it to the id that JobIdentity.job_id gives",
    )


def never_fits(min_workers: int, slots: int) -> str:
    """Return why a job can never fit into the cluster."""
    return f"min_workers={min_workers} never fits: the cluster has {slots} slots"


def stale_claim(job_id: str, claim: int, current: int) -> Refusal:
    """409: a newer attempt owns the job."""
    return Refusal(
        409,
        "stale_claim",
        f"claim {claim} on job {job_id} is stale: a newer attempt holds claim {current}",
        "leave the job to it; nothing was changed",
    )
