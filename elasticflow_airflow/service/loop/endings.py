"""Ends jobs: decides what the end of their last generation means, and records their result.

Works on rows and files of the job; calls no engine. A job is over when its last worker has left and every checkpoint
is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from elasticflow_airflow.api import JobResult, State
from elasticflow_airflow.api.event_data import RestartingData, WarningData, end_data
from elasticflow_airflow.engines.port import GangOutcome
from elasticflow_airflow.runtime.protocol import UNTRAINED, RescaleMode
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.service.decisions import loss_target, task_history
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.store.documents.generation_notes import OutOfMemory
from elasticflow_airflow.service.store.store import HeldSlots
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import move
from elasticflow_airflow.times import duration, moment

Interval = tuple[float, float]
Held = GenerationRow | HeldSlots

_NOTHING_KNOWN = (
    "the script ended with status 0, and reported no step: how long it is was not said, and nothing is known of what it"
    " has trained"
)


def conclude(context: PassContext) -> None:
    """End every job whose end was decided and whose workers have all left."""
    for row in context.rows:
        if row.ending and not row.terminal and not context.open_of(row):
            with context.on_behalf_of(row.job_id, "bringing it to its end"):
                _conclude(context, row)


def _conclude(context: PassContext, row: IncarnationRow) -> None:
    ending = row.ending
    assert ending is not None  # checked by the caller
    state, reason = ending.state, ending.reason
    if state is State.SUCCEEDED and ending.use_checkpoint and row.promoted is None:
        state, reason = State.FAILED, f"{reason}, but there is no checkpoint to use"
        row.ending = ending = replace(ending, failure=reason)
    row.finished_at = context.now
    row.failure = ending.failure
    if ending.is_done:
        _measure_tail(context, row)
        if row.deadline_at is not None:
            reason = f"{reason}, {_beside_the_deadline(row.deadline_at, context.now)}"
    if state is not State.REJECTED:
        row.result = result_of(context, row, state)
    if state is State.SUCCEEDED:
        task_history.remember(context, row, complete=context.knows_curve(row), success=True)
        context.learned = True
    row.terminal = True
    row.secret_env = None
    row.scheduler_state = None
    row.at_risk = False
    row.lease_expires_at = None
    row.projected_finish_at = row.finished_at if state is State.SUCCEEDED else None
    move(row, state, reason)
    if state is not State.REJECTED:
        context.event(end_data(state, row.result), reason, row)
    # Only now may the scheduler give the slots to others. It goes by job id, as it knows no incarnations.
    if row.introduced and context.knows(row.job_id):
        if state is State.SUCCEEDED:
            feed(context, ev.JobFinished(row.job_id))
        elif state is State.CANCELLED:
            feed(context, ev.JobCancelled(row.job_id))
        else:
            feed(context, ev.JobFailed(row.job_id))


def _beside_the_deadline(deadline_at: float, now: float) -> str:
    side = "before" if now <= deadline_at else "after"
    return f"{duration(abs(deadline_at - now))} {side} the deadline {moment(deadline_at)}"


def _measure_tail(context: PassContext, row: IncarnationRow) -> None:
    if row.last_step_at is not None:
        tail_s = (
            min(max(0.0, context.now - row.last_step_at), context.lived_s(row)) + context.settings.wake_up_allowance_s
        )
        row.costs = row.costs.updated(tail_s=tail_s)


def result_of(context: PassContext, row: IncarnationRow, state: State) -> JobResult:
    """Return the result of a job that ends in ``state`` now."""
    generations = context.tx.generations(row.job_id, row.incarnation)
    path = None
    if row.promoted is not None:
        path = str(context.files.checkpoint(row.job_id, row.incarnation, row.promoted.path))
    deadline_at = row.deadline_at
    finished_at = context.now
    return JobResult(
        checkpoint_path=path,
        checkpoint_digest=row.promoted.digest if row.promoted else None,
        steps=row.step,
        final_loss=row.loss,
        metrics=row.metrics,
        finished_at=finished_at,
        met=None if deadline_at is None else state is State.SUCCEEDED and finished_at <= deadline_at,
        slack_s=None if deadline_at is None else deadline_at - finished_at,
        gpu_seconds=gpu_seconds(generations, finished_at),
        rescales=rescales(generations),
    )


def gpu_seconds(generations: Sequence[Held], now: float) -> float:
    """Return the seconds for which slots were held; slots shared by two generations (a change in place) count once."""
    return sum((until - since for since, until in holdings(generations, now)), 0.0)


def holdings(generations: Sequence[Held], now: float) -> list[Interval]:
    """Return when the slots of one job were held, as intervals; those of the same slot do not overlap."""
    by_slot: dict[tuple[str, int], list[Interval]] = {}
    for g in generations:
        if g.holding_at is not None:
            for node, index in g.placement:
                until = now if g.ended_at is None else g.ended_at
                by_slot.setdefault((str(node), int(index)), []).append((g.holding_at, until))
    return [one for intervals in by_slot.values() for one in union(intervals)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not overlap, in order."""
    found: list[Interval] = []
    for since, until in sorted(intervals):
        if until <= since:
            continue
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return found


