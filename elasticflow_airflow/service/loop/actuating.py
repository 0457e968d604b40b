"""Drives the engine to the state in the rows; only this module calls ``apply``, ``stop``, ``renew`` and ``forget``.

Works on what was committed; everything here may be repeated. Refusals of the engine are counted, and end the job when
there are too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec

import structlog

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.engines.port import Engine, EngineError, GangSpec, GangState, SlotsHeldError
from elasticflow_airflow.runtime.protocol import Promotion, RescaleMode
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service import crashpoints
from elasticflow_airflow.service.decisions.pass_context import PassContext, alive, can_be_stopped
from elasticflow_airflow.service.decisions.session_settings import python_of, session_of
from elasticflow_airflow.service.job_files.snapshots import SnapshotLostError, Snapshots
from elasticflow_airflow.service.loop.rescaling import Holders, fall_back
from elasticflow_airflow.service.loop.unknown_gangs import Leftovers
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.scheduler_values import placement_from_json
from elasticflow_airflow.service.store.stored_bounds import promotion_of
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow

_OF_NOBODY = "this service has no such job"

log = structlog.get_logger()

_P = ParamSpec("_P")
Secrets = Callable[[IncarnationRow], Mapping[str, str]]


@dataclass(slots=True)
class Refusals:
    """How often in a row the engine refused to start a job's gang, since when, and its last message."""

    since_monotonic_s: float
    count: int = 0
    message: str = ""
    told: bool = False
    """Whether an event has reported it."""
    held: bool = False
    """Another holder is on its slots: not a failure of the job, however long it takes."""


