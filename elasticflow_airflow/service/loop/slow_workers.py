"""Moves gangs off slots of persistently slow workers, as off draining nodes: a slow worker holds up its whole gang.

The workers' measurements are compared within the gang (``scheduler_core.jobs.stragglers``). Before anything is done, a
copy of the scheduler is asked for the outcome: the gang moves to other slots if it can, or goes on with fewer workers
if no deadline suffers and that is faster; otherwise it stays. The slot is avoided for a while. Rows in, rows out; calls
no engine. ``GenerationRow.notes`` holds ``windows`` (compute seconds per step, by worker) and ``slow`` (by slow worker:
when a way to leave its slot was last tried).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from elasticflow_airflow.api.event_data import SlotBackData, SlowWorkerData
from elasticflow_airflow.engines.port import GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import Report
from elasticflow_airflow.scheduler_core.jobs.stragglers import StragglerRule, add_window, find_stragglers
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import JobState
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.next_generation import can_continue
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow

_ASK_AGAIN_S = 30.0
"""Seconds until a slow worker that was left in place is tried again, as other slots may be free by then."""
_LEAST_GAIN = 0.1
"""Fraction of the gang's step. If waiting for a worker costs less (most of a step is no computing), it is harmless."""
_MOST_GAIN = 0.9
"""Fraction of a step's time: leaving a slow slot is never expected to save more."""


@dataclass(frozen=True, slots=True)
class _Slow:
    """A slow worker: its compute time per step, and the median of the other workers' (seconds)."""

    worker: WorkerObservation
    step_s: float
    median_s: float

    @property
    def seen(self) -> Reason:
        slot = self.worker.slot
        return Reason(
            "worker {worker} on {slot} computes {step_s:.3g} s a step, and the median of the others is {median_s:.3g} "
            "s",
            worker=self.worker.worker_id,
            slot=slot.name,
            step_s=self.step_s,
            median_s=self.median_s,
        )


def note(context: PassContext, generation: GenerationRow, report: Report) -> None:
    """Record a worker's own time per step, without waiting for others and without what only rank 0 does."""
    data = report.data
    compute, steps = data.get("compute_s"), data.get("window_steps")
    if not isinstance(compute, int | float) or not isinstance(steps, int):
        return
    loading = data.get("data_s")
    own_s = float(compute) + (float(loading) if isinstance(loading, int | float) else 0.0)
    windows = add_window(generation.notes.windows, report.worker_id, own_s, steps, _rule(context))
    generation.notes = replace(generation.notes, windows=windows)


def watch(context: PassContext) -> None:
    """Handle persistently slow workers, at most one per gang and pass."""
    for row in context.rows:
        with context.on_behalf_of(row.job_id, "comparing the speeds of its workers"):
            _watch(context, row)


def _watch(context: PassContext, row: IncarnationRow) -> None:
    training = context.training(row)
    if training is None or row.terminal or row.ending or training is not context.desired(row):
        return
    usual = training.state == GangState.RUNNING and training.running_at is not None
    if not usual or training.purpose != Purpose.TRAIN or training.notes.finished:
        return
    slow = _find(context, row, training)
    if slow is not None:
        known = training.notes.slow
        training.notes = replace(training.notes, slow={**known, slow.worker.worker_id: context.now})
        _answer(context, row, training, slow, again=slow.worker.worker_id in known)


def take_back(context: PassContext) -> None:
    """Stop avoiding slots whose time has expired."""
    for row in context.tx.avoided():
        if row.until_at <= context.now:
            context.tx.forget_avoided(row)
            reason = Reason(
                "slot {node}:{slot} is used again: {why}", node=row.node_id, slot=row.slot_index, why=row.reason
            )
            context.tx.add_event(SlotBackData(node_id=row.node_id, slot=row.slot_index), reason)


def _find(context: PassContext, row: IncarnationRow, training: GenerationRow) -> _Slow | None:
    windows = training.notes.windows
    workers = {w.worker_id: w for w in context.workers.get((training.job_id, training.generation), ())}
    if len(workers) < 2 or any(worker.exit_code is not None for worker in workers.values()):
        return None
    for found in find_stragglers(windows, list(workers), _rule(context)):
        if context.now - training.notes.slow.get(found.worker_id, -math.inf) >= _ASK_AGAIN_S:
            others = [median(windows[worker_id]) for worker_id in workers if worker_id != found.worker_id]
            slow = _Slow(workers[found.worker_id], median(windows[found.worker_id]), median(others))
            if row.steps_per_s and (slow.step_s - slow.median_s) * row.steps_per_s >= _LEAST_GAIN:
                return slow
    return None