def rescales(generations: list[GenerationRow]) -> int:
    """Return how often the number of workers changed between gangs that trained (without profiling)."""
    sizes = [g.workers for g in generations if g.purpose == Purpose.TRAIN and g.running_at is not None]
    return sum(1 for before, after in pairwise(sizes) if before != after)


def settle(context: PassContext) -> None:
    """Decide what the end of each ended and judged generation means."""
    for generation in sorted(context.generations.values(), key=lambda g: g.generation):
        if generation.state == "ended" and generation.judged and not generation.handled:
            with context.on_behalf_of(generation.job_id, "deciding what the end of its workers means"):
                _handle(context, generation)


def _handle(context: PassContext, generation: GenerationRow) -> None:
    row = context.row(generation.job_id, generation.incarnation)
    generation.handled = True
    if row is None:
        return
    # A generation is cleared only once no older one is open: changes in place can overtake each other.
    left = context.open_of(row)
    gone = left[0].generation - 1 if left else generation.generation
    row.cleared_generation = max(row.cleared_generation, gone)
    if not row.terminal:
        _settle(context, row, generation)


def _settle(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    outcome = generation.outcome
    if generation.notes.too_many and not row.ending:
        if row.desired_generation == generation.generation:
            _again(context, row, f"its script has {row.logical_workers} logical workers, fewer than there were workers")
        return
    if generation.notes.kind == UNTRAINED and not row.ending:
        context.end(row, State.FAILED, str(generation.notes.message), failure=_failure(generation))
        return
    if outcome == GangOutcome.FINISHED and not (row.ending and row.ending.state is not State.SUCCEEDED):
        _finished(context, row, generation)
        return
    if row.ending:
        return
    was_desired = row.desired_generation == generation.generation or _trained_until_now(context, row, generation)
    if outcome == GangOutcome.FAILED and generation.notes.kind == "nan_loss":
        context.end(row, State.FAILED, f"the loss is not a number at step {row.step}", failure=_failure(generation))
    elif generation.notes.out_of_memory is not None and outcome == GangOutcome.FAILED:
        _out_of_memory(context, row, generation)
    elif not was_desired:
        if outcome == GangOutcome.FAILED and not generation.notes.dropped:
            reason = f"generation {generation.generation} failed while it was leaving: {_first_line(generation)}"
            context.event(WarningData(generation=generation.generation), reason, row)
    elif generation.stop_cause == "hang":
        _again(context, row, f"restarts after a hang at step {row.step}")
    elif generation.stop_cause == "deaths":
        _restart_or_fail(context, row, generation, _first_line(generation), progressed=True)
    elif outcome == GangOutcome.FAILED:
        _failed(context, row, generation)
    elif outcome == GangOutcome.LOST:
        _lost(context, row, generation)
    else:
        _again(context, row, "its workers have left, which nobody asked for (was the machine asleep?)")


def _trained_until_now(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> bool:
    """Return whether a generation ended before its successor in place switched: then the job has lost its gang."""
    change = context.desired(row)
    return (
        change is not None
        and change.mode == RescaleMode.IN_PLACE
        and change.continues == generation.generation
        and change.running_at is None
        and change.first_step is None
    )


def _finished(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    finished = generation.notes.finished
    total = row.total_steps
    done = row.step
    if finished is None and row.ever_reported and total is not None and done < total - 1:
        # A plain script may count its steps from 0.
        reason = (
            f"the script ended with status 0 after {done} of {total} steps: it must go on until all are done"
            " (did it stop early, or resume from nothing?)"
        )
        context.end(row, State.FAILED, reason, failure=reason)
        return
    if finished is None and (untrained := _trained_nothing(row, generation)) is not None:
        context.end(row, State.FAILED, untrained, failure=untrained)
        return
    reached, early = loss_target.reached(row), None if finished is None else finished.early
    if finished is not None and total is not None and done < total and not reached and not early:
        reason = (
            f"the script says that it is finished after {done} of {total} steps: if that is meant, let it say why, with"
            " session.finish(early=...)"
        )
        context.end(row, State.FAILED, reason, failure=reason)
        return
    if finished is not None and finished.path and (row.promoted is None or row.promoted.path != finished.path):
        reason = f"the final checkpoint {finished.path} is missing or damaged"
        _restart_or_fail(context, row, generation, reason, progressed=True)
        return
    parts = [f"done: {done} steps"]
    if finished is None and not row.ever_reported:
        parts = [_NOTHING_KNOWN]
    if early:
        parts = [f"done early, after {done} of {total} steps: {early}"]
    if reached and row.target:
        parts.append(f"target loss {row.target.loss:g} reached")
    if row.loss is not None:
        parts.append(f"loss {row.loss:.4g}")
    context.end(row, State.SUCCEEDED, ", ".join(parts))


def _trained_nothing(row: IncarnationRow, generation: GenerationRow) -> str | None:
    """Return why status 0 without any reported step is no success; None if nothing speaks against a success."""
    if generation.notes.uses_session and generation.first_step is None:
        return (
            "the script uses elasticflow_airflow.runtime, and ended with status 0 before its first session.step(), by"
            " os._exit() or the like: nothing was trained"
        )
    if row.ever_reported:
        return None
    return _unread_progress(row) or _unreported_length(row)


def _unreported_length(row: IncarnationRow) -> str | None:
    """Return the failure of a script that reported no step of a training of known length; None if there is none."""
    epochs = row.submission.length.epochs
    if row.total_steps is None and epochs is None:
        return None
    length = f"{epochs} epochs" if row.total_steps is None else f"{row.total_steps} steps"
    return (
        f"the script ended with status 0 after reporting 0 of {length}: a script that does not use the session needs"
        " progress_regex= or progress_file= where its length is known; without, leave steps= and epochs= out, and"
        " nothing will be known of what it has trained"
    )


def _unread_progress(row: IncarnationRow) -> str | None:
    """Return the failure of a script whose declared progress output never showed a step; None if there is none."""
    asked = row.submission
    named = {"progress_regex": asked.progress_regex, "progress_file": asked.progress_file}
    said = " or ".join(f"{name}={value!r}" for name, value in named.items() if value)
    if not said:
        return None
    return f"the script ended with status 0, and {said} never showed a step: nothing is known to be trained"


def _out_of_memory(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    said = generation.notes.out_of_memory or OutOfMemory()
    global_batch = row.submission.global_batch_size
    micro = said.micro_batch_size or row.micro_batch_size or global_batch
    if micro <= 1:
        reason = "the device's memory does not suffice for a micro-batch of 1: use a smaller model or a larger device"
        context.end(row, State.FAILED, reason, failure=f"{reason}\n{said.message}".strip())
        return
    row.micro_batch_size = smaller = (micro + 1) // 2  # Rounded up, so that 3 becomes 2: BatchNorm cannot train with 1.
    _again(
        context,
        row,
        f"out of memory with a micro-batch of {micro}: tries again with {smaller}; the global batch stays"
        f" {global_batch}",
    )


def _failed(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    if generation.notes.exit_zero and generation.notes.finished is None:
        if (untrained := _trained_nothing(row, generation)) is not None:
            context.end(row, State.FAILED, untrained, failure=untrained)
            return
        total = f" of {row.total_steps}" if row.total_steps is not None else ""
        reason = f"the script ended with status 0 after {row.step}{total} steps, before it was finished"
        if row.total_steps is not None and row.step >= row.total_steps:
            reason += ": a loop of your own ends with session.finish(), which saves the result"
        if not row.ever_reported:
            context.end(row, State.SUCCEEDED, _NOTHING_KNOWN)
            return
        context.end(row, State.FAILED, reason, failure=reason)
        return
    by_signal = generation.notes.signalled
    if generation.notes.kind == "bad_checkpoint":
        by_signal = True
    saved = row.promoted is not None and row.promoted.step > row.restart_step
    progressed = saved or row.step > max(row.restart_step, 0)
    _restart_or_fail(context, row, generation, _first_line(generation), progressed=progressed or by_signal)


def _lost(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    row.losses = 1 if _saved_step(row) > max(row.restart_step, 0) else row.losses + 1
    if row.losses > context.settings.max_losses:
        reason = f"lost its workers {row.losses} times in a row without progress: {_first_line(generation)}"
        context.end(row, State.FAILED, reason, failure=_failure(generation))
        return
    _again(context, row, f"lost its workers: {_first_line(generation)}")


def _restart_or_fail(
    context: PassContext, row: IncarnationRow, generation: GenerationRow, reason: str, *, progressed: bool
) -> None:
    if row.restarts >= context.settings.max_restarts or not progressed:
        why = "without progress since the start" if not progressed else f"after {row.restarts} restarts"
        where = f"at step {row.step}" + (f" of {row.total_steps}" if row.total_steps is not None else "")
        context.end(row, State.FAILED, f"failed {where}, {why}: {reason}", failure=_failure(generation, reason))
        return
    row.restarts += 1
    _again(context, row, f"restart {row.restarts} of {context.settings.max_restarts} after a failure: {reason}")


def _again(context: PassContext, row: IncarnationRow, reason: str) -> None:
    """Restart a job whose gang is gone; the scheduler decides when and where the next one starts."""
    step, lost = _saved_step(row), row.step
    row.restart_step = step
    row.desired_generation = None
    row.step = min(row.step, step) if row.promoted else row.step
    if row.promoted is None and lost > 0:
        where = f"begins again at step 0, as there was no checkpoint yet ({lost} steps are lost)"
    else:
        where = f"goes on from step {step}"
    context.event(RestartingData(step=step), f"{reason}; {where}", row)
    if context.knows(row.job_id):
        if row.promoted:
            loss_target.tell(context, row, step=step)
        feed(context, ev.GangLost(row.job_id))


def _saved_step(row: IncarnationRow) -> int:
    """Return the step from which the next workers go on."""
    return 0 if row.promoted is None else row.promoted.step


def _failure(generation: GenerationRow, otherwise: str = "no message") -> str:
    return generation.failure or generation.notes.message or otherwise


def _first_line(generation: GenerationRow) -> str:
    text = generation.notes.message or generation.failure or "no message"
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
