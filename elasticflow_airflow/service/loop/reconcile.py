"""The reconcile loop: one thread that owns the scheduler and the engine, and drives the actual to the desired state.

Each pass observes, decides outside of any transaction (``stages.py``), writes in a short transaction, and acts on what
was committed. If a pass fails or is killed at any point, the next one repairs it: the scheduler is rebuilt from the
store, and every call to the engine may be repeated. A pass that fails on single jobs is restarted without them (see
``setting_aside.py``).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.engines.port import (
    Engine,
    EngineError,
    EngineNode,
    GangObservation,
    GangState,
    SupersededError,
)
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.jobs.learned_speed import sigma_of_margin
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import JobState, Node, Slot
from elasticflow_airflow.service import crashpoints
from elasticflow_airflow.service.decisions import recurring_runs, setting_aside
from elasticflow_airflow.service.decisions.deciding import record_all
from elasticflow_airflow.service.decisions.fault_attribution import Faults, SchedulerFaultError, ServiceFaultError
from elasticflow_airflow.service.decisions.foresight import Foresight, foresight_of
from elasticflow_airflow.service.decisions.pass_context import Absence, Held, PassContext, alive
from elasticflow_airflow.service.job_files.candidates import CandidateService, Looked
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.loop import introducing, observing, old_job_details, unknown_gangs, watching
from elasticflow_airflow.service.loop.actuating import Actuator
from elasticflow_airflow.service.loop.cluster_nodes import nodes_now, set_aside_nodes
from elasticflow_airflow.service.loop.stages import Seen, StageParts, stages
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.renewals import Renewals
from elasticflow_airflow.service.secrets import SecretBox, SecretError, hidden_values
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.scheduler_values import StoredState
from elasticflow_airflow.service.store.store import LostOwnershipError, Store
from elasticflow_airflow.service.store.stored_bounds import state_out_of_bounds
from elasticflow_airflow.service.store.tables import IncarnationRow
from elasticflow_airflow.service.store.unit_of_work import StaleReadError, UnitOfWork, UnstorableError, unit_of_work

_RETRY_S = 1.0
_CLOCK_JUMP_S = 5.0
_PROJECTION_CHANGE_S = 0.5
_MOST_BEGINNINGS = 200
_TRY_AGAIN_S = 20.0
"""How long after the start jobs that an earlier process set aside are tried again: all others are served first."""
_CROWD_S = (0.5, 5.0)
"""Least and most seconds for which new submissions are decided on in one batch. A job that is submitted together with
many others gets its verdict after about that long, and not after all the others have theirs."""
_NEXT_S = 0.3
"""How many seconds to wait for the next submissions of a burst."""

log = structlog.get_logger()


class _BeginAgainError(Exception):
    """Nothing of a pass was written: it is restarted without the jobs that caused the failure."""


class Reconciler:
    """The reconcile loop. ``clock`` returns UTC seconds, ``monotonic`` seconds that never jump."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        settings: ServiceSettings,
        notifier: Notifier,
        snapshots: Snapshots,
        secrets: SecretBox,
        candidate_service: CandidateService,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        renewals: Renewals | None = None,
        begins: str = "the service has started",
    ) -> None:
        """``renewals``: of a process in which handlers go on while loops come and go; ``begins``: how this one came."""
        self._begins = begins
        self._store, self._engine, self._settings, self._notifier = store, engine, settings, notifier
        self._snapshots = snapshots
        self._box, self._candidate_service, self._clock, self._monotonic = secrets, candidate_service, clock, monotonic
        self._leftovers = unknown_gangs.Leftovers()
        self._actuator = Actuator(
            engine, settings, snapshots, self._secrets_of, monotonic, self._leftovers, self._with_gangs
        )
        self._inbox = observing.Inbox()
        self.renewals = renewals or Renewals()
        """Requests of owners for their jobs, counted in the handlers' threads."""
        self._leases = introducing.Leases(self.renewals)
        self._hang_detector = watching.HangDetector()
        self._recurring_runs = recurring_runs.RecurringRuns()
        self._stages = stages(
            StageParts(
                self._actuator,
                self._inbox,
                self._leases,
                self._recurring_runs,
                self._hang_detector,
                candidate_service,
                self._secrets_to_hide,
                self._notice_clock,
                self._hear,
            )
        )
        self._retention = old_job_details.Retention()
        self._thinking = threading.Lock()
        self._scheduler: Scheduler | None = None
        self._wake_at: float | None = None
        self._nodes: tuple[EngineNode, ...] = ()
        self._looked_at_nodes_s = -math.inf
        self._clock_offset_s = clock() - monotonic()
        self._stop = threading.Event()
        self._problem = ""
        self._faults = Faults()
        self._begun_s: float | None = None
        """When the first pass began, in monotonic time."""
        self._absence: Absence | None = None
        self._ignored: list[str] = []
        """Stored facts about nodes and slots that cannot be used."""
        self._broken_nodes: list[str] = []
        """Nodes that are set aside until somebody has looked at them."""
        self._bounds = setting_aside.BoundsCheck()
        self._held: Mapping[Slot, Held] = {}
        self._foresight: Foresight | None = None
        self._written: dict[str, JobState] = {}
        """The scheduler's states of jobs as they are stored, by job id."""
        self._has_begun = False
        self._heard_s, self._crowd_s = 0.0, _CROWD_S[0]
        self._singly = False
        self._passed_over: frozenset[tuple[str, int]] = frozenset()
        """Submitted incarnations that cannot be decided on yet."""

    @property
    def nodes(self) -> tuple[EngineNode, ...]:
        """The nodes as last observed; ``busy`` names holders that are no jobs of ours. Empty before the first pass."""
        held: dict[str, dict[int, str]] = {}
        for slot, one in self._held.items():
            held.setdefault(slot.node_id, {})[slot.index] = one.holder
        return tuple(replace(node, busy={**held.get(node.node_id, {}), **node.busy}) for node in self._nodes)

    @property
    def wake_at(self) -> float | None:
        """When the scheduler wants to be woken (UTC seconds); None if it does not."""
        return self._wake_at

    @property
    def problem(self) -> str:
        """Why the last pass failed; empty if it did not."""
        return self._problem

    @property
    def problems(self) -> list[str]:
        """Current problems: of the last pass, of jobs (or recurring tasks) that are set aside, of nodes and slots."""
        aside = [f"{owner} is set aside: {fault}" for owner, fault in list(self._faults.aside.items())]
        strange = self._leftovers.problems(self._clock())
        own = [self._problem] if self._problem else []
        return [*own, *aside, *self._ignored, *self._broken_nodes, *strange, *self._engine.problems()]

    @property
    def device_type(self) -> str:
        """The device type of the slots; empty before the first pass."""
        return self._nodes[0].device_type if self._nodes else ""

    def copy_scheduler(self) -> Scheduler | None:
        """Return a copy of the scheduler between two passes, for trials; None if there is none now. Thread-safe."""
        with self._thinking:
            return None if self._scheduler is None else self._scheduler.twin()

    def foresee(self) -> Foresight | None:
        """Return what the last pass decided; None before the first one. Does not block. Thread-safe."""
        return self._foresight

    def hear_of_runs(self) -> None:
        """Have the next pass tell the scheduler about due runs that were stored meanwhile. Thread-safe."""
        self._recurring_runs.hear()
        self._notifier.wake()

    def stop(self) -> None:
        """Have :meth:`run` return after the current pass; gangs keep running."""
        self._stop.set()
        self._notifier.wake()

    def run(self) -> None:
        """Run passes until :meth:`stop` is called."""
        threading.Thread(target=self._renew, name="renew", daemon=True).start()
        while not self._stop.is_set():
            self._notifier.sleep(self.try_once())

    def _renew(self) -> None:
        """Renew the leases of gangs, however long a pass takes or keeps failing."""
        while not self._stop.wait(self._settings.renew_interval_s):
            self._hold(unless_renewed_within_s=2 * self._settings.renew_interval_s)

    def _hold(self, *, unless_renewed_within_s: float = 0.0) -> None:
        """Renew the leases of gangs. Any failure is logged and retried."""
        try:
            self._actuator.hold(unless_renewed_within_s=unless_renewed_within_s)
        except Exception as error:  # noqa: BLE001  (this thread must survive any error)
            log.warning("the leases of workers could not be renewed; it is tried again", error=repr(error))

    def _with_gangs(self) -> list[str]:
        with self._store.read() as reader:
            return reader.with_gangs()

    def try_once(self) -> float | None:
        """Run one pass. A failure is logged, and the next pass starts with a scheduler rebuilt from the store.

        No failure stops the workers of any job, however long it lasts.
        """
        try:
            wait_s = self.run_once()
        except (LostOwnershipError, SupersededError) as error:
            self._scheduler = None
            said = str(getattr(error, "orig", None) or error)
            if self._problem != said:
                log.warning("nothing is decided here", reason=said)
            self._problem = said
            return _RETRY_S
        except Exception as error:
            self._scheduler = None
            if self._problem != repr(error):
                log.exception("the reconcile pass failed; it is tried again")
            self._problem = repr(error)
            self._faults.new.clear()
            self._hold()
            return _RETRY_S
        self._problem = ""
        self._faults.nothing_failed()
        return wait_s

    def run_once(self) -> float | None:
        """Run one pass; restart it without the jobs on which it fails, which are set aside.

        Returns the seconds until the next pass (None: when the notifier wakes the loop). Raises errors that cannot be
        attributed to a single job.
        """
        if self._begun_s is not None and self._monotonic() - self._begun_s >= _TRY_AGAIN_S and self._faults.try_again():
            self._scheduler = None  # It is built anew with them.
        observations = self._look()
        for _ in range(_MOST_BEGINNINGS):
            try:
                began_s, self._heard_s = time.perf_counter(), 0.0
                wait_s = self._pass(observations)
                rest_s = time.perf_counter() - began_s - self._heard_s
                self._crowd_s = min(_CROWD_S[1], max(_CROWD_S[0], rest_s))
                break
            except _BeginAgainError:
                self._scheduler = None
        else:
            raise ServiceFaultError(f"a pass was begun {_MOST_BEGINNINGS} times, and failed on other jobs each time")
        return 0.0 if self._decide_on_the_new() else wait_s

    def _decide_on_the_new(self) -> bool:
        """Decide on jobs submitted during the pass, before the next full pass; return whether there were any.

        A burst of submissions gets half of the time, however long a full pass over all other jobs takes.
        """
        began_s, heard = time.perf_counter(), False
        while time.perf_counter() - began_s < self._crowd_s and not self._stop.is_set():
            with self._store.read() as reader:
                new = reader.not_introduced()
            if new <= self._passed_over:
                return heard
            try:
                self._pass(None)
            except _BeginAgainError:
                self._scheduler = None
                return True  # The next pass handles it.
            heard = True
            self._notifier.sleep(_NEXT_S)  # A submitter that got its verdict may have more jobs.
        return heard

    def _pass(self, observations: tuple[GangObservation, ...] | None) -> float | None:
        """Run one pass; without observations, only over new submissions."""
        looked: Sequence[Looked] = () if observations is None else self._candidate_service.collect()
        now, monotonic_s = self._clock(), self._monotonic()
        with self._thinking, unit_of_work(self._store) as work:
            self._notice_ignored(work.ignored())
            self._broken_nodes = set_aside_nodes(work.avoided())
            if self._begun_s is None:
                self._begun_s = monotonic_s
                self._faults.inherit(
                    {row.job_id: row.set_aside for _, row in work.current_rows if row.set_aside and not row.terminal}
                )
            if not self._has_begun:
                self._absence = _absence_until(now, work)
            context = self._open(work, now)
            try:
                setting_aside.notice_troubles(context, observations or ())
                self._bounds.check(context, observations or ())
                if self._set_aside(context):  # Nothing was decided yet, so the pass goes on without them.
                    self._scheduler, context = None, self._open(work, now)
                if observations is not None:
                    self._leftovers.look(context, observations, self._nodes)
                context.held = self._leftovers.held(context)
                unknown_gangs.number_above(context, self._engine.latest, everyone=self._scheduler is None)
                setting_aside.place(context, observations or ())
                if self._scheduler is None:
                    self._scheduler = self._restore(context)
                if observations is None:
                    self._hear(context)
                else:
                    seen = Seen(observations, looked, self._nodes, monotonic_s)
                    for stage in self._stages:
                        stage.run(context, seen)
                written = self._write_states(context)
                if not self._faults.new:
                    work.commit()
            except StaleReadError as error:
                log.info("a pass is begun again", reason=str(error))
                raise _BeginAgainError from error
            except UnstorableError as error:
                if error.job_id is None:
                    raise
                self._faults.note(error.job_id, "writing down what is known of it", error)
            except SchedulerFaultError as error:
                self._attribute(context, error)
            if self._set_aside(context):
                raise _BeginAgainError
        self._wake_at, self._has_begun, self._singly = context.wake_at, True, False
        self._written = written
        if context.decided or self._foresight is None:
            self._publish(context, written)
        self._passed_over = frozenset() if context.more else context.not_introduced()
        self._held = context.held
        if observations is not None:
            self._leftovers.stored()
            self._inbox.stored()
            self._leases.stored()
            self._candidate_service.settled(looked)
        for job_id in setting_aside.ended(context):
            self._faults.lift(job_id)
        self._notifier.changed()
        if observations is None:
            return 0.0
        self._actuator.act(context)
        if self._actuator.refused_slots:
            self._looked_at_nodes_s = -math.inf  # The engine may see the holder by now.
        for job_id, _ in self._actuator.drained:
            gangs = [g for g in context.generations.values() if g.job_id == job_id]
            self._inbox.forget(job_id, {g.generation for g in gangs if g.state != GangState.ENDED})
        self._retention.trim(self._store, self._engine.files, self._snapshots, self._settings, now, monotonic_s)
        if self._set_aside(context):
            self._scheduler = None
            return 0.0
        return self._interval(context)

    def _open(self, work: UnitOfWork, now: float) -> PassContext:
        context = PassContext.open(
            work,
            now,
            self._settings,
            self._scheduler or Scheduler(),
            self._engine.files,
            self._wake_at,
            self._faults,
        )
        context.singly, context.absence = self._singly, self._absence
        return context

    def _publish(self, context: PassContext, states: Mapping[str, JobState]) -> None:
        """Keep the plan for readers until the next pass. Nothing depends on it, so an error here fails no pass."""
        try:
            self._foresight = foresight_of(context.scheduler, states)
        except Exception:
            log.exception("what is planned cannot be shown")

    def _attribute(self, context: PassContext, error: SchedulerFaultError) -> None:
        """Find the jobs on which the scheduler failed. Raises the fault itself if it is no job's."""
        states = [state for row in context.rows if (state := self._state_of(context, row)) is not None]

        def fresh() -> Scheduler:
            return _new_scheduler(self._settings, nodes_now(context, self._nodes))

        found = setting_aside.culprits(context, states, fresh)
        if not found:
            self._singly = True  # No job fails alone, so the next pass feeds one event at a time.
            raise error
        for owner in found:
            self._faults.note(owner, "planning with it", error.__cause__ or error)

    def _set_aside(self, context: PassContext) -> bool:
        """Set aside the jobs on which the pass failed; True if there were any: the scheduler must be rebuilt."""
        if not self._faults.new:
            return False
        for owner in self._faults.set_aside(len(context.jobs), self._monotonic()):
            log.error("a job is set aside", job_id=owner, reason=str(self._faults.aside[owner]))
        return True

    # -- observe ------------------------------------------------------------------------------------------------

    def _look(self) -> tuple[GangObservation, ...]:
        monotonic_s = self._monotonic()
        if monotonic_s - self._looked_at_nodes_s >= self._settings.inventory_interval_s or not self._nodes:
            crashpoints.point("before inventory")
            self._nodes = self._engine.inventory()
            self._looked_at_nodes_s = monotonic_s
        crashpoints.point("before observe")
        observations = self._engine.observe()
        crashpoints.point("after observe")
        self._inbox.deliver(observations)
        return observations

    # -- decide -------------------------------------------------------------------------------------------------

    def _restore(self, context: PassContext) -> Scheduler:
        scheduler = _new_scheduler(self._settings, nodes_now(context, self._nodes))
        self._recurring_runs.begin()
        self._written = {}
        states = [state for row in context.rows if (state := self._state_of(context, row)) is not None]
        context.scheduler, context.decided = scheduler, True
        introducing.recall(context, scheduler)
        try:
            decisions = scheduler.restore(states, context.now)
        except Exception as error:
            raise SchedulerFaultError(None) from error
        context.wake_at = None
        record_all(context, decisions)
        if states and not self._has_begun:
            reason = Reason(f"{self._begins} and goes on with {{jobs:#job}}", jobs=len(states))
            context.tx.add_event(EventKind.SERVICE_STARTED, reason)
        return scheduler

    def _state_of(self, context: PassContext, row: IncarnationRow) -> JobState | None:
        """Return the stored scheduler state of a job; None if it has none, or it cannot be read."""
        if not row.introduced or row.terminal or row.scheduler_state is None:
            return None
        with context.on_behalf_of(row.job_id, "reading what the scheduler remembered of it"):
            state = self._with_its_margin(row.scheduler_state)
            problem = state_out_of_bounds(state)
            if problem is not None:
                raise setting_aside.OutOfBoundsError(problem)
            return state
        return None

    def _with_its_margin(self, stored: StoredState) -> JobState:
        """Keep the flat margin of a job admitted when all speeds had one, where its speed was not measured."""
        state = stored.state
        if stored.has_speed_sigma:
            return state
        sigma = sigma_of_margin(self._settings.throughput_error, self._settings.scheduler_config())
        return replace(state, job=replace(state.job, speed_sigma=sigma))

    def _hear(self, context: PassContext) -> None:
        """Decide on new submissions and on amendments."""
        began_s = time.perf_counter()
        slots = sum(node.slots for node in self._nodes)
        introducing.introduce(
            context,
            self.device_type,
            slots,
            introducing.Preparing(self._candidate_service, self._engine.prepare_environment),
            self._crowd_s,
        )
        self._heard_s += time.perf_counter() - began_s
        introducing.amend(context)

    def _notice_clock(self, context: PassContext, monotonic_s: float) -> None:
        offset_s = context.now - monotonic_s
        jump_s = offset_s - self._clock_offset_s
        self._clock_offset_s = offset_s
        if abs(jump_s) > _CLOCK_JUMP_S:
            direction = "forward" if jump_s > 0 else "back"
            kind = f"the clock of this machine jumped {direction} by {{jump:duration}}; leases are not affected"
            reason = Reason(kind, jump=abs(jump_s))
            context.tx.add_event(EventKind.CLOCK_JUMPED, reason)
            log.warning(str(reason))

    def _notice_ignored(self, ignored: list[str]) -> None:
        """Log each stored fact that is ignored, once."""
        for said in ignored:
            if said not in self._ignored:
                log.warning(said)
        self._ignored = ignored

    def _write_states(self, context: PassContext) -> dict[str, JobState]:
        """Write changed scheduler states into the rows; return the states that the rows now have, by job id."""
        if not context.decided:
            return self._written
        written: dict[str, JobState] = {}
        for row in context.rows:
            if not row.introduced or row.terminal:
                continue
            with context.on_behalf_of(row.job_id, "writing down what the scheduler remembers of it"):
                state = context.scheduler.state(row.job_id)
                if state is None:
                    continue
                if self._written.get(row.job_id) != state or row.scheduler_state is None:
                    row.scheduler_state = StoredState.of(state)
                written[row.job_id] = state
                self._project(context, row)
        return written

    def _project(self, context: PassContext, row: IncarnationRow) -> None:
        finish_s = context.scheduler.projected_finish_s(row.job_id)
        projected = None if finish_s is None else finish_s + context.costs_of(row).tail_s
        before = row.projected_finish_at
        if projected is None or before is None or abs(projected - before) > _PROJECTION_CHANGE_S:
            row.projected_finish_at = projected

    def _secrets_of(self, row: IncarnationRow) -> Mapping[str, str]:
        try:
            return self._box.open(row.secret_env)
        except SecretError as error:
            raise EngineError(str(error)) from error

    def _secrets_to_hide(self, row: IncarnationRow) -> Mapping[str, str]:
        return hidden_values(self._box, row.submission, row.secret_env)

    # -- when the next pass is due ------------------------------------------------------------------------------

    def _interval(self, context: PassContext) -> float | None:
        s = self._settings
        if context.more:
            return 0.0
        rows = [row for row in context.rows if not row.drained]
        if not rows:
            return None if self._stop.is_set() else s.inventory_interval_s
        if any(self._in_transition(context, row) for row in rows):
            return s.transition_interval_s
        wait_s = s.running_interval_s
        if context.wake_at is not None:
            wait_s = min(wait_s, max(0.01, context.wake_at - self._clock()))
        return wait_s

    @staticmethod
    def _in_transition(context: PassContext, row: IncarnationRow) -> bool:
        if row.terminal or row.ending or not row.introduced:
            return True
        generations = context.open_of(row)
        desired = context.desired(row)
        if desired is not None and desired.purpose == Purpose.PROFILE:
            return True
        nearly_done = row.total_steps is not None and row.step >= row.total_steps - 1
        return nearly_done or any(g.state != GangState.RUNNING or (g is not desired and alive(g)) for g in generations)


def _new_scheduler(settings: ServiceSettings, nodes: Iterable[Node]) -> Scheduler:
    return Scheduler(settings.scheduler_config(), nodes, recurring_runs.POLICY)


def _absence_until(now: float, work: UnitOfWork) -> Absence:
    """Return since when no service has stored anything of the jobs that live: one that is there stores reports."""
    signs = [at for _, row in work.current_rows for at in (row.submitted_at, row.last_step_at)]
    signs += [generation.created_at for generation in work.current_generations]
    # What is stored of a job may be anything, see ``setting_aside.py``.
    return Absence(max((at for at in signs if isinstance(at, int | float) and at <= now), default=now), now)