def _answer(context: PassContext, row: IncarnationRow, training: GenerationRow, slow: _Slow, *, again: bool) -> None:
    """Have the gang leave the slot if that helps and does no harm; write an event, once only if the gang stays."""
    until_s = context.now + context.settings.straggler_avoid_s
    slot = slow.worker.slot
    event = ev.SlotSlow(row.job_id, slot, until_s, _gain(context, row, slow))
    against, workers = _outcome(context, row, training, event)
    data = SlowWorkerData(
        action="left",
        worker=slow.worker.worker_id,
        slot=[slot.node_id, slot.index],
        step_s=slow.step_s,
        median_s=slow.median_s,
        slowdown=slow.step_s / slow.median_s,
    )
    if against:
        if not again:
            context.event(data, Reason("{seen}: it is left there, as {against}", seen=slow.seen, against=against), row)
        return
    action = "moved" if workers >= training.workers else "shrunk"
    done = "its gang moves to other slots" if action == "moved" else "its gang goes on with {workers} of its workers"
    kind = f"{{seen}}: {done}, and the slot is avoided until {{until_s:moment}}"
    reason = Reason(kind, seen=slow.seen, workers=workers, until_s=until_s)
    context.event(replace(data, action=action, until_at=until_s), reason, row)
    context.tx.avoid(
        slot.node_id,
        slot.index,
        until_s,
        Reason("worker {worker_id} of {job:job} was slow there", worker_id=slow.worker.worker_id, job=row.job_id),
    )
    feed(context, event)


def _gain(context: PassContext, row: IncarnationRow, slow: _Slow) -> float:
    """Return the factor by which the gang would speed up without the worker, as the others need not wait for it."""
    state = context.scheduler.state(row.job_id)
    if not row.steps_per_s or state is None or state.job.curve is None:
        return 1.0
    step_s = 1.0 / row.steps_per_s
    likely = 1.0 / (step_s - min(slow.step_s - slow.median_s, _MOST_GAIN * step_s))
    known = state.job.curve.steps_per_s.get(state.placement.workers)
    return 1.0 if known is None else min(max(1.0, likely / known), slow.step_s / slow.median_s)


def _outcome(
    context: PassContext, row: IncarnationRow, training: GenerationRow, event: ev.SlotSlow
) -> tuple[Reason, int]:
    """Ask a copy of the scheduler. Return why the gang should stay (empty: it should leave), and its new size."""
    if not context.settings.straggler_removal:
        return Reason("ELASTICFLOW_STRAGGLER_REMOVAL is off"), 0
    if can_continue(context, row) is None:
        return Reason("its session cannot change its workers while it trains"), 0
    before = {state.job.job_id: state for state in context.scheduler.states()}
    trial = context.scheduler.twin()
    decisions = trial.handle(event, context.now)
    after = {state.job.job_id: state for state in trial.states()}
    mine = after.get(row.job_id)
    if mine is None or not mine.placement.slots or event.slot in mine.placement.slots:
        return Reason("no other slots are free"), 0
    workers = mine.placement.workers
    if any(isinstance(decision, de.AtRisk) for decision in decisions):
        return Reason("no other slots are free, and without this one a deadline would be missed"), 0
    losers = [name for name in before if name != row.job_id and _loses(before[name], after.get(name))]
    if losers:
        return Reason("the other slots are held by {others:job}", others=sorted(losers)), 0
    if workers < training.workers and _speed(mine) <= (row.steps_per_s or 0.0):
        return Reason(
            "no other slots are free, and with {workers} of its workers it would be slower still", workers=workers
        ), 0
    return Reason(""), workers


def _loses(before: JobState, after: JobState | None) -> bool:
    return after is None or after.placement.workers < before.placement.workers


def _speed(state: JobState) -> float:
    curve = state.job.curve
    known = {} if curve is None else curve.steps_per_s
    return max((speed for size, speed in known.items() if size <= state.placement.workers), default=0.0)


def _rule(context: PassContext) -> StragglerRule:
    s = context.settings
    return StragglerRule(windows=s.straggler_windows, least_excess=s.straggler_excess)
