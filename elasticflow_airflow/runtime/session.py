"""The session: the interface of a training script, identical alone, under a bare torchrun and under the service.

Workers join and leave while a script runs. Either the group changes at a step boundary and each worker continues with
another share of each batch (gang/membership.py), or all workers save and exit and the next generation resumes. Scripts
notice neither, provided that they read rank and number of workers from the session each time and do not cache them.
May import torch and the standard library only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered, Stateful
from elasticflow_airflow.runtime.context import detect
from elasticflow_airflow.runtime.gang.process_group import GroupBroken
from elasticflow_airflow.runtime.logical_workers import choose_logical_workers, owned_by
from elasticflow_airflow.runtime.protocol import ReportKind, SessionConfig
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
    """One worker's view of one training run. Created by :func:`elasticflow_airflow.runtime.init`."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core
        self._steps = SessionSteps(core)

    @property
    def config(self) -> SessionConfig:
        """What to train, as it was submitted, with what the script adds to it."""
        return self._core.config

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._core.device

    @property
    def seed(self) -> int:
        """Seed of all randomness in the training: the submitted one, else the script's, else 0."""
        return self._core.seed

    @property
    def rank(self) -> int:
        """Current rank of this worker; it may change at a step boundary. It is fixed after ``finish``."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """Current number of workers; it may change at a step boundary."""
        return self._core.world_size

    @property
    def logical_workers(self) -> int:
        """Number of shares of each global batch; a share belongs to one worker at a time. See ``init``."""
        return self._core.logical_workers

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves; always False while a joining worker warms up."""
        return self._core.is_main

    @property
    def is_warming_up(self) -> bool:
        """Whether this worker is only warming up before it joins a running training; its steps do not count."""
        return self._core.is_rehearsing

    @property
    def steps_done(self) -> int:
        """Total number of optimizer steps done, over all generations."""
        return self._core.step

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._core.epoch

    @property
    def total_steps(self) -> int:
        """Length of the training in steps. Raises ValueError while it is unknown."""
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
        """Declare what checkpoints hold, and restore it: from the checkpoint to resume from, else from ``init_from``.

        Only the weights are taken from ``init_from``. Call this once, when everything is built. Further optimizers are
        passed under names of their own in ``others``.
        Raises CheckpointError if a checkpoint does not fit, TypeError for a model or optimizer that is not supported.
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
        """Distribute a training set: every sample of an epoch is used exactly once, whatever the number of workers.

        ``global_batch_size`` is the number of samples per optimizer step over all workers; under the service the
        submitted value is used. A map-style dataset is shuffled unless ``shuffle=False``. A stream (an iterable with
        ``state_dict`` and ``load_state_dict``) is read by every worker in the stream's own order; ``samples`` is its
        number of samples per epoch, and ``transform`` is applied to each sample that a worker keeps. With ``drop_last``
        an epoch has full global batches only; the samples of the short last batch (other ones in each epoch if
        shuffled) are left out. ``lengths`` gives one number per sample (its tokens, for example), equal on all workers,
        and puts samples of similar length into the same batch. Other ``options`` are passed to
        ``torch.utils.data.DataLoader``. Use an ordinary loader for validation. Raises TypeError or ValueError for a
        dataset that cannot be distributed exactly.
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
            # The service that started the workers could not know that the script asks for fewer.
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
        """Count from ``step``: the script has restored a state of that step by itself, the same on every worker.

        Does nothing if the session has restored one of its own checkpoints, or joins a running training.
        """
        core = self._core
        if core.started:
            raise RuntimeError("session.begin_at() comes before the first step")
        if core.resumed_from is None and not core.is_rehearsing:
            core.step = bootstrap.current_step = step

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the remaining epochs, including the current one, until all steps are done.

        ``count`` is the length that the script asks for; a length from the service or ``runtime.init`` overrides it.
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
        """Begin one optimizer step. At this step boundary the worker may save, or save and exit."""
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
            # This is the first step, or the script has frozen or unfrozen parameters since the last one.
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
        """Return the least number of samples for a forward pass, where the share has that many."""
        return 2 if self._core.has_batch_norm else 1

    def log(self, **scalars: float | Tensor) -> None:
        """Set numbers for all later progress reports. ``loss`` may be replaced; other names are to be new ones."""
        for name, value in scalars.items():
            self._core.scalars[name] = float(value)

    def wait_for_all(self) -> bool:
        """Wait for all workers at a barrier; return True when every worker has reached it.

        Return False if a worker died and the survivors have formed a new group. The worker that now has the dead
        worker's rank must then complete its unfinished work, and all workers must call this again. Raises GroupBroken
        if no new group can form: under a bare torchrun, which ends all workers when one dies, and before
        :meth:`register`, when there is no state to continue from.
        """
        try:
            self._core.group.wait_for_all()
        except GroupBroken as error:
            self._steps.recover_for_the_dead(error)
            return False
        return True

    def finish(self, metrics: Mapping[str, Any] | None = None, *, early: str | None = None) -> None:
        """Finish the training: the final checkpoint, with ``metrics``, becomes the job's result.

        ``early`` is the reason for an intended end before the full length ("no better for 3 epochs"). Without it the
        service counts an early end as a failure, since it suggests an error in the script's loops.
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
                # Rank 0 may have died before it saved. The survivors then wait for the new rank 0 to save.
                self._steps.finish_for_the_dead(error, data)
        core.say_if_main(ReportKind.FINISHED, **data)
        core.disband()
        # From here on the session does not control the script; a SIGTERM must end it as before.
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
    """Join the training. The call is the same alone, under torchrun and under the service.

    Defaults are given in parentheses. ``epochs`` or ``steps`` is the length that the script asks for.
    ``micro_batch_size`` is the largest number of samples in one forward pass. ``init_from`` is the folder or URL of a
    checkpoint whose weights to start from. ``checkpoint_dir`` is where to keep checkpoints: a folder or an fsspec URL
    (``ELASTICFLOW_CHECKPOINT_DIR``, else ``./elasticflow-checkpoints``). ``checkpoint_interval_s`` is the time between
    saves in seconds (chosen from the cost of saving; 0: after every step). ``consistency`` is "consistent" (the
    default: the result is independent of the number of workers, bit for bit) or "fast". ``logical_workers`` is the
    number of shares of each batch in consistent mode, a power of two that divides the global batch (8, if possible). It
    must be at least the largest number of workers that there will ever be; the result is the same only for the same
    number. ``max_workers`` above 8 raises its default to that. ``threads`` is the number of torch threads of each
    worker on a CPU, in consistent mode (1, or ``OMP_NUM_THREADS``); another number may change the last bits. ``seed``
    (0) determines all randomness: weights, order of samples, dropout. ``target_loss`` ends the training as soon as the
    smoothed loss reaches it (``stepping/loss_target.py``), or at ``steps`` or ``epochs`` if those come first. States
    larger than ``shard_checkpoints_above_gb`` (4 GB) are written in parts, one per worker, in consistent mode. Under
    the service, submitted settings override these, but for ``shard_checkpoints_above_gb`` and ``allow_nonfinite_loss``.
    Raises ValueError for contradictory lengths.
    """
    if epochs is not None and steps is not None:
        raise ValueError("give steps= or epochs=, not both")
    return Session(
        SessionCore(
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
    )
