"""Sets aside jobs that the service fails on, with the reason and their workers kept, so that all others go on.

Only operations that cannot fail are done for them: their workers' leases are renewed, their slots count as held, and
they can be cancelled. A restarted service, also of a newer version, tries them again. Which jobs these are is decided
in ``fault_attribution.py``. Rows in, rows out; calls no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.api.event_data import end_data
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangState
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import JobState, Slot
from elasticflow_airflow.service.decisions.fault_attribution import Fault, find_culprits
from elasticflow_airflow.service.decisions.pass_context import PassContext, alive, can_be_stopped
from elasticflow_airflow.service.secrets import redact
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer, Ending
from elasticflow_airflow.service.store.documents.scheduler_values import placement_from_json, slots_to_json
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.stored_bounds import (
    amendment_out_of_bounds,
    course_out_of_bounds,
    generation_out_of_bounds,
    submission_out_of_bounds,
)
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import ORDERED, overwrite, overwrite_generation


class OutOfBoundsError(Exception):
    """A stored value of a job exceeds a limit, which the message names."""


class UnreadableGangError(Exception):
    """The engine cannot observe a job's workers; the message gives the reason."""


_ADVICE = (
    "It is set aside: its workers go on and keep their slots, and nothing else is done for it until the service starts"
    " anew. Cancel it to end it; the log of the service says more"
)


def write_down(context: PassContext, secrets: Callable[[IncarnationRow], Mapping[str, str]]) -> None:
    """Record the reason of each job that is set aside; clear it for jobs that this process has not failed on.

    ``secrets`` returns the values that must not appear in messages.
    """
    for row in context.aside:
        fault = context.faults.aside.get(row.job_id)
        if row.set_aside is None and fault is not None and not row.terminal:
            row.set_aside = _reason(row, fault, secrets)
            row.state_reason = Reason("{fault:text}. " + _ADVICE, fault=row.set_aside)
            context.event(EventKind.SET_ASIDE, row.state_reason, row)
    for row in context.rows:
        if row.set_aside is not None:
            row.set_aside = None
            row.state_reason = Reason("the service has started anew: it is tried again, and not set aside any more")
            context.event(EventKind.TRIED_AGAIN, row.state_reason, row)


def _reason(row: IncarnationRow, fault: Fault, secrets: Callable[[IncarnationRow], Mapping[str, str]]) -> str:
    try:
        return redact(str(fault), secrets(row))
    except (ValueError, TypeError, KeyError, AttributeError):  # The submission itself may be faulty.
        return f"the service failed while {fault.doing}"


@dataclass(slots=True)
class BoundsCheck:
    """Sets aside jobs with stored values that cannot be decided on, accepted by an older version."""

    _checked: dict[tuple[str, int], StoredSubmission] = field(default_factory=dict)
    """Submissions that were found within bounds; they hardly ever change."""

    def check(self, context: PassContext, observations: Sequence[GangObservation]) -> None:
        """Check every job that may be decided on, and its stored placement against the engine's observations."""
        seen = {(gang.job_id, gang.generation): gang for gang in observations}
        for row in context.rows:
            if row.terminal:
                self._checked.pop((row.job_id, row.incarnation), None)
                continue
            with context.on_behalf_of(row.job_id, "reading what is known of it"):
                self._check(row)
                for generation in context.open_of(row):
                    problem = generation_out_of_bounds(generation)
                    if problem is not None:
                        raise OutOfBoundsError(f"generation {generation.generation}: {problem}")
                    _check_placement(generation, seen.get((generation.job_id, generation.generation)))
        for amendment in context.tx.open_amendments():
            problem = amendment_out_of_bounds(amendment)
            if problem is not None:
                amendment.answer = AmendmentAnswer(accepted=False, reason=Reason(problem))

    def _check(self, row: IncarnationRow) -> None:
        key = (row.job_id, row.incarnation)
        problem = None
        if self._checked.get(key) != row.submission:
            problem = submission_out_of_bounds(row.submission)
            self._checked[key] = row.submission
        problem = problem or course_out_of_bounds(row)
        if problem is not None:
            self._checked.pop(key, None)
            raise OutOfBoundsError(problem)


def _check_placement(generation: GenerationRow, gang: GangObservation | None) -> None:
    """Check a stored placement: a slot that is missing from it would be given to another job."""
    slots = placement_from_json(generation.placement).slots
    if len(set(slots)) != generation.workers:
        raise OutOfBoundsError(
            f"generation {generation.generation} is stored with {generation.workers} workers on {len(set(slots))} slots"
        )
    stand = () if gang is None or gang.state is GangState.ENDED else tuple(worker.slot for worker in gang.workers)
    if stand and stand != slots:
        others = ", ".join(f"{slot.node_id}:{slot.index}" for slot in slots if slot not in stand) or "another order"
        raise OutOfBoundsError(
            f"generation {generation.generation} is stored with slots on which it has no workers ({others})"
        )


def notice_troubles(context: PassContext, observations: Sequence[GangObservation]) -> None:
    """Set aside jobs whose workers the engine cannot observe, for example because their scripts damaged files."""
    for gang in observations:
        if gang.trouble is not None and gang.job_id in context.jobs and gang.job_id not in context.faults:
            with context.on_behalf_of(gang.job_id, "looking at its workers"):
                raise UnreadableGangError(gang.trouble)


