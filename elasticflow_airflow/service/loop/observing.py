"""Folds what the engine reports into the rows: states of gangs, progress, checkpoints, failures.

Every report is folded in exactly once, though the engine may deliver it again after a restart. Decides only what
follows from a report alone (progress that goes backwards, a loss that is not finite); calls no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.api.event_data import (
    LengthData,
    LogicalWorkersData,
    MeasuredData,
    RescaledData,
    SeedData,
    StartedData,
    WarningData,
)
from elasticflow_airflow.bounds import TEXT_CHARACTERS, clean_text
from elasticflow_airflow.engines.job_files import CANDIDATE_PATH
from elasticflow_airflow.engines.port import STANDING, GangObservation, GangOutcome, GangState
from elasticflow_airflow.runtime.logical_workers import is_power_of_two
from elasticflow_airflow.runtime.protocol import DEVICE_FAULT, Report, ReportKind, RescaleMode
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Phase
from elasticflow_airflow.service.decisions import loss_target, task_history
from elasticflow_airflow.service.decisions.deciding import feed, feed_reports
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.reported_bounds import finite_number, within_bounds
from elasticflow_airflow.service.decisions.session_settings import script_decides
from elasticflow_airflow.service.loop import cluster_nodes, samples, slow_workers
from elasticflow_airflow.service.loop.rescaling import go_on_as_planned
from elasticflow_airflow.service.secrets import redact, redact_all
from elasticflow_airflow.service.store.documents import speed_measurement
from elasticflow_airflow.service.store.documents.generation_notes import Finished, OutOfMemory
from elasticflow_airflow.service.store.documents.scheduler_values import placement_from_json
from elasticflow_airflow.service.store.tables import CandidateRow, GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import ORDERED, advance, move

Secrets = Callable[[IncarnationRow], Mapping[str, str]]
_MOST_REFUSED = 100
"""The most fields out of bounds that a job is warned about."""
_LAST_LOOK_S = 2.0
"""So long before the time for a size is over, what was seen of it has to do."""


class Inbox:
    """Reports that were delivered but are not stored yet: a pass that fails must not lose them.

    An engine delivers each report of a generation once per life of the engine object, in order. The number of a
    report, counted from the first, shows whether it has been folded in already.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], list[tuple[int, Report]]] = {}
        self._counts: dict[tuple[str, int, str], int] = {}

    def deliver(self, observations: Sequence[GangObservation]) -> None:
        """Add the reports of an observation."""
        for gang in observations:
            for report in gang.reports:
                key = (gang.job_id, gang.generation, report.worker_id)
                number = self._counts.get(key, 0)
                self._counts[key] = number + 1
                self._waiting.setdefault((gang.job_id, gang.generation), []).append((number, report))

    def waiting(self, job_id: str, generation: int) -> list[tuple[int, Report]]:
        """Return the reports to fold in, each with its number among its worker's reports."""
        return self._waiting.get((job_id, generation), [])

    def stored(self) -> None:
        """Clear the inbox: all its reports are in the store."""
        self._waiting.clear()

    def forget(self, job_id: str, living: Collection[int]) -> None:
        """Drop the counts of a job that the engine has forgotten, except for generations that still live."""
        self._counts = {key: n for key, n in self._counts.items() if key[0] != job_id or key[1] in living}


def fold(context: PassContext, observations: Sequence[GangObservation], inbox: Inbox, secrets: Secrets) -> None:
    """Update the rows to what was observed."""
    seen = {(gang.job_id, gang.generation): gang for gang in observations}
    context.tx.load_worker_times(
        {
            (generation.job_id, generation.incarnation, report.worker_id)
            for key, generation in context.generations.items()
            for _, report in inbox.waiting(*key)
            if report.kind is ReportKind.WORKER
        }
    )
    for key, generation in list(context.generations.items()):
        row = context.row(generation.job_id, generation.incarnation)
        if row is None or generation.state == GangState.ENDED:
            continue
        gang = seen.get(key)
        with context.on_behalf_of(row.job_id, "taking in what its workers report"):
            if gang is None:
                _fold_absence(context, row, generation)
                continue
            hidden = secrets(row)
            context.workers[key] = gang.workers
            _fold_reports(context, row, generation, inbox.waiting(*key), hidden)
            _fold_state(context, row, generation, gang, hidden)
            samples.write(context)
    # After all reports are folded in, so that the scheduler plans once and not after each of them.
    reports: list[ev.Reported] = [
        started
        for generation, started in context.started.values()
        if (row := context.live(started.job_id)) is not None and row.desired_generation == generation
    ]
    reports += context.costs.values()  # After the starts: their jobs would be taken to have trained since the plan.
    reports += context.progressed.values()
    feed_reports(context, [one for one in reports if (row := context.live(one.job_id)) is not None and not row.ending])
    context.started.clear()
    context.costs.clear()
    context.progressed.clear()


