"""The steps of a session: what all workers agree on at their end, and how workers change between them.

May import torch and the standard library only.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints.saving import turn_of_survivors
from elasticflow_airflow.runtime.gang.membership import Adoption, Dismissed, JoinerSilent
from elasticflow_airflow.runtime.gang.process_group import GroupBroken
from elasticflow_airflow.runtime.logical_workers import owned_by
from elasticflow_airflow.runtime.protocol import GENERATION_ENV, Report, ReportKind, read_reports, report_path
from elasticflow_airflow.runtime.reporting import WORKER_EVERY
from elasticflow_airflow.runtime.samples.length_groups import OTHER_LENGTHS
from elasticflow_airflow.runtime.samples.sample_order import Batch
from elasticflow_airflow.runtime.samples.stream_checks import OTHER_ORDERS
from elasticflow_airflow.runtime.session_core import Leaving, SessionCore, finite_or_none, trained_parameters
from elasticflow_airflow.runtime.stepping.gradient_step import Sums, from_rows, to_row
from elasticflow_airflow.runtime.stepping.measuring import Activity

REHEARSALS = 4
"""Steps that a joiner makes on its own before it joins: its first ones are several times slower."""
_PREPARE = 1
"""In the place of a token: no save yet, but each worker gets memory and writer ready for its part."""
_TOKEN_BITS = 48
_TOKEN = 1 << (_TOKEN_BITS - 1)
"""In every token, so that none is zero or ``_PREPARE``; a float64 holds more bits."""
_LAST_WORDS_BYTES = 1 << 16
"""The last report of a worker is mostly within so many bytes at the end of its file."""


class Vote(NamedTuple):
    """What one worker says at the end of a step, beside its sums; all are sent to all as numbers, in this order."""

    leaving: float
    """It was told to leave."""
    saving: float
    """Rank 0 wants a save at the next boundary."""
    switching: float
    """The generation to switch to that it is ready for; 0: none."""
    measuring: float
    """Rank 0 wants the norms of the gradients measured."""
    strayed: float
    """The number, from 1, of a buffer that forward passes have changed and that cannot be merged; 0: none."""
    parts: float
    """Where the parts of a save go (a token), or ``_PREPARE``; rank 0's word counts, as elsewhere a listing of the same
    folder may have been stale."""
    generation: float
    order: float
    """A mark of the order in which it reads a stream, or of the lengths that it was given: it must be the same."""


class SessionSteps(SessionCore):
    """Commits steps, and lets workers come, go and die between and within them."""

    def step_failed(self, error: BaseException, micro_batch_size: int) -> None:
        """Report an out-of-memory with the micro-batch that was too large; explain what torch does not."""
        if "more than 1 value per channel" in str(error):
            error.add_note(
                "BatchNorm got a micro-batch of one sample: choose another global batch size, or a micro-batch size "
                "that leaves no single sample over, in the last batch of an epoch, too"
            )
        if bootstrap.is_out_of_memory(error):
            self._say(ReportKind.OUT_OF_MEMORY, micro_batch_size=micro_batch_size, message=str(error)[:500])

    def phase(self, name: str) -> None:
        """Note what this worker is doing, for its heartbeat."""
        if name == "reduce":
            self._meter.reducing()
        if self._member is not None:
            self._member.watcher.phase = name

    def batch_of_step(self, batch: Batch) -> Batch:
        """This worker's part of the step's batch; fetched again where the worker's place has changed since."""
        self.phase("compute")
        batch = self._fitting(batch)
        self._meter.step_begins(batch.global_samples, sum(share.samples for share in batch.shares))
        return batch

    def _fitting(self, batch: Batch) -> Batch:
        assert self._loader is not None  # the batch came from it
        position, owned = self._position(), owned_by(self.rank, self.world_size, self.logical_workers)
        if (batch.epoch, batch.step_in_epoch) == position:
            same = [share.ticket.logical for share in batch.shares] == list(owned)
            # Who joins those that read a stream has a stand-in in hand, wherever that says it is from.
            if same and not (self._just_joined and self._streams):
                return batch
        elif not self._just_joined and not self._is_rehearsing:
            raise RuntimeError(
                f"batch {batch.step_in_epoch} of epoch {batch.epoch} came to the step for batch {position[1]} of "
                f"epoch {position[0]}: every batch of the loader needs exactly one session.step(), in order"
            )
        return self._loader.batch(*position)

    def commit(self, sums: Sums) -> Sums:
        """Tell all workers that the gradients are summed, and agree on what happens at the next boundary.

        Who gets the answer knows that everybody has the whole sums: should it alone hear of it, the others can still
        follow. Raises GroupBroken; TypeError when forward passes have changed what cannot be merged, or the workers
        read a stream in different orders, or were given different lengths.
        """
        self._meter.reduced()
        if self._is_rehearsing:
            return replace(sums, loss=sum(sums.losses.values()))
        if self._member is not None:
            self._member.watcher.look()
        leaving = self._terminated or (self._member is not None and self._member.told_to_stop)
        saving, parts = self._wishes_to_save()
        switching = 0 if self._member is None else self._member.ready_for(self._epoch_of(self._step + 1))
        assert self._gradient_step is not None  # the sums are its own
        measuring, strayed = self.is_main and self._norms.due, self._gradient_step.statistics.strayed()
        vote = Vote(leaving, saving, switching, measuring, strayed, parts, self._context.generation, self._order)
        rows = self._group.exchange(to_row(sums, [float(number) for number in vote], self.logical_workers))
        sums, flags = from_rows(rows, sums, len(vote), self.logical_workers)
        votes = [Vote(*numbers) for numbers in flags]
        strayed = int(max(vote.strayed for vote in votes))
        if strayed:
            # All hear of it, and all end here; the model is not what it should be any more.
            raise TypeError(self._gradient_step.statistics.refusal(strayed))
        if len({vote.order for vote in votes}) > 1:
            raise TypeError(OTHER_ORDERS if self._streams else OTHER_LENGTHS)
        self._leaving, self._saving = any(vote.leaving for vote in votes), any(vote.saving for vote in votes)
        self._parts = int(votes[0].parts), int(votes[0].generation)
        if self._member is not None:
            self._member.agree([int(vote.switching) for vote in votes])
        self._measures = any(vote.measuring for vote in votes)
        self._committed = sums
        self._meter.enter(Activity.COMPUTE)
        return sums

    def _wishes_to_save(self) -> tuple[bool, int]:
        """Whether this worker, rank 0, wants a save at the next boundary; zero for a whole one, else a new token.

        Without a save: ``_PREPARE``, where each is to get ready for its part.
        """
        if not (self.is_main and self._shards() and self._saver.can_write_parts):
            return self.is_main and self._saver.is_due, 0
        if self._saver.must_prepare_parts(self.world_size):
            return False, _PREPARE
        # Not of Python's or torch's generators: they are seeded, and a token is used once.
        return (True, secrets.randbits(_TOKEN_BITS) | _TOKEN) if self._saver.is_due_in_parts else (False, 0)

    def recover(self, error: GroupBroken, sums: Sums | None) -> Sums | None:
        """Go on without those that are gone, from the states in memory; see Step. Raises GroupBroken without a plan."""
        if self._member is None or self._is_rehearsing:
            raise error
        assert self._gradient_step is not None
        assert self._registered is not None
        self._say(ReportKind.WARNING, message=f"{error}: waiting for the plan without it")
        self._gradient_step.statistics.reset()
        pending = None if sums is None else self._step + 1
        adoption = self._recover(pending)
        self._meter.enter(Activity.COMPUTE)
        if sums is None or adoption.committed is None:
            return None
        # Should others die at once, this worker may be the only one who knows of it.
        self._committed = _committed_of(adoption.committed, sums)
        return self._committed

    def step_done(self, loss: float) -> None:
        """Count a step; ``loss`` is the mean over the global batch."""
        self._meter.enter(Activity.OTHER)
        if self._is_rehearsing:
            self._rehearsals += 1
            assert self._loader is not None  # a batch came from it
            self._loader.jump()
            return
        self._just_joined = False
        self._step += 1
        bootstrap.current_step = self._step
        self._speed.step_done()
        self._meter.step_done()
        if self._gradient_step is not None:
            self._norms.step_done(self._gradient_step.reducer.norms.seconds)
        self._loss = loss
        self._track.add(loss)
        if self._member is not None:
            self._member.watcher.step = self._step
        if self.is_main and self._registered is not None:
            self._measure_state(self._registered)
            if not self._knows_size:
                self._knows_size = True
                self._saver.expect(self._registered)
                self._look_for_room(self._registered, steps=1)
            if not self._shards():
                self._saver.step_done(self._registered)
        if not math.isfinite(loss) and not self._allow_nonfinite_loss:
            self._diverged(f"the loss is {loss} at step {self._step}")
        if self._speed.due:
            self._progress()
        if self._meter.worker_is_due(WORKER_EVERY * self._context.reporter.interval_s):
            self._report_worker()

    def _boundary(self) -> None:
        if self._is_rehearsing:
            if self._rehearsals >= REHEARSALS:
                self._join()
            elif self._member is not None and self._member.told_to_stop:
                self._leave_at_once()
            return
        if self._leaving:
            self._leave()
        self._tell_saved(self._saver.poll)
        token, generation = self._parts
        if token == _PREPARE and self._registered is not None:
            self._saver.prepare_part(self._registered, self._part(token))
        if self._saving:
            self._meter.enter(Activity.SAVE)
            self._save(wait=False, part=self._part(token) if token else None, generation=generation if token else None)
            self._saving = False
            self._speed.leave_out()
        self._parts = 0, 0
        if self._member is not None and self._member.switch_is_due:
            self._switch()

    def _leave(self) -> None:
        self._progress()
        self._save(wait=True)
        # Everybody waits for the save: the service takes who is gone for one that needs no time any more.
        try:
            self._group.wait_for_all()
        except GroupBroken:
            self._save_as_survivor()
        self._say_if_main(ReportKind.STOPPED)
        self._disband()
        raise Leaving

    def _save_as_survivor(self) -> None:
        """Save, unless another survivor has: the first rank may be the one that has died."""
        checkpoints = self._context.checkpoints
        if not isinstance(checkpoints, Path):
            return  # Under a bare torchrun, which ends all workers when one dies.
        with turn_of_survivors(checkpoints, self._context.generation, self._step) as needed:
            if needed:
                self._save(wait=True, whoever=True)

    def _leave_at_once(self) -> NoReturn:
        """Leave without saving: others have the state, or this worker never had it."""
        if not self._is_rehearsing:
            self._progress()
            self._say(ReportKind.STOPPED)
        self._disband()
        raise Leaving

    def _leave_at_once_unheard(self) -> NoReturn:
        """Leave before anything was trained."""
        self._disband()
        raise Leaving

    def _join(self) -> None:
        """A joiner's way in: wait for the others at a boundary and take their state over."""
        assert self._member is not None
        assert self._registered is not None
        assert self._loader is not None
        try:
            adoption = self._member.join(self._registered, self.epoch)
        except Dismissed:
            self._leave_at_once()
        if adoption is None:
            # The others are in another epoch: so that the script's own loops follow, another rehearsal there.
            per_epoch, total = self._loader.plan.steps_per_epoch, self._total_or_none()
            epoch = self._member.next_epoch_to_join(self.epoch)
            self._step = per_epoch * (epoch if total is None else min(epoch, (total - 1) // per_epoch))
            return
        self._loader.jump()
        self._just_joined = True
        self._adopted(adoption)

    def _switch(self) -> None:
        assert self._member is not None
        assert self._registered is not None
        self.phase("switch")
        self._meter.enter(Activity.PAUSE)
        try:
            adoption = self._member.switch(self._registered, self._facts())
        except GroupBroken as error:
            # The group of before is there still; where it is not, the next step finds that out, and recovers.
            absent = error.workers if isinstance(error, JoinerSilent) else []
            message = f"the change did not come about ({error}): goes on as before"
            self._say(ReportKind.WARNING, message=message, absent=absent)
            return
        except Dismissed:
            self._leave_at_once()
        self._adopted(adoption)

    def _recover(self, pending: int | None) -> Adoption:
        assert self._member is not None
        assert self._registered is not None
        self.phase("wait")
        self._meter.enter(Activity.PAUSE)
        try:
            is_over = lambda: self._terminated or self._is_over()  # noqa: E731  (it is asked many times)
            adoption = self._member.recover(self._registered, self._facts(), pending, is_over)
        except Dismissed:
            if self._member.everybody_stops or self._terminated:
                self._save_as_survivor()
            self._leave_at_once()
        # What was agreed on with the dead is agreed on anew: not all may have heard of it.
        self._leaving = self._saving = False
        self._parts = 0, 0
        self._adopted(adoption)
        return adoption

    def _is_over(self) -> bool:
        """Whether rank 0 has said that training is done, whoever died then: no plan would come any more."""
        assert self._member is not None
        folder, first = Path(self.config.incarnation_dir), self._member.members[0]
        path = report_path(folder, self._context.generation, first)
        try:
            return any(report.kind is ReportKind.FINISHED for report in last_words(path))
        except FileNotFoundError:
            return False

    def _finish_for_the_dead(self, error: GroupBroken, data: dict[str, Any]) -> None:
        """A worker died while all were finishing: who is rank 0 now saves."""
        self._recover_for_the_dead(error)
        data["path"] = self._save(wait=True)

    def _recover_for_the_dead(self, error: GroupBroken) -> None:
        """A worker died outside of a step."""
        self._say(ReportKind.WARNING, message=f"{error}: waiting for the plan without it")
        self._recover(None)

    def _facts(self) -> dict[str, Any]:
        """What a member that joins, or is a step behind, must know beside the state."""
        present = self._committed.present if self._committed is not None else []
        bits = sum(1 << i for i, here in enumerate(present) if here)
        counts = self._committed.counts if self._committed is not None else []
        trained = 0 if self._registered is None else len(trained_parameters(self._registered.model))
        loss = finite_or_none(self._loss)
        return {
            "step": self._step,
            "loss": loss,
            "present": f"{bits:x}",
            "counts": counts,
            "trained": trained,
            "track": self._track.state(),
            "trained_s": self._saver.trained_s,
        }

    def _adopted(self, adoption: Adoption) -> None:
        """The group has changed: everything that names generation, rank or size follows."""
        self._progress()
        # What is being written belongs to the generation that ends now: nobody would look at it any more.
        self._saver.drop()
        if adoption.took_over is not None:
            self._check_same_parameters(int(adoption.took_over["trained"]))
            self._step, self._loss = int(adoption.took_over["step"]), adoption.took_over["loss"]
            self._track.restore(adoption.took_over["track"])
            self._saver.carry_on(adoption.took_over["trained_s"])
            self._committed = _committed_of(adoption.took_over, None)
            bootstrap.current_step = self._step
            self._saver.restart_clock()
        os.environ[GENERATION_ENV], os.environ["RANK"] = str(adoption.generation), str(self.rank)
        self._context.generation = adoption.generation
        self._context.reporter.adopt(adoption.generation)
        if self._gradient_step is not None:
            self._gradient_step.group = self._group
            self._gradient_step.logical_workers = self.logical_workers
        self._say_started(
            from_generation=adoption.from_generation,
            pause_s=adoption.pause_s,
            state_bytes=adoption.state_bytes,
            recovered=adoption.recovered,
            samples=self._loader.plan.samples if self._loader else None,
            steps=self._total_or_none(),
        )
        self._speed.leave_out()
        self._meter.restart()

    def _check_same_parameters(self, theirs: int) -> None:
        """A joiner that trains other parameters than the others would wait for sums that never come."""
        assert self._registered is not None  # it has just taken the state over
        own = len(trained_parameters(self._registered.model))
        if own != theirs:
            raise RuntimeError(
                f"the workers that train have {theirs} parameters that require gradients, this one has {own}: let what"
                " is frozen follow from session.epoch or session.steps_done in every step, not from what a loop did"
                " before this worker joined"
            )


def last_words(path: Path) -> list[Report]:
    """The last reports of a worker, at least one if there is any: it may be long, with a script's metrics."""
    size, span = path.stat().st_size, _LAST_WORDS_BYTES
    while True:
        found = [report for report, _ in read_reports(path, max(0, size - span))]
        if found or span >= size:
            return found
        span *= 2


def _committed_of(facts: Mapping[str, Any], sums: Sums | None) -> Sums:
    """What ``facts`` tell of the last step that counts; ``sums``: its sums, of a worker that did it, too."""
    bits, loss = int(facts["present"], 16), facts["loss"]
    present = [bool(bits >> i & 1) for i in range(int(facts["trained"]))]
    own = Sums(losses={}, present=present, counts=[]) if sums is None else sums
    # A loss that is no number is not in the facts.
    return replace(own, loss=math.nan if loss is None else float(loss), present=present, counts=list(facts["counts"]))