def _gangs_of(context: PassContext, observations: Sequence[GangObservation]) -> dict[tuple[str, int], GangObservation]:
    """Return the gangs of jobs that are set aside, by job and generation; fast when there are none, the usual case."""
    aside = {row.job_id for row in context.aside}
    return {(gang.job_id, gang.generation): gang for gang in observations if gang.job_id in aside} if aside else {}


def place(context: PassContext, observations: Sequence[GangObservation]) -> None:
    """Overwrite the stored placements of jobs that are set aside with the engine's observations."""
    seen = _gangs_of(context, observations)
    for row in context.aside:
        for generation in context.open_of(row):
            gang = seen.get((generation.job_id, generation.generation))
            if gang is not None and gang.workers:
                generation.placement = slots_to_json(worker.slot for worker in gang.workers)
                generation.workers = len(gang.workers)


def look_after(context: PassContext, observations: Sequence[GangObservation]) -> None:
    """Track the workers of jobs that are set aside, and end the jobs that are to end."""
    seen = _gangs_of(context, observations)
    for row in context.aside:
        for generation in context.open_of(row):
            gang = seen.get((generation.job_id, generation.generation))
            if gang is not None:
                overwrite_generation(generation, gang.state)
            elif generation.state != ORDERED or row.desired_generation != generation.generation:
                overwrite_generation(generation, GangState.ENDED)
            if generation.state == GangState.ENDED:
                outcome = GangOutcome.LOST if gang is None or gang.outcome is None else gang.outcome
                generation.outcome, generation.ended_at = outcome.value, context.now
                generation.judged = generation.handled = True
        if row.cancel_reason is not None:
            context.end(row, State.CANCELLED, Reason.quoted(row.cancel_reason or "cancelled"))
        if row.ending and not row.terminal and not any(map(can_be_stopped, context.open_of(row))):
            _end(context, row)


def _end(context: PassContext, row: IncarnationRow) -> None:
    """End a job without reading what it has reached, as that may be what the service fails on."""
    for generation in context.open_of(row):
        overwrite_generation(generation, GangState.ENDED)
        generation.outcome = GangOutcome.STOPPED.value
        generation.judged = generation.handled = True
    ending = readable(row.ending) or Ending(State.FAILED, Reason("it was to end, and how cannot be read any more"))
    state, reason = ending.state, ending.reason
    if state is State.SUCCEEDED:
        state, reason = (
            State.FAILED,
            Reason("{reason}; but it was set aside, and what it has reached could not be read", reason=reason),
        )
    row.finished_at = context.now
    row.failure = row.set_aside
    row.terminal = True
    row.secret_env = row.scheduler_state = row.lease_expires_at = row.projected_finish_at = None
    row.at_risk = False
    overwrite(row, state, reason)
    context.event(end_data(state, None), reason, row)


def ended(context: PassContext) -> set[str]:
    """Return the jobs that were set aside and are over: their next submissions are tried like any other."""
    first = {row.job_id: row for row in reversed(context.aside) if row.set_aside is not None}
    return {job_id for job_id, row in first.items() if row.terminal}


def held_slots(context: PassContext) -> dict[str, dict[int, str]]:
    """Return the holders of slots that jobs set aside hold, by node id and slot index."""
    found: dict[str, dict[int, str]] = {}
    for row in context.aside:
        for generation in context.open_of(row):
            if alive(generation):
                for slot in slots_of(generation):
                    found.setdefault(slot.node_id, {})[slot.index] = f"{row.job_id}, which is set aside"
    return found


def slots_of(generation: GenerationRow) -> tuple[Slot, ...]:
    """Return the slots of a gang; empty if the stored placement cannot be read (and the engine reported none)."""
    try:
        return placement_from_json(generation.placement).slots
    except (TypeError, ValueError, OverflowError):
        return ()


def culprits(context: PassContext, states: Sequence[JobState], fresh: Callable[[], Scheduler]) -> list[str]:
    """Return the jobs (or recurring tasks) without which the scheduler would not have failed in this pass.

    ``states`` are those that the last scheduler was, or would be, restored from; ``fresh`` creates a scheduler without
    jobs. The events that the scheduler got in this pass are replayed with subsets of the jobs.
    """
    owners = {state.job.job_id: None for state in states} | dict.fromkeys(
        owner for event in context.fed if (owner := owner_of(event)) is not None
    )

    def works(some: Sequence[str]) -> bool:
        chosen, scheduler = set(some), fresh()
        try:
            scheduler.restore([state for state in states if state.job.job_id in chosen], context.now)
            for event in context.fed:
                owner = owner_of(event)
                if owner is None or owner in chosen:
                    scheduler.handle(event, context.now)
        except Exception:  # noqa: BLE001  (whether it fails is all that is asked)
            return False
        return True

    return find_culprits(list(owners), works)


def owner_of(event: ev.Event | ev.CalendarEvent) -> str | None:
    """Return the job or the recurring task that an event concerns; None if there is neither."""
    match event:
        case ev.JobSubmitted():
            return event.job.job_id
        case ev.RunExpected():
            return event.run.task
        case ev.RunForgotten():
            return event.run_id.rpartition("@")[0]
        case ev.WakeUp() | ev.NodeJoined() | ev.NodeLost() | ev.NodeDraining():
            return None
        case _:
            return event.job_id
