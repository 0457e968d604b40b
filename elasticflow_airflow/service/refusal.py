"""Refusals of the API as one exception: a status, a short code, what was wrong, and what to do."""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.api import Problem

MEANINGS = {
    400: "It cannot be read: it is no HTTP request, or its body is no JSON",
    401: "The token is missing or wrong",
    404: "There is no such thing here",
    408: "It did not come in time",
    409: "Not as things stand: a stale claim, say",
    413: "It is larger than is taken",
    422: "Something that was given is wrong or out of bounds: which, the limit, and what to give instead",
    431: "Its address and headers are longer than is taken",
    500: "A defect of the service",
    501: "This service does not offer it",
    503: "Not now: ask again in a moment",
    507: "There is no room for it on the disk",
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
