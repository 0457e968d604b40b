"""Handles changes of a job's workers in place that fail: lost workers, failed joins, fallbacks to a restart.

A change in place is a generation that *continues* another: until all its workers report that they have switched, the
previous generation trains on, and both are open. What can go wrong, and the response:

- a worker of the training gang dies or is given up: a generation of the surviving workers starts at once, from memory;
- a worker that was to join dies: a generation with the previous slots starts, and the scheduler decides again;
- the change is not done in time, cannot be ordered, or a join fails again: it is done by stop, save and restart;
- two jobs wait for each other's slots: one of them makes room by a restart.

The scheduler is told of generations that the service orders by itself once they run. Rows in, rows out; calls no
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elasticflow_airflow.api import State
from elasticflow_airflow.api.event_data import (
    JoinFailedData,
    NotMeasuredData,
    ResizedData,
    RestartInsteadData,
    WorkerLostData,
)
from elasticflow_airflow.engines.port import GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.next_generation import can_continue, gave_up, order
from elasticflow_airflow.service.decisions.pass_context import PassContext, alive
from elasticflow_airflow.service.store.documents.scheduler_values import placement_from_json, slots_to_json
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import ORDERED

LEFT_ALONE_S = 5.0
"""Grace period: workers of a finished training exit shortly after each other, after reporting that it is finished."""


def heal(context: PassContext) -> None:
    """Handle workers that died since the last pass, in gangs that go on without them."""
    for row in context.rows:
        with context.on_behalf_of(row.job_id, "looking after its workers"):
            _heal(context, row)


def _heal(context: PassContext, row: IncarnationRow) -> None:
    desired, training = context.desired(row), context.training(row)
    if desired is None or training is None or row.terminal or row.ending or desired.desired != "run":
        return
    if training.notes.finished:
        return
    workers = _workers(context, training)
    codes = {worker.exit_code for worker in workers} - {None}
    is_session = training.notes.in_place is not None
    if is_session and desired is training and 0 in codes and any(worker.exit_code is None for worker in workers):
        _end_left_alone(context, row, training)
        return
    if not training.notes.in_place:
        return
    leaving = 0 in codes  # It is done; or, in a change, it is not part of the new gang.
    if any(code > 0 for code in codes if code is not None) or (leaving and desired is training):
        return  # It ends, by failure or success of its script: not handled here.
    known = context.lost_since(row, training)
    dead = [w for w in workers if (w.exit_code or 0) < 0 and w.worker_id not in known]
    if dead:
        said = _names(dead, [f"died ({_signal(worker)})" for worker in dead])
        recover(context, row, training, {worker.worker_id for worker in dead}, Reason(said))
    elif desired is not training and not leaving and desired.mode == RescaleMode.IN_PLACE:
        _look_after_joiners(context, row, training, desired)


def _end_left_alone(context: PassContext, row: IncarnationRow, training: GenerationRow) -> None:
    """End a training whose worker exited without reporting an end: the others would wait for it for ever."""
    left_at = training.notes.left_at
    if left_at is None:
        training.notes = replace(training.notes, left_at=context.now)
    elif context.now > left_at + LEFT_ALONE_S:
        left = [worker for worker in _workers(context, training) if worker.exit_code == 0]
        said = _names(left, ["ended with status 0" for _ in left])
        total = f" of {row.total_steps}" if row.total_steps is not None else ""
        reason = Reason(
            "{said} after {step}{total} steps, before it was finished, and left the others alone",
            said=said,
            step=row.step,
            total=total,
        )
        context.end(row, State.FAILED, reason, failure=reason)


def recover(context: PassContext, row: IncarnationRow, training: GenerationRow, lost: set[str], what: Reason) -> None:
    """Have the surviving workers go on from memory; ``what`` describes what happened to the ``lost``."""
    known = context.lost_since(row, training) | lost
    living = [w for w in _workers(context, training) if w.exit_code is None and w.worker_id not in known]
    if not living:
        return  # The engine reports the end of the gang.
    desired = context.desired(row)
    window_s = context.settings.recovery_window_s
    before = [at for at in row.in_place.recoveries if context.now - at < window_s]
    if len(before) >= context.settings.max_recoveries:
        again = "; it is the {ordinal} time within {window_s:duration}" if before else ""
        reason = Reason(
            "{what}" + again + ": restarts from the last checkpoint",
            what=what,
            ordinal=_ordinal(len(before) + 1),
            window_s=window_s,
        )
        context.event(WorkerLostData(generation=training.generation, lost=sorted(lost)), reason, row)
        for generation in (desired, training):
            if generation is not None:
                generation.desired, generation.stop_cause = "stop", "deaths"
        training.notes = replace(training.notes, message=str(reason))
        return
    row.in_place = replace(row.in_place, recoveries=(*before, context.now))
    _drop_unswitched(context, row, training)
    slots = survivors(training.placement, [list(w.slot) for w in living])
    on = "{workers:#worker} goes on" if len(slots) == 1 else "{workers:#worker} go on"
    reason = Reason("{what}: " + on + " from memory", what=what, workers=len(slots))
    generation = order(
        context,
        row,
        slots=slots,
        purpose=training.purpose,
        reason=reason,
        continues=training,
        lost=known,
        own=True,
    )
    context.event(
        WorkerLostData(
            generation=generation.generation,
            workers=len(slots),
            workers_before=training.workers,
            slots=slots,
            lost=sorted(lost),
            mode=generation.mode,
        ),
        reason,
        row,
    )


def survivors(placement: Sequence[Sequence[object]], living: Sequence[Sequence[object]]) -> list[list[object]]:
    """Return the slots that go on: as many as possible, a power of two, and if possible an aligned part of the gang."""
    there = [list(slot) for slot in placement if list(slot) in [list(one) for one in living]]
    size = 1 << (len(there).bit_length() - 1)
    row = sorted((list(slot) for slot in placement), key=lambda slot: (str(slot[0]), slot[1]))
    for start in range(0, len(row) - size + 1, size):
        part = row[start : start + size]
        if all(slot in there for slot in part):
            return [slot for slot in there if slot in part]
    return there[:size]


def fall_back(context: PassContext, row: IncarnationRow, generation: GenerationRow, why: Reason) -> None:
    """Replace a change in place that failed by stop, save and restart."""
    _count_failure(row)
    training = context.training(row)
    before = training.workers if training is not None and training is not generation else 0
    _drop_unswitched(context, row, training)
    generation.notes = replace(generation.notes, dropped=True)
    further = " and so are all further changes" if gave_up(context, row) else ""
    reason = Reason("{why}: changed by stop, save and restart instead{further}", why=why, further=further)
    restart = order(
        context,
        row,
        slots=generation.placement,
        purpose=generation.purpose,
        reason=reason,
        continues=None,
        own=generation.notes.own,
    )
    context.event(
        RestartInsteadData(
            generation=restart.generation,
            workers=restart.workers,
            workers_before=before,
            slots=restart.placement,
            mode=restart.mode,
        ),
        reason,
        row,
    )


def break_circles(context: PassContext) -> None:
    """Have one of the jobs that wait in a circle for each other's slots make room and restart."""
    waiting: dict[str, tuple[IncarnationRow, GenerationRow, set[str]]] = {}
    on_slots = Holders(context)
    for row in context.rows:
        with context.on_behalf_of(row.job_id, "looking for whom it waits"):
            due = context.due(row)
            if due is None or due.state != ORDERED or row.ending or due.notes.vacate:
                continue
            holders = on_slots.before(due)
            if holders and any(alive(g) for g in context.open_of(row)):
                waiting[row.job_id] = (row, due, holders)
    for job_id in sorted(waiting):
        if job_id in waiting and _reaches(waiting, job_id, job_id):
            row, due, holders = waiting.pop(job_id)
            due.mode, due.continues, due.lost = RescaleMode.RESTART.value, None, []
            due.notes = replace(due.notes, vacate=True)
            reason = Reason(
                "its new slots are held by {others:job}, waiting for its own: saves, makes room, and starts again",
                others=sorted(holders),
            )
            context.event(RestartInsteadData(mode=due.mode, workers=due.workers), reason, row)