@dataclass(slots=True)
class Actuator:
    """Calls the engine. Its memory only saves calls: a restarted service repeats them, which changes nothing."""

    engine: Engine
    settings: ServiceSettings
    snapshots: Snapshots
    secrets: Secrets
    monotonic: Callable[[], float]
    leftovers: Leftovers
    wanted: Callable[[], list[str]]
    """Returns the stored jobs that may have workers: their leases are renewed until a pass has succeeded."""
    refusals: dict[str, Refusals] = field(default_factory=dict)
    drained: set[tuple[str, int]] = field(default_factory=set)
    """Terminal incarnations whose gangs the engine has forgotten; the next pass stores that."""
    refused_slots: bool = False
    """Whether the engine refused slots in the last pass because they are held."""
    _renewed_at_s: float = -math.inf
    _applied: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By job id: the generation that the engine accepted last, and the fence (cleared generation) sent with it."""
    _written: dict[tuple[str, int], Promotion] = field(default_factory=dict)
    _held: list[str] | None = None
    """Jobs that had workers at the last pass; None before the first pass."""

    def act(self, context: PassContext) -> None:
        """Make the engine match the rows."""
        renew = self.monotonic() - self._renewed_at_s >= self.settings.renew_interval_s
        if renew:
            self._renewed_at_s = self.monotonic()
        self._held = sorted({row.job_id for row in (*context.rows, *context.aside) if context.open_of(row)})
        on_slots = Holders(context)
        self.refused_slots = False
        for job_id in self.leftovers.to_leave(context):
            self._try("stop", self.engine.stop, job_id, self.settings.grace_s, _OF_NOBODY)
        for row in context.rows:
            with context.on_behalf_of(row.job_id, "starting, changing or stopping its workers"):
                self._act(context, row, on_slots, renew=renew)
        for row in context.aside:
            with context.on_behalf_of(row.job_id, "keeping its workers"):
                self._keep(context, row, renew=renew)

    def _act(self, context: PassContext, row: IncarnationRow, on_slots: Holders, *, renew: bool) -> None:
        self._write_promotion(row)
        generations = context.open_of(row)
        due = context.due(row)
        if due is not None and due.desired == "run" and not row.terminal:
            if due.state != GangState.ENDED and not self._is_settled(row, due):
                self._apply_or_wait(context, row, due, on_slots)
            elif renew and alive(due):
                self.leftovers.took(placement_from_json(due.placement).slots)
        elif any(map(can_be_stopped, generations)):
            self._stop(row)
        if renew and any(alive(g) for g in generations):
            self._try("renew", self.engine.renew, row.job_id)
        if row.terminal and not row.drained and not generations:
            self._forget(context, row)

    def _keep(self, context: PassContext, row: IncarnationRow, *, renew: bool) -> None:
        """Keep the workers of a job that is set aside running, unless it is to end."""
        generations = context.open_of(row)
        if any(map(can_be_stopped, generations)):
            if row.ending:
                self._stop(row)
            elif renew:
                self._try("renew", self.engine.renew, row.job_id)
        elif row.terminal and not row.drained:
            self._forget(context, row)

    def _stop(self, row: IncarnationRow) -> None:
        reason = str(row.state_reason) or "no longer wanted"
        grace_s = 0.0 if (ending := readable(row.ending)) and ending.is_done else self.settings.grace_s
        self._try("stop", self.engine.stop, row.job_id, grace_s, reason)

    def hold(self, *, unless_renewed_within_s: float = 0.0) -> None:
        """Renew the leases of all jobs that had workers at the last pass, so that they train on. For any thread.

        Before the first pass: of all jobs with stored workers. Raises what the store raises.
        """
        if self.monotonic() - self._renewed_at_s < unless_renewed_within_s:
            return
        held = self.wanted() if self._held is None else self._held
        self._renewed_at_s = self.monotonic()
        for job_id in held:
            try:
                self.engine.renew(job_id)
            except Exception as error:  # noqa: BLE001  (the other jobs are still renewed)
                log.warning("the engine refused", call="renew", job_id=job_id, error=repr(error))

    def _apply_or_wait(self, context: PassContext, row: IncarnationRow, due: GenerationRow, on_slots: Holders) -> None:
        """Have the engine start a generation once its slots are free of other workers."""
        if not on_slots.before(due) and not _own_leavers(context, row, due):
            self._apply(row, due, context.now)
        elif due.notes.vacate and any(alive(g) for g in context.open_of(row)):
            self._try("stop", self.engine.stop, row.job_id, self.settings.grace_s, str(due.reason))

    def _is_settled(self, row: IncarnationRow, generation: GenerationRow) -> bool:
        """Return whether the engine has this gang, it runs, and its lease lasts beyond the next renewal.

        Then it only has to be renewed: to apply it again would change nothing, and costs a look at all its files.
        """
        if generation.state != GangState.RUNNING or row.lease_s < 3 * self.settings.renew_interval_s:
            return False
        return self._applied.get(row.job_id) == (generation.generation, row.cleared_generation)

    def _write_promotion(self, row: IncarnationRow) -> None:
        """Write the promotion file before any gang may start from it; the row was committed first."""
        key = (row.job_id, row.incarnation)
        if row.promoted is None or self._written.get(key) == row.promoted:
            return
        promotion = promotion_of(row)
        if promotion is None:
            return  # Jobs that are not over are set aside for it.
        if self.engine.files.promote(row.job_id, row.incarnation, promotion):
            crashpoints.point("after promotion")
        self._written[key] = promotion

    def _apply(self, row: IncarnationRow, generation: GenerationRow, now: float) -> None:
        crashpoints.point("before apply")
        try:
            self.engine.files.prepare(row.job_id, row.incarnation)
            self.snapshots.ensure(row.submission.command.snapshot)
            self.engine.apply(self.spec_of(row, generation))
        except (EngineError, SnapshotLostError, OSError) as error:
            if alive(generation):  # It runs, so the change can be sent later.
                log.warning(
                    "the engine refused",
                    call="apply",
                    job_id=row.job_id,
                    incarnation=row.incarnation,
                    generation=generation.generation,
                    error=str(error),
                )
            else:
                refusals = self.refusals.setdefault(row.job_id, Refusals(self.monotonic()))
                refusals.count += 1
                refusals.message = str(error)
                refusals.held = isinstance(error, SlotsHeldError)
                if isinstance(error, SlotsHeldError):
                    self.leftovers.refuse(error.held, now)
                    self.refused_slots = True
        else:
            self.refusals.pop(row.job_id, None)
            if alive(generation):
                self.leftovers.took(placement_from_json(generation.placement).slots)
            self._applied[row.job_id] = (generation.generation, row.cleared_generation)
        crashpoints.point("after apply")

    def _forget(self, context: PassContext, row: IncarnationRow) -> None:
        """Forget a job once none of its incarnations has an unhandled end, as the engine forgets by job id."""
        if not any(g.job_id == row.job_id and not g.handled for g in context.generations.values()):
            self._try("forget", self.engine.forget, row.job_id)
            self.drained.add((row.job_id, row.incarnation))
            self._written.pop((row.job_id, row.incarnation), None)
            self._applied.pop(row.job_id, None)
            self.refusals.pop(row.job_id, None)

    def _try(self, name: str, call: Callable[_P, None], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Call the engine; a refusal is logged, and the call is repeated in the next pass."""
        crashpoints.point(f"before {name}")
        try:
            call(*arguments, **named)
        except EngineError as error:
            log.warning("the engine refused", call=name, job_id=arguments[0], error=str(error))
        crashpoints.point(f"after {name}")

    def spec_of(self, row: IncarnationRow, generation: GenerationRow) -> GangSpec:
        """Return the gang that a generation's row describes."""
        command = row.submission.command
        session = session_of(row, self.settings, self.snapshots, self.engine.files, generation.notes.threads)
        return GangSpec(
            job_id=row.job_id,
            incarnation=row.incarnation,
            generation=generation.generation,
            cleared_generation=row.cleared_generation,
            placement=placement_from_json(generation.placement).slots,
            session=session,
            python=python_of(row),
            requirements=command.requirements,
            env=dict(command.env),
            secret_env=self.secrets(row),
            mode=RescaleMode(generation.mode),
            lost=tuple(generation.lost),
            lease_s=row.lease_s,
            grace_s=self.settings.grace_s,
            reason=str(generation.reason),
        )


