"""Who owns the live jobs: what the service tells Airflow of them, and what Airflow says of their task instances."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elasticflow_airflow.api.base import Wire
from elasticflow_airflow.api.fields import Counter, Name
from elasticflow_airflow.api.status import JobStatus
from elasticflow_airflow.api.submission import JobIdentity

MOST_OWNERS = 1000
"""In one page or report."""
JobId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,119}$")]


class OwnedJob(Wire):
    """A live job: whose it is, by which claim, and when somebody asked for it last.

    ``known_to`` is the Airflow that has said that the task instance is there, ``seen_at`` when it said so last.
    """

    job_id: str
    claim: int
    identity: JobIdentity
    heard_at: float | None = None
    known_to: str | None = None
    seen_at: float | None = None


class OwnedJobs(Wire):
    """Live jobs in the order of their ids. ``next_after``: go on after this id; None: these were the last."""

    at: float
    jobs: list[OwnedJob]
    next_after: str | None = None


class OwnerSeen(Wire):
    """What has become of a job's task instance: it is there, has ended for good, or was deleted.

    ``state`` is what Airflow calls it. ``claim`` is the one that the job had before Airflow was asked: with a newer
    one, another attempt owns the job.
    """

    job_id: JobId
    claim: Counter
    owner: Literal["there", "ended", "deleted"]
    state: Annotated[str, Field(max_length=40, pattern=r"^[a-z_]*$")] = ""


class OwnersReport(Wire):
    """What an Airflow knows of the task instances of its namespace. Of what it does not name, it says nothing.

    ``airflow`` tells one Airflow from another: that a task instance is no more is believed of the one that had it.
    """

    namespace: Annotated[Name, Field(min_length=1)]
    airflow: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    owners: Annotated[list[OwnerSeen], Field(max_length=MOST_OWNERS)]


class OwnersAnswer(Wire):
    """The jobs that are cancelled, as their owner is gone. Others were claimed anew meanwhile, or are over."""

    cancelled: list[str]


class UnownedJob(Wire):
    """A live job that nobody seems to want: since when (UTC seconds), and why it is taken for that.

    ``owner_gone``: Airflow has said so, and the job is being cancelled.
    """

    job: JobStatus
    since_at: float
    why: str
    owner_gone: bool = False