class Holders:
    """The living generations on each slot. Valid as long as no generation changes."""

    def __init__(self, context: PassContext) -> None:
        self._on: dict[tuple[Any, ...], list[GenerationRow]] = {}
        for generation in context.generations.values():
            if alive(generation):
                for slot in generation.placement:
                    self._on.setdefault(tuple(slot), []).append(generation)

    def before(self, wanted: GenerationRow) -> set[str]:
        """Return other jobs whose gangs still hold slots of a generation, which has to wait until they have left."""
        there = (g.job_id for slot in wanted.placement for g in self._on.get(tuple(slot), ()))
        return {job_id for job_id in there if job_id != wanted.job_id}


def go_on_as_planned(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Tell the scheduler of a gang that the service ordered by itself, or move the gang to its newly planned slots.

    While the surviving workers re-formed, the scheduler may have given their slots to other jobs.
    """
    state = context.scheduler.state(row.job_id)
    if state is None:
        return
    if not _given_away(context, generation):
        feed(context, ev.GangReformed(row.job_id, placement_from_json(generation.placement)))
        return
    planned = slots_to_json(state.placement.slots)
    if not planned:
        return
    reason = Reason("goes on to the slots that were planned for it")
    following = order(
        context,
        row,
        slots=planned,
        purpose=generation.purpose,
        reason=reason,
        continues=can_continue(context, row),
    )
    context.event(
        ResizedData(
            generation=following.generation,
            workers=following.workers,
            workers_before=generation.workers,
            slots=planned,
            purpose=generation.purpose,
            mode=following.mode,
        ),
        reason,
        row,
    )


def _look_after_joiners(
    context: PassContext, row: IncarnationRow, training: GenerationRow, change: GenerationRow
) -> None:
    """Give up a change whose new workers die or do not answer: the training gang loses nothing by it."""
    if change.running_at is not None:
        return
    staying = {worker.worker_id for worker in _workers(context, training)}
    absent = set(training.notes.absent)
    joiners = [w for w in _workers(context, change) if w.worker_id not in staying]
    dead = [w for w in joiners if w.exit_code is not None or w.worker_id in absent]
    if not dead and change.state != GangState.ENDED:
        return
    if dead:
        said = Reason(_names(dead, [_why_it_did_not_join(worker) for worker in dead]))
    else:
        said = Reason(
            "generation {generation} ended before it could train: {why:text}",
            generation=change.generation,
            why=change.failure or "nobody said why",
        )
    if change.purpose == Purpose.PROFILE and not change.notes.measured and context.knows(row.job_id):
        change.notes = replace(change.notes, measured=True)
        _count_failure(row)
        _stay(context, row, training, dead, said)
        context.event(
            NotMeasuredData(workers=change.workers),
            Reason("{workers} workers could not be measured: {said}", workers=change.workers, said=said),
            row,
        )
        feed(context, ev.JobMeasured(row.job_id, change.workers, None, failed=True))
    elif row.in_place.failures + 1 >= context.settings.in_place_attempts or _given_away(context, training):
        fall_back(context, row, change, said)
    else:
        _count_failure(row)
        _stay(context, row, training, dead, said)


def _why_it_did_not_join(worker: WorkerObservation) -> str:
    if worker.exit_code is None:
        return "did not answer when it was to join"
    return f"ended ({_signal(worker)}) before it could join"


def _stay(
    context: PassContext,
    row: IncarnationRow,
    training: GenerationRow,
    dead: Sequence[WorkerObservation],
    said: Reason,
) -> None:
    _drop_unswitched(context, row, training)
    reason = Reason("{said}: stays with {workers:#worker} where it was", said=said, workers=training.workers)
    generation = order(
        context,
        row,
        slots=training.placement,
        purpose=training.purpose,
        reason=reason,
        continues=training,
        lost={worker.worker_id for worker in dead},
        own=True,
    )
    context.event(
        JoinFailedData(
            generation=generation.generation,
            workers=training.workers,
            workers_before=training.workers,
            slots=training.placement,
            lost=generation.lost,
            mode=generation.mode,
        ),
        reason,
        row,
    )


def _given_away(context: PassContext, training: GenerationRow) -> bool:
    """Return whether the scheduler has given slots of this gang to other jobs."""
    mine = {(str(node), int(index)) for node, index in training.placement}
    return any(
        tuple(slot) in mine
        for state in context.scheduler.states()
        if state.job.job_id != training.job_id
        for slot in state.placement.slots
    )


def _drop_unswitched(context: PassContext, row: IncarnationRow, training: GenerationRow | None) -> None:
    """Mark changes that were not completed as dropped: their outcome does not affect the job."""
    for generation in context.open_of(row):
        if training is not None and generation.generation > training.generation:
            generation.notes = replace(generation.notes, dropped=True)


def _count_failure(row: IncarnationRow) -> None:
    row.in_place = replace(row.in_place, failures=row.in_place.failures + 1)


def _workers(context: PassContext, generation: GenerationRow) -> tuple[WorkerObservation, ...]:
    return context.workers.get((generation.job_id, generation.generation), ())


def _reaches(waiting: dict[str, tuple[IncarnationRow, GenerationRow, set[str]]], start: str, goal: str) -> bool:
    seen: set[str] = set()
    front = list(waiting[start][2])
    while front:
        job_id = front.pop()
        if job_id == goal:
            return True
        if job_id not in seen and job_id in waiting:
            seen.add(job_id)
            front += waiting[job_id][2]
    return False


def _names(workers: Sequence[WorkerObservation], fates: Sequence[str]) -> str:
    return ", ".join(
        f"worker {worker.worker_id} on {worker.slot.node_id}:{worker.slot.index} {fate}"
        for worker, fate in zip(workers, fates, strict=True)
    )


def _signal(worker: WorkerObservation) -> str:
    code = worker.exit_code or 0
    return f"signal {-code}" if code < 0 else f"status {code}"


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
