"""Watches time limits: deadlines that pass, gangs that hang or never start, measurements that take too long.

Hangs are measured on the monotonic clock. Writes rows and asks the scheduler; calls no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.api.event_data import HangData, NotMeasuredData, WarningData
from elasticflow_airflow.engines.job_files import Heartbeat
from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.loop.rescaling import fall_back, recover
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow

_HANG_STEPS = 20
_WAITING = ("reduce", "wait")
"""Phases of a heartbeat in which a worker waits for the others."""
_SILENT_FRACTION = 0.25
"""Fraction of the allowed start time for which a gang must have been silent, whatever the wall clock says."""


def watch_deadlines(context: PassContext) -> None:
    """Apply ``on_miss`` to jobs whose deadline passes before their end."""
    for row in context.rows:
        with context.on_behalf_of(row.job_id, "watching its deadline"):
            _watch_deadline(context, row)


def _watch_deadline(context: PassContext, row: IncarnationRow) -> None:
    if row.terminal or row.ending or row.deadline_passed or row.deadline_at is None or not row.introduced:
        return
    if context.now <= row.deadline_at or row.verdict.decision not in ("admitted", "renegotiated"):
        return
    row.deadline_passed = True
    on_miss = row.submission.on_miss
    reason = Reason(
        "missed its deadline {deadline_at:moment} at step {step} of {total}",
        deadline_at=row.deadline_at,
        step=row.step,
        total=row.total_steps or "?",
    )
    context.event(
        EventKind.DEADLINE_MISSED, Reason('{reason}; on_miss="{on_miss}"', reason=reason, on_miss=on_miss), row
    )
    if on_miss == "fail":
        context.end(row, State.FAILED, reason, failure=reason)
    elif on_miss == "use_last_checkpoint":
        step = "None" if row.promoted is None else row.promoted.step
        used = Reason("{missed}; its last checkpoint is used (step {step})", missed=reason, step=step)
        context.end(row, State.SUCCEEDED, used, use_checkpoint=True)


@dataclass(slots=True)
class _Sign:
    """The last sign of life of a generation, and when it was seen."""

    of: tuple[object, ...]
    at_monotonic_s: float


class HangDetector:
    """Tracks since when each gang has shown no sign of life, in monotonic time."""

    def __init__(self) -> None:
        self._signs: dict[tuple[str, int], _Sign] = {}

    def watch_gangs(self, context: PassContext, monotonic_s: float) -> None:
        """Stop gangs that hang or never start; give up sizes that cannot be measured."""
        for key in self._signs.keys() - context.generations.keys():
            del self._signs[key]
        for row in context.rows:
            with context.on_behalf_of(row.job_id, "watching whether its workers hang"):
                self._watch_gang(context, row, monotonic_s)

    def _watch_gang(self, context: PassContext, row: IncarnationRow, monotonic_s: float) -> None:
        desired, training = context.desired(row), context.training(row)
        if desired is None or row.terminal or row.ending or desired.desired == "stop":
            return
        self._watch(context, row, desired, monotonic_s)
        due = context.due(row)
        waits = due is not None and bool(due.lost)  # The survivors wait until the gang is complete again.
        if training is not None and training is not desired and context.desired(row) is desired and not waits:
            self._watch(context, row, training, monotonic_s)  # It trains on until the change is done.

    def _watch(self, context: PassContext, row: IncarnationRow, generation: GenerationRow, monotonic_s: float) -> None:
        key = (generation.job_id, generation.generation)
        sign = (generation.state, generation.last_step, generation.running_at)
        last = self._signs.get(key)
        if last is None or last.of != sign:
            self._signs[key] = _Sign(sign, monotonic_s)
        else:
            _quiet(context, row, generation, monotonic_s - last.at_monotonic_s)


def _quiet(context: PassContext, row: IncarnationRow, generation: GenerationRow, quiet_s: float) -> None:
    s = context.settings
    if generation.state == GangState.STARTING:
        profiled = generation.purpose == Purpose.PROFILE and not generation.notes.measured
        if profiled and quiet_s > s.profile_startup_s and context.knows(row.job_id):
            _cannot_measure(
                context, row, generation, Reason("it did not start within {quiet_s:duration}", quiet_s=quiet_s)
            )
        elif generation.mode == RescaleMode.IN_PLACE:
            if quiet_s > s.in_place_limit_s:
                fall_back(
                    context,
                    row,
                    generation,
                    Reason("the workers were not changed in place within {quiet_s:duration}", quiet_s=quiet_s),
                )
        elif quiet_s > s.start_limit_s:
            _hang(
                context,
                row,
                generation,
                Reason("did not make a first step within {quiet_s:duration} of its start", quiet_s=quiet_s),
            )
    elif generation.state == GangState.RUNNING:
        if not row.ever_reported:
            # Counted from when it was ordered: the scheduler gives it up a little after ``profile_startup_s``.
            ordered_s = context.now - generation.created_at
            if ordered_s > s.profile_startup_s and quiet_s > _SILENT_FRACTION * s.profile_startup_s:
                _reports_nothing(context, row, generation)
            return
        if generation.notes.in_place and _give_up_hung(context, row, generation, quiet_s):
            return
        if generation.purpose == Purpose.PROFILE and not generation.notes.measured:
            if quiet_s > s.profile_limit_s:
                _cannot_measure(
                    context, row, generation, Reason("it made no step for {quiet_s:duration}", quiet_s=quiet_s)
                )
            return
        done = generation.notes.finished is not None or (row.total_steps is not None and row.step >= row.total_steps)
        limit_s = s.tail_limit_s if done else _hang_limit_s(context, row)
        if quiet_s > limit_s:
            where = "after its last step" if done else "at step {step}"
            what = Reason(f"made no progress for {{quiet_s:duration}} {where}", quiet_s=quiet_s, step=row.step)
            _hang(context, row, generation, what)


def _hang_limit_s(context: PassContext, row: IncarnationRow) -> float:
    step_s = 1.0 / row.steps_per_s if row.steps_per_s else 0.0
    return max(context.settings.hang_min_s, _HANG_STEPS * step_s)


def _give_up_hung(context: PassContext, row: IncarnationRow, generation: GenerationRow, quiet_s: float) -> bool:
    """Give up the workers that hold the others up; return False if none can be identified."""
    limit_s = context.settings.heartbeat_limit_s
    step_s = 1.0 / row.steps_per_s if row.steps_per_s else 0.0
    workers = context.workers.get((generation.job_id, generation.generation), ())
    if quiet_s <= max(limit_s, _HANG_STEPS * step_s) or len(workers) < 2 or generation.notes.finished:
        return False
    known = context.lost_since(row, generation)
    living = [w.worker_id for w in workers if w.exit_code is None and w.worker_id not in known]
    files = context.files
    beats = {worker_id: files.heartbeat(row.job_id, row.incarnation, worker_id) for worker_id in living}
    patient = quiet_s <= _hang_limit_s(context, row)
    hung = find_hung(beats, limit_s=limit_s, only_silent=patient)
    if not hung:
        return False
    who = "worker {names}" if len(hung) == 1 else "workers {names}"
    what = Reason(who + " held the others up for {quiet_s:duration}", names=", ".join(sorted(hung)), quiet_s=quiet_s)
    recover(context, row, generation, hung, what)
    return True


def find_hung(beats: Mapping[str, Heartbeat | None], *, limit_s: float, only_silent: bool) -> set[str]:
    """Return the workers that block the others; empty if none can be singled out, or none would be left.

    These are the workers silent for ``limit_s`` seconds while another one still reports that it waits. If none is
    silent, and ``only_silent`` is False, they are those that still compute while others wait. The workers' timestamps
    are only compared with each other, so that a machine that slept makes no worker suspect. No conclusion is drawn from
    a missing heartbeat.
    """
    known = {worker_id: beat for worker_id, beat in beats.items() if beat is not None}
    if len(beats) < 2 or not known:
        return set()
    latest_s = max(beat.at_s for beat in known.values())
    silent = {worker_id for worker_id, beat in known.items() if latest_s - beat.at_s > limit_s}
    lively = {worker_id: beat for worker_id, beat in known.items() if worker_id not in silent}
    if not any(beat.phase in _WAITING for beat in lively.values()):
        return set()
    if silent:
        return silent
    if only_silent or len(known) < len(beats):
        return set()
    return {worker_id for worker_id, beat in lively.items() if beat.phase == "compute"}


def _cannot_measure(context: PassContext, row: IncarnationRow, generation: GenerationRow, why: Reason) -> None:
    generation.notes = replace(generation.notes, measured=True)
    reason = Reason("{workers} workers could not be measured: {why}", workers=generation.workers, why=why)
    context.event(NotMeasuredData(workers=generation.workers), reason, row)
    feed(context, ev.JobMeasured(row.job_id, generation.workers, None, failed=True))


def _reports_nothing(context: PassContext, row: IncarnationRow, generation: GenerationRow) -> None:
    if generation.notes.told_silent:
        return
    generation.notes = replace(generation.notes, told_silent=True)
    known = row.total_steps is not None
    unknown, fails = ("progress", ", and fails in the end unless it reports some") if known else ("length", "")
    reason = Reason(
        "the script reports no steps, so its {unknown} and speed are unknown: it goes on as best effort{fails}. Use "
        "the session, or give steps= with progress_regex= or progress_file=",
        unknown=unknown,
        fails=fails,
    )
    context.event(WarningData(), reason, row)
    if not row.best_effort and context.knows(row.job_id):
        feed(context, ev.JobAmended(row.job_id, best_effort=True))
        row.verdict = replace(row.verdict, decision="best_effort", reason=reason, deadline_at=None)


def _hang(context: PassContext, row: IncarnationRow, generation: GenerationRow, what: Reason) -> None:
    """Have a gang that hangs start once more; a job that hangs without progress in between, or too often, fails."""
    hung = (one for one in context.tx.generations(row.job_id, row.incarnation) if one.stop_cause == "hang")
    hung_at = max((one.last_step or 0 for one in hung), default=0)
    row.hangs += 1
    too_often = row.hangs > max(1, context.settings.max_restarts)
    if row.hangs > 1 and ((generation.last_step or 0) <= hung_at or too_often):
        reason = Reason("hangs: {what}, again after a restart", what=what)
        context.end(row, State.FAILED, reason, failure=reason)
        return
    for one in (context.desired(row), generation):
        if one is not None:
            one.desired, one.stop_cause = "stop", "hang"
    context.event(
        HangData(generation=generation.generation),
        Reason("{what}: it is stopped and started once more", what=what),
        row,
    )
