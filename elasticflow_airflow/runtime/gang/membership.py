"""This worker's membership of the gang: joins a group, changes to the next one in place, recovers from a death.

The plan names the workers that train. The old group trains on until all workers of the new one are ready and all agree
at a step boundary to switch (EDL, arXiv:1909.11985). Workers that hold the training state send it to joiners. May
import torch and the standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.gang.handover import JOINER_SILENCE_LIMIT_S, EpochAim, Handover
from elasticflow_airflow.runtime.gang.process_group import GroupBroken, WorkerGroup
from elasticflow_airflow.runtime.gang.transfer import StateServer, TransferError, receive
from elasticflow_airflow.runtime.gang.watching import PlanWatcher
from elasticflow_airflow.runtime.protocol import Membership, RescaleMode, own_address

FIRST_MEETING_LIMIT_S = 600.0
RECOVERY_LIMIT_S = 60.0
"""How long, in seconds, survivors wait for a plan without the dead workers, counted from the last news."""
ABANDONED_STATUS = 75
"""Exit status of a survivor that received no plan in time (EX_TEMPFAIL)."""
_WAIT_S = 0.05
_POLL_S = 0.005
_LAST_LOOK_LIMIT_S = 0.5
_END_LIMIT_S = 3.0


class JoinerSilent(GroupBroken):
    """Joiners do not answer: the change is abandoned, and the training workers continue as before."""

    def __init__(self, workers: list[str]) -> None:
        names, verb = ", ".join(workers), "has" if len(workers) == 1 else "have"
        super().__init__(f"{names} {verb} not answered for {JOINER_SILENCE_LIMIT_S:.0f} s")
        self.workers = workers


class Dismissed(Exception):  # noqa: N818  (a signal, not an error)
    """The plan excludes this worker or stops all workers: this worker has nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """The result of a change of the group. ``took_over`` is the sender's facts if this worker received its state."""

    from_generation: int
    generation: int
    pause_s: float
    state_bytes: int
    recovered: bool
    top_step: int
    """The step that all workers are at now; -1 if no worker had a state."""
    took_over: Mapping[str, Any] | None
    committed: Mapping[str, Any] | None
    """If this worker is one step behind: the facts of a member that has committed the pending step."""


