"""The session: what a training script talks to, the same alone, under a bare torchrun and under the service.

Workers come and go while a script runs: at a step boundary its group changes, and it goes on with another share of each
batch (membership.py); or all save and leave, and the next generation resumes. Scripts notice none of that: rank and
number of workers are asked of the session, never remembered.
May import torch and the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from elasticflow_airflow.runtime import bootstrap, checkpoint
from elasticflow_airflow.runtime.checkpoint import Registered, Stateful
from elasticflow_airflow.runtime.checkpointer import Saved
from elasticflow_airflow.runtime.context import Context, detect
from elasticflow_airflow.runtime.data import (
    Batch,
    BatchPlan,
    ElasticLoader,
    mix_seed,
    refuse_own_options,
)
from elasticflow_airflow.runtime.fetching import make_fetcher
from elasticflow_airflow.runtime.group import GroupBroken, WorkerGroup
from elasticflow_airflow.runtime.interval import SaveInterval
from elasticflow_airflow.runtime.logical import choose_logical_workers, owned_by
from elasticflow_airflow.runtime.machinery import Machinery, Sums, from_rows, to_row
from elasticflow_airflow.runtime.manifest import CandidateInfo, CheckpointError
from elasticflow_airflow.runtime.measuring import Activity, Meter, NormSchedule, TimedFetcher
from elasticflow_airflow.runtime.membership import Adoption, Dismissed, Place
from elasticflow_airflow.runtime.protocol import GENERATION_ENV, Membership, ReportKind, heartbeats_path
from elasticflow_airflow.runtime.reduction import broadcast_model, refuse_unsupported
from elasticflow_airflow.runtime.reporting import WORKER_EVERY, Speedometer
from elasticflow_airflow.runtime.resume import agree_on_checkpoint
from elasticflow_airflow.runtime.saving import Saver
from elasticflow_airflow.runtime.step import Step
from elasticflow_airflow.runtime.target import LossTrack, Outlook

REHEARSALS = 4
"""Steps that a joiner makes on its own before it joins: its first ones are several times slower."""


class Leaving(SystemExit):
    """Ends the script with status 0 after the state was saved; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


class NonFiniteLoss(FloatingPointError):  # noqa: N818  (it is named for what it is)
    """The loss, or a weight, is NaN or infinite: what would be trained from here on is worth nothing."""


