"""Tells the scheduler what callers want: new jobs, cancels, amendments, owners that are away or back.

Reads what handlers wrote, writes what follows; calls no engine. Leases are measured on the monotonic clock, so that no
lease expires because the wall clock jumps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from elasticflow_airflow.api import EventKind, JobSubmission, State, largest_share
from elasticflow_airflow.api.event_data import SubmittedData
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.planning.protection_price import FORGOTTEN
from elasticflow_airflow.service.decisions import lateness, loss_target, recurring_runs, resuming, task_history
from elasticflow_airflow.service.decisions.deciding import feed, feed_owners, feed_submitted
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.scheduler_job import job_of_row, logical_workers, most_workers
from elasticflow_airflow.service.decisions.session_settings import python_of
from elasticflow_airflow.service.decisions.task_history import Past
from elasticflow_airflow.service.job_files.candidates import CandidateService
from elasticflow_airflow.service.renewals import Renewals
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer, StoredVerdict
from elasticflow_airflow.service.store.tables import AmendmentRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import move
from elasticflow_airflow.service.store.views import UNREADABLE

_OWNERS = "looking whether its owner is there"
_TASKS_AT_ONCE = 200
"""For so many new jobs what is known of their tasks is loaded together."""


@dataclass(frozen=True, slots=True)
class Preparing:
    """Prepares what an incarnation needs before the scheduler is asked about it; neither part blocks."""

    candidate_service: CandidateService
    """Copies the checkpoint that it resumes from."""
    prepare_environment: Callable[[str, tuple[str, ...]], bool]
    """Builds the environment of its workers (see the engine port)."""

    def is_ready(self, context: PassContext, row: IncarnationRow) -> bool:
        """Return whether it can be introduced. One whose environment cannot be built ends."""
        return resuming.is_ready(context, row, self.candidate_service) and self._has_environment(context, row)

    def _has_environment(self, context: PassContext, row: IncarnationRow) -> bool:
        requirements = row.submission.command.requirements
        if not requirements:
            return True
        try:
            if self.prepare_environment(python_of(row), requirements):
                return True
        except EngineError as error:
            row.introduced, row.verdict = True, StoredVerdict()
            context.end(row, State.FAILED, Reason("{failure:text}", failure=str(error)), failure=str(error))
        else:
            row.state_reason = Reason("waits for its environment: what it requires is being installed")
        return False


def introduce(context: PassContext, device_type: str, slots: int, preparing: Preparing, within_s: float) -> None:
    """Ask the scheduler about new incarnations whose predecessors have all ended, for at most ``within_s`` seconds.

    ``slots`` is the number of slots in the cluster.
    """
    asked: list[IncarnationRow] = []
    feed_submitted(context, _newcomers(context, device_type, slots, preparing, time.monotonic() + within_s, asked))
    for row in asked:
        with context.on_behalf_of(row.job_id, "asking the scheduler about it"):
            if row.target and row.target.at_most is not None and context.knows(row.job_id) and not row.ending:
                loss_target.tell(context, row)
            if row.state == State.SUBMITTED and not row.ending:
                move(row, State.WAITING, row.verdict.reason or Reason("waits for slots"))


def _newcomers(
    context: PassContext,
    device_type: str,
    slots: int,
    preparing: Preparing,
    until_s: float,
    asked: list[IncarnationRow],
) -> Iterator[Job]:
    """Yield the jobs to ask the scheduler about, and add their rows to ``asked``.

    Stops when the time is over, but not before the first: however busy the machine, each pass gets on.
    """
    new = (row for row in context.rows if not row.introduced and not row.terminal)
    context.tx.load_tasks([context.jobs[row.job_id].recurring_key for row in islice(new, _TASKS_AT_ONCE)])
    for row in list(context.rows):
        if row.introduced or row.terminal or row.cancel_reason is not None or row.ending:
            continue
        if asked and time.monotonic() > until_s:
            context.more = True  # Jobs decided on get their verdict now; the next pass takes the rest.
            return
        job = None
        with context.on_behalf_of(row.job_id, "asking the scheduler about it"):
            earlier = (one for one in context.incarnations_of(row.job_id) if one.incarnation < row.incarnation)
            if any(not one.terminal for one in earlier) or context.knows(row.job_id):
                continue
            row.logical_workers = logical_workers(row.submission)
            if preparing.is_ready(context, row):
                job = _introduce(context, row, device_type, slots)
        if job is not None:
            asked.append(row)
            yield job


def _introduce(context: PassContext, row: IncarnationRow, device_type: str, slots: int) -> Job | None:
    """Record what is known of a job before it trains; None if it is over and the scheduler need not be asked."""
    submission = row.submission
    job = context.jobs[row.job_id]
    row.introduced = True
    row.verdict = StoredVerdict()
    row.signature = task_history.signature_of(submission, device_type, row.logical_workers)
    past = task_history.past_of(context.tx.history(job.recurring_key, row.signature))
    row.costs = replace(past.costs, **row.costs.known())
    row.total_steps = task_history.length_of(submission.length, submission.global_batch_size, past)
    # If only the script knows the length, the job is profiled again: meanwhile the script reports it.
    needs_length = row.total_steps is None and not row.best_effort
    measured = None if needs_length else past.measured
    speeds = task_history.speeds_to_plan_with(submission.scaling_curve, measured)
    row.told_speeds = speeds
    _say_where_it_starts(context, row)
    loss_target.begin(context, row, past.loss_curve)
    most, least = most_workers(submission, row.logical_workers), submission.min_workers
    if most < least:
        reason = Reason(
            "min_workers={least}, but the checkpoint that it goes on from was trained with {logical_workers} logical "
            "workers, and there are never more workers: give min_workers={most} at most, or logical_workers= to train "
            "from the beginning",
            least=least,
            logical_workers=row.logical_workers or most,
            most=most,
        )
        context.end(row, State.FAILED, reason, failure=reason)
        return None
    asked = lateness.settle(
        context,
        row,
        job_of_row(
            row,
            past,
            context.settings.scheduler_config(),
            steps=None if row.total_steps is None else max(0, row.total_steps - row.step),
            speeds=speeds,
            costs=context.costs_of(row),
        ),
    )
    if asked is None:
        return None
    limit = _limit(submission, row.logical_workers, slots)
    row.verdict = replace(row.verdict, limit=limit)
    said = Reason("submitted; {known}{limit}", known=_what_is_known(submission, speeds), limit=limit)
    curve = None if speeds is None else {str(size): speed for size, speed in speeds.items()}
    context.event(SubmittedData(deadline_at=row.deadline_at, curve=curve), said, row)
    return replace(asked, task=recurring_runs.arrive(context, job, row))


def _what_is_known(submission: JobSubmission, speeds: Mapping[int, float] | None) -> Reason:
    """Describe what is known of the speed of a job, for the event of its submission."""
    if not speeds:
        return Reason("its speed is not known yet: it is measured first")
    if submission.scaling_curve:
        return Reason("its scaling curve is known")
    *most, last = map(str, sorted(speeds))
    sizes = f"{', '.join(most)} and {last} workers" if most else "1 worker" if last == "1" else f"{last} workers"
    return Reason("its speed with {sizes} is known from earlier runs", sizes=sizes)


def recall(context: PassContext, scheduler: Scheduler) -> None:
    """Tell a new scheduler about past jobs: it learns its price from all jobs that were ever submitted."""
    if scheduler.config.objective is Objective.FIRST_COME:
        return
    since = context.now - FORGOTTEN * max(scheduler.config.protection_half_lives_s)
    scheduler.recall(filter(None, (_past_job(context, row) for row in context.tx.over_since(since))))


def _past_job(context: PassContext, row: IncarnationRow) -> tuple[Job, bool] | None:
    """Return a job that is over, and whether it was refused; None if too little is known of it or can be read."""
    with suppress(*UNREADABLE):
        speeds = row.speeds or task_history.speeds_to_plan_with(row.submission.scaling_curve, None)
        if speeds and row.total_steps is not None:
            config, costs = context.settings.scheduler_config(), context.costs_of(row)
            job = job_of_row(row, Past(), config, steps=row.total_steps, speeds=speeds, costs=costs)
            return job, row.verdict.decision not in ("undecided", "admitted")
    return None


def _limit(submission: JobSubmission, shares: int | None, slots: int) -> Reason:
    """Return the text for a job whose shares keep it from slots that the cluster has and ``max_workers`` allows."""
    wanted = min(slots, submission.max_workers or slots)
    if shares is None or shares >= wanted:
        return Reason("")
    batch = submission.global_batch_size
    if submission.logical_workers:
        kind = "; at most {shares} workers train it, one for each of its logical_workers"
    elif largest_share(batch, wanted) > shares:
        kind = "; at most {shares} workers train it, one for each of its logical_workers: max_workers= raises both"
    else:
        kind = "; at most {shares} workers can share its global_batch_size={batch} equally"
    return Reason(kind, shares=shares, batch=batch)


def _say_where_it_starts(context: PassContext, row: IncarnationRow) -> None:
    wanted = row.submission.init_from
    if wanted == "latest" and row.init_from_path is None:
        latest = context.tx.last_success(context.jobs[row.job_id].recurring_key, row.job_id)
        none = "there is no earlier success of this task"
        if latest is not None:
            none = "where the last success of this task left its checkpoint cannot be read"
        context.event(EventKind.INITIALISED, Reason('init_from="latest": {none}, so it starts fresh', none=none), row)
    elif row.init_from_path is not None and not context.files.is_checkpoint(row.init_from_path):
        reason = Reason("init_from={path}: there is no such checkpoint folder on this machine", path=row.init_from_path)
        context.end(row, State.FAILED, reason, failure=reason)


def cancel(context: PassContext) -> None:
    """End jobs whose cancellation was requested."""
    for row in context.rows:
        if row.cancel_reason is not None and not row.terminal:
            # ``end`` keeps an end that was decided before, also a success that is about to complete.
            with context.on_behalf_of(row.job_id, "cancelling it"):
                context.end(row, State.CANCELLED, Reason.quoted(row.cancel_reason or "cancelled"))


def amend(context: PassContext) -> None:
    """Ask the scheduler about amendments, in order."""
    for amendment in context.tx.open_amendments():
        if amendment.job_id in context.faults:
            amendment.answer = AmendmentAnswer(accepted=False, reason=Reason("the job is set aside"))
            continue
        with context.on_behalf_of(amendment.job_id, "asking the scheduler about an amendment of it"):
            _amend(context, amendment)


def _amend(context: PassContext, amendment: AmendmentRow) -> None:
    row = context.row(amendment.job_id, amendment.incarnation)
    if row is not None and not row.introduced and not row.terminal:
        return
    if row is None or row.terminal or row.ending or not context.knows(row.job_id):
        amendment.answer = AmendmentAnswer(accepted=False, reason=Reason("the job is over"))
        return
    context.amendment = amendment
    feed(
        context,
        ev.JobAmended(
            row.job_id,
            deadline_s=amendment.deadline_at,
            value=amendment.value,
            best_effort=amendment.best_effort,
        ),
    )
    context.amendment = None
    if amendment.answer is None:
        amendment.answer = AmendmentAnswer(accepted=True, reason=Reason("nothing changed"))


@dataclass(slots=True)
class _Lease:
    renewals: int
    renewed_at_monotonic_s: float


class Leases:
    """When each owner last renewed its lease, in this process' monotonic time; a restart starts every lease anew.

    So does a period without a stored pass (the database was unavailable, the process was stopped): requests made then
    were not seen. What a check finds counts only once it is stored: an owner that came back in a pass that failed is
    seen in the next pass. Renewals are counted in the store (submits and attachments) and in ``renewals``.
    """

    def __init__(self, renewals: Renewals) -> None:
        self._renewals = renewals
        self._stored: dict[tuple[str, int], _Lease] = {}
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._stored_at_s = self._checked_at_s = -math.inf

    def stored(self) -> None:
        """Adopt what the last check found, now that it is stored."""
        self._stored, self._stored_at_s = self._leases, self._checked_at_s

    def check(self, context: PassContext, monotonic_s: float) -> None:
        """Park jobs whose owner is away, cancel those whose owner stays away, and unpark those whose owner is back."""
        live = {(row.job_id, row.incarnation): row for row in context.rows if row.introduced and not row.terminal}
        live |= {(row.job_id, row.incarnation): row for row in context.aside if not row.terminal}
        self._renewals.keep(live)
        self._leases = {key: lease for key, lease in self._stored.items() if key in live}
        deaf_s = monotonic_s - self._stored_at_s - context.settings.running_interval_s
        self._checked_at_s = monotonic_s
        left, back = list[tuple[IncarnationRow, Reason]](), list[IncarnationRow]()
        for key, row in live.items():
            with context.on_behalf_of(row.job_id, _OWNERS):
                if self._renew(context, row, key, deaf_s, monotonic_s):
                    back.append(row)
                elif reason := _expire(context, row, monotonic_s - self._leases[key].renewed_at_monotonic_s):
                    left.append((row, reason))
        _park(context, left)
        _unpark(context, back)

    def _renew(
        self, context: PassContext, row: IncarnationRow, key: tuple[str, int], deaf_s: float, monotonic_s: float
    ) -> bool:
        """Renew the lease of a job whose owner was heard; return whether it was parked until now."""
        lease, renewals = self._leases.get(key), row.renewals + self._renewals.count(*key)
        if lease is None or lease.renewals != renewals or deaf_s > row.lease_s / 2:
            self._leases[key] = _Lease(renewals, monotonic_s)
            row.lease_expires_at = context.now + row.lease_s
            if lease is not None and lease.renewals != renewals:
                row.heard_at = context.now  # Handlers only count requests.
            return row.parked and lease is not None and lease.renewals != renewals
        return False


def _expire(context: PassContext, row: IncarnationRow, away_s: float) -> Reason | None:
    """Cancel a job whose owner stays away; return why it is to be parked, None if it is not."""
    if row.ending:
        return None
    if away_s > row.lease_s + row.orphan_s:
        reason = Reason("no client has polled the job for {away_s:duration}: cancelled", away_s=away_s)
        context.tx.rely_on(row, "renewals")
        context.end(row, State.CANCELLED, reason)
    elif away_s > row.lease_s and not row.parked and row.job_id not in context.faults:
        context.tx.rely_on(row, "renewals")
        return Reason(
            "no client has polled the job for {away_s:duration}: suspended with a checkpoint until somebody does",
            away_s=away_s,
        )
    return None


def _park(context: PassContext, left: Sequence[tuple[IncarnationRow, Reason]]) -> None:
    """Have jobs give up what they hold until somebody asks for them again."""
    for row, reason in left:
        with context.on_behalf_of(row.job_id, _OWNERS):
            row.parked = True
            context.event(EventKind.PARKED, reason, row)
    feed_owners(context, [ev.JobParked(row.job_id) for row, _ in left])
    for row, reason in left:
        with context.on_behalf_of(row.job_id, _OWNERS):
            row.desired_generation = None
            move(row, State.SUSPENDED, reason)


def _unpark(context: PassContext, back: Sequence[IncarnationRow]) -> None:
    """Let jobs have slots again."""
    for row in back:
        with context.on_behalf_of(row.job_id, _OWNERS):
            row.parked = False
            reason = Reason("its owner is back")
            context.event(EventKind.UNPARKED, reason, row)
            move(row, State.ADMITTED, reason)
    feed_owners(context, [ev.JobUnparked(row.job_id) for row in back])
