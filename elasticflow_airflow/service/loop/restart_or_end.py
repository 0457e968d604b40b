"""Decides what the end of a generation means: its job trains again, or is over. Ends jobs, and records their results.

Works on rows and files of the job; calls no engine. A job is over when its last worker has left and every checkpoint
is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elasticflow_airflow.api import JobResult, State
from elasticflow_airflow.api.event_data import RestartingData, WarningData, end_data
from elasticflow_airflow.engines.port import GangOutcome
from elasticflow_airflow.runtime.protocol import DEVICE_FAULT, UNTRAINED, RescaleMode
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions import loss_target, task_history
from elasticflow_airflow.service.decisions.deciding import feed, feed_ends
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.store.documents.generation_notes import OutOfMemory
from elasticflow_airflow.service.store.held_slots import gpu_seconds, rescales
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import move

_END_AS: Mapping[str, type[ev.JobEnd]] = {State.SUCCEEDED: ev.JobFinished, State.CANCELLED: ev.JobCancelled}

_NOTHING_KNOWN = Reason(
    "the script ended with status 0, and reported no step: how long it is was not said, and nothing is known of what it"
    " has trained"
)


def conclude(context: PassContext) -> None:
    """End every job whose end was decided and whose workers have all left."""
    ended: list[ev.JobEnd] = []
    for row in context.rows:
        if row.ending and not row.terminal and not context.open_of(row):
            with context.on_behalf_of(row.job_id, "bringing it to its end"):
                _conclude(context, row)
                # Only now may the scheduler give the slots to others. It goes by job id, as it knows no incarnations.
                if row.introduced and context.knows(row.job_id):
                    ended.append(_END_AS.get(row.state, ev.JobFailed)(row.job_id))
    feed_ends(context, ended)


def _conclude(context: PassContext, row: IncarnationRow) -> None:
    ending = row.ending
    assert ending is not None  # checked by the caller
    state, reason = ending.state, ending.reason
    if state is State.SUCCEEDED and ending.use_checkpoint and row.promoted is None:
        state, reason = State.FAILED, Reason("{reason}, but there is no checkpoint to use", reason=reason)
        row.ending = ending = replace(ending, failure=str(reason))
    row.finished_at = context.now
    row.failure = ending.failure
    if ending.is_done:
        _measure_tail(context, row)
        if row.deadline_at is not None:
            side = "before" if context.now <= row.deadline_at else "after"
            reason = Reason(
                f"{{done}}, {{distance:duration}} {side} the deadline {{deadline:moment}}",
                done=reason,
                distance=abs(row.deadline_at - context.now),
                deadline=row.deadline_at,
            )
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


def _measure_tail(context: PassContext, row: IncarnationRow) -> None:
    if row.last_step_at is not None:
        tail_s = min(max(0.0, context.now - row.last_step_at), context.lived_s(row))
        allowance_s = context.settings.wake_up_allowance_s
        context.measured_cost(row, "tail_s", tail_s + allowance_s, (row.last_step_at, context.now))


def result_of(context: PassContext, row: IncarnationRow, state: State) -> JobResult:
    """Return the result of a job that ends in ``state`` now."""
    generations = context.tx.generations(row.job_id, row.incarnation)
    path = None
    if row.promoted is not None:
        path = context.files.checkpoint(row.job_id, row.incarnation, row.promoted.path)
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
            _again(
                context,
                row,
                Reason(
                    "its script has {logical_workers} logical workers, fewer than there were workers",
                    logical_workers=row.logical_workers or 0,
                ),
            )
        return
    if generation.notes.kind == UNTRAINED and not row.ending:
        context.end(row, State.FAILED, Reason.quoted(str(generation.notes.message)), failure=_failure(generation))
        return
    if outcome == GangOutcome.FINISHED and not (row.ending and row.ending.state is not State.SUCCEEDED):
        _finished(context, row, generation)
        return
    if row.ending:
        return
    was_desired = row.desired_generation == generation.generation or _trained_until_now(context, row, generation)
    if outcome == GangOutcome.FAILED and generation.notes.kind == "nan_loss":
        context.end(
            row,
            State.FAILED,
            Reason("the loss is not a number at step {step}", step=row.step),
            failure=_failure(generation),
        )
    elif generation.notes.out_of_memory is not None and outcome == GangOutcome.FAILED:
        _out_of_memory(context, row, generation)
    elif not was_desired:
        if (
            outcome == GangOutcome.FAILED
            and not generation.notes.dropped
            and generation.notes.kind != DEVICE_FAULT  # that has its own event
        ):
            reason = Reason(
                "generation {generation} failed while it was leaving: {said:text}",
                generation=generation.generation,
                said=_first_line(generation),
            )
            context.event(WarningData(generation=generation.generation), reason, row)
    elif generation.stop_cause == "hang":
        _again(context, row, Reason("restarts after a hang at step {step}", step=row.step))
    elif generation.stop_cause == "deaths":
        _restart_or_fail(context, row, generation, Reason.quoted(_first_line(generation)), progressed=True)
    elif outcome == GangOutcome.LOST or generation.notes.kind == DEVICE_FAULT:
        _lost(context, row, generation)
    elif outcome == GangOutcome.FAILED:
        _failed(context, row, generation)
    else:
        _again(context, row, Reason("its workers have left, which nobody asked for (was the machine asleep?)"))


def _trained_until_now(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> bool:
    """Return whether a generation ended that trained until a change in place is done: then the job has lost its gang.

    It need not be the one that the change was to continue: that may have been replaced meanwhile, by an earlier change.
    """
    change = context.desired(row)
    if change is None or change.mode != RescaleMode.IN_PLACE or change.running_at is not None:
        return False
    trained = [g.generation for g in context.open_of(row) if g.running_at is not None]
    return (
        change.first_step is None
        and generation.running_at is not None
        and generation.generation >= max(trained, default=0)
    )


def _finished(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    finished = generation.notes.finished
    total = row.total_steps
    done = row.step
    if finished is None and row.ever_reported and total is not None and done < total - 1:
        # A plain script may count its steps from 0.
        reason = Reason(
            "the script ended with status 0 after {done} of {total} steps: it must go on until all are done (did it "
            "stop early, or resume from nothing?)",
            done=done,
            total=total,
        )
        context.end(row, State.FAILED, reason, failure=reason)
        return
    if finished is None and (untrained := _trained_nothing(row, generation)) is not None:
        context.end(row, State.FAILED, untrained, failure=untrained)
        return
    reached, early = loss_target.reached(row), None if finished is None else finished.early
    if finished is not None and total is not None and done < total and not reached and not early:
        reason = Reason(
            "the script says that it is finished after {done} of {total} steps: if that is meant, let it say why, with "
            "session.finish(early=...)",
            done=done,
            total=total,
        )
        context.end(row, State.FAILED, reason, failure=reason)
        return
    if finished is not None and finished.path and (row.promoted is None or row.promoted.path != finished.path):
        reason = Reason("the final checkpoint {path} is missing or damaged", path=finished.path)
        _restart_or_fail(context, row, generation, reason, progressed=True)
        return
    what = Reason("done: {done} steps", done=done)
    if finished is None and not row.ever_reported:
        what = _NOTHING_KNOWN
    if early:
        what = Reason(
            "done early, after {done} of {total} steps: {early:text}",
            done=done,
            total="an unknown number" if total is None else total,
            early=early,
        )
    if reached and row.target:
        what = Reason("{what}, target loss {loss:g} reached", what=what, loss=row.target.loss)
    if row.loss is not None:
        what = Reason("{what}, loss {loss:.4g}", what=what, loss=row.loss)
    context.end(row, State.SUCCEEDED, what)


def _trained_nothing(row: IncarnationRow, generation: GenerationRow) -> Reason | None:
    """Return why status 0 without any reported step is no success; None if nothing speaks against a success."""
    if generation.notes.uses_session and generation.first_step is None:
        return Reason(
            "the script uses elasticflow_airflow.runtime, and ended with status 0 before its first session.step(), by"
            " os._exit() or the like: nothing was trained"
        )
    if row.ever_reported:
        return None
    return _unread_progress(row) or _unreported_length(row)


def _unreported_length(row: IncarnationRow) -> Reason | None:
    """Return the failure of a script that reported no step of a training of known length; None if there is none."""
    epochs = row.submission.length.epochs
    if row.total_steps is None and epochs is None:
        return None
    length = f"{epochs} epochs" if row.total_steps is None else f"{row.total_steps} steps"
    return Reason(
        "the script ended with status 0 after reporting 0 of {length}: a script that does not use the session needs"
        " progress_regex= or progress_file= where its length is known; without, leave steps= and epochs= out, and"
        " nothing will be known of what it has trained",
        length=length,
    )


def _unread_progress(row: IncarnationRow) -> Reason | None:
    """Return the failure of a script whose declared progress output never showed a step; None if there is none."""
    asked = row.submission
    named = {"progress_regex": asked.progress_regex, "progress_file": asked.progress_file}
    said = " or ".join(f"{name}={value!r}" for name, value in named.items() if value)
    if not said:
        return None
    kind = "the script ended with status 0, and {said:text} never showed a step: what was trained is unknown"
    return Reason(kind, said=said)


def _out_of_memory(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    said = generation.notes.out_of_memory or OutOfMemory()
    global_batch = row.submission.global_batch_size
    micro = said.micro_batch_size or row.micro_batch_size or global_batch
    if micro <= 1:
        reason = Reason(
            "the device's memory does not suffice for a micro-batch of 1: use a smaller model or a larger device"
        )
        context.end(row, State.FAILED, reason, failure=f"{reason}\n{said.message}".strip())
        return
    row.micro_batch_size = smaller = (micro + 1) // 2  # Rounded up, so that 3 becomes 2: BatchNorm cannot train with 1.
    _again(
        context,
        row,
        Reason(
            "out of memory with a micro-batch of {micro}: tries again with {smaller}; the global batch stays "
            "{global_batch}",
            micro=micro,
            smaller=smaller,
            global_batch=global_batch,
        ),
    )


def _failed(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    if generation.notes.exit_zero and generation.notes.finished is None:
        if (untrained := _trained_nothing(row, generation)) is not None:
            context.end(row, State.FAILED, untrained, failure=untrained)
            return
        total = f" of {row.total_steps}" if row.total_steps is not None else ""
        kind = "the script ended with status 0 after {step}{total} steps, before it was finished"
        if row.total_steps is not None and row.step >= row.total_steps:
            kind += ": a loop of your own ends with session.finish(), which saves the result"
        reason = Reason(kind, step=row.step, total=total)
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
    _restart_or_fail(
        context, row, generation, Reason.quoted(_first_line(generation)), progressed=progressed or by_signal
    )


def _lost(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    row.losses = 1 if _saved_step(row) > max(row.restart_step, 0) else row.losses + 1
    if row.losses > context.settings.max_losses:
        reason = Reason(
            "lost its workers {losses} times in a row without progress: {said:text}",
            losses=row.losses,
            said=_first_line(generation),
        )
        context.end(row, State.FAILED, reason, failure=_failure(generation))
        return
    kind = "a device failed: {said:text}" if generation.notes.kind == DEVICE_FAULT else "lost its workers: {said:text}"
    _again(context, row, Reason(kind, said=_first_line(generation)))


def _restart_or_fail(
    context: PassContext, row: IncarnationRow, generation: GenerationRow, reason: Reason, *, progressed: bool
) -> None:
    if row.restarts >= context.settings.max_restarts or not progressed:
        why = "without progress since the start" if not progressed else f"after {row.restarts} restarts"
        where = f"at step {row.step}" + (f" of {row.total_steps}" if row.total_steps is not None else "")
        said = Reason("failed {where}, {why}: {reason}", where=where, why=why, reason=reason)
        context.end(row, State.FAILED, said, failure=_failure(generation, str(reason)))
        return
    row.restarts += 1
    kind = "restart {restarts} of {most} after a failure: {reason}"
    _again(context, row, Reason(kind, restarts=row.restarts, most=context.settings.max_restarts, reason=reason))


def _again(context: PassContext, row: IncarnationRow, reason: Reason) -> None:
    """Restart a job whose gang is gone; the scheduler decides when and where the next one starts."""
    step, lost = _saved_step(row), row.step
    row.restart_step = step
    row.desired_generation = None
    row.step = min(row.step, step) if row.promoted else row.step
    if row.promoted is None and lost > 0:
        where = Reason("begins again at step 0, as there was no checkpoint yet ({lost} steps are lost)", lost=lost)
    else:
        where = Reason("goes on from step {step}", step=step)
    context.event(RestartingData(step=step), Reason("{reason}; {where}", reason=reason, where=where), row)
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
