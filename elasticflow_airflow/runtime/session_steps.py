"""The steps of a session: what all workers agree on at the end of each, and how workers change between steps.

May import torch and the standard library only.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints.saving import turn_of_survivors
from elasticflow_airflow.runtime.gang.membership import Adoption, Dismissed, JoinerSilent
from elasticflow_airflow.runtime.gang.process_group import GroupBroken, WorkerGroup
from elasticflow_airflow.runtime.logical_workers import owned_by
from elasticflow_airflow.runtime.protocol import GENERATION_ENV, Report, ReportKind, read_reports, report_path
from elasticflow_airflow.runtime.reporting import WORKER_INTERVAL_S
from elasticflow_airflow.runtime.samples.length_groups import OTHER_LENGTHS
from elasticflow_airflow.runtime.samples.sample_order import Batch
from elasticflow_airflow.runtime.samples.stream_checks import OTHER_ORDERS
from elasticflow_airflow.runtime.session_core import Leaving, SessionCore, finite_or_none, trained_parameters
from elasticflow_airflow.runtime.stepping.gradient_step import Sums, from_rows, to_row
from elasticflow_airflow.runtime.stepping.measuring import Activity

REHEARSALS = 4
"""Number of warm-up steps of a joining worker: the first steps of a process are several times slower."""
_PREPARE = 1
"""Value in place of a token: do not save yet, but allocate memory and start the writer for this worker's part."""
_TOKEN_BITS = 48
_TOKEN = 1 << (_TOKEN_BITS - 1)
"""Bit set in every token, so that no token equals zero or ``_PREPARE``; a float64 holds more than 48 bits exactly."""
_LAST_WORDS_BYTES = 1 << 16
"""How many bytes at the end of a report file are read first; they usually contain the last report."""


class Vote(NamedTuple):
    """Flags that each worker sends to all at the end of a step, with its sums; encoded as numbers in this order."""

    leaving: float
    """Whether the worker has been asked to exit."""
    saving: float
    """Whether rank 0 requests a save at the next boundary."""
    switching: float
    """The generation that the worker is ready to switch to; 0: none."""
    measuring: float
    """Whether rank 0 requests that gradient norms be measured."""
    strayed: float
    """The number, from 1, of a buffer that forward passes changed and that cannot be merged; 0: none."""
    parts: float
    """Token that identifies a save in parts, or ``_PREPARE``. Only rank 0's value is used, because other workers may
    see a stale listing of the same folder."""
    generation: float
    order: float
    """Fingerprint of the order in which the worker reads a stream, or of its lengths; it must be equal on all."""


def _nothing(*_: object) -> None:
    """Default hook, for scripts without a framework."""


@dataclass(slots=True)
class StepHooks:
    """Hooks of a framework integration, called at points of a step that only the session knows."""

    before_commit: Callable[[WorkerGroup], None] = _nothing
    """Called when all gradients are summed. A worker that receives the commit knows that all workers have called it."""
    redone: Callable[[], None] = _nothing
    """Called when a worker has died and the step is repeated."""
    group_changed: Callable[[], None] = _nothing
    """Called when rank and number of workers may have changed."""