def _own_leavers(context: PassContext, row: IncarnationRow, due: GenerationRow) -> bool:
    """Return whether workers of the job itself are still leaving slots on which its new workers should start."""
    training = context.training(row)
    if due.mode != RescaleMode.IN_PLACE or training is None:
        return False
    new = {tuple(slot) for slot in due.placement} - {tuple(slot) for slot in training.placement}
    return any(
        g is not due and g is not training and g.state == GangState.LEAVING and new & {tuple(s) for s in g.placement}
        for g in context.open_of(row)
    )


def record_refusals(context: PassContext, actuator: Actuator) -> None:
    """Report the engine's refusals, and end jobs that it refused too often."""
    for job_id, refusals in list(actuator.refusals.items()):
        row = context.live(job_id)
        if row is None:
            del actuator.refusals[job_id]
            continue
        with context.on_behalf_of(job_id, "writing down why its workers did not start"):
            _record_refusals(context, row, refusals, actuator)


def _record_refusals(context: PassContext, row: IncarnationRow, refusals: Refusals, actuator: Actuator) -> None:
    if not refusals.told:
        refusals.told = True
        reason = Reason("the workers could not be started: {message:text}; it is tried again", message=refusals.message)
        context.event(EventKind.NOT_STARTED, reason, row)
    refused_s = actuator.monotonic() - refusals.since_monotonic_s
    due = context.due(row)
    if due is None or due.state == GangState.ENDED:
        del actuator.refusals[row.job_id]  # It is not wanted any more.
    elif due.mode == RescaleMode.IN_PLACE:
        # The previous gang trains on, so there is time, and a restart can replace the change.
        if refused_s >= context.settings.grace_s:
            del actuator.refusals[row.job_id]
            reason = Reason("the workers could not be changed in place ({message:text})", message=refusals.message)
            fall_back(context, row, due, reason)
    elif refusals.held:
        refusals.since_monotonic_s, refusals.count = actuator.monotonic(), 0
    elif refused_s >= context.settings.apply_limit_s and refusals.count >= context.settings.apply_attempts:
        reason = Reason("could not be started: {message:text}", message=refusals.message)
        context.end(row, State.FAILED, reason, failure=refusals.message)


def record_drained(context: PassContext, actuator: Actuator) -> None:
    """Mark the terminal incarnations that need no further pass."""
    for row in (*context.rows, *context.aside):
        if (row.job_id, row.incarnation) in actuator.drained:
            row.drained = True
    actuator.drained.clear()