def _fold_absence(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Handle a generation unknown to the engine: it was never started, or all trace of it is gone."""
    if generation.state == ORDERED:
        if row.desired_generation != generation.generation:
            advance(generation, GangState.ENDED)
            generation.outcome = GangOutcome.STOPPED.value
            generation.judged = True
        return
    advance(generation, GangState.ENDED)
    generation.outcome = GangOutcome.LOST.value
    generation.ended_at = context.now
    generation.failure = "the engine knows nothing of it any more"


def _fold_state(
    context: PassContext,
    row: IncarnationRow,
    generation: GenerationRow,
    gang: GangObservation,
    hidden: Mapping[str, str],
) -> None:
    generation.log_names = sorted({*generation.log_names, *(worker.log_name for worker in gang.workers)})
    advance(generation, gang.state)
    if gang.state is GangState.LEAVING and generation.notes.leaving_at is None:
        generation.notes = replace(generation.notes, leaving_at=context.now)
    if gang.state in STANDING and generation.holding_at is None:
        generation.holding_at = context.now
    # Not only on a change of state: while its job was set aside, the change was not handled.
    ran = gang.state is GangState.RUNNING or _ran_unseen(generation, gang)
    if ran and generation.running_at is None:
        _running(context, row, generation)
    if gang.state is GangState.RUNNING:
        _tell_started(context, row, generation)
        _count_slow_start(context, row, generation)
    if gang.state is GangState.ENDED:
        generation.ended_at = context.now
        generation.outcome = None if gang.outcome is None else gang.outcome.value
        codes = [worker.exit_code for worker in gang.workers]
        generation.notes = replace(
            generation.notes,
            exit_zero=bool(codes) and all(code == 0 for code in codes),
            signalled=any(code is not None and code < 0 for code in codes),
        )
        if gang.failure:
            generation.failure = clean_text(redact(gang.failure, hidden), tail=True)


def _ran_unseen(generation: GenerationRow, gang: GangObservation) -> bool:
    """Return whether a gang that has ended made steps between two looks, when nobody saw it running."""
    if gang.state is not GangState.ENDED:
        return False
    finished = gang.outcome is GangOutcome.FINISHED
    if generation.mode == RescaleMode.IN_PLACE:
        return finished and generation.notes.switch.at_s is not None
    trained = generation.first_step is not None or not generation.notes.uses_session
    return generation.last_step is not None or (finished and trained)


def _running(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    generation.running_at = context.now
    if row.ending:
        return
    desired = row.desired_generation == generation.generation
    if desired and generation.purpose == Purpose.TRAIN and row.state in (State.ADMITTED, State.SUSPENDED):
        move(row, State.RUNNING, generation.reason)
    if generation.mode == RescaleMode.IN_PLACE:
        _switched(context, row, generation)
    elif desired:
        step = row.step if generation.first_step is None else generation.first_step
        context.event(
            StartedData(generation=generation.generation, workers=generation.workers, step=step),
            Reason(
                "generation {generation} trains with {workers:#worker} from step {step}",
                generation=generation.generation,
                workers=generation.workers,
                step=step,
            ),
            row,
        )


def _switched(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Record that all workers of a change in place have switched, with its cost, which later plans use."""
    before = context.tx.generation(row.job_id, generation.continues or 0)
    switch = generation.notes.switch
    pause_s, size_bytes = switch.pause_s, switch.state_bytes
    step = row.step if generation.first_step is None else generation.first_step
    new = before is not None and any(slot not in before.placement for slot in generation.placement)
    context.event(
        RescaledData(
            generation=generation.generation,
            workers=generation.workers,
            workers_before=None if before is None else before.workers,
            step=step,
            pause_s=pause_s,
            state_bytes=size_bytes,
        ),
        Reason(
            "{change} at step {step}{cost}",
            change=_change(generation, before, new=new),
            step=step,
            cost=_cost(pause_s, size_bytes),
        ),
        row,
    )
    costs = row.costs
    if pause_s is not None and not generation.lost:
        costs = costs.updated(in_place_pause_s=pause_s)
    if new and not generation.lost:
        began_at = generation.created_at if generation.holding_at is None else generation.holding_at
        joined_s = max(0.0, (context.now if switch.at_s is None else switch.at_s) - began_at)
        costs = costs.updated(join_s=joined_s)
        row.in_place = replace(row.in_place, failures=0)
    if costs != row.costs:
        row.costs = costs
        _tell_costs(context, row)


def _tell_costs(context: PassContext, row: IncarnationRow) -> None:
    """Have the scheduler told the current costs of a change; a job being profiled sends them with its next speed."""
    state = context.scheduler.state(row.job_id)
    costs = context.costs_of(row)
    context.costs.pop(row.job_id, None)
    if state is not None and state.phase is Phase.ADMITTED and state.job.costs != costs and not row.ending:
        context.costs[row.job_id] = ev.JobMeasured(row.job_id, max(1, state.placement.workers), None, costs)


def _tell_started(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Tell the scheduler once that a gang makes steps.

    One being profiled must report first, one of a session, and one of a plain script that shows its progress: after
    some time they count as running, and may still load.
    """
    if row.desired_generation != generation.generation or row.ending or generation.notes.told_started:
        return
    reports = generation.notes.uses_session or row.submission.progress_regex or row.submission.progress_file
    if generation.first_step is None and (generation.purpose == Purpose.PROFILE or reports):
        return
    generation.notes = replace(generation.notes, told_started=True)
    if generation.notes.own:
        loss_target.tell(context, row)
        go_on_as_planned(context, row, generation)
    else:
        in_place = generation.mode == RescaleMode.IN_PLACE
        began_at = generation.notes.switch.at_s if in_place else generation.notes.started_at
        started = ev.GangStarted(row.job_id, placement_from_json(generation.placement), began_at)
        context.started[row.job_id] = (generation.generation, started)
    _tell_able(context, row, generation)


def _count_slow_start(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Record at once that a start took longer than planned: a job with few slots may lose them in a moment.

    The exact cost is known only with the speed; if the gang is stopped before that, the plans would never learn it.
    Only sessions report when they begin. The time of an observation says nothing, as the service may have been down.
    """
    began_at = generation.notes.started_at
    if began_at is None or not generation.fresh_start or generation.purpose == Purpose.PROFILE or row.ending:
        return
    took_s = began_at - generation.created_at
    if generation.notes.cost_measured or took_s <= context.costs_of(row).startup_s:
        return
    generation.notes = replace(generation.notes, cost_measured=True)
    context.measured_cost(row, "startup_s", took_s, (generation.created_at, began_at))
    _tell_costs(context, row)


def _tell_able(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Plan with the pauses of changes in place or of restarts, whichever this session supports."""
    able = bool(generation.notes.in_place)
    if generation.first_step is not None and row.in_place.able is not able:
        row.in_place = replace(row.in_place, able=able)
        _tell_costs(context, row)


def _change(generation: GenerationRow, before: GenerationRow | None, *, new: bool) -> Reason:
    if before is None:
        return Reason("goes on with {workers:#worker}", workers=generation.workers)
    if before.workers != generation.workers:
        return Reason(
            "rescaled in place from {before} to {after:#worker}", before=before.workers, after=generation.workers
        )
    if new:
        return Reason("moved in place with {workers:#worker} to other slots", workers=generation.workers)
    return Reason("goes on in place with {workers:#worker}", workers=generation.workers)


def _cost(pause_s: float | None, size_bytes: float | None) -> str:
    if pause_s is None:
        return ""
    pause = f"{pause_s * 1000:.0f} ms" if pause_s < 1.0 else f"{pause_s:.2g} s"
    state = f" ({size_bytes / 1e6:.3g} MB of state)" if size_bytes else ""
    return f": training paused {pause}{state}"


def _fold_reports(
    context: PassContext,
    row: IncarnationRow,
    generation: GenerationRow,
    reports: Sequence[tuple[int, Report]],
    hidden: Mapping[str, str],
) -> None:
    folded = dict(generation.folded)
    progressed = False
    for number, given in reports:
        if number < folded.get(given.worker_id, 0):
            continue
        folded[given.worker_id] = number + 1
        bounded = within_bounds(_without_secrets(given, hidden), row.step, context.now, context.lived_s(row))
        _say_refused(context, row, generation, bounded.refused)
        report = bounded.report
        if report is None:
            continue
        if report.kind is ReportKind.STARTED:
            _note_switch(generation, report, context.now)
        if report.kind is ReportKind.WORKER:
            slow_workers.note(context, generation, report)
            samples.take_worker(context, row, generation, report)
        if report.kind is ReportKind.WARNING and report.data.get("absent"):
            generation.notes = replace(generation.notes, absent=tuple(map(str, report.data["absent"])))
        if report.rank == 0 or report.kind in (ReportKind.FAILED, ReportKind.OUT_OF_MEMORY):
            progressed |= _fold_report(context, row, generation, report)
    if folded != generation.folded:
        generation.folded = folded
    if progressed:
        _tell_progress(context, row, generation)


def _without_secrets(report: Report, hidden: Mapping[str, str]) -> Report:
    """Return a report with secrets redacted from its texts. Must run before any text is cut."""
    if not hidden:
        return report
    kept = {"path": report.data["path"]} if CANDIDATE_PATH.match(str(report.data.get("path"))) else {}
    return replace(report, data={**redact_all(report.data, hidden), **kept})


def _fold_report(context: PassContext, row: IncarnationRow, generation: GenerationRow, report: Report) -> bool:
    """Fold in one report; return whether it is new progress."""
    data: Mapping[str, Any] = report.data
    message = clean_text(str(data.get("message", "")), tail=True)
    match report.kind:
        case ReportKind.USES_SESSION:
            generation.notes = replace(generation.notes, uses_session=True)
        case ReportKind.STARTED:
            return _started(context, row, generation, report)
        case ReportKind.PROGRESS:
            return _progress(context, row, generation, report)
        case ReportKind.CHECKPOINT:
            _candidate(context, row, generation, str(data.get("path", "")), report)
        case ReportKind.STOPPED:
            if data.get("logical_workers") is not None:
                generation.notes = replace(generation.notes, too_many=True)
                _adopt_logical_workers(context, row, report)
        case ReportKind.FINISHED:
            early = clean_text(str(data.get("early") or ""), TEXT_CHARACTERS)
            path = None if data.get("path") is None else str(data["path"])
            generation.notes = replace(generation.notes, finished=Finished(path, early or None))
            loss_target.finished(context, row, report)
            row.metrics = dict(data.get("metrics") or {})
            row.step = max(row.step, report.step)
            loss = finite_number(data.get("loss"))
            row.loss = row.loss if loss is None else loss
            samples.take(context, row, generation, min(report.at_s, context.now), row.steps_per_s, last=True)
            if path:
                _candidate(context, row, generation, path, report)
        case ReportKind.OUT_OF_MEMORY:
            trouble = OutOfMemory(data.get("micro_batch_size"), message)
            generation.notes = replace(generation.notes, out_of_memory=trouble)
        case ReportKind.FAILED:
            row.step = max(row.step, report.step)  # The step of the failure, which is later than the last reported one.
            kind = None if data.get("kind") is None else str(data["kind"])
            if kind == DEVICE_FAULT and not cluster_nodes.device_failed(
                context, row, generation, report.worker_id, message
            ):
                kind = None
            generation.notes = generation.notes.failed(message, kind)
        case ReportKind.WARNING:
            if data.get("field") is None or _is_new(row, str(data["field"])):
                context.event(WarningData(generation=generation.generation), Reason.quoted(message), row)
    return report.kind is ReportKind.FINISHED and loss_target.reached(row)  # Otherwise the last step has reported it.


def _say_refused(
    context: PassContext, row: IncarnationRow, generation: GenerationRow, refused: Mapping[str, str]
) -> None:
    """Warn about the refused fields of a report, once per job and field."""
    for field, problem in refused.items():
        if _is_new(row, field):
            reason = Reason(
                "the training reports values that are not taken: {field:text} {problem:text}",
                field=field,
                problem=problem,
            )
            context.event(WarningData(generation=generation.generation, field=field), reason, row)


def _is_new(row: IncarnationRow, field: str) -> bool:
    told = row.sampling.refused
    if field in told or len(told) >= _MOST_REFUSED:
        return False
    row.sampling = replace(row.sampling, refused=(*told, field))
    return True


def _note_switch(generation: GenerationRow, report: Report, now: float) -> None:
    """Keep what workers report of a change in place: the time of the last one to switch, and the largest cost."""
    data = report.data
    if report.rank == 0:
        generation.notes = replace(generation.notes, in_place=bool(data.get("in_place")))
    if generation.mode == RescaleMode.IN_PLACE:
        state_bytes = data.get("state_bytes")
        size_bytes = None if state_bytes is None else float(state_bytes)
        switch = generation.notes.switch.at_least(float(min(report.at_s, now)), data.get("pause_s"), size_bytes)
        generation.notes = replace(generation.notes, switch=switch)


def _started(context: PassContext, row: IncarnationRow, generation: GenerationRow, report: Report) -> bool:
    _adopt_logical_workers(context, row, report)
    first, row.ever_reported = not row.ever_reported, True
    generation.first_step = report.step
    data = report.data
    if data.get("threads") and report.rank == 0:
        generation.notes = replace(generation.notes, threads=data["threads"])
    if report.rank == 0:
        generation.notes = replace(generation.notes, started_at=min(report.at_s, context.now))
    if data.get("seed") is not None:
        row.seed = int(data["seed"]) if row.seed is None else row.seed
        if first:
            shares = "" if row.logical_workers is None else f" in {row.logical_workers} logical workers"
            context.event(
                SeedData(seed=row.seed), Reason("trains with seed {seed}{shares}", seed=row.seed, shares=shares), row
            )
    if data.get("init_from"):
        context.event(
            EventKind.INITIALISED, Reason("starts from the weights of {path:text}", path=str(data["init_from"])), row
        )
    steps = data.get("steps")
    if steps is None or row.total_steps == steps:
        return False
    if row.total_steps is not None:
        reason = Reason(
            "the training says that it is {steps} steps long, not {total_steps}",
            steps=steps,
            total_steps=row.total_steps,
        )
        context.event(LengthData(steps=steps), reason, row)
    row.total_steps = int(steps)
    if context.knows(row.job_id) and not row.ending:
        loss_target.tell(context, row, step=report.step, total=True)
    return False


def _adopt_logical_workers(context: PassContext, row: IncarnationRow, report: Report) -> None:
    """Adopt the script's number of logical workers where the script decides; it caps the number of workers."""
    said = report.data.get("logical_workers")
    if said is None or said == row.logical_workers or not script_decides(row):
        return
    if not is_power_of_two(said) or row.submission.global_batch_size % said:
        return
    row.logical_workers = said
    reason = Reason(
        "the script says how many logical workers it has, {said}: at most so many workers train it", said=said
    )
    context.event(LogicalWorkersData(logical_workers=said), reason, row)
    if context.knows(row.job_id) and not row.ending:
        feed(context, ev.JobAmended(row.job_id, max_workers=said))


def _progress(context: PassContext, row: IncarnationRow, generation: GenerationRow, report: Report) -> bool:
    row.ever_reported = True
    last = generation.last_step
    if last is not None and report.step < last and report.worker_id != generation.notes.progress_of:
        return False  # A late report of the rank 0 before a change: the workers' files are not read at the same moment.
    if last is not None and report.step < last:
        reason = Reason(
            "the progress went backwards, from step {last} to {step}, without a restart", last=last, step=report.step
        )
        context.end(row, State.FAILED, reason, failure=reason)
        return False
    data = report.data
    loss = data.get("loss")
    if isinstance(loss, str) or (isinstance(loss, float) and not math.isfinite(loss)):
        reason = Reason("the loss is {loss} at step {step}", loss=str(loss), step=report.step)
        context.end(row, State.FAILED, reason, failure=reason)
        return False
    at_s = min(report.at_s, context.now)
    steps, seconds = data.get("window_steps"), data.get("window_s")
    if steps is None and last is not None and generation.last_step_at is not None:
        steps, seconds = report.step - last, min(at_s - generation.last_step_at, context.lived_s(row))
    if steps and seconds and seconds > 0:
        generation.window = speed_measurement.add_window(generation.window, int(steps), float(seconds), context.enough)
    generation.last_step, generation.last_step_at = report.step, at_s
    if generation.notes.progress_of != report.worker_id:
        generation.notes = replace(generation.notes, progress_of=report.worker_id)
    if generation.first_step is None:
        generation.first_step = report.step
    row.step, row.last_step_at = report.step, at_s
    row.loss = row.loss if loss is None else loss
    loss_target.fold(context, row, report)
    speed = speed_measurement.recent_speed(generation.window, context.enough)
    if speed is not None:
        row.steps_per_s = speed
    samples.note(row, data)
    samples.take(context, row, generation, at_s, speed)
    return True


def _tell_progress(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    desired = context.desired(row)
    if desired is None or row.ending or not context.knows(row.job_id):
        return
    if desired is not generation:
        if context.training(row) is generation:
            _tell_progress_meanwhile(context, row, generation)
        return
    _measure(context, row, generation)
    if generation.purpose == Purpose.PROFILE and not generation.notes.measured:
        speed, few = speed_measurement.measured_speed(generation.window, context.enough), ""
        if speed is None and context.now >= _profiled_until_s(context, row) - _LAST_LOOK_S:
            # Its steps are slow. A size that is known roughly can be used, and one that is not known never can.
            speed, few = speed_measurement.rough_speed(generation.window), ", in a few steps only"
        if speed is not None:
            generation.notes = replace(generation.notes, measured=True)
            reason = Reason(
                "measured {speed:.3g} steps/s with {workers:#worker}{few}",
                speed=speed,
                workers=generation.workers,
                few=few,
            )
            context.event(MeasuredData(workers=generation.workers, steps_per_s=speed), reason, row)
            if not row.submission.scaling_curve:  # Even if it is refused, its next run need not measure this again.
                task_history.remember(context, row)
            loss_target.tell(context, row)
            feed(context, ev.JobMeasured(row.job_id, generation.workers, speed, context.costs_of(row)))
            return
    training = generation.purpose == Purpose.TRAIN and generation.running_at is not None
    speed = speed_measurement.recent_speed(generation.window, context.enough) if training else None
    report = loss_target.progress(row, speed=speed)
    if report is not None:
        context.progressed[row.job_id] = report


def _profiled_until_s(context: PassContext, row: IncarnationRow) -> float:
    """Return when the scheduler gives up to measure the size that a job has now; infinite if it measures none."""
    state = context.scheduler.state(row.job_id)
    return math.inf if state is None or state.profile_until_s is None else state.profile_until_s


def _tell_progress_meanwhile(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Tell the scheduler the progress of the gang that trains on while a change in place is under way.

    Until the time at which the change is planned to be done, the plan already accounts for what is lost by then, and
    reporting steps in between would count them twice. After that time the plan is too optimistic, and only the steps
    are true.
    """
    _measure(context, row, generation)
    state = context.scheduler.state(row.job_id)
    if state is not None and context.now > state.no_progress_until_s:
        loss_target.tell(context, row)


def _measure(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    """Record the speed at this size and, once per generation, what its start or its pause cost."""
    speed = speed_measurement.measured_speed(generation.window, context.enough)
    if speed is None or generation.last_step_at is None:
        return
    row.speeds = {**row.speeds, generation.workers: speed}
    if generation.notes.cost_measured or generation.mode == RescaleMode.IN_PLACE:
        return
    generation.notes = replace(generation.notes, cost_measured=True)
    began_at = speed_measurement.training_began_at(generation.window, generation.last_step_at, speed)
    lost_s = began_at - generation.created_at
    if generation.fresh_start:
        context.measured_cost(row, "startup_s", lost_s, (generation.created_at, began_at))
        return
    # The previous gang trained on while this one started: its steps count, at the speed of this one.
    ordered_step, first_step = generation.notes.ordered_at_step, generation.first_step
    if ordered_step is not None and first_step is not None:
        lost_s -= max(0, first_step - ordered_step) / speed
        context.measured_cost(row, "pause_s", lost_s, (generation.created_at, began_at))


def _candidate(context: PassContext, row: IncarnationRow, generation: GenerationRow, path: str, report: Report) -> None:
    known = {c.path for c in context.tx.candidates(row.job_id, row.incarnation)}
    if path and path not in known:
        context.tx.add(
            CandidateRow(
                job_id=row.job_id,
                incarnation=row.incarnation,
                path=path,
                generation=generation.generation,
                step=report.step,
                digest="",
                status="new",
                at=min(report.at_s, context.now),
                size_bytes=report.data.get("size_bytes"),
            )
        )
