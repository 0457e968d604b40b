"""What later attempts of a job ask for, if that was changed after one had ended: the terms that are kept and taken."""

from __future__ import annotations

from elasticflow_airflow.api import AmendRequest, State
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer
from elasticflow_airflow.service.store.store import Writer
from elasticflow_airflow.service.store.tables import IncarnationRow
from elasticflow_airflow.times import moment


def has_ended_badly(row: IncarnationRow) -> bool:
    """Whether a job has not succeeded, and trains no more: its workers may still be leaving."""
    if row.terminal:
        return row.state != State.SUCCEEDED
    ending = readable(row.ending) if row.ending else None
    return ending is not None and ending.state is not State.SUCCEEDED


def answer_for_next_attempt(row: IncarnationRow, request: AmendRequest, now: float) -> AmendmentAnswer:
    """Answer an amendment of a job that has ended; whether its deadline can be promised is decided with the attempt."""

    def refused(why: Reason) -> AmendmentAnswer:
        return AmendmentAnswer(accepted=False, reason=why)

    asked, wanted_at = readable(row.submission), request.deadline_at
    asked_at = None if asked is None else asked.deadline_at
    if not has_ended_badly(row):
        return refused(Reason("the job is {state} meanwhile: look at it first", state=row.state))
    if request.best_effort:
        asks = Reason("is best effort")
    elif wanted_at is not None:
        if wanted_at <= now:
            return refused(Reason("{deadline_at:moment} has passed already", deadline_at=wanted_at))
        if asked is not None and asked.best_effort:
            return refused(Reason("the task asks for best effort: give it a deadline in the DAG"))
        if asked_at is not None and wanted_at <= asked_at:
            return refused(Reason("the task itself asks for a later deadline, {asked_at:moment}", asked_at=asked_at))
        asks = Reason("asks for the deadline {deadline_at:moment}", deadline_at=wanted_at)
    elif request.value is not None:
        asks = Reason("has the value {value:g}", value=request.value)
    else:
        return refused(Reason("nothing to change was given"))
    reason = Reason("the next attempt {asks}; it begins when the task is cleared, or submitted again", asks=asks)
    return AmendmentAnswer(accepted=True, reason=reason, for_next_attempt=True)


def take_terms(tx: Writer, row: IncarnationRow, now: float) -> list[str]:
    """Give a new attempt the deadline and value that were set after an earlier one; returns warnings that say so.

    If the attempt itself asks for a later deadline, that is used.
    """
    terms, changed = tx.next_terms(row.job_id), []
    if terms.value is not None and terms.value != row.value:
        row.value = terms.value
        changed.append(f"has the value {row.value:g}")
    asked_at = 0.0 if row.deadline_at is None else row.deadline_at
    if terms.best_effort and not row.best_effort:
        row.deadline_at, row.best_effort = None, True
        changed.append("is best effort")
    elif terms.deadline_at is not None and not row.best_effort and terms.deadline_at > max(now, asked_at):
        row.deadline_at = terms.deadline_at
        latest_at = row.submission.latest_deadline_at
        if latest_at is not None and latest_at <= terms.deadline_at:
            row.submission = row.submission.model_copy(update={"latest_deadline_at": None})
        changed.append(f"has the deadline {moment(terms.deadline_at)}")
    return [f"this attempt {' and '.join(changed)}, as was set after an earlier one"] if changed else []
