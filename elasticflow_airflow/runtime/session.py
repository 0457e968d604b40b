"""The session: what a training script talks to, the same alone, under a bare torchrun and under the service.

Workers come and go while a script runs: at a step boundary its group changes, and it goes on with another share of each
batch (membership.py); or all save and leave, and the next generation resumes. Scripts notice none of that: rank and
number of workers are asked of the session, never remembered.
May import torch and the standard library only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered, Stateful
from elasticflow_airflow.runtime.context import Context, detect
from elasticflow_airflow.runtime.gang.process_group import GroupBroken
from elasticflow_airflow.runtime.logical_workers import choose_logical_workers, owned_by
from elasticflow_airflow.runtime.protocol import ReportKind
from elasticflow_airflow.runtime.samples.fetching import make_fetcher
from elasticflow_airflow.runtime.samples.length_groups import SampleLengths
from elasticflow_airflow.runtime.samples.sample_order import (
    BatchPlan,
    ElasticLoader,
    Fetcher,
    mix_seed,
    refuse_own_options,
)
from elasticflow_airflow.runtime.samples.stream_checks import is_stream, refuse_stream_options, stream_reader
from elasticflow_airflow.runtime.samples.streams import Stream, StreamFetcher
from elasticflow_airflow.runtime.session_core import SessionCore, trained_parameters
from elasticflow_airflow.runtime.session_steps import SessionSteps
from elasticflow_airflow.runtime.stepping.gradient_step import GradientStep
from elasticflow_airflow.runtime.stepping.measuring import Activity, TimedFetcher
from elasticflow_airflow.runtime.stepping.optimizer_step import Step
from elasticflow_airflow.runtime.stepping.reduction import refuse_optimizer, refuse_unsupported
from elasticflow_airflow.runtime.stepping.running_statistics import batch_norms
from elasticflow_airflow.runtime.stores.manifest import CheckpointError


class Session:
    """One worker's view of one training run. Made by :func:`elasticflow_airflow.runtime.init`."""

    def __init__(self, context: Context, **options: Any) -> None:
        """``options``: as :class:`SessionCore` takes them."""
        self._core = SessionCore(context, **options)
        self._steps = SessionSteps(self._core)
        self.config = self._core.config
        self.device = self._core.device
        self.seed = self._core.seed
        """Of all that is random in the training: as submitted, else as the script says, else 0."""

    @property
    def rank(self) -> int:
        """Rank of this worker now; it may change at a step boundary. After ``finish`` it stays."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """Number of workers now; it may change at a step boundary."""
        return self._core.world_size

    @property
    def logical_workers(self) -> int:
        """Into how many shares each global batch is cut; each share is one worker's at a time. See ``init``."""
        return self._core.logical_workers

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves; never one that only warms up to join."""
        return self._core.is_main

    @property
    def is_warming_up(self) -> bool:
        """Whether this worker only rehearses, to join others that train: nothing that it does now counts."""
        return self._core.is_rehearsing

    @property
    def steps_done(self) -> int:
        """Optimizer steps done in all, over every generation."""
        return self._core.step

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._core.epoch

    @property
    def total_steps(self) -> int:
        """Length of the training in steps. Raises ValueError while nobody has said it."""
        total = self._core.total_or_none()
        if total is None:
            raise ValueError(
                "the length of the training is not known yet: give epochs= or steps= where the session is made, and "
                "call session.dataloader() before asking for total_steps"
            )
        return total

    def register(
        self,
        model: nn.Module,
        optimizer: Stateful | None = None,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        **others: Stateful,
    ) -> None:
        """Name what a checkpoint holds, and restore it: from the one to resume from, else ``init_from``'s weights.

        Call it once, when everything is built. Several optimizers have a name each, the second among ``others``. Raises
        CheckpointError when a checkpoint does not fit, TypeError for what cannot be trained here.
        """
        core = self._core
        if core.registered is not None:
            raise ValueError("session.register() was called before; name everything in one call")
        refuse_unsupported(model, consistent=core.is_consistent)
        named = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **others}
        for name, part in named.items():
            refuse_optimizer(name, part)
        core.registered = Registered(model, {name: part for name, part in named.items() if part is not None})
        core.has_batch_norm = bool(batch_norms(model))
        model.to(self.device)
        try:
            if not core.is_rehearsing:
                core.restore(core.registered)
        except CheckpointError as error:
            core.say(ReportKind.FAILED, message=str(error), kind="bad_checkpoint")
            raise
        core.register_stream()

    def dataloader(
        self,
        dataset: Dataset[Any] | Stream,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        samples: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        lengths: Iterable[int] | Tensor | None = None,
        **options: Any,
    ) -> ElasticLoader:
        """Deal out a training set: every sample of an epoch exactly once, whoever trains.

        ``global_batch_size`` counts samples of one optimizer step over all workers; under the service the submitted
        one is used. A map-style set is shuffled unless ``shuffle=False``. A stream (an iterable with ``state_dict``
        and ``load_state_dict``) is read by every worker in its own order; ``samples`` says how many it has in an epoch,
        and ``transform`` is done to each sample that a worker keeps. With ``drop_last`` an epoch has full global
        batches only: what would be a short one, other samples each time if shuffled, is left out. ``lengths``, one a
        sample (its tokens, say), the same on every worker, puts samples of similar length into the same batch. Other
        ``options`` go to ``torch.utils.data.DataLoader``. For validation use an ordinary loader. Raises TypeError and
        ValueError for a set that could not be dealt out exactly.
        """
        core = self._core
        if core.loader is not None:
            raise ValueError("session.dataloader() is for the training set and may be called once")
        size = self.config.global_batch_size if core.context.submitted else global_batch_size
        if size is None:
            raise ValueError("session.dataloader() needs global_batch_size= when the script runs without the service")
        refuse_own_options(options)
        options = {"num_workers": num_workers, **options}
        reader = None
        if is_stream(dataset):
            if lengths is not None:
                raise ValueError("lengths= is for a map-style dataset: a stream is read in its own order")
            reader, core.order = stream_reader(
                dataset,
                samples=samples if samples is not None or hasattr(dataset, "__len__") else self.config.samples,
                collate_fn=collate_fn,
                transform=transform,
                shuffle=shuffle,
                num_workers=num_workers,
            )
            samples, shuffle = reader.samples, False
        else:
            refuse_stream_options(transform, samples)
            samples, shuffle = len(cast(Sized, dataset)), shuffle is not False
        found = None if lengths is None else SampleLengths.of(lengths, samples)
        plan = BatchPlan(
            samples=samples,
            global_batch_size=size,
            seed=core.mixed_seed,
            shuffle=shuffle,
            drop_last=drop_last,
            lengths=found,
        )
        if found is not None:
            core.order = found.digest
        said = self.config.samples
        if said is not None and said != samples:
            core.warn(f"the submission says samples={said}, the dataset has {samples}; the dataset counts")
        asked, workers = self.config.logical_workers, self.world_size
        core.logical = choose_logical_workers(
            asked,
            size,
            1 if self.config.script_decides and core.is_consistent else workers,
            consistent=core.is_consistent,
            max_workers=core.max_workers or 1,
        )
        if core.is_consistent and core.logical < workers:
            # Who has started them could not know how few the script says.
            core.say_if_main(ReportKind.STOPPED, logical_workers=core.logical)
            self._steps.leave_at_once_unheard()
        fetcher: Fetcher
        if reader is None:
            fetcher = make_fetcher(cast("Dataset[Any]", dataset), collate_fn or default_collate, options)
        else:
            fetcher = StreamFetcher(
                reader, plan, core.book, options, rehearses=lambda: core.is_rehearsing, warn=core.warn
            )
        core.loader = ElasticLoader(
            plan,
            TimedFetcher(fetcher, core.meter),
            logical_workers=lambda: self.logical_workers,
            position=core.position,
            owned=lambda: owned_by(self.rank, self.world_size, self.logical_workers),
            finished=core.all_done,
            fewest=self._fewest,
        )
        core.has_stream = reader is not None
        core.register_stream()
        return core.loader

    def begin_at(self, step: int) -> None:
        """Count from ``step``: the script itself has restored a state of that step, the same on every worker.

        Changes nothing where the session has restored one of its own checkpoints, or joins others.
        """
        core = self._core
        if core.started:
            raise RuntimeError("session.begin_at() comes before the first step")
        if core.resumed_from is None and not core.is_rehearsing:
            core.step = bootstrap.current_step = step

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left, the one under way included, until all steps are done.

        ``count`` is the script's own idea of the length; what the service or ``runtime.init`` says wins.
        """
        core = self._core
        core.script_epochs = count
        if core.loader is None:
            raise ValueError("call session.dataloader() before session.epochs()")
        core.start()
        while not core.all_done():
            before = core.step, core.rehearsals
            yield self.epoch
            if (core.step, core.rehearsals) == before:
                raise RuntimeError("an epoch went by without a session.step(): every batch needs one")

    def step(self) -> Step:
        """Open one optimizer step: the boundary at which this worker may save, or save and leave."""
        core = self._core
        if core.registered is None:
            raise ValueError("call session.register() before session.step()")
        if core.finished:
            raise RuntimeError("session.step() after session.finish(): the result is out already")
        core.start()
        self._steps.boundary()
        trained = trained_parameters(core.registered.model)
        if not trained:
            raise ValueError("nothing to train: no parameter of the registered model requires a gradient")
        if core.gradient_step is None or list(map(id, trained)) != list(map(id, core.gradient_step.reducer.parameters)):
            # The first step; or the script has frozen or freed parameters since the last.
            core.gradient_step = GradientStep(
                core.registered,
                self.logical_workers,
                consistent=core.is_consistent,
                alone=core.member is None and self.world_size == 1 and not core.context.managed,
            )
            core.gradient_step.group = core.group
        core.gradient_step.measures = core.measures
        core.meter.enter(Activity.COMPUTE)
        return Step(
            self._steps,
            core.gradient_step,
            self.config.micro_batch_size,
            mix_seed(core.mixed_seed, core.step),
            fewest=self._fewest(),
        )

    def _fewest(self) -> int:
        """How many samples a forward pass needs, as far as there are so many."""
        return 2 if self._core.has_batch_norm else 1

    def log(self, **scalars: float | Tensor) -> None:
        """Attach numbers to the next progress report, ``loss`` among them; its own epoch and speed stay."""
        for name, value in scalars.items():
            self._core.scalars[name] = float(value)

    def wait_for_all(self) -> bool:
        """Return True when every worker has come here.

        False: one was gone, and those who live are a group again. Whatever it may have left undone is for who has its
        rank now; then all call this once more. Raises GroupBroken where they cannot be one: under a bare torchrun,
        which ends all workers when one dies, and before :meth:`register`, when there is no state to go on from.
        """
        core = self._core
        try:
            core.group.wait_for_all()
        except GroupBroken as error:
            if core.member is None or core.registered is None:
                raise
            self._steps.recover_for_the_dead(error)
            return False
        return True

    def finish(self, metrics: Mapping[str, Any] | None = None, *, early: str | None = None) -> None:
        """Say that training is done: the final checkpoint, with ``metrics``, becomes the job's result.

        ``early`` says why it ends before its length, where that is meant ("no better for 3 epochs"). Without it, the
        service counts an early end as a failure: something went wrong in the script's loops.
        """
        core = self._core
        if core.finished:
            return
        core.start()
        if core.is_rehearsing:
            self._steps.leave_at_once()
        core.say_progress()
        path = core.save(wait=True)
        core.finished = True
        data = {"metrics": dict(metrics or {}), "loss": core.loss, "path": path}
        total = core.total_or_none()
        if early is not None and total is not None and core.step < total:
            data["early"] = str(early)
        if core.track.target is not None:
            data |= {"target_reached": core.track.reached, "smoothed_loss": core.track.smoothed}
            data |= {"loss_curve": core.track.curve}
        while True:
            try:
                core.group.wait_for_all()
                break
            except GroupBroken as error:
                if self.is_main:
                    break
                if core.member is None:
                    raise
                # Rank 0 may have died before it had saved: then it is up to the others, who wait for whoever it is now.
                self._steps.finish_for_the_dead(error, data)
        core.say_if_main(ReportKind.FINISHED, **data)
        core.disband()
        # What the script does from here on is its own; a SIGTERM ends it again.
        signal.signal(signal.SIGTERM, core.previous_handler or signal.SIG_DFL)


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
    max_workers: int | None = None,
    threads: int | None = None,
    consistency: str | None = None,
    seed: int | None = None,
    target_loss: float | None = None,
    shard_checkpoints_above_gb: float | None = None,
) -> Session:
    """Join the training: alone, under torchrun, or under the service; the same call.

    ``epochs`` or ``steps`` is the script's own length, ``micro_batch_size`` the most samples in one forward pass,
    ``init_from`` the folder or URL of a checkpoint whose weights to start from, ``checkpoint_dir`` where to keep
    checkpoints: a folder or an fsspec URL (``ELASTICFLOW_CHECKPOINT_DIR``, else ``./elasticflow-checkpoints``),
    ``checkpoint_interval_s`` how often to save (as often as pays off; 0: after every step). ``consistency`` is
    "consistent" (the default: the result does not depend on the number of workers, bit for bit) or "fast".
    ``logical_workers``, a power of two that divides the global batch (8, if it can be), is into how many shares each
    batch is cut in consistent mode: at least as many as there will ever be workers, and always the same for the same
    result; ``max_workers`` above 8 raises it to that. ``threads`` is with how many torch computes in each worker on a
    CPU, in consistent mode (1, or ``OMP_NUM_THREADS``): with another number the last bits may be others. ``seed`` (0)
    decides all that is random: weights, order of samples, dropout. ``target_loss`` ends the training as soon as the
    smoothed loss is there (``step/loss_target.py``), or at ``steps`` or ``epochs`` if
    those come first.
    ``shard_checkpoints_above_gb``: larger states (4 GB) are written in parts, one a worker, in consistent mode.
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
        max_workers=max_workers,
        threads=threads,
        consistency=consistency,
        seed=seed,
        target_loss=target_loss,
        shard_checkpoints_above_gb=shard_checkpoints_above_gb,
    )
