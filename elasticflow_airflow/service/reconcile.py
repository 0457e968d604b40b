"""The reconcile loop: one thread that owns the scheduler and the engine, and drives what is to what should be.

Each pass looks, thinks inside one write transaction, and acts on what was committed. A pass that fails, or a kill at
any point of it, is repaired by the next: the scheduler is rebuilt from the store, and every call to the engine may be
repeated.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog

from elasticflow_airflow.engines.port import Engine, EngineError, EngineNode, GangObservation, GangState
from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core import events as ev
from elasticflow_airflow.scheduler_core.config import Objective
from elasticflow_airflow.scheduler_core.decisions import Purpose
from elasticflow_airflow.scheduler_core.policies.port import ServicePolicy
from elasticflow_airflow.scheduler_core.policies.registry import DEFAULT_POLICY, make_policy
from elasticflow_airflow.scheduler_core.values import Node
from elasticflow_airflow.service import (
    crashpoints,
    endings,
    introducing,
    observing,
    promotion,
    recurring,
    rescaling,
    resuming,
    retention,
    stragglers,
    watching,
)
from elasticflow_airflow.service.actuating import Actuator, record_drained, record_refusals
from elasticflow_airflow.service.books import Books, alive
from elasticflow_airflow.service.candidates import CandidateDesk, Looked
from elasticflow_airflow.service.codec import state_from_json, state_to_json
from elasticflow_airflow.service.deciding import feed, record_all, when
from elasticflow_airflow.service.foresight import Foresight, foresight_of
from elasticflow_airflow.service.models import IncarnationRow
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.secrets import SecretBox, SecretError, secrets_in_args
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.snapshots import Snapshots
from elasticflow_airflow.service.store import DATABASE_AWAY, Store

_RETRY_S = 1.0
_CLOCK_JUMP_S = 5.0
_OFFER_ROUND_S = 60.0
_PROJECTION_CHANGE_S = 0.5

log = structlog.get_logger()


class Reconciler:
    """The loop. ``clock`` gives UTC seconds and ``monotonic`` seconds that never jump."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        settings: ServiceSettings,
        notifier: Notifier,
        snapshots: Snapshots,
        secrets: SecretBox,
        desk: CandidateDesk,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._engine, self._settings, self._notifier = store, engine, settings, notifier
        self._box, self._desk, self._clock, self._monotonic = secrets, desk, clock, monotonic
        self._actuator = Actuator(engine, settings, snapshots, self._secrets_of, monotonic)
        self._inbox = observing.Inbox()
        self._leases = introducing.Leases()
        self._patience = watching.Patience()
        self._almanac = recurring.Almanac()
        self._retention = retention.Retention()
        self._thinking = threading.Lock()
        self._scheduler: ServicePolicy | None = None
        self._wake_at: float | None = None
        self._nodes: tuple[EngineNode, ...] = ()
        self._looked_at_nodes_s = -math.inf
        self._clock_offset_s = clock() - monotonic()
        self._stop = threading.Event()
        self._problem = ""

    @property
    def nodes(self) -> tuple[EngineNode, ...]:
        """The nodes as last seen; empty before the first pass."""
        return self._nodes

    @property
    def wake_at(self) -> float | None:
        """When the scheduler wants to be woken, UTC seconds; None: it does not."""
        return self._wake_at

    @property
    def problem(self) -> str:
        """Why the last pass failed; empty when it did not."""
        return self._problem

    @property
    def device_type(self) -> str:
        """The kind of device of the slots; empty before the first pass."""
        return self._device_type()

    def copy_scheduler(self) -> ServicePolicy | None:
        """The scheduler as it is between two passes, to try things on; None while it is not there. Thread-safe."""
        with self._thinking:
            return copy.deepcopy(self._scheduler)

    def foresee(self) -> Foresight | None:
        """What the scheduler has in mind between two passes; None while it is not there. Thread-safe."""
        with self._thinking:
            return None if self._scheduler is None else foresight_of(self._scheduler)

    def hear_of_runs(self) -> None:
        """Somebody has stored other due runs: the next pass tells the scheduler. Thread-safe."""
        self._almanac.hear()
        self._notifier.wake()

    def stop(self) -> None:
        """Have :meth:`run` return after the pass under way; gangs go on."""
        self._stop.set()
        self._notifier.wake()

    def run(self) -> None:
        """Pass after pass until :meth:`stop`."""
        while not self._stop.is_set():
            self._notifier.sleep(self.try_once())

    def try_once(self) -> float | None:
        """One pass. A pass that fails is logged, and the next one begins with a scheduler rebuilt from the store.

        While the database is away nobody's workers stop for it.
        """
        try:
            wait_s = self.run_once()
        except Exception as error:
            self._scheduler = None
            if self._problem != repr(error):
                log.exception("the reconcile pass failed; it is tried again")
            self._problem = repr(error)
            if isinstance(error, DATABASE_AWAY):
                self._actuator.hold()
            return _RETRY_S
        self._problem = ""
        return wait_s

    def run_once(self) -> float | None:
        """One pass; returns after how many seconds the next should come (None: when somebody wakes it)."""
        observations = self._look()
        looked = self._desk.collect()
        now, monotonic_s = self._clock(), self._monotonic()
        with self._thinking, self._store.write() as tx:
            if self._scheduler is None:
                self._scheduler = self._restore(Books.open(tx, now, self._settings, Scheduler(), None))
            books = Books.open(tx, now, self._settings, self._scheduler, self._wake_at)
            self._think(books, observations, looked, monotonic_s)
            self._write_states(books)
        self._wake_at = books.wake_at
        self._inbox.stored()
        self._leases.stored()
        self._desk.settled(looked)
        self._notifier.changed()
        self._actuator.act(books)
        for job_id, _ in self._actuator.drained:
            gangs = [g for g in books.generations.values() if g.job_id == job_id]
            self._inbox.forget(job_id, {g.generation for g in gangs if g.state != GangState.ENDED})
        return self._interval(books)

    # -- look ---------------------------------------------------------------------------------------------------

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

    # -- think --------------------------------------------------------------------------------------------------

    def _restore(self, books: Books) -> ServicePolicy:
        scheduler = _policy(self._settings, self._nodes_now(books))
        self._almanac.begin()
        states = [
            state_from_json(row.scheduler_state)
            for row in books.rows
            if row.introduced and not row.terminal and row.scheduler_state is not None
        ]
        books.scheduler = scheduler
        if isinstance(scheduler, Scheduler):
            introducing.recall(books, scheduler)
        record_all(books, scheduler.restore(states, books.now))
        self._wake_at = books.wake_at
        if states:
            jobs = "job" if len(states) == 1 else "jobs"
            books.tx.add_event("service_started", f"the service has started and goes on with {len(states)} {jobs}")
        return scheduler

    def _think(
        self, books: Books, observations: Sequence[GangObservation], looked: Sequence[Looked], monotonic_s: float
    ) -> None:
        self._notice_clock(books, monotonic_s)
        self._tell_nodes(books)
        observing.fold(books, observations, self._inbox, self._secrets_to_hide)
        promotion.record(books, looked)
        resuming.record(books, looked, self._desk)
        rescaling.heal(books)
        stragglers.watch(books)
        record_refusals(books, self._actuator)
        endings.settle(books)
        introducing.cancel(books)
        self._leases.check(books, monotonic_s)
        self._almanac.keep(books)
        slots = sum(node.slots for node in self._nodes)
        introducing.introduce(books, self._device_type(), slots, self._desk)
        introducing.amend(books)
        watching.watch_deadlines(books)
        self._patience.watch_gangs(books, monotonic_s)
        if books.wake_at is not None and books.wake_at <= books.now:
            feed(books, ev.WakeUp())
        rescaling.break_circles(books)
        endings.conclude(books)
        if books.learned:
            self._almanac.keep(books)
        promotion.ask(books, self._desk)
        record_drained(books, self._actuator)
        self._retention.trim(books, monotonic_s)

    def _notice_clock(self, books: Books, monotonic_s: float) -> None:
        offset_s = books.now - monotonic_s
        jump_s = offset_s - self._clock_offset_s
        self._clock_offset_s = offset_s
        if abs(jump_s) > _CLOCK_JUMP_S:
            direction = "forward" if jump_s > 0 else "back"
            reason = f"the clock of this machine jumped {direction} by {abs(jump_s):.0f} s; leases are not affected"
            books.tx.add_event("clock_jumped", reason)
            log.warning(reason)

    def _nodes_now(self, books: Books) -> list[Node]:
        """The nodes as the scheduler should see them: one that goes away is to be left some time before."""
        drains, lead_s, avoided = books.tx.drains(), self._settings.drain_lead_s, books.tx.avoided()
        return [
            Node(
                node_id=node.node_id,
                slots=node.slots,
                busy=frozenset(node.busy),
                draining_until_s=drains[node.node_id] - lead_s if node.node_id in drains else None,
                avoided={row.slot_index: row.until_at for row in avoided if row.node_id == node.node_id},
            )
            for node in self._nodes
        ]

    def _tell_nodes(self, books: Books) -> None:
        stragglers.take_back(books)
        known = {node.node_id: node for node in books.scheduler.nodes()}
        there = {node.node_id: node for node in self._nodes_now(books)}
        for node_id in known.keys() - there.keys():
            books.tx.add_event("node_lost", f"node {node_id} is gone")
            feed(books, ev.NodeLost(node_id))
            books.tx.forget_drain(node_id)
        for node_id, node in there.items():
            before = known.get(node_id)
            drained = None if before is None else before.draining_until_s
            if node.draining_until_s != drained:
                until_s = node.draining_until_s
                reason = f"node {node_id} stays after all"
                if until_s is not None:
                    reason = f"node {node_id} goes away: nothing is planned on it after {when(until_s)}"
                books.tx.add_event("node_draining", reason)
            dated = before and replace(before, draining_until_s=node.draining_until_s, avoided=node.avoided)
            if dated == node:
                if before != node:
                    feed(books, ev.NodeJoined(node))
            elif before != node:
                holders = next(n.busy for n in self._nodes if n.node_id == node_id)
                busy = "".join(f"; slot {index} is held by {holder}" for index, holder in sorted(holders.items()))
                books.tx.add_event("node_changed", f"node {node_id} has {node.slots} slots{busy}")
                feed(books, ev.NodeJoined(node))

    def _write_states(self, books: Books) -> None:
        if not books.fed:
            return
        rows = {row.job_id: row for row in books.rows if row.introduced and not row.terminal}
        for state in books.scheduler.states():
            row = rows.get(state.job.job_id)
            if row is None:
                continue
            raw = state_to_json(state)
            if raw != row.scheduler_state:
                row.scheduler_state = raw
            self._project(books, row)

    def _project(self, books: Books, row: IncarnationRow) -> None:
        finish_s = books.scheduler.projected_finish_s(row.job_id)
        projected = None if finish_s is None else finish_s + books.costs_of(row).tail_s
        before = row.projected_finish_at
        if projected is None or before is None or abs(projected - before) > _PROJECTION_CHANGE_S:
            row.projected_finish_at = projected

    def _secrets_of(self, row: IncarnationRow) -> Mapping[str, str]:
        try:
            return self._box.open(row.secret_env)
        except SecretError as error:
            raise EngineError(str(error)) from error

    def _secrets_to_hide(self, row: IncarnationRow) -> Mapping[str, str]:
        """What must not show up in messages. Without the key no environment was given to the workers."""
        command = row.submission["command"]
        in_args = secrets_in_args(command["args"], command.get("args_shown"))
        try:
            return {**in_args, **self._box.open(row.secret_env)}
        except SecretError:
            return in_args

    def _device_type(self) -> str:
        return self._nodes[0].device_type if self._nodes else ""

    # -- when next ----------------------------------------------------------------------------------------------

    def _interval(self, books: Books) -> float | None:
        s = self._settings
        rows = [row for row in books.rows if not row.drained]
        if not rows:
            return None if self._stop.is_set() else s.inventory_interval_s
        if any(self._in_transition(books, row) for row in rows):
            return s.transition_interval_s
        wait_s = s.running_interval_s
        if books.wake_at is not None:
            wait_s = min(wait_s, max(0.01, books.wake_at - self._clock()))
        return wait_s

    @staticmethod
    def _in_transition(books: Books, row: IncarnationRow) -> bool:
        if row.terminal or row.ending or not row.introduced:
            return True
        generations = books.open_of(row)
        desired = books.desired(row)
        if desired is not None and desired.purpose == Purpose.PROFILE:
            return True
        nearly_done = row.total_steps is not None and row.step >= row.total_steps - 1
        return nearly_done or any(g.state != GangState.RUNNING or (g is not desired and alive(g)) for g in generations)


def _policy(settings: ServiceSettings, nodes: Iterable[Node]) -> ServicePolicy:
    config = _scheduler_config(settings)
    if settings.policy == DEFAULT_POLICY:
        return Scheduler(config, nodes, recurring.POLICY)
    return make_policy(settings.policy, nodes, config)


def _scheduler_config(settings: ServiceSettings) -> SchedulerConfig:
    return SchedulerConfig(
        objective=Objective(settings.objective),
        speed_error=settings.throughput_error,
        deadline_margin_s=settings.deadline_margin_s,
        offer_margin_s=settings.offer_margin_s,
        offer_round_s=_OFFER_ROUND_S,
        profile_budget_s=settings.profile_limit_s,
        profile_startup_s=settings.profile_startup_s,
        explore_gain=settings.explore_gain,
    )
