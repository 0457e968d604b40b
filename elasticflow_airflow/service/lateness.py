"""What becomes of a job that comes after its deadline, or comes again when its deadline cannot be kept any more.

Rows in, rows out; asks nobody.
"""

from __future__ import annotations

from dataclasses import replace

from elasticflow_airflow.scheduler_core.values import Job, OnReject
from elasticflow_airflow.service.books import Books
from elasticflow_airflow.service.deciding import when
from elasticflow_airflow.service.models import IncarnationRow
from elasticflow_airflow.wire import State

_TAKEN_ON = ("admitted", "renegotiated", "best_effort")


def how_to_ask(books: Books, row: IncarnationRow) -> OnReject | None:
    """What the scheduler shall do where it cannot promise the deadline; None: it is over, nobody need be asked.

    A deadline that has passed becomes none where the submitter wants that, and where an incarnation before had been
    taken on, so that ``on_miss`` says what a miss means. Every other is refused.
    """
    submission = row.submission
    choice = OnReject(submission["on_reject"])
    if row.deadline_at is None:
        return choice
    earlier = _taken_on(books, row)
    goes_on = bool(earlier)
    on_miss = submission["on_miss"]
    if books.now < last_deadline_at(row):
        # A retry may end late where the training might have; to refuse it would throw away what was trained.
        return OnReject.BEST_EFFORT if goes_on and on_miss == "finish" and choice is OnReject.FAIL else choice
    passed = f"its deadline {when(row.deadline_at)} has passed already"
    policy = submission.get("on_past_deadline", "on_miss")
    if policy == "best_effort":
        _give_in(books, row, passed)
    elif policy == "on_miss" and goes_on:
        if not any(one.deadline_passed for one in earlier):
            passed = f"missed its deadline {when(row.deadline_at)} while it did not train, at step {row.step}"
            books.event("deadline_missed", f'{passed}; on_miss="{on_miss}"', row)
        row.deadline_passed = True
        if on_miss == "finish":
            _give_in(books, row, passed)
        elif on_miss == "fail":
            books.end(row, State.FAILED, passed, failure=passed)
            return None
        else:
            reason = f"{passed}; its last checkpoint is used"
            books.end(row, State.SUCCEEDED, reason, use_checkpoint=True)
            return None
    return OnReject.FAIL


def as_asked(job: Job, policy: str, now: float, *, makes_offers: bool) -> Job | None:
    """A job that goes on from nothing, as the scheduler is asked about it; None: it is refused without being asked.

    ``makes_offers``: whether the scheduler names a later deadline in place of one that has passed. For dry runs; what
    is submitted goes through ``how_to_ask``.
    """
    last_s = job.last_deadline_s
    if job.deadline_s is None or last_s is None or job.deadline_s > now:
        return job
    if last_s > now:
        return job if makes_offers else None
    if policy == "best_effort":
        return replace(job, deadline_s=None, on_reject=OnReject.FAIL, latest_deadline_s=None)
    can_offer = makes_offers and job.curve is not None and job.total_steps is not None
    return replace(job, on_reject=OnReject.FAIL) if can_offer else None


def last_deadline_at(row: IncarnationRow) -> float:
    """The latest end that is still worth something; raises ValueError for a job without a deadline."""
    if row.deadline_at is None:
        raise ValueError(f"job {row.job_id} has no deadline")
    soft = row.submission["on_reject"] in (OnReject.RENEGOTIATE, OnReject.LATE)
    return float(row.submission["latest_deadline_at"]) if soft else row.deadline_at


def _give_in(books: Books, row: IncarnationRow, why: str) -> None:
    row.deadline_at, row.best_effort = None, True
    given_up = {"deadline_at": None, "best_effort": True, "on_reject": "fail", "latest_deadline_at": None}
    row.submission = {**row.submission, **given_up}
    books.event("best_effort", f"{why}: trains as best effort", row)


def _taken_on(books: Books, row: IncarnationRow) -> list[IncarnationRow]:
    """The incarnations that it goes on from; none where all of them were refused."""
    found: list[IncarnationRow] = []
    before = row.resume_from
    while before is not None and (earlier := books.tx.incarnation(row.job_id, before)) is not None:
        found.append(earlier)
        before = earlier.resume_from
    return found if any(one.verdict.get("decision") in _TAKEN_ON for one in found) else []
