"""What the API refuses, as one exception: a status, a short code, what was wrong, and what to do."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818  (an answer, not a defect)
    """Becomes an error answer with a ``Problem`` as its body."""

    def __init__(self, status: int, error: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status, self.error, self.message, self.hint = status, error, message, hint


def no_such_job(job_id: str) -> Refusal:
    """404."""
    return Refusal(404, "job_not_found", f"there is no job {job_id!r} here", "submit it, or look at `elasticflow jobs`")


def wrong_job_id(job_id: str, made: str) -> Refusal:
    """422: a submission was sent to another id than its identity makes."""
    return Refusal(
        422,
        "wrong_job_id",
        f"the submission's identity makes the id {made!r}, not {job_id!r}",
        "send it to the id that JobIdentity.job_id gives",
    )


def never_fits(min_workers: int, slots: int) -> str:
    """Why a job is too large for any moment."""
    return f"min_workers={min_workers} never fits: the cluster has {slots} slots"


def stale_claim(job_id: str, claim: int, current: int) -> Refusal:
    """409: a newer attempt owns the job."""
    return Refusal(
        409,
        "stale_claim",
        f"claim {claim} on job {job_id} is stale: a newer attempt holds claim {current}",
        "leave the job to it; nothing was changed",
    )
