"""Tells the scheduler what callers want: new jobs, cancels, amendments, owners that are away or back.

Reads what handlers wrote, writes what follows; calls no engine. Leases are measured on the monotonic clock, so that a
clock that jumps expires nobody's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core import events as ev
from elasticflow_airflow.scheduler_core.config import Objective
from elasticflow_airflow.scheduler_core.pricing import FORGOTTEN
from elasticflow_airflow.scheduler_core.values import Job, OnReject
from elasticflow_airflow.service import history, lateness, outlook, recurring, resuming
from elasticflow_airflow.service.books import Books
from elasticflow_airflow.service.candidates import CandidateDesk
from elasticflow_airflow.service.codec import curve_from_json
from elasticflow_airflow.service.deciding import feed
from elasticflow_airflow.service.models import IncarnationRow
from elasticflow_airflow.wire import Length, State, largest_share


def introduce(books: Books, device_type: str, slots: int, desk: CandidateDesk) -> None:
    """Ask the scheduler about every new incarnation whose predecessors have all come to their end.

    ``slots`` is how many the cluster has, by which a job without ``logical_workers`` gets its number of them. ``desk``
    copies the checkpoint that an incarnation goes on from; it is introduced once it is there.
    """
    for row in books.rows:
        if row.introduced or row.terminal or books.knows(row.job_id):
            continue
        if any(r.job_id == row.job_id and r.incarnation < row.incarnation and not r.terminal for r in books.rows):
            continue
        if row.cancel_reason is not None or row.ending:
            continue
        row.logical_workers = logical_workers(row.submission, slots)
        if resuming.is_ready(books, row, desk):
            _introduce(books, row, device_type)


def _introduce(books: Books, row: IncarnationRow, device_type: str) -> None:
    submission = row.submission
    job = books.jobs[row.job_id]
    row.introduced = True
    row.verdict = {"decision": "undecided", "reason": ""}
    row.signature = history.signature_of(submission, device_type, row.logical_workers)
    past = books.tx.history(job.recurring_key, row.signature)
    if past is not None:
        row.costs = {**past.costs, **row.costs}
    length = Length.model_validate(submission["length"])
    row.total_steps = history.length_of(length, int(submission["global_batch_size"]), past)
    speeds = known_speeds(submission, past.speeds if past is not None and past.complete else None)
    _say_where_it_starts(books, row)
    outlook.begin(books, row, None if past is None else past.loss_curve)
    most, least = most_workers(submission, row.logical_workers), int(submission["min_workers"])
    if most < least:
        reason = (
            f"min_workers={least}, but the checkpoint that it goes on from was trained with {row.logical_workers}"
            f" logical workers, and there are never more workers: give min_workers={most} at most, or logical_workers="
            " to train from the beginning"
        )
        books.end(row, State.FAILED, reason, failure=reason)
        return
    asked = lateness.settle(
        books,
        row,
        Job(
            job_id=row.job_id,
            submitted_s=row.submitted_at,
            deadline_s=row.deadline_at,
            total_steps=None if row.total_steps is None else float(max(0, row.total_steps - row.step)),
            curve=curve_from_json(speeds) if speeds else None,
            costs=books.costs_of(row),
            min_workers=least,
            max_workers=most,
            value=row.value,
            on_reject=OnReject(submission["on_reject"]),
            latest_deadline_s=submission["latest_deadline_at"],
            explore=not submission["scaling_curve"],
        ),
    )
    if asked is None:
        return
    reason = "its scaling curve is known" if speeds else "its speed is not known yet: it is measured first"
    books.event("submitted", f"submitted; {reason}", row, deadline_at=row.deadline_at, curve=speeds)
    asked = replace(asked, task=recurring.arrive(books, job, row))
    try:
        feed(books, ev.JobSubmitted(asked))
    except ValueError as error:
        reason = f"cannot be scheduled: {error}"
        books.event("failed", reason, row)
        books.end(row, State.FAILED, reason, failure=reason)
        return
    if row.target.get("at_most") is not None and books.knows(row.job_id) and not row.ending:
        outlook.tell(books, row)
    if row.state == State.SUBMITTED and not row.ending:
        books.set_state(row, State.WAITING, row.verdict.get("reason") or "waits for slots")


def recall(books: Books, scheduler: Scheduler) -> None:
    """Tell a new scheduler what came and went before it: a price is learned from all that ever asked."""
    if scheduler.config.objective is not Objective.VALUE:
        return
    since = books.now - FORGOTTEN * max(scheduler.config.protection_half_lives_s)
    known = [(row, row.speeds or known_speeds(row.submission, None)) for row in books.tx.over_since(since)]
    scheduler.recall(
        Job(
            job_id=row.job_id,
            submitted_s=row.submitted_at,
            deadline_s=row.deadline_at,
            total_steps=float(row.total_steps),
            curve=curve_from_json(speeds),
            costs=books.costs_of(row),
            min_workers=int(row.submission["min_workers"]),
            max_workers=most_workers(row.submission, row.logical_workers),
            value=row.value,
        )
        for row, speeds in known
        if speeds and row.total_steps is not None
    )


def logical_workers(submission: Mapping[str, Any], slots: int) -> int | None:
    """Into how many shares each step is cut for the whole life of the incarnation; None in fast mode."""
    if submission.get("consistency", "consistent") == "fast":
        return None
    asked = submission.get("logical_workers")
    if asked is not None:
        return int(asked)
    batch, least = int(submission["global_batch_size"]), int(submission["min_workers"])
    return largest_share(batch, max(least, submission["max_workers"] or slots))


def most_workers(submission: Mapping[str, Any], shares: int | None) -> int:
    """The most workers that the scheduler may give: one for each share, or for each sample."""
    batch = int(submission["global_batch_size"])
    most = shares if shares is not None else 1 << (batch.bit_length() - 1)
    return min(most, submission["max_workers"] or most)


def known_speeds(submission: Mapping[str, Any], past: Mapping[str, float] | None) -> dict[str, float] | None:
    """The curve that the submitter gave, or that past runs showed; by workers as text."""
    given = submission["scaling_curve"] or past
    return {str(workers): float(speed) for workers, speed in given.items()} if given else None


def _say_where_it_starts(books: Books, row: IncarnationRow) -> None:
    wanted = row.submission["init_from"]
    if wanted == "latest" and row.init_from_path is None:
        books.event(
            "initialised", 'init_from="latest": there is no earlier success of this task, so it starts fresh', row
        )
    elif row.init_from_path is not None and not Path(row.init_from_path).is_dir():
        reason = f"init_from={row.init_from_path}: there is no such checkpoint folder on this machine"
        books.end(row, State.FAILED, reason, failure=reason)


def cancel(books: Books) -> None:
    """End what somebody wants cancelled."""
    for row in books.rows:
        if row.cancel_reason is not None and not row.terminal:
            # A decided end other than success gives way to nobody; a success that is nearly there stays one.
            books.end(row, State.CANCELLED, row.cancel_reason or "cancelled")


def amend(books: Books) -> None:
    """Ask the scheduler about amendments, in order."""
    for amendment in books.tx.open_amendments():
        row = books.row(amendment.job_id, amendment.incarnation)
        if row is not None and not row.introduced and not row.terminal:
            continue
        if row is None or row.terminal or row.ending or not books.knows(row.job_id):
            amendment.answer = {"accepted": False, "reason": "the job is over", "earliest_deadline_at": None}
            continue
        books.amendment = amendment
        feed(
            books,
            ev.JobAmended(
                row.job_id,
                deadline_s=amendment.deadline_at,
                value=amendment.value,
                best_effort=amendment.best_effort,
            ),
        )
        books.amendment = None
        if amendment.answer is None:
            amendment.answer = {"accepted": True, "reason": "nothing changed", "earliest_deadline_at": None}


@dataclass(slots=True)
class _Lease:
    renewals: int
    renewed_at_monotonic_s: float


class Leases:
    """When each owner was heard last, in this process' monotonic time; a restart gives everybody a new first limit.

    So does a time without a pass that was stored (the database was away, the process was stopped): whoever asked then
    was not heard. What a check finds counts once it is stored: an owner that came back in a pass that failed is heard
    in the next.
    """

    def __init__(self) -> None:
        self._stored: dict[tuple[str, int], _Lease] = {}
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._stored_at_s = self._checked_at_s = -math.inf

    def stored(self) -> None:
        """What the last check found is in the store."""
        self._stored, self._stored_at_s = self._leases, self._checked_at_s

    def check(self, books: Books, monotonic_s: float) -> None:
        """Park jobs whose owner is away, cancel those whose owner stays away, and take back who is there again."""
        live = {(row.job_id, row.incarnation): row for row in books.rows if row.introduced and not row.terminal}
        self._leases = {key: lease for key, lease in self._stored.items() if key in live}
        deaf_s = monotonic_s - self._stored_at_s - books.settings.running_interval_s
        self._checked_at_s = monotonic_s
        for key, row in live.items():
            lease = self._leases.get(key)
            if lease is None or lease.renewals != row.renewals or deaf_s > row.lease_s / 2:
                self._leases[key] = _Lease(row.renewals, monotonic_s)
                row.lease_expires_at = books.now + row.lease_s
                if row.parked and lease is not None and lease.renewals != row.renewals:
                    _unpark(books, row)
            elif not row.ending:
                _expire(books, row, monotonic_s - lease.renewed_at_monotonic_s)


def _expire(books: Books, row: IncarnationRow, away_s: float) -> None:
    if away_s > row.lease_s + row.orphan_s:
        reason = f"nobody has asked for the job for {away_s:.0f} s: cancelled"
        books.end(row, State.CANCELLED, reason)
    elif away_s > row.lease_s and not row.parked:
        row.parked = True
        reason = f"nobody has asked for the job for {away_s:.0f} s: suspended with a checkpoint until somebody does"
        books.event("parked", reason, row)
        feed(books, ev.JobParked(row.job_id))
        row.desired_generation = None
        books.set_state(row, State.SUSPENDED, reason)


def _unpark(books: Books, row: IncarnationRow) -> None:
    row.parked = False
    reason = "its owner is back"
    books.event("unparked", reason, row)
    books.set_state(row, State.ADMITTED, reason)
    feed(books, ev.JobUnparked(row.job_id))
