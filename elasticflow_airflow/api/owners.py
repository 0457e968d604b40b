"""Ownership of live jobs: what the service reports about them, and what Airflow reports about their task instances."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elasticflow_airflow.api.base import Wire
from elasticflow_airflow.api.fields import Counter, Name
from elasticflow_airflow.api.status import JobStatus
from elasticflow_airflow.api.submission import JobIdentity

MOST_OWNERS = 1000
"""Maximum number of entries in one page or report."""
JobId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,119}$")]


class OwnedJob(Wire):
    """A live job: its owner, its claim, and when it was last polled or renewed (``heard_at``).

    ``known_to`` is the Airflow that has reported that the task instance exists, ``seen_at`` when it last did so.
    """

    job_id: str
    claim: int
    identity: JobIdentity
    heard_at: float | None = None
    known_to: str | None = None
    seen_at: float | None = None


class OwnedJobs(Wire):
    """A page of live jobs in the order of their ids. ``next_after``: where the next page starts; None: last page."""

    at: float
    jobs: list[OwnedJob]
    next_after: str | None = None


class OwnerSeen(Wire):
    """The status of a job's task instance: it exists, has ended for good, or was deleted.

    ``state`` is Airflow's state of the task instance. ``claim`` is the job's claim before Airflow was asked: if the job
    has a newer one by now, another attempt owns it.
    """

    job_id: JobId
    claim: Counter
    owner: Literal["there", "ended", "deleted"]
    state: Annotated[str, Field(max_length=40, pattern=r"^[a-z_]*$")] = ""


class OwnersReport(Wire):
    """What one Airflow knows about task instances of its namespace; makes no statement about those not listed.

    ``airflow`` identifies the Airflow: a report that a task instance was deleted is accepted only from the Airflow that
    had it.
    """

    namespace: Annotated[Name, Field(min_length=1)]
    airflow: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    owners: Annotated[list[OwnerSeen], Field(max_length=MOST_OWNERS)]


class OwnersAnswer(Wire):
    """The jobs that are cancelled because their owner is gone. Others were claimed again meanwhile, or have ended."""

    cancelled: list[str]


class UnownedJob(Wire):
    """A live job that seems to have no owner: since when (UTC seconds), and why it is considered unowned.

    ``owner_gone``: Airflow has reported that the owner is gone, and the job is being cancelled.
    """

    job: JobStatus
    since_at: float
    why: str
    owner_gone: bool = False
