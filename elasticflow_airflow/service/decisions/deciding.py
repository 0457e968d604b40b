"""Passes events to the scheduler and records its decisions: verdicts, generations, reasons. Calls no engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.api.event_data import (
    AdmittedData,
    AmendedData,
    AmendRejectedData,
    AtRiskData,
    KeptData,
    OnTrackData,
    RejectedData,
    ResizedData,
    WaitingData,
)
from elasticflow_airflow.api.status import AdmissionDecision
from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import (
    Admit,
    Amended,
    AmendRejected,
    AtRisk,
    Decision,
    JobDecision,
    OnTrack,
    Purpose,
    Reject,
    Resize,
    Suspend,
    Terms,
    Wait,
    WakeMeAt,
)
from elasticflow_airflow.scheduler_core.model.events import CalendarEvent, Event
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.service.decisions import task_history
from elasticflow_airflow.service.decisions.fault_attribution import SchedulerFaultError
from elasticflow_airflow.service.decisions.next_generation import can_continue, order, unbegun_restart_of
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer, StoredVerdict
from elasticflow_airflow.service.store.documents.scheduler_values import plan_to_json, slots_to_json
from elasticflow_airflow.service.store.store import DATABASE_AWAY
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import move
from elasticflow_airflow.service.telemetry import instruments

_DECISIONS: Mapping[Terms, AdmissionDecision] = {
    Terms.DEADLINE: "admitted",
    Terms.BEST_EFFORT: "best_effort",
    Terms.RENEGOTIATED: "renegotiated",
}


def feed(context: PassContext, event: Event | CalendarEvent) -> None:
    """Pass an event to the scheduler and record everything that it decides. Raises SchedulerFaultError."""
    context.fed.append(event)
    _write_down(context, event, lambda: context.scheduler.handle(event, context.now))


def feed_reports(context: PassContext, reports: Sequence[ev.Reported]) -> None:
    """Pass the reports of several jobs to the scheduler, so that it plans once for all. Raises as :func:`feed`."""
    _feed_together(context, reports, lambda: context.scheduler.reported(reports, context.now))


def feed_ends(context: PassContext, ends: Sequence[ev.JobEnd]) -> None:
    """Pass the ends of several jobs to the scheduler, so that it plans once for all. Raises as :func:`feed`."""
    _feed_together(context, ends, lambda: context.scheduler.ended(ends, context.now))


def feed_nodes(context: PassContext, changes: Sequence[ev.NodeChange]) -> None:
    """Pass the changes of several nodes to the scheduler, so that it plans once for all. Raises as :func:`feed`.

    Were they told one by one, a job would be moved onto a node whose own change comes next, and off it again.
    """
    _feed_together(context, changes, lambda: context.scheduler.nodes_changed(changes, context.now))


def feed_owners(context: PassContext, changes: Sequence[ev.OwnerChange]) -> None:
    """Tell the scheduler which jobs have lost their owners or have them back, so that it plans once for all.

    Raises as :func:`feed`.
    """
    _feed_together(context, changes, lambda: context.scheduler.owners_changed(changes, context.now))


def _feed_together(context: PassContext, events: Sequence[Event], decide: Callable[[], Sequence[Decision]]) -> None:
    if context.singly:
        for event in events:
            feed(context, event)
    elif events:
        context.fed += events
        _write_down(context, events[0], decide)


def feed_submitted(context: PassContext, jobs: Iterable[Job]) -> None:
    """Ask the scheduler about jobs, one by one in order, so that it plans once for all. Raises as :func:`feed`.

    ``jobs`` is consumed lazily and may stop at a time limit: the next job is requested once the previous one is
    decided on.
    """
    if context.singly:
        for job in jobs:
            feed(context, ev.JobSubmitted(job))
        return
    noted = _noted(context, jobs)
    first = next(noted, None)
    if first is not None:
        coming = itertools.chain([first], noted)
        _write_down(context, ev.JobSubmitted(first), lambda: context.scheduler.submitted(coming, context.now))


def _noted(context: PassContext, jobs: Iterable[Job]) -> Iterator[Job]:
    for job in jobs:
        context.fed.append(ev.JobSubmitted(job))
        yield job


def _write_down(context: PassContext, first: Event | CalendarEvent, decide: Callable[[], Sequence[Decision]]) -> None:
    """Have the scheduler decide on a batch of events, represented by ``first`` in metrics and errors."""
    context.decided = True
    try:
        with instruments.deciding(first):
            decisions = decide()
    except DATABASE_AWAY:
        raise
    except Exception as error:
        raise SchedulerFaultError(first) from error
    context.wake_at = None  # The scheduler requests it anew after each event.
    record_all(context, decisions)


def record_all(context: PassContext, decisions: Sequence[Decision]) -> None:
    """Record decisions that were made together, of each job only the last placement.

    A job that loses its slots and gets others (or the same) in one batch is never recorded without slots. A job that
    gets the slots that its gang trains on goes on there, and the scheduler is told that the gang has started.
    """
    changes = [(decision.job_id, i) for i, decision in enumerate(decisions) if isinstance(decision, Resize | Suspend)]
    last = dict(changes)
    goes_on = []
    for i, decision in enumerate(decisions):
        if isinstance(decision, Resize | Suspend) and i != last[decision.job_id]:
            continue
        later = last.get(decision.job_id, i) if isinstance(decision, Wait) else i
        if later > i and isinstance(decisions[later], Resize):
            continue  # It gets slots in the same batch.
        if isinstance(decision, WakeMeAt):
            context.wake_at = decision.at_s
            continue
        with context.on_behalf_of(decision.job_id, "writing down what was decided"):
            record(context, decision)
            if isinstance(decision, Resize) and _trains_there(context, decision.job_id):
                goes_on.append(ev.GangStarted(decision.job_id, decision.placement))
    feed_reports(context, goes_on)


def _trains_there(context: PassContext, job_id: str) -> bool:
    row = context.live(job_id)
    generation = None if row is None else context.desired(row)
    return generation is not None and generation.state == GangState.RUNNING and generation.notes.told_started


def record(context: PassContext, decision: JobDecision) -> None:
    """Record one decision."""
    row = context.live(decision.job_id)
    if row is None or row.ending:
        return  # Its end is decided already, whatever the scheduler wants.
    if isinstance(decision, Admit):
        _admit(context, row, decision)
    elif isinstance(decision, Reject):
        _reject(context, row, decision)
    elif isinstance(decision, Wait):
        _wait(context, row, decision)
    elif isinstance(decision, Resize):
        _resize(context, row, decision)
    elif isinstance(decision, Suspend):
        _suspend(context, row, decision)
    elif isinstance(decision, Amended):
        _amended(context, row, decision)
    elif isinstance(decision, AmendRejected):
        _amend_rejected(context, row, decision)
    elif isinstance(decision, AtRisk):
        row.at_risk = True
        row.projected_finish_at = decision.projected_s
        context.event(
            AtRiskData(deadline_at=decision.deadline_s, projected_at=_finite(decision.projected_s)),
            decision.reason,
            row,
        )
    elif isinstance(decision, OnTrack):
        row.at_risk = False
        row.projected_finish_at = decision.projected_s
        reason = Reason("fits its deadline again: projected end {projected_s:moment}", projected_s=decision.projected_s)
        context.event(OnTrackData(deadline_at=decision.deadline_s, projected_at=decision.projected_s), reason, row)


def _admit(context: PassContext, row: IncarnationRow, decision: Admit) -> None:
    asked = row.deadline_at
    if decision.terms is Terms.BEST_EFFORT:
        row.best_effort, row.deadline_at = True, None
    elif decision.deadline_s is not None:
        row.deadline_at = decision.deadline_s
    reason = limited(decision.reason, row.verdict.limit)
    verdict = StoredVerdict(
        decision=_DECISIONS[decision.terms],
        reason=reason,
        deadline_at=row.deadline_at,
        plan=plan_to_json(decision.plan),
    )
    context.give_verdict(
        row, AdmittedData(terms=decision.terms.value, deadline_at=row.deadline_at, asked_deadline_at=asked), verdict
    )
    _take_on(context, row, decision.reason)
    if context.knows_curve(row):
        task_history.remember(context, row, complete=True)
        context.learned = True


def _take_on(context: PassContext, row: IncarnationRow, reason: Reason) -> None:
    """Move a job that was decided on to training, whether it was profiled or waiting before."""
    generation = context.desired(row)
    if generation is not None and generation.purpose == Purpose.PROFILE:
        generation.purpose = Purpose.TRAIN.value  # Unless a Resize follows, it simply goes on.
    running = generation is not None and generation.state == GangState.RUNNING
    move(row, State.RUNNING if running else State.ADMITTED, reason)


def _reject(context: PassContext, row: IncarnationRow, decision: Reject) -> None:
    earliest, reason = decision.earliest_deadline_s, limited(decision.reason, row.verdict.limit)
    verdict = StoredVerdict(
        decision="rejected", reason=reason, deadline_at=row.deadline_at, earliest_deadline_at=earliest
    )
    context.give_verdict(row, RejectedData(deadline_at=row.deadline_at, earliest_deadline_at=earliest), verdict)
    context.end(row, State.REJECTED, reason)


def _wait(context: PassContext, row: IncarnationRow, decision: Wait) -> None:
    if row.state == State.WAITING and row.state_reason == decision.reason:
        return
    if row.verdict.decision == "undecided":
        verdict = StoredVerdict(reason=decision.reason, limit=row.verdict.limit)
        context.give_verdict(row, WaitingData(until=decision.until_s), verdict)
    else:
        context.event(WaitingData(until=decision.until_s), decision.reason, row)
    if context.desired(row) is None:
        move(row, State.WAITING, decision.reason)
    else:
        row.state_reason = decision.reason


def _resize(context: PassContext, row: IncarnationRow, decision: Resize) -> None:
    slots = slots_to_json(decision.placement.slots)
    profile = decision.purpose is Purpose.PROFILE
    current = context.desired(row)
    if current is not None and current.placement == slots and current.desired == "run" and not _over(current):
        current.purpose = decision.purpose.value
        reason = Reason("goes on with {workers:#worker} on the slots that it has", workers=len(slots))
        context.event(KeptData(generation=current.generation, workers=len(slots)), reason, row)
        return
    there = None if current is None else unbegun_restart_of(context, row, current)
    if there is not None and there.placement == slots:
        row.desired_generation, there.purpose = there.generation, decision.purpose.value
        reason = Reason(
            "goes on with {workers:#worker} where it is: the change that was ordered had not begun", workers=len(slots)
        )
        context.event(KeptData(generation=there.generation, workers=len(slots)), reason, row)
        row.state_reason = decision.reason
        return
    training = context.training(row) or current
    generation = order(
        context,
        row,
        slots=slots,
        purpose=decision.purpose.value,
        reason=decision.reason,
        continues=can_continue(context, row),
    )
    context.event(
        ResizedData(
            generation=generation.generation,
            workers=len(slots),
            workers_before=training.workers if training is not None else 0,
            slots=slots,
            purpose=decision.purpose.value,
            mode=generation.mode,
        ),
        decision.reason,
        row,
    )
    if profile:
        move(row, State.PROFILING, decision.reason)
    elif row.state in (State.SUBMITTED, State.WAITING, State.PROFILING):
        move(row, State.ADMITTED, decision.reason)
    else:
        row.state_reason = decision.reason


def _suspend(context: PassContext, row: IncarnationRow, decision: Suspend) -> None:
    row.desired_generation = None
    context.event(EventKind.SUSPENDED, decision.reason, row)
    move(row, State.SUSPENDED, decision.reason)


def _amended(context: PassContext, row: IncarnationRow, decision: Amended) -> None:
    row.deadline_at, row.value = decision.deadline_s, decision.value
    row.best_effort = decision.deadline_s is None
    row.deadline_passed = False
    until = "best effort" if decision.deadline_s is None else "deadline {deadline:moment}"
    reason = Reason(f"amended: {until}, value {{value:g}}", deadline=decision.deadline_s or 0.0, value=decision.value)
    told = AmendedData(deadline_at=decision.deadline_s, value=decision.value)
    undecided = row.verdict.decision == "undecided"
    if undecided and decision.deadline_s is None and not row.parked:
        _take_on(context, row, reason)
    if not undecided or decision.deadline_s is None:
        verdict = replace(
            row.verdict,
            decision="best_effort" if decision.deadline_s is None else "admitted",
            reason=reason,
            deadline_at=decision.deadline_s,
            plan=plan_to_json(decision.plan),
        )
        context.give_verdict(row, told, verdict)
    else:
        context.event(told, reason, row)
    if context.amendment is not None and context.amendment.job_id == row.job_id:
        context.amendment.answer = AmendmentAnswer(accepted=True, reason=reason)


def _amend_rejected(context: PassContext, row: IncarnationRow, decision: AmendRejected) -> None:
    earliest = decision.earliest_deadline_s
    context.event(AmendRejectedData(earliest_deadline_at=earliest), decision.reason, row)
    if context.amendment is not None and context.amendment.job_id == row.job_id:
        context.amendment.answer = AmendmentAnswer(
            accepted=False, reason=decision.reason, earliest_deadline_at=earliest
        )


def limited(reason: Reason, limit: Reason) -> Reason:
    """Return the reason of a verdict, with what limits the number of workers apart from the cluster."""
    return Reason("{reason}{limit}", reason=reason, limit=limit) if limit else reason


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _over(generation: GenerationRow) -> bool:
    return generation.state in (GangState.ENDED, GangState.LEAVING)
