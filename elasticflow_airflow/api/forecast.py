"""The forecast of all jobs and runs that are due: requests and responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from elasticflow_airflow.api.base import Wire
from elasticflow_airflow.api.fields import HorizonH, UtcSeconds
from elasticflow_airflow.api.submission import JobSubmission


class PlannedRun(Wire):
    """A run that the calendar does not know yet, or not in this form: for example of a DAG that is about to change."""

    submission: JobSubmission
    due_at: UtcSeconds

    @model_validator(mode="after")
    def _has_deadline(self) -> PlannedRun:
        if self.submission.deadline_at is None:
            raise ValueError("a planned run needs a deadline: nothing is kept free for best effort")
        return self


class ForecastRequest(Wire):
    """Request the forecast of everything that is due in the next ``hours``.

    ``planned`` runs are treated as due, too, and replace what the calendar expects of the same tasks.
    """

    hours: HorizonH = 24.0
    planned: list[PlannedRun] = Field(default_factory=list, max_length=500)


class ForecastItem(Wire):
    """One deadline, of a live job or of an expected run.

    ``kept``: the deadline will be met. ``at_risk``: it was promised but will probably be missed. ``undecided``: the job
    is being measured, or waits although it would fit. ``missed``: a job that waits for capacity, or an expected run,
    would be rejected in the current state; ``earliest_deadline_at`` could be promised. A planned run that is ``kept``
    and has an ``earliest_deadline_at`` meets that later deadline, which its ``latest_deadline_at`` allows. ``unknown``:
    too little is known about the task.
    """

    kind: Literal["job", "expected"]
    outcome: Literal["kept", "at_risk", "undecided", "missed", "unknown"]
    task: str
    planned: bool = False
    """Whether this is one of the request's ``planned`` runs."""
    job_id: str | None = None
    namespace: str | None = None
    """With ``dag_id``, the owner of the task: a caller that shows the answer to users must check what they may read."""
    dag_id: str | None = None
    due_at: float | None = None
    deadline_at: float | None = None
    probability: float = 1.0
    """Probability that an expected run comes, by how often it has come."""
    projected_at: float | None = None
    earliest_deadline_at: float | None = None
    reason: str = ""


class ForecastAnswer(Wire):
    """The forecast of every deadline until ``until_at``, soonest first, including expected runs due by then.

    ``missing_slots`` is the number of additional slots with which all would be kept; None: no number that was tried
    suffices.
    """

    asked_at: float
    until_at: float
    kept: int
    not_kept: int
    missing_slots: int | None
    summary: str
    items: list[ForecastItem] = Field(default_factory=list)
