"""What will become of all that is due: questions and answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from elasticflow_airflow.api.base import Wire
from elasticflow_airflow.api.fields import HorizonH, UtcSeconds
from elasticflow_airflow.api.submission import JobSubmission


class PlannedRun(Wire):
    """A run that the calendar does not know of yet, or not as it will be: of a DAG that is about to change, say."""

    submission: JobSubmission
    due_at: UtcSeconds

    @model_validator(mode="after")
    def _has_deadline(self) -> PlannedRun:
        if self.submission.deadline_at is None:
            raise ValueError("a planned run needs a deadline: nothing is kept free for best effort")
        return self


class ForecastRequest(Wire):
    """Ask what will become of everything that is due in the next ``hours``.

    ``planned`` runs are taken as if they were due too, instead of what the calendar expects of the same tasks.
    """

    hours: HorizonH = 24.0
    planned: list[PlannedRun] = Field(default_factory=list, max_length=500)


class ForecastItem(Wire):
    """One deadline: of a live job, or of a run that is expected.

    ``kept``: it will be met. ``at_risk``: promised, but no longer on course. ``undecided``: a job that is being
    measured, or waits though it would fit. ``missed``: a job that waits for capacity, or an expected run, that would be
    rejected as things stand; ``earliest_deadline_at`` would do. A planned run that is ``kept`` and has an
    ``earliest_deadline_at`` is kept by that one, as its ``latest_deadline_at`` allows. ``unknown``: too little is known
    of the task.
    """

    kind: Literal["job", "expected"]
    outcome: Literal["kept", "at_risk", "undecided", "missed", "unknown"]
    task: str
    planned: bool = False
    """Whether it is one of the request's own runs."""
    job_id: str | None = None
    namespace: str | None = None
    """With ``dag_id``, whose task this is: who shows the answer to people must know what they may read."""
    dag_id: str | None = None
    due_at: float | None = None
    deadline_at: float | None = None
    probability: float = 1.0
    """How surely an expected run comes, by how often it did."""
    projected_at: float | None = None
    earliest_deadline_at: float | None = None
    reason: str = ""


class ForecastAnswer(Wire):
    """The outlook of every deadline until ``until_at``, soonest first; expected runs are those due by then.

    ``missing_slots``: with so many more slots all would be kept; None: no number that was tried would do.
    """

    asked_at: float
    until_at: float
    kept: int
    not_kept: int
    missing_slots: int | None
    summary: str
    items: list[ForecastItem] = Field(default_factory=list)