class SessionSteps:
    """Commits steps, and handles workers that join, leave or die between and within steps."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core
        self.device = core.device
        self.hooks = StepHooks()

    def step_failed(self, error: BaseException, micro_batch_size: int) -> None:
        """Report an out-of-memory error with the micro-batch size; add a note to BatchNorm's single-sample error."""
        if "more than 1 value per channel" in str(error):
            error.add_note(
                "BatchNorm got a micro-batch of one sample: choose another global batch size, or a micro-batch size "
                "that leaves no single sample over, in the last batch of an epoch, too"
            )
        if bootstrap.is_out_of_memory(error):
            self._core.say(ReportKind.OUT_OF_MEMORY, micro_batch_size=micro_batch_size, message=str(error)[:500])

    def phase(self, name: str) -> None:
        """Record what this worker is doing, for its heartbeat."""
        core = self._core
        if name == "reduce":
            core.meter.reducing()
        if core.member is not None:
            core.member.watcher.phase = name

    def batch_of_step(self, batch: Batch) -> Batch:
        """Return this worker's part of the step's batch; fetch it again if the worker's shares have changed since."""
        self.phase("compute")
        batch = self._fitting(batch)
        self._core.meter.step_begins(batch.global_samples, sum(share.samples for share in batch.shares))
        return batch

    def _fitting(self, batch: Batch) -> Batch:
        core = self._core
        assert core.loader is not None  # the batch came from it
        position, owned = core.position(), owned_by(core.rank, core.world_size, core.logical_workers)
        if (batch.epoch, batch.step_in_epoch) == position:
            same = [share.ticket.logical for share in batch.shares] == list(owned)
            # A worker that has just joined holds stand-in samples of the stream, whatever position they claim.
            if same and not (core.just_joined and core.has_stream):
                return batch
        elif not core.just_joined and not core.is_rehearsing:
            raise RuntimeError(
                f"batch {batch.step_in_epoch} of epoch {batch.epoch} came to the step for batch {position[1]} of "
                f"epoch {position[0]}: every batch of the loader needs exactly one session.step(), in order"
            )
        return core.loader.batch(*position)

    def commit(self, sums: Sums) -> Sums:
        """Exchange votes: all workers confirm their sums and agree on what happens at the next boundary.

        A worker that receives all votes knows that every worker has the complete sums. If it is the only one that
        receives them, the others can still catch up. Raises GroupBroken. Raises TypeError if forward passes changed a
        buffer that cannot be merged, or if the workers read a stream in different orders or have different lengths.
        """
        core = self._core
        if not core.is_rehearsing:
            self.hooks.before_commit(core.group)
        core.meter.reduced()
        if core.is_rehearsing:
            return replace(sums, loss=sum(sums.losses.values()))
        if core.member is not None:
            core.member.watcher.look()
        leaving = core.terminated or (core.member is not None and core.member.told_to_stop)
        saving, parts = self._wishes_to_save()
        switching = 0 if core.member is None else core.member.ready_for(core.epoch_of(core.step + 1))
        assert core.gradient_step is not None  # it has computed the sums
        measuring, strayed = core.is_main and core.norms.due, core.gradient_step.statistics.strayed()
        vote = Vote(leaving, saving, switching, measuring, strayed, parts, core.context.generation, core.order)
        rows = core.group.exchange(to_row(sums, [float(number) for number in vote], core.logical_workers))
        sums, flags = from_rows(rows, sums, len(vote), core.logical_workers)
        votes = [Vote(*numbers) for numbers in flags]
        strayed = int(max(vote.strayed for vote in votes))
        if strayed:
            # All workers see this vote and all end here; the model's state is no longer correct.
            raise TypeError(core.gradient_step.statistics.refusal(strayed))
        if len({vote.order for vote in votes}) > 1:
            raise TypeError(OTHER_ORDERS if core.has_stream else OTHER_LENGTHS)
        core.leaving, core.saving = any(vote.leaving for vote in votes), any(vote.saving for vote in votes)
        core.parts = int(votes[0].parts), int(votes[0].generation)
        if core.member is not None:
            core.member.agree([int(vote.switching) for vote in votes])
        core.measures = any(vote.measuring for vote in votes)
        core.committed = sums
        core.meter.enter(Activity.COMPUTE)
        return sums

    def _wishes_to_save(self) -> tuple[bool, int]:
        """Return whether this worker, if it is rank 0, requests a save at the next boundary, and the token for it.

        The token is zero for a save in one piece. Without a save it is ``_PREPARE`` if all workers must prepare to
        write their parts, else zero.
        """
        core = self._core
        if not (core.is_main and core.shards() and core.saver.can_write_parts):
            return core.is_main and core.saver.is_due, 0
        if core.saver.must_prepare_parts(core.world_size):
            return False, _PREPARE
        # Python's and torch's generators are seeded and would repeat; a token must be unique.
        return (True, secrets.randbits(_TOKEN_BITS) | _TOKEN) if core.saver.is_due_in_parts else (False, 0)

    def recover(self, error: GroupBroken, sums: Sums | None) -> Sums | None:
        """Continue without dead workers from the states in memory; see Step. Raises GroupBroken if there is no plan."""
        core = self._core
        if core.member is None or core.is_rehearsing:
            raise error
        assert core.gradient_step is not None
        assert core.registered is not None
        core.say(ReportKind.WARNING, message=f"{error}: waiting for the plan without it")
        core.gradient_step.statistics.reset()
        pending = None if sums is None else core.step + 1
        adoption = self.regroup(pending)
        core.meter.enter(Activity.COMPUTE)
        if sums is None or adoption.committed is None:
            self.hooks.redone()
            return None
        # If others die right now, this worker may be the only one that knows about the commit.
        core.committed = _committed_of(adoption.committed, sums)
        return core.committed

    def step_done(self, loss: float) -> None:
        """Count a step; ``loss`` is the mean over the global batch."""
        core = self._core
        core.meter.enter(Activity.OTHER)
        if core.is_rehearsing:
            core.rehearsals += 1
            assert core.loader is not None  # a batch came from it
            core.loader.jump()
            return
        core.just_joined = False
        core.step += 1
        bootstrap.current_step = core.step
        core.speedometer.step_done()
        core.meter.step_done()
        if core.gradient_step is not None:
            core.norms.step_done(core.gradient_step.reducer.norms.seconds)
        core.loss = loss
        core.track.add(loss)
        if core.member is not None:
            core.member.watcher.step = core.step
        if core.is_main and core.registered is not None:
            core.measure_state(core.registered)
            if not core.knows_size:
                core.knows_size = True
                core.saver.expect(core.registered)
                core.look_for_room(core.registered, steps=1)
            if not core.shards():
                core.saver.step_done(core.registered)
        if not math.isfinite(loss) and not core.allow_nonfinite_loss:
            core.diverged(f"the loss is {loss} at step {core.step}")
        if core.speedometer.due:
            core.say_progress()
        if core.meter.worker_is_due(max(WORKER_INTERVAL_S, core.context.reporter.interval_s)):
            core.say_worker()

    def boundary(self) -> None:
        """Join, save, change the group or exit between two steps, as agreed at the end of the last step."""
        core = self._core
        if core.is_rehearsing:
            if core.rehearsals >= REHEARSALS:
                self._join()
            elif core.member is not None and core.member.told_to_stop:
                self.leave_at_once()
            return
        if core.leaving:
            self._leave()
        core.tell_saved(core.saver.poll)
        token, generation = core.parts
        if token == _PREPARE and core.registered is not None:
            core.saver.prepare_part(core.registered, core.part(token))
        if core.saving:
            core.meter.enter(Activity.SAVE)
            core.save(wait=False, part=core.part(token) if token else None, generation=generation if token else None)
            core.saving = False
            core.speedometer.leave_out()
        core.parts = 0, 0
        if core.member is not None and core.member.switch_is_due:
            self._switch()

    def _leave(self) -> None:
        core = self._core
        core.say_progress()
        core.save(wait=True)
        # All workers wait for the save: the service does not expect a worker that has exited to need more time.
        try:
            core.group.wait_for_all()
        except GroupBroken:
            self._save_as_survivor()
        core.say_if_main(ReportKind.STOPPED)
        core.disband()
        raise Leaving

    def _save_as_survivor(self) -> None:
        """Save unless another survivor has done so: rank 0 may be the worker that died."""
        core = self._core
        checkpoints = core.context.checkpoints
        if not isinstance(checkpoints, Path):
            return  # A bare torchrun, which ends all workers when one dies.
        with turn_of_survivors(checkpoints, core.context.generation, core.step) as needed:
            if needed:
                core.save(wait=True, whoever=True)

    def leave_at_once(self) -> NoReturn:
        """Exit without saving: other workers have the state, or this worker never had it."""
        core = self._core
        if not core.is_rehearsing:
            core.say_progress()
            core.say(ReportKind.STOPPED)
        core.disband()
        raise Leaving

    def leave_at_once_unheard(self) -> NoReturn:
        """Exit without a report, before any training."""
        self._core.disband()
        raise Leaving

    def _join(self) -> None:
        """Join the training: wait for the other workers at a step boundary and take over their state."""
        core = self._core
        assert core.member is not None
        assert core.registered is not None
        assert core.loader is not None
        try:
            adoption = core.member.join(core.registered, core.epoch)
        except Dismissed:
            self.leave_at_once()
        if adoption is None:
            # The others are in another epoch. Warm up again there, so that the script's own loops follow.
            per_epoch, total = core.loader.plan.steps_per_epoch, core.total_or_none()
            epoch = core.member.next_epoch_to_join(core.epoch)
            core.step = per_epoch * (epoch if total is None else min(epoch, (total - 1) // per_epoch))
            return
        core.loader.jump()
        core.just_joined = True
        self._adopted(adoption)

    def _switch(self) -> None:
        core = self._core
        assert core.member is not None
        assert core.registered is not None
        self.phase("switch")
        core.meter.enter(Activity.PAUSE)
        try:
            adoption = core.member.switch(core.registered, self._facts())
        except GroupBroken as error:
            # The old group usually still exists. If it does not, the next step notices and recovers.
            absent = error.workers if isinstance(error, JoinerSilent) else []
            message = f"the change did not come about ({error}): goes on as before"
            core.say(ReportKind.WARNING, message=message, absent=absent)
            return
        except Dismissed:
            self.leave_at_once()
        self._adopted(adoption)

    def regroup(self, pending: int | None) -> Adoption:
        """Form a group of the survivors by the plan without the dead; ``pending`` is the uncommitted step, if any."""
        core = self._core
        assert core.member is not None
        assert core.registered is not None
        self.phase("wait")
        core.meter.enter(Activity.PAUSE)
        try:
            is_over = lambda: core.terminated or self._is_over()  # noqa: E731  (it is called many times)
            adoption = core.member.recover(core.registered, self._facts(), pending, is_over)
        except Dismissed:
            if core.member.everybody_stops or core.terminated:
                self._save_as_survivor()
            self.leave_at_once()
        # Agreements with the dead are void, since some survivors may not have received them.
        core.leaving = core.saving = False
        core.parts = 0, 0
        self._adopted(adoption)
        return adoption

    def _is_over(self) -> bool:
        """Return whether rank 0 has reported FINISHED: if a worker dies after that, no new plan will come."""
        core = self._core
        assert core.member is not None
        folder, first = Path(core.config.incarnation_dir), core.member.members[0]
        path = report_path(folder, core.context.generation, first)
        try:
            return any(report.kind is ReportKind.FINISHED for report in last_words(path))
        except FileNotFoundError:
            return False

    def finish_for_the_dead(self, error: GroupBroken, data: dict[str, Any]) -> None:
        """Recover when a worker died while all were finishing; the new rank 0 saves."""
        self.recover_for_the_dead(error)
        data["path"] = self._core.save(wait=True)

    def recover_for_the_dead(self, error: GroupBroken) -> None:
        """Form a new group when a worker died outside of a step.

        Raises ``error`` if none can form: under a bare torchrun, which ends all workers when one dies, and before
        :meth:`Session.register`, when there is no state to continue from.
        """
        if self._core.member is None or self._core.registered is None:
            raise error
        self._core.say(ReportKind.WARNING, message=f"{error}: waiting for the plan without it")
        self.regroup(None)

    def _facts(self) -> dict[str, Any]:
        """Return what a member that joins, or is a step behind, needs in addition to the state."""
        core = self._core
        present = core.committed.present if core.committed is not None else []
        bits = sum(1 << i for i, here in enumerate(present) if here)
        counts = core.committed.counts if core.committed is not None else []
        trained = 0 if core.registered is None else len(trained_parameters(core.registered.model))
        loss = finite_or_none(core.loss)
        return {
            "step": core.step,
            "loss": loss,
            "present": f"{bits:x}",
            "counts": counts,
            "trained": trained,
            "track": core.track.state(),
            "trained_s": core.saver.trained_s,
        }

    def _adopted(self, adoption: Adoption) -> None:
        """Update everything that depends on generation, rank or size after the group has changed."""
        core = self._core
        core.say_progress()
        # A save in progress belongs to the generation that ends now, and would never be used.
        core.saver.drop()
        if adoption.took_over is not None:
            self._check_same_parameters(int(adoption.took_over["trained"]))
            core.step, core.loss = int(adoption.took_over["step"]), adoption.took_over["loss"]
            core.track.restore(adoption.took_over["track"])
            core.saver.carry_on(adoption.took_over["trained_s"])
            core.committed = _committed_of(adoption.took_over, None)
            bootstrap.current_step = core.step
            core.saver.restart_clock()
        os.environ[GENERATION_ENV], os.environ["RANK"] = str(adoption.generation), str(core.rank)
        core.context.generation = adoption.generation
        core.context.reporter.adopt(adoption.generation)
        if core.gradient_step is not None:
            core.gradient_step.group = core.group
            core.gradient_step.logical_workers = core.logical_workers
        core.say_started(
            from_generation=adoption.from_generation,
            pause_s=adoption.pause_s,
            state_bytes=adoption.state_bytes,
            recovered=adoption.recovered,
            samples=core.loader.plan.samples if core.loader else None,
            steps=core.total_or_none(),
        )
        core.speedometer.leave_out()
        core.meter.restart()
        self.hooks.group_changed()

    def _check_same_parameters(self, theirs: int) -> None:
        """Raise RuntimeError if this joining worker trains another number of parameters: its sums would never end."""
        assert self._core.registered is not None  # it has just taken over the state
        own = len(trained_parameters(self._core.registered.model))
        if own != theirs:
            raise RuntimeError(
                f"the workers that train have {theirs} parameters that require gradients, this one has {own}: let what"
                " is frozen follow from session.epoch or session.steps_done in every step, not from what a loop did"
                " before this worker joined"
            )


def last_words(path: Path) -> list[Report]:
    """Return the last reports of a worker, at least one if there is any; one may be long (a script's metrics)."""
    size, span = path.stat().st_size, _LAST_WORDS_BYTES
    while True:
        found = [report for report, _ in read_reports(path, max(0, size - span))]
        if found or span >= size:
            return found
        span *= 2


def _committed_of(facts: Mapping[str, Any], sums: Sums | None) -> Sums:
    """Build the sums of the last committed step from ``facts``, and ``sums`` if this worker computed that step, too."""
    bits, loss = int(facts["present"], 16), facts["loss"]
    present = [bool(bits >> i & 1) for i in range(int(facts["trained"]))]
    own = Sums(losses={}, present=present, counts=[]) if sums is None else sums
    # A loss that is not finite is None in the facts.
    return replace(own, loss=math.nan if loss is None else float(loss), present=present, counts=list(facts["counts"]))
