"""What becomes of a job that comes after its deadline, or comes again when its deadline cannot be kept any more.

Rows in, rows out; asks nobody.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.values import OnReject
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
    goes_on = _was_taken_on(books, row)
    on_miss = submission["on_miss"]
    if books.now < last_deadline_at(row):
        # A retry may end late where the training might have; to refuse it would throw away what was trained.
        return OnReject.BEST_EFFORT if goes_on and on_miss == "finish" and choice is OnReject.FAIL else choice
    passed = f"its deadline {when(row.deadline_at)} has passed already"
    policy = submission.get("on_past_deadline", "on_miss")
    if policy == "best_effort":
        _give_in(books, row, passed)
    elif policy == "on_miss" and goes_on:
        passed = f"missed its deadline {when(row.deadline_at)} while it did not train, at step {row.step}"
        books.event("deadline_missed", f'{passed}; on_miss="{on_miss}"', row)
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


def _was_taken_on(books: Books, row: IncarnationRow) -> bool:
    """Whether one of the incarnations that it goes on from was not refused."""
    before = row.resume_from
    while before is not None:
        earlier = books.tx.incarnation(row.job_id, before)
        if earlier is None:
            return False
        if earlier.verdict.get("decision") in _TAKEN_ON:
            return True
        before = earlier.resume_from
    return False
