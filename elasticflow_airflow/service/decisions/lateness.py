"""Handles jobs submitted after their deadline, and retries whose deadline cannot be met any more.

Rows in, rows out; does not call the scheduler.
"""

from __future__ import annotations

from dataclasses import replace

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.api.event_data import RejectedData
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job, OnReject
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.store.documents.job_documents import StoredVerdict
from elasticflow_airflow.service.store.tables import IncarnationRow

_TAKEN_ON = ("admitted", "renegotiated", "best_effort")


def settle(context: PassContext, row: IncarnationRow, job: Job) -> Job | None:
    """Return the job as the scheduler is to be asked about it; None if it is over and the scheduler need not be asked.

    A deadline that has passed is dropped if the submitter wants that, or if an earlier incarnation had been accepted,
    so that ``on_miss`` decides what a miss means. Any other job with a passed deadline is refused.
    """
    deadline_s, last_s = job.deadline_s, job.last_deadline_s
    if deadline_s is None or last_s is None:
        return job
    earlier, on_miss = _taken_on(context, row), row.submission.on_miss
    if earlier and on_miss == "finish" and job.on_reject is OnReject.FAIL and context.now < last_s:
        # A retry may end late if the training might have; refusing it would throw away what was trained.
        return replace(job, on_reject=OnReject.BEST_EFFORT)
    why = Reason("its deadline {deadline_s:moment} has passed already", deadline_s=deadline_s)
    policy = row.submission.on_past_deadline
    if context.now >= last_s and policy == "on_miss" and earlier:
        if not any(one.deadline_passed for one in earlier):
            why = Reason(
                "missed its deadline {deadline_s:moment} while it did not train, at step {step}",
                deadline_s=deadline_s,
                step=row.step,
            )
            context.event(
                EventKind.DEADLINE_MISSED, Reason('{why}; on_miss="{on_miss}"', why=why, on_miss=on_miss), row
            )
        row.deadline_passed = True
        if on_miss == "fail":
            context.end(row, State.FAILED, why, failure=why)
            return None
        if on_miss == "use_last_checkpoint":
            context.end(
                row, State.SUCCEEDED, Reason("{why}; its last checkpoint is used", why=why), use_checkpoint=True
            )
            return None
        policy = "best_effort"
    asked = as_asked(job, policy, context.now)
    if asked is None:
        _reject_at_once(context, row, passed_already(deadline_s))
    elif asked.deadline_s is None:
        _give_in(context, row, why)
    return asked


def as_asked(job: Job, policy: str, now: float) -> Job | None:
    """Return a job as the scheduler is to be asked about it, earlier incarnations aside; None if it is refused at once.

    ``policy``: ``on_past_deadline`` of the submission.
    """
    last_s = job.last_deadline_s
    if job.deadline_s is None or last_s is None or max(job.deadline_s, last_s) > now:
        return job
    if policy == "best_effort":
        return replace(job, deadline_s=None, on_reject=OnReject.FAIL, latest_deadline_s=None)
    can_offer = job.curve is not None and job.total_steps is not None
    return replace(job, on_reject=OnReject.FAIL) if can_offer else None


def passed_already(deadline_at: float) -> Reason:
    """Return why a deadline before now is refused."""
    return Reason(
        "its deadline {deadline_at:moment} has passed already: choose a later one, or best_effort=True",
        deadline_at=deadline_at,
    )


def _give_in(context: PassContext, row: IncarnationRow, why: Reason) -> None:
    row.deadline_at, row.best_effort = None, True
    context.tx.rely_on(row, "submission")
    given_up = {"deadline_at": None, "best_effort": True, "on_reject": "fail", "latest_deadline_at": None}
    row.submission = row.submission.model_copy(update=given_up)
    context.event(EventKind.BEST_EFFORT, Reason("{why}: trains as best effort", why=why), row)


def _taken_on(context: PassContext, row: IncarnationRow) -> list[IncarnationRow]:
    """Return the incarnations that it resumes from; empty if all of them were refused."""
    found: list[IncarnationRow] = []
    before = row.resume_from
    while before is not None and (earlier := context.tx.incarnation(row.job_id, before)) is not None:
        found.append(earlier)
        before = earlier.resume_from
    return found if any(one.verdict.decision in _TAKEN_ON for one in found) else []


def _reject_at_once(context: PassContext, row: IncarnationRow, reason: Reason) -> None:
    verdict = StoredVerdict(decision="rejected", reason=reason, deadline_at=row.deadline_at)
    context.give_verdict(row, RejectedData(deadline_at=row.deadline_at, earliest_deadline_at=None), verdict)
    context.end(row, State.REJECTED, reason)