class GroupMember:
    """The current group, and how it changes. ``joined`` is False while a joiner still warms up."""

    def __init__(self, folder: Path, worker_id: str, device: torch.device, plan: Membership) -> None:
        self._folder, self._worker_id, self._device = folder, worker_id, device
        self._lock = threading.Lock()
        self.plan = plan
        self.group = WorkerGroup(generation=0)
        self.members: tuple[str, ...] = ()
        self.joined = False
        self.told_to_stop = False
        """Save and exit, because of a stop, a change by restart, or a plan without this worker."""
        self.everybody_stops = False
        """All workers stop, as opposed to the others continuing without this worker."""
        self._handover: Handover | None = None
        self._agreed: Handover | None = None
        self._news = threading.Event()
        self._announced: int | None = None
        self._arrival: tuple[Handover, Future[Any]] | None = None
        self._aim = EpochAim()
        self.watcher = PlanWatcher(folder, worker_id, self._on_plan)
        self._ending: list[WorkerGroup | Handover] = []
        """Groups and handovers left behind, perhaps with live threads: the interpreter aborts if it exits with one."""
        self._first = plan.mode is RescaleMode.RESTART

    # -- the plan (in the watcher's thread) -------------------------------------------------------------------------

    def _on_plan(self, plan: Membership) -> None:
        with self._lock:
            known = self._handover.generation if self._handover is not None else self.group.generation
            in_it = plan.rank_of(self._worker_id) is not None
            stays = in_it and plan.generation <= known
            if plan.mode is RescaleMode.RESTART or not plan.members:
                if not stays:
                    self.told_to_stop = self.everybody_stops = True
                    self._end_handover("everybody stops")
                    if not self.joined:
                        self.group.give_up("everybody stops")
            elif plan.generation > known:
                self._end_handover(f"generation {plan.generation} has taken its place")
                if self._worker_id in plan.lost:
                    # The others go on without it, and it may not be able to reach them: it must not wait for them.
                    # In this order: it must not vote to leave in a group that still works, or all would leave.
                    self.group.give_up("the others go on without this worker")
                    self.told_to_stop = True
                elif self.joined or in_it:
                    joins = not self.joined
                    self._handover = Handover(self._folder, plan, self._worker_id, self._device, joins=joins)
                    if joins and self._announced is not None:
                        self._handover.announce(self._announced)
                else:
                    self.told_to_stop = True
                gone = set(plan.lost) & set(self.members)
                if gone:
                    self.group.give_up(f"worker {', '.join(sorted(gone))} is lost")
            self.plan = plan
        self._news.set()

    def _end_handover(self, why: str) -> None:
        if self._handover is not None:
            self._handover.stop(why)
            self._ending.append(self._handover)
            if self._handover.group is not None:
                self._handover.group.close()
                self._ending.append(self._handover.group)
            self._handover = None

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Form the first group of a generation that starts together; a joiner only starts its plan watcher.

        Raises RuntimeError if the other workers do not arrive, and Dismissed if the plan has moved on.
        """
        if self._first:
            handover = Handover(self._folder, self.plan, self._worker_id, self._device, joins=True)
            self._handover = handover
            handover.announce(0)
            self.watcher.start()
            end_s = time.monotonic() + FIRST_MEETING_LIMIT_S
            while not handover.ready:
                if self.told_to_stop or handover.stopped:
                    raise Dismissed
                if handover.failure is not None or time.monotonic() > end_s:
                    raise RuntimeError(
                        f"the workers of generation {handover.generation} could not meet:"
                        f" {handover.failure or 'timeout'}"
                    )
                handover.wait(_WAIT_S)
            try:
                self._take_place(handover)
            except GroupBroken:
                raise Dismissed from None  # another plan arrived at this moment
        else:
            self.watcher.start()

    @property
    def rank(self) -> int:
        """Current rank; for a joiner that still warms up, the planned rank."""
        return self.group.rank if self.joined else (self.plan.rank_of(self._worker_id) or 0)

    @property
    def size(self) -> int:
        """Current number of workers; for a joiner that still warms up, the planned number."""
        return self.group.size if self.joined else max(1, len(self.plan.members))

    # -- agreeing ---------------------------------------------------------------------------------------------------

    def ready_for(self, next_epoch: int) -> int:
        """Return the generation that this worker can switch to if the next step is in ``next_epoch``; 0 if none."""
        handover = self._handover
        if handover is None or not self.joined:
            return 0
        handover.now_in_epoch(next_epoch)
        if not handover.ready or any(epoch != next_epoch for epoch in handover.joiner_epochs):
            return 0
        return handover.generation

    def agree(self, generations: list[int]) -> None:
        """Process the generations that all workers are ready for: if they match, the next step boundary switches."""
        handover = self._handover
        if handover is not None and generations and set(generations) == {handover.generation}:
            self._agreed = handover

    @property
    def switch_is_due(self) -> bool:
        """Whether all workers have agreed to switch at the next step boundary."""
        return self._agreed is not None

    # -- switching --------------------------------------------------------------------------------------------------

    def switch(self, registered: Registered, facts: Mapping[str, Any]) -> Adoption:
        """Change to the agreed group. Raises Dismissed if this worker is not in it.

        Raises GroupBroken if the change fails because a later plan replaced it or a worker died. Nothing has changed
        then, and the previous group still exists: it trains on if all its members are alive.
        """
        handover, self._agreed = self._agreed, None
        assert handover is not None  # switch_is_due
        return self._enter(handover, registered, facts, time.perf_counter())

    def recover(
        self,
        registered: Registered,
        facts: Mapping[str, Any],
        pending: int | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Adoption:
        """Wait for a plan without the dead workers and form its group from the survivors' states in memory.

        ``pending`` is the step whose sums this worker holds and whose commit failed. Raises Dismissed if the plan
        excludes this worker or ``is_over`` returns true because it is no longer needed, and SystemExit if no plan
        arrives.
        """
        began_s = time.perf_counter()
        self._agreed = None
        self.group.give_up("its operations fail")
        # Unblocks its members that wait for this worker.
        self.group.close()
        end_s = time.monotonic() + RECOVERY_LIMIT_S
        while time.monotonic() < end_s:
            if self.told_to_stop or is_over():
                raise Dismissed
            handover = self._handover
            if handover is None or not (handover.ready or handover.failure):
                self._news.wait(_WAIT_S)
                self._news.clear()
                continue
            end_s = time.monotonic() + RECOVERY_LIMIT_S
            if handover.failure is not None:
                self._leave_unformed(handover, handover.failure)
                continue
            try:
                return self._enter(handover, registered, facts, began_s, pending=pending, recovered=True)
            except GroupBroken as error:
                sys.stderr.write(f"elasticflow: generation {handover.generation} broke while it formed: {error}\n")
        sys.stderr.write(f"elasticflow: no plan without the lost workers came in {RECOVERY_LIMIT_S:.0f} s: leaving\n")
        raise SystemExit(ABANDONED_STATUS)

    def join(self, registered: Registered, epoch: int) -> Adoption | None:
        """Join the group as a warmed-up joiner whose loops are in ``epoch``; None if the others will not switch there.

        Raises Dismissed if the plan excludes this worker.
        """
        self._announced = epoch
        with self._lock:
            if self._handover is not None:
                self._handover.announce(epoch)
        while True:
            if self.told_to_stop:
                raise Dismissed
            handover = self._handover
            if handover is None or handover.stopped or not handover.ready:
                if handover is not None and handover.failure is not None:
                    self._leave_unformed(handover, handover.failure)  # a later plan follows
                    continue
                self._news.wait(_WAIT_S) if handover is None else handover.wait(_WAIT_S)
                self._news.clear()
                continue
            if self._aim.misses(epoch, handover.epoch_of_holders, handover.joiner_epochs):
                return None
            assert handover.group is not None  # it is ready, and this worker is in it
            if self._arrival is None or self._arrival[0] is not handover:
                self._arrival = (handover, handover.group.begin_exchange_values({"step": -1}))
            arrived = self._arrival[1]
            if not arrived.done():
                time.sleep(0.002)
                continue
            if isinstance(arrived.exception(), RuntimeError):
                time.sleep(_WAIT_S)  # a later plan follows, or all workers are dead
                continue
            rows = arrived.result()
            if all(row["step"] < 0 for row in rows) and not handover.store.check(["leavers"]):
                time.sleep(_WAIT_S)  # all members are joiners: the leaving workers have yet to agree
                continue
            try:
                return self._settle(handover, registered, rows, None, time.perf_counter())
            except GroupBroken as error:
                self._leave_handover(handover, str(error))  # a later plan follows

    def next_epoch_to_join(self, otherwise: int) -> int:
        """Return the epoch in which a joiner that missed the training workers should wait for them next."""
        handover = self._handover
        if handover is None or handover.epoch_of_holders is None:
            return otherwise
        return self._aim.choose(handover.epoch_of_holders, handover.joiner_epochs)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _enter(
        self,
        handover: Handover,
        registered: Registered,
        facts: Mapping[str, Any],
        began_s: float,
        *,
        pending: int | None = None,
        recovered: bool = False,
    ) -> Adoption:
        known = set(self.members)
        joiners = [m for m in handover.plan.members if m.worker_id not in known]
        stayers = len(handover.plan.members) - len(joiners)
        # After a break a known worker may be a joiner that went back before it took its place.
        serves = bool(joiners) or recovered
        server = StateServer(registered, facts, own_address()) if serves else None
        try:
            if handover.group is None:
                if stayers == 0 and server is not None:
                    self._serve_as_leaver(handover, server, len(joiners))
                else:
                    _wait_as_leaver(handover)
                raise Dismissed
            row: dict[str, Any] = {"step": facts["step"], "pending": pending, "facts": facts}
            if server is not None:
                row["contact"] = server.contact
            rows = handover.group.exchange_values(row, lambda: _look_at_joiners(handover))
            return self._settle(handover, registered, rows, server, began_s, recovered=recovered)
        except GroupBroken as error:
            handover.give_up(str(error))
            self._leave_handover(handover, str(error))
            raise
        finally:
            if server is not None:
                server.close()

    def _serve_as_leaver(self, handover: Handover, server: StateServer, joiners: int) -> None:
        """Serve the state when all workers leave and others join: leavers exit after the transfer, or all stay."""
        mine = sum(1 for i in range(joiners) if i % self.group.size == self.group.rank)
        handover.tell(f"leaver/{self.group.rank}", json.dumps(server.contact))
        handover.tell("leavers", str(self.group.size))

        def gone() -> bool:
            # The store is lost with its host, the first of the joiners.
            return handover.stopped or handover.failure is not None or bool(handover.silent_joiners())

        done = server.wait(mine, gone)
        if not self.group.broken:
            done = bool(self.group.exchange(torch.tensor([float(done)])).all())
        if not done:
            _look_at_joiners(handover)
            raise GroupBroken("a worker that joins did not take the state")

    def _leave_unformed(self, handover: Handover, failure: str) -> None:
        sys.stderr.write(f"elasticflow: generation {handover.generation} did not form: {failure}\n")
        self._leave_handover(handover, failure)

    def _leave_handover(self, handover: Handover, why: str) -> None:
        """Abandon the handover for this worker, and unblock the workers that wait for it there."""
        with self._lock:
            if self._handover is handover:
                self._end_handover(why)

    def _settle(
        self,
        handover: Handover,
        registered: Registered,
        rows: list[dict[str, Any]],
        server: StateServer | None,
        began_s: float,
        *,
        recovered: bool = False,
    ) -> Adoption:
        """Bring all workers of the new group to the same step."""
        assert handover.group is not None
        assert handover.rank is not None
        rank, own = handover.rank, rows[handover.rank]
        top = max(int(row["step"]) for row in rows)
        holders = [r for r, row in enumerate(rows) if row["step"] == top]
        catches_up = own["step"] == top - 1 and own.get("pending") == top
        needy = [
            r
            for r, row in enumerate(rows)
            if row["step"] < top and not (row["step"] == top - 1 and row.get("pending") == top)
        ]
        took_over: Mapping[str, Any] | None = None
        nbytes = 0
        if rank in needy and self.joined:
            _die(f"the others went on to step {top} without this worker, which is at {own['step']}")
        if top < 0:
            contact = self._contact_of_leaver(handover)
            received = self._receive(handover, contact, registered)
            took_over, nbytes, top = received.facts, received.nbytes, int(received.facts["step"])
        elif rank in needy:
            source = rows[holders[needy.index(rank) % len(holders)]]
            received = self._receive(handover, source["contact"], registered)
            took_over, nbytes = received.facts, received.nbytes
        elif server is not None and rank in holders:
            mine = sum(1 for i in range(len(needy)) if holders[i % len(holders)] == rank)
            group = handover.group
            if not server.wait(mine, lambda: handover.stopped or group.broken or bool(handover.silent_joiners())):
                _look_at_joiners(handover)
                raise GroupBroken("a worker that joins did not take the state")
            nbytes = server.nbytes
        # All leave the previous group together or not at all: nothing changes until every worker has the state.
        handover.group.exchange(torch.zeros(1), lambda: _look_at_joiners(handover))
        before = self.group.generation
        self._take_place(handover)
        return Adoption(
            from_generation=before,
            generation=handover.generation,
            pause_s=time.perf_counter() - began_s,
            state_bytes=nbytes,
            recovered=recovered,
            top_step=top,
            took_over=took_over,
            committed=rows[holders[0]]["facts"] if catches_up else None,
        )

    def _contact_of_leaver(self, handover: Handover) -> Any:
        assert handover.rank is not None  # a joiner is in the plan
        return json.loads(handover.store.get(f"leaver/{handover.rank % int(handover.store.get('leavers'))}"))

    def _receive(self, handover: Handover, contact: Any, registered: Registered) -> Any:
        try:
            return receive(contact, registered)
        except TransferError as error:
            self.watcher.look()
            if handover.stopped:
                # The sender saw a later plan before this worker did.
                raise GroupBroken(str(error)) from error
            _die(f"the state of training could not be taken over: {error}")

    def _take_place(self, handover: Handover) -> None:
        assert handover.group is not None  # this worker is in it
        old = self.group
        with self._lock:
            if handover.stopped:
                raise GroupBroken(f"generation {handover.generation} was overtaken by a later plan")
            self.group = handover.group
            self.members = tuple(m.worker_id for m in handover.plan.members)
            self.joined = True
            if self._handover is handover:
                self._handover = None
            gone = set(self.plan.lost) & set(self.members)
        old.close()
        handover.end()
        self._ending = [part for part in self._ending if not part.join(0.0)] + [old, handover]
        if gone:
            self.group.give_up(f"worker {', '.join(sorted(gone))} is lost")

    def close(self) -> bool:
        """Leave the group. Returns False if a thread remains, blocked in an operation with a worker that is gone."""
        self.watcher.stop()
        with self._lock:
            self._end_handover("this worker leaves")
        self.group.close()
        ended = [part.join(_END_LIMIT_S) for part in [*self._ending, self.group]]
        return all(ended)


def _wait_as_leaver(handover: Handover) -> None:
    """Return once the staying workers no longer need this one. Raises GroupBroken if it must continue with them."""
    while not handover.settled:
        why = handover.given_up or handover.failure
        if why is None and handover.stopped:
            handover.join(_LAST_LOOK_LIMIT_S)
            if handover.settled:
                return
            why = f"generation {handover.generation} was overtaken by a later plan"
        if why is not None:
            raise GroupBroken(why)
        _look_at_joiners(handover)
        time.sleep(_POLL_S)


def _look_at_joiners(handover: Handover) -> None:
    """Raise JoinerSilent if a joiner no longer answers. Joiners themselves wait for the plan."""
    silent = handover.silent_joiners()
    if silent:
        raise JoinerSilent(silent)


def _die(why: str) -> NoReturn:
    """Exit like a worker that died, not like a script that failed: the others continue without it."""
    sys.stderr.write(f"elasticflow: {why}\n")
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(ABANDONED_STATUS)  # not reached: the signal is delivered to this process