class Session:
    """One worker's view of one training run. Made by :func:`elasticflow_airflow.runtime.init`."""

    def __init__(
        self,
        context: Context,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        micro_batch_size: int | None = None,
        init_from: str | Path | None = None,
        checkpoint_interval_s: float | None = None,
        allow_nonfinite_loss: bool = False,
        logical_workers: int | None = None,
        consistency: str | None = None,
        target_loss: float | None = None,
    ) -> None:
        config = context.config
        if not context.managed:
            config = replace(config, logical_workers=logical_workers, consistency=consistency or config.consistency)
        if config.consistency not in ("consistent", "fast"):
            raise ValueError(f"consistency={config.consistency!r}: it is 'consistent' or 'fast'")
        if config.steps is None and config.epochs is None:
            config = replace(config, steps=steps, epochs=epochs)
        if config.micro_batch_size is None:
            config = replace(config, micro_batch_size=micro_batch_size)
        if config.target_loss is None:
            config = replace(config, target_loss=target_loss)
        if config.init_from is None and init_from is not None:
            config = replace(config, init_from=str(init_from))
        if checkpoint_interval_s is not None and not context.managed:
            config = replace(config, checkpoint_interval_s=checkpoint_interval_s)
        self.config = config
        self.device = _pick_device()
        self._context = context
        self._allow_nonfinite_loss = allow_nonfinite_loss
        self._consistent = config.consistency == "consistent"
        self._lone_group = WorkerGroup()
        self._place = self._find_place()
        if self._place is None:
            size = int(os.environ.get("WORLD_SIZE", "1"))
            self._lone_group = WorkerGroup.of_torchrun(self.device, int(os.environ.get("RANK", "0")), size)
        self._disbanded = False
        self._rehearsals = 0
        self._just_joined = False
        self._committed: Sums | None = None
        self._logical: int | None = None
        self._machinery: Machinery | None = None
        torch.manual_seed(mix_seed(config.seed, 0x1717))
        self._terminated = False
        self._pid = os.getpid()
        self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._registered: Registered | None = None
        self._loader: ElasticLoader | None = None
        self._script_epochs: int | None = None
        self._step = 0
        self._started = self._leaving = self._saving = self._finished = False
        self._resumed_from: CandidateInfo | None = None
        self._initialised_from: str | None = None
        self._loss: float | None = None
        self._track = LossTrack(config.target_loss)
        self._outlook = Outlook(self._track)
        self._scalars: dict[str, float] = {}
        self._saver = Saver(
            context.checkpoints,
            incarnation=config.incarnation,
            promotes=not context.managed,
            keep=config.keep_checkpoints,
            interval=config.checkpoint_interval_s
            if context.managed or checkpoint_interval_s is not None
            else SaveInterval(),
        )
        self._speed = Speedometer(context.reporter.interval_s)
        self._meter, self._norms, self._measures = Meter(self.device), NormSchedule(), False
        bootstrap.session_initialised = True
        atexit.register(self._at_exit)

    def _find_place(self) -> Place | None:
        """This worker's place in the plan; None where there is no plan: alone, or under a bare torchrun."""
        if not self._context.managed:
            return None
        plan = Membership.read(Path(self.config.incarnation_dir))
        if plan is None:
            return None
        place = Place(Path(self.config.incarnation_dir), self._context.worker_id, self.device, plan)
        if plan.rank_of(self._context.worker_id) is None:
            raise Leaving
        try:
            place.begin()
        except Dismissed:
            place.close()
            raise Leaving from None
        return place

    @property
    def _group(self) -> WorkerGroup:
        return self._lone_group if self._place is None else self._place.group

    @property
    def _is_rehearsing(self) -> bool:
        return self._place is not None and not self._place.joined

    # -- where we are -------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker now; it may change at a step boundary. After ``finish`` it stays."""
        return self._group.rank if self._place is None else self._place.rank

    @property
    def world_size(self) -> int:
        """Number of workers now; it may change at a step boundary."""
        return self._group.size if self._place is None else self._place.size

    @property
    def logical_workers(self) -> int:
        """Into how many shares each global batch is cut; each share is one worker's at a time. See ``init``."""
        if self._logical is None:
            raise ValueError("the number of logical workers is known once session.dataloader() was called")
        return self._logical if self._consistent else self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves; never one that only warms up to join."""
        return self.rank == 0 and not self._is_rehearsing

    @property
    def is_warming_up(self) -> bool:
        """Whether this worker only rehearses, to join others that train: nothing that it does now counts."""
        return self._is_rehearsing

    @property
    def steps_done(self) -> int:
        """Optimizer steps done in all, over every generation."""
        return self._step

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._position()[0]

    @property
    def total_steps(self) -> int:
        """Length of the training in steps. Raises ValueError while nobody has said it."""
        total = self._total_or_none()
        if total is None:
            raise ValueError(
                "the length of the training is not known yet: give epochs= or steps= to runtime.init(), and call "
                "session.dataloader() before asking for total_steps"
            )
        return total

    # -- set-up -------------------------------------------------------------------------------------------------

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: Stateful | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        **others: Stateful,
    ) -> None:
        """Name what a checkpoint holds, and restore it: from the one to resume from, else ``init_from``'s weights.

        Call it once, when everything is built. Raises CheckpointError when a checkpoint does not fit.
        """
        if self._registered is not None:
            raise ValueError("session.register() was called before; name everything in one call")
        refuse_unsupported(model, consistent=self._consistent)
        named = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **others}
        self._registered = Registered(model, {name: part for name, part in named.items() if part is not None})
        model.to(self.device)
        try:
            if not self._is_rehearsing:
                self._restore(self._registered)
        except CheckpointError as error:
            self._say(ReportKind.FAILED, message=str(error), kind="bad_checkpoint")
            raise

    def dataloader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> ElasticLoader:
        """Deal out a map-style training set: every sample of an epoch exactly once, whoever trains.

        ``global_batch_size`` counts samples of one optimizer step over all workers; under the service the submitted
        one is used. Other ``options`` go to ``torch.utils.data.DataLoader``. For validation use an ordinary loader.
        """
        if self._loader is not None:
            raise ValueError("session.dataloader() is for the training set and may be called once")
        size = self.config.global_batch_size if self._context.managed else global_batch_size
        if size is None:
            raise ValueError("session.dataloader() needs global_batch_size= when the script runs without the service")
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"session.dataloader() needs a map-style dataset, with __len__ and __getitem__; "
                f"{type(dataset).__name__} has no length, so nobody could say which of its samples were used"
            )
        samples = len(dataset)
        refuse_own_options(options)
        options = {"num_workers": num_workers, **options}
        plan = BatchPlan(samples=samples, global_batch_size=size, seed=self.config.seed, shuffle=shuffle)
        said = self.config.samples
        if said is not None and said != samples:
            self._warn(f"the submission says samples={said}, the dataset has {samples}; the dataset counts")
        self._logical = choose_logical_workers(
            self.config.logical_workers, size, self.world_size, consistent=self._consistent
        )
        self._loader = ElasticLoader(
            plan,
            TimedFetcher(make_fetcher(dataset, collate_fn or default_collate, options), self._meter),
            logical_workers=lambda: self.logical_workers,
            position=self._position,
            owned=lambda: owned_by(self.rank, self.world_size, self.logical_workers),
            finished=self._all_done,
        )
        return self._loader

    def begin_at(self, step: int) -> None:
        """Count from ``step``: the script itself has restored a state of that step, the same on every worker.

        Changes nothing where the session has restored one of its own checkpoints, or joins others.
        """
        if self._started:
            raise RuntimeError("session.begin_at() comes before the first step")
        if self._resumed_from is None and not self._is_rehearsing:
            self._step = bootstrap.current_step = step

    # -- training -----------------------------------------------------------------------------------------------

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left, the one under way included, until all steps are done.

        ``count`` is the script's own idea of the length; what the service or ``runtime.init`` says wins.
        """
        self._script_epochs = count
        if self._loader is None:
            raise ValueError("call session.dataloader() before session.epochs()")
        self._start()
        while not self._all_done():
            before = self._step, self._rehearsals
            yield self.epoch
            if (self._step, self._rehearsals) == before:
                raise RuntimeError("an epoch went by without a session.step(): every batch needs one")

    def step(self) -> Step:
        """Open one optimizer step: the boundary at which this worker may save, or save and leave."""
        if self._registered is None:
            raise ValueError("call session.register() before session.step()")
        if self._finished:
            raise RuntimeError("session.step() after session.finish(): the result is out already")
        self._start()
        self._boundary()
        trained = _trained_parameters(self._registered.model)
        if self._machinery is None or list(map(id, trained)) != list(map(id, self._machinery.reducer.parameters)):
            # The first step; or the script has frozen or freed parameters since the last.
            self._machinery = Machinery(self._registered, self.logical_workers, consistent=self._consistent)
            self._machinery.group = self._group
        self._machinery.measures = self._measures
        self._meter.enter(Activity.COMPUTE)
        return Step(self, self._machinery, self.config.micro_batch_size, mix_seed(self.config.seed, self._step))

    def log(self, **scalars: float | Tensor) -> None:
        """Attach numbers to the next progress report, ``loss`` among them; its own epoch and speed stay."""
        for name, value in scalars.items():
            self._scalars[name] = float(value)

    def wait_for_all(self) -> None:
        """Return when every worker has come here, or when one is gone: the next step, or ``finish``, sees to that."""
        with contextlib.suppress(GroupBroken):
            self._group.wait_for_all()

    def finish(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Say that training is done: the final checkpoint, with ``metrics``, becomes the job's result."""
        if self._finished:
            return
        self._start()
        if self._is_rehearsing:
            self._leave_at_once()
        self._progress()
        path = self._save(wait=True)
        self._finished = True
        data = {"metrics": dict(metrics or {}), "loss": self._loss, "path": path}
        if self._track.target is not None:
            data |= {"target_reached": self._track.reached, "smoothed_loss": self._track.smoothed}
            data |= {"loss_curve": self._track.curve}
        try:
            self._group.wait_for_all()
        except GroupBroken as error:
            if not self.is_main:
                # Rank 0 may have died before it had saved: then it is up to the others.
                self._finish_for_the_dead(error, data)
        self._say_if_main(ReportKind.FINISHED, **data)
        self._disband()
        # What the script does from here on is its own; a SIGTERM ends it again.
        signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)

    # -- called by Step -----------------------------------------------------------------------------------------

    def step_failed(self, error: BaseException, micro_batch_size: int) -> None:
        """Report an out-of-memory with the micro-batch that was too large."""
        if bootstrap.is_out_of_memory(error):
            self._say(ReportKind.OUT_OF_MEMORY, micro_batch_size=micro_batch_size, message=str(error)[:500])

    def phase(self, name: str) -> None:
        """Note what this worker is doing, for its heartbeat."""
        if name == "reduce":
            self._meter.reducing()
        if self._place is not None:
            self._place.watcher.phase = name

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
            if [share.ticket.logical for share in batch.shares] == list(owned):
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
        follow. Raises GroupBroken.
        """
        self._meter.reduced()
        if self._is_rehearsing:
            return replace(sums, loss=sum(sums.losses.values()))
        if self._place is not None:
            self._place.watcher.look()
        leaving = self._terminated or (self._place is not None and self._place.told_to_stop)
        saving = self.is_main and self._saver.is_due
        switching = 0 if self._place is None else self._place.ready_for(self._epoch_of(self._step + 1))
        flags = [float(leaving), float(saving), float(switching), float(self.is_main and self._norms.due)]
        rows = self._group.exchange(to_row(sums, flags, self.logical_workers))
        sums, votes = from_rows(rows, sums, len(flags), self.logical_workers)
        self._leaving, self._saving = any(vote[0] for vote in votes), any(vote[1] for vote in votes)
        if self._place is not None:
            self._place.agree([int(vote[2]) for vote in votes])
        self._measures = any(vote[3] for vote in votes)
        self._committed = sums
        self._meter.enter(Activity.COMPUTE)
        return sums

    def recover(self, error: GroupBroken, sums: Sums | None) -> Sums | None:
        """Go on without those that are gone, from the states in memory; see Step. Raises GroupBroken without a plan."""
        if self._place is None or self._is_rehearsing:
            raise error
        assert self._machinery is not None
        assert self._registered is not None
        self._say(ReportKind.WARNING, message=f"{error}: waiting for the plan without it")
        self._machinery.statistics.reset()
        pending = None if sums is None else self._step + 1
        adoption = self._recover(pending)
        self._meter.enter(Activity.COMPUTE)
        if sums is None or adoption.committed is None:
            return None
        facts = adoption.committed
        present = [bool(int(facts["present"], 16) >> i & 1) for i in range(len(sums.present))]
        return replace(sums, loss=float(facts["loss"]), present=present, counts=list(facts["counts"]))

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
        if self._machinery is not None:
            self._norms.step_done(self._machinery.reducer.norms.seconds)
        self._loss = loss
        self._track.add(loss)
        if self._place is not None:
            self._place.watcher.step = self._step
        if self.is_main and self._registered is not None:
            self._saver.step_done(self._registered)
        if not math.isfinite(loss) and not self._allow_nonfinite_loss:
            self._diverged(f"the loss is {loss} at step {self._step}")
        if self._speed.due:
            self._progress()
        if self._meter.worker_is_due(WORKER_EVERY * self._context.reporter.interval_s):
            self._report_worker()

    # -- inside -------------------------------------------------------------------------------------------------

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that the script has forked: it has no step boundary to leave at.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._terminated = True

    def _position(self) -> tuple[int, int]:
        per_epoch = self._loader.plan.steps_per_epoch if self._loader else max(1, self._step + 1)
        return divmod(self._step, per_epoch)

    def _epoch_of(self, step: int) -> int:
        return 0 if self._loader is None else step // self._loader.plan.steps_per_epoch

    def _total_or_none(self) -> int | None:
        if self.config.steps is not None:
            return self.config.steps
        epochs = self.config.epochs or self._script_epochs
        if epochs is None or self._loader is None:
            return None
        return epochs * self._loader.plan.steps_per_epoch

    def _all_done(self) -> bool:
        total = self._total_or_none()
        return self._track.reached or (total is not None and self._step >= total)

    def _restore(self, registered: Registered) -> None:
        checkpoints, incarnation = self._context.checkpoints, self.config.incarnation
        with agree_on_checkpoint(self._group, checkpoints, incarnation, self._warn) as found:
            if found is not None:
                checkpoint.load(
                    registered, found, logical_workers=self.config.logical_workers if self._consistent else None
                )
                self._step, self._resumed_from, self._loss = found.step, found, found.metadata.get("loss")
                self._track.restore(found.metadata.get("loss_track"))
                bootstrap.current_step = self._step
                return
        if self.config.init_from is not None:
            checkpoint.load_weights(registered.model, self.config.init_from)
            self._initialised_from = self.config.init_from
        broadcast_model(registered.model, self._group)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        samples = self._loader.plan.samples if self._loader else None
        total = self._total_or_none()
        if total is None and self.config.target_loss is None:
            raise ValueError(
                "nobody has said how long to train: call session.epochs(n), or give steps=, epochs= or target_loss= to"
                " runtime.init()"
            )
        if self._is_rehearsing:
            self._step = self._guess_step()
            return
        self._check_same_data()
        self._say_started(
            resumed_from=None if self._resumed_from is None else self._resumed_from.name,
            init_from=self._initialised_from,
            samples=samples,
            steps=total,
        )
        self._speed.leave_out()
        self._meter.begin()
        self._saver.restart_clock()

    def _check_same_data(self) -> None:
        if self._resumed_from is None or self._loader is None:
            return
        same_batch = self._resumed_from.metadata.get("global_batch_size") == self._loader.plan.global_batch_size
        try:
            # With another batch, of which it warns, it is another training anyway.
            checkpoint.refuse_other_size(self._resumed_from, self._logical if self._consistent and same_batch else None)
        except CheckpointError as error:
            self._say(ReportKind.FAILED, message=str(error), kind="bad_checkpoint")
            raise
        changes = self._loader.plan.changes_since(self._resumed_from.metadata)
        if changes:
            self._warn(
                f"the checkpoint was written with other data settings ({changes}): training goes on at step "
                f"{self._step}, but samples of this epoch may be used twice or not at all"
            )

    def _say_started(self, **data: Any) -> None:
        micro = self.config.micro_batch_size
        if micro is None and self._loader is not None:
            micro = -(-self._loader.plan.global_batch_size // self.logical_workers)
        logical = self._logical if self._consistent else None
        in_place = self._place is not None
        self._say(ReportKind.STARTED, micro_batch_size=micro, logical_workers=logical, in_place=in_place, **data)

    def _boundary(self) -> None:
        if self._is_rehearsing:
            if self._rehearsals >= REHEARSALS:
                self._join()
            elif self._place is not None and self._place.told_to_stop:
                self._leave_at_once()
            return
        if self._leaving:
            self._leave()
        self._tell_saved(self._saver.poll)
        if self._saving:
            self._meter.enter(Activity.SAVE)
            self._save(wait=False)
            self._saving = False
            self._speed.leave_out()
        if self._place is not None and self._place.switch_is_due:
            self._switch()

    def _leave(self) -> None:
        self._progress()
        self._save(wait=True)
        # Everybody waits for the save: the service takes who is gone for one that needs no time any more.
        with contextlib.suppress(GroupBroken):
            self._group.wait_for_all()
        self._say_if_main(ReportKind.STOPPED)
        self._disband()
        raise Leaving

    def _leave_at_once(self) -> NoReturn:
        """Leave without saving: others have the state, or this worker never had it."""
        if not self._is_rehearsing:
            self._progress()
            self._say(ReportKind.STOPPED)
        self._disband()
        raise Leaving

    def _disband(self) -> None:
        if self._loader is not None:
            self._loader.close()
        if self._disbanded:
            return
        self._disbanded = True
        self._saver.close()
        if self._place is not None:
            # A thread that is blocked with somebody who is gone would abort an interpreter that ends by itself.
            bootstrap.leave_abruptly = not self._place.close()
        else:
            self._lone_group.close()
            bootstrap.leave_abruptly = not self._lone_group.join(1.0)
            if dist.is_initialized():
                dist.destroy_process_group()

    # -- changing places ----------------------------------------------------------------------------------------

    def _join(self) -> None:
        """A joiner's way in: wait for the others at a boundary and take their state over."""
        assert self._place is not None
        assert self._registered is not None
        assert self._loader is not None
        try:
            adoption = self._place.join(self._registered, self.epoch)
        except Dismissed:
            self._leave_at_once()
        if adoption is None:
            # The others are in another epoch: so that the script's own loops follow, another rehearsal there.
            self._step = self._place.epoch_of_others(self.epoch) * self._loader.plan.steps_per_epoch
            return
        self._loader.jump()
        self._just_joined = True
        self._adopted(adoption)

    def _switch(self) -> None:
        assert self._place is not None
        assert self._registered is not None
        self.phase("switch")
        self._meter.enter(Activity.PAUSE)
        try:
            adoption = self._place.switch(self._registered, self._facts())
        except GroupBroken as error:
            self._say(ReportKind.WARNING, message=f"{error}: waiting for the next plan")
            adoption = self._recover(None)
            return
        except Dismissed:
            self._leave_at_once()
        self._adopted(adoption)

    def _recover(self, pending: int | None) -> Adoption:
        assert self._place is not None
        assert self._registered is not None
        self.phase("wait")
        self._meter.enter(Activity.PAUSE)
        try:
            adoption = self._place.recover(self._registered, self._facts(), pending)
        except Dismissed:
            self._leave_at_once()
        # What was agreed on with the dead is agreed on anew: not all may have heard of it.
        self._leaving = self._saving = False
        self._adopted(adoption)
        return adoption

    def _finish_for_the_dead(self, error: GroupBroken, data: dict[str, Any]) -> None:
        """A worker died while all were finishing: who is rank 0 now saves."""
        self._say(ReportKind.WARNING, message=f"{error}: waiting for the plan without it")
        self._recover(None)
        data["path"] = self._save(wait=True)

    def _facts(self) -> dict[str, Any]:
        """What a member that joins, or is a step behind, must know beside the state."""
        present = self._committed.present if self._committed is not None else []
        bits = sum(1 << i for i, here in enumerate(present) if here)
        counts = self._committed.counts if self._committed is not None else []
        trained = 0 if self._registered is None else len(_trained_parameters(self._registered.model))
        loss = _finite_or_none(self._loss)
        return {
            "step": self._step,
            "loss": loss,
            "present": f"{bits:x}",
            "counts": counts,
            "trained": trained,
            "track": self._track.state(),
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
            bootstrap.current_step = self._step
            self._saver.restart_clock()
        os.environ[GENERATION_ENV], os.environ["RANK"] = str(adoption.generation), str(self.rank)
        self._context.generation = adoption.generation
        self._context.reporter.adopt(adoption.generation)
        if self._machinery is not None:
            self._machinery.group = self._group
            self._machinery.logical_workers = self.logical_workers
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
        own = len(_trained_parameters(self._registered.model))
        if own != theirs:
            raise RuntimeError(
                f"the workers that train have {theirs} parameters that require gradients, this one has {own}: let what"
                " is frozen follow from session.epoch or session.steps_done in every step, not from what a loop did"
                " before this worker joined"
            )

    def _guess_step(self) -> int:
        """Where the others are, from their heartbeats: a rehearsal in the right epoch spares another."""
        steps = [0]
        for path in heartbeats_path(Path(self.config.incarnation_dir)).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                steps.append(int(json.loads(path.read_text())["step"]))
        return max(steps)

    def _diverged(self, what: str) -> NoReturn:
        message = (
            f"{what}: nothing after it would be worth keeping. Lower the learning rate, clip gradients or look at the "
            "batch; checkpoints from before stay valid."
        )
        self._say(ReportKind.FAILED, message=message, kind="nan_loss")
        raise NonFiniteLoss(message)

    def _save(self, *, wait: bool) -> str | None:
        """Save a checkpoint (rank 0 only; every worker has the same state), and return its name if it waited for it.

        Without ``wait`` only a copy is made now; a later boundary tells when it is on disk.
        """
        self._saver.restart_clock()
        if not self.is_main or self._registered is None:
            return None
        if not self._allow_nonfinite_loss and not _all_finite(self._registered.model):
            # A finite loss with gradients that are not: found here, or the checkpoint would be spoilt.
            self._diverged(f"the model has weights that are no numbers after step {self._step}")
        registered = self._registered
        epoch, step_in_epoch = self._position()
        metadata = {
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "loss": _finite_or_none(self._loss),
            "loss_track": self._track.state(),
            "logical_workers": self._logical if self._consistent else None,
            **(asdict(self._loader.plan) if self._loader else {}),
        }

        def save() -> list[Saved]:
            saved = self._saver.save(
                registered, generation=self._context.generation, step=self._step, metadata=metadata, wait=wait
            )
            return [] if saved is None else [saved]

        saved = self._tell_saved(save)
        return saved[0].name if saved else None

    def _tell_saved(self, done: Callable[[], list[Saved]]) -> list[Saved]:
        """Report what has come to disk, or that it could not."""
        try:
            saved = done()
        except CheckpointError as error:
            self._say(ReportKind.FAILED, message=str(error), kind="checkpoint_not_written")
            raise
        for one in saved:
            self._context.reporter.say(
                ReportKind.CHECKPOINT,
                self.rank,
                one.step,
                path=one.name,
                digest=one.digest,
                size_bytes=one.size_bytes,
                write_s=one.write_s,
                stall_s=one.stall_s,
            )
        return saved

    def _progress(self) -> None:
        steps, seconds = self._speed.take()
        if not steps:
            return
        own = {"window_steps": steps, "window_s": seconds, "epoch": self.epoch}
        data: dict[str, Any] = (
            own | {"loss": self._loss} | self._scalars | own | self._measurements(seconds) | self._outlook_of_target()
        )
        if self._allow_nonfinite_loss:
            # A reader of the reports would end the training over it.
            data["loss"] = _finite_or_none(data["loss"])
        self._say_if_main(ReportKind.PROGRESS, **data)

    def _measurements(self, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = self._meter.progress()
        found["samples_per_s"] = found["samples"] / seconds if seconds > 0 else None
        found["noise_scale"] = None if self._machinery is None else self._machinery.noise.value
        return found

    def _outlook_of_target(self) -> dict[str, Any]:
        found = self._outlook.look() if self.is_main else {}
        total = self._total_or_none()
        if total is not None and "steps_left" in found:
            found["steps_left"] = min(found["steps_left"], total - self._step)
        return found

    def _report_worker(self) -> None:
        """What this worker, of whatever rank, has measured of itself."""
        found = self._meter.worker()
        if found is not None:
            self._say(ReportKind.WORKER, **found)

    def _at_exit(self) -> None:
        """At the end of a process that is not finished: the steps since the last report; no thread stays behind."""
        if os.getpid() != self._pid:
            return
        is_under_way = self._started and not self._finished and not self._is_rehearsing
        if is_under_way and not self._disbanded:
            with contextlib.suppress(CheckpointError):  # It was told.
                self._tell_saved(self._saver.flush)
        if self._context.managed and is_under_way and Path(self.config.incarnation_dir).is_dir():
            self._progress()
        self._disband()

    def _warn(self, message: str) -> None:
        self._say_if_main(ReportKind.WARNING, message=message)

    def _say(self, what: ReportKind, /, **data: Any) -> None:
        self._context.reporter.say(what, self.rank, self._step, **data)

    def _say_if_main(self, what: ReportKind, /, **data: Any) -> None:
        if self.is_main:
            self._say(what, **data)


def init(
    *,
    epochs: int | None = None,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    init_from: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_interval_s: float | None = None,
    allow_nonfinite_loss: bool = False,
    logical_workers: int | None = None,
    consistency: str | None = None,
    target_loss: float | None = None,
) -> Session:
    """Join the training: alone, under torchrun, or under the service; the same call.

    ``epochs`` or ``steps`` is the script's own length, ``micro_batch_size`` the most samples in one forward pass,
    ``init_from`` the folder or URL of a checkpoint whose weights to start from, ``checkpoint_dir`` where to keep
    checkpoints: a folder or an fsspec URL (``ELASTICFLOW_CHECKPOINT_DIR``, else ``./elasticflow-checkpoints``),
    ``checkpoint_interval_s`` how often to save (as often as pays off; 0: after every step). ``consistency`` is
    "consistent" (the default: the result does not depend on the number of workers, bit for bit) or "fast".
    ``logical_workers``, a power of two that divides the global batch (8, if it can be), is into how many shares each
    batch is cut in consistent mode: at least as many as there will ever be workers, and always the same for the same
    result. ``target_loss`` ends the training as soon as the smoothed loss is there
    (:class:`~elasticflow_airflow.runtime.target.LossTrack`), or at ``steps`` or ``epochs`` if those come first.
    Under the service what was submitted wins over all of them. Raises ValueError for lengths that contradict
    each other.
    """
    if epochs is not None and steps is not None:
        raise ValueError("give steps= or epochs=, not both")
    return Session(
        detect(checkpoint_dir),
        epochs=epochs,
        steps=steps,
        micro_batch_size=micro_batch_size,
        init_from=init_from,
        checkpoint_interval_s=checkpoint_interval_s,
        allow_nonfinite_loss=allow_nonfinite_loss,
        logical_workers=logical_workers,
        consistency=consistency,
        target_loss=target_loss,
    )


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _pick_device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _all_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or infinite. Eight times faster than ``isfinite().all()``, which makes a mask."""
    weights = [p.detach() for p in model.parameters() if p.is_floating_point() and p.numel()]
    return all(bool(bound.isfinite()) for weight in weights for bound in torch.aminmax(weight))


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
