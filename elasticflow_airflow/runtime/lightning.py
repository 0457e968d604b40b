"""PyTorch Lightning: ``Trainer(strategy=ElasticStrategy())`` trains the same bits with any number of workers.

The only module of the runtime that needs Lightning (2.6): ``lightning`` or ``pytorch_lightning``, whichever the script
imports. Lightning sees one device and one process. The session distributes the data, runs the logical workers inside
``training_step``, and changes the workers between two batches.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elasticflow_airflow.runtime import earlier_release

earlier_release.forget_if_unused()

from elasticflow_airflow.runtime.context import detect
from elasticflow_airflow.runtime.frameworks import lightning_limits as limits
from elasticflow_airflow.runtime.frameworks.lightning_notes import Notes, Recorder
from elasticflow_airflow.runtime.gang.process_group import GroupBroken
from elasticflow_airflow.runtime.samples.sample_order import Batch, ElasticLoader
from elasticflow_airflow.runtime.session import Session
from elasticflow_airflow.runtime.session_core import SessionCore
from elasticflow_airflow.runtime.session_steps import StepHooks
from elasticflow_airflow.runtime.stepping.optimizer_step import Step

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _import_lightning() -> Any:
    """Return the Lightning package of the script: the library exists under two names with incompatible classes."""
    for name in _PACKAGES:
        if name in sys.modules:
            return sys.modules[name]
    for name in _PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            return import_module(name)
    raise ModuleNotFoundError("ElasticStrategy needs PyTorch Lightning: pip install 'lightning>=2.6,<2.7'")


_PL = _import_lightning()
_CALL = import_module(f"{_PL.__name__}.trainer.call")
_RANK_ZERO = import_module("lightning_utilities.core.rank_zero").rank_zero_only
_SingleDevice: Any = _PL.strategies.SingleDeviceStrategy


@dataclass(eq=False, slots=True)
class GlobalBatch:
    """The ``batch`` argument of Lightning's training hooks: one step's batch, with the ``shares`` of this worker."""

    batch: Batch
    step: Step
    gradients: list[Tensor | None] | None = None
    """Summed over all workers; None before the training step is done."""

    @property
    def samples(self) -> int:
        """Samples of the global batch, over all workers."""
        return self.batch.global_samples


class _GlobalBatches:
    """Replaces the training DataLoader: each item is one step, and fetching it is the step boundary."""

    def __init__(self, loader: ElasticLoader, begin: Callable[[], GlobalBatch | None]) -> None:
        self._loader, self._begin = loader, begin

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[GlobalBatch]:
        while (batch := self._begin()) is not None:
            yield batch


class ElasticStrategy(_SingleDevice):  # type: ignore[misc]  # which of two packages it comes from is known at run time
    """Trains a LightningModule elastically: ``Trainer(strategy=ElasticStrategy(), max_epochs=3)``.

    The training DataLoader's ``batch_size`` is the global one, over all workers; under the service the submitted
    settings override it as well as ``max_epochs`` and ``max_steps``. ``lengths``, one number per training sample, puts
    samples of similar length into the same batch. The other arguments are those of
    :func:`elasticflow_airflow.runtime.init`. ``fit`` raises ValueError or TypeError at its start for what is not
    supported, such as manual optimisation.
    """

    strategy_name = "elastic"

    def __init__(
        self,
        *,
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
        shard_checkpoints_above_gb: float | None = None,
        lengths: Iterable[int] | Tensor | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self._core = SessionCore(
            detect(checkpoint_dir),
            micro_batch_size=micro_batch_size,
            init_from=init_from,
            checkpoint_interval_s=checkpoint_interval_s,
            allow_nonfinite_loss=allow_nonfinite_loss,
            logical_workers=logical_workers,
            max_workers=max_workers,
            threads=threads,
            consistency=consistency,
            seed=seed,
            shard_checkpoints_above_gb=shard_checkpoints_above_gb,
        )
        self.session = Session(self._core)
        self._recorder = Recorder()
        self.session._steps.hooks = StepHooks(
            before_commit=self._recorder.merge, redone=self._recorder.clear, group_changed=self._take_rank
        )
        super().__init__(
            device=self.session.device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._notes = Notes(lambda: self._trainer, _CALL)
        self._lengths = lengths
        self._loader: ElasticLoader | None = None
        self._opened: Step | None = None
        self._current: GlobalBatch | None = None
        self._may_agree = True
        self._take_rank()

    # -- before training --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Check the trainer, build the optimizer and restore a checkpoint. Raises ValueError and CheckpointError."""
        if not self._is_fitting:
            super().setup(trainer)
            return
        if self._core.registered is not None:
            raise ValueError("ElasticStrategy is for one fit(): make a new process for another training")
        limits.refuse_trainer(trainer, self.lightning_module, self.precision_plugin)
        limits.refuse_checkpoint(trainer)
        super().setup(trainer)
        schedules = [config.scheduler for config in self.lr_scheduler_configs]
        self.session.register(
            model=self.lightning_module,
            optimizer=self.optimizers[0],
            scheduler=schedules[0] if schedules else None,
            scaler=getattr(self.precision_plugin, "scaler", None),
            **{f"scheduler_{number}": schedule for number, schedule in enumerate(schedules[1:], 1)},
            lightning=self._notes,
        )
        trainer.fit_loop.setup_data()
        self._set_position()

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the optimizer. Raises ValueError for none or several, in place of Lightning's advice to use several."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            limits.refuse_number_of_optimizers("several")
        limits.refuse_optimizers(self.optimizers)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Distribute the training set; every worker iterates over the whole of any other set."""
        if not (self._is_fitting and self._trainer.state.stage == "train"):
            return dataloader
        if self._loader is not None:
            raise ValueError("ElasticStrategy cannot train with several training DataLoaders: join their datasets")
        dataset, shuffle, options = limits.options_of(dataloader)
        session = self.session
        self._loader = session.dataloader(
            dataset, global_batch_size=dataloader.batch_size, shuffle=shuffle, lengths=self._lengths, **options
        )
        self._set_length(len(self._loader))
        return _GlobalBatches(self._loader, self._begin_step)

    def _set_length(self, per_epoch: int) -> None:
        """Set session and Trainer to the same length: the submitted one, else the Trainer's."""
        session, loop = self.session, self._trainer.fit_loop
        if session.config.steps is None and session.config.epochs is None:
            lengths = [loop.max_epochs * per_epoch] if loop.max_epochs not in (None, -1) else []
            lengths += [loop.max_steps] if loop.max_steps != -1 else []
            if not lengths:
                raise ValueError(
                    "ElasticStrategy needs to know how long to train: Trainer(max_epochs=) or (max_steps=)"
                )
            self._core.config = replace(session.config, steps=min(lengths))
        total = session.total_steps
        loop.max_epochs = -(-total // per_epoch)
        loop.epoch_loop.max_steps = total if total % per_epoch else -1

    def on_train_start(self) -> None:
        """Warm up and join if others already train."""
        self._notes.apply()
        # Lightning would end the training at once; the session exits with all others, at a step boundary.
        connector = self._trainer._signal_connector
        connector._original_handlers.pop(signal.SIGTERM, None)
        signal.signal(signal.SIGTERM, self._core.on_sigterm)
        if self.session.is_warming_up:
            self._rehearse_and_join()
            self._notes.apply()
        self._set_position()

    def _rehearse_and_join(self) -> None:
        """Do warm-up steps before joining, and discard them: the first steps of a process are several times slower."""
        session = self.session
        assert self._loader is not None  # fit has set up its data
        while True:
            step = session.step()
            if not self._core.is_rehearsing:
                self._opened = step
                break
            with step:
                self._backward_all(step, self._loader.batch(*self._core.position()), (0,))
                self.optimizers[0].step()
        for part in self.lightning_module.modules():
            if hasattr(part, "compute") and hasattr(part, "reset"):
                part.reset()

    # -- a step, in the order of Lightning's calls ------------------------------------------------------------------

    def _begin_step(self) -> GlobalBatch | None:
        """Begin a step at its boundary, where the training may save, change its workers, or exit."""
        session, loop = self.session, self._trainer.fit_loop
        if self._current is not None:
            raise RuntimeError(
                "a batch went by without an optimizer step: on_train_batch_start must not return -1, training_step not "
                "None, and an optimizer_step of your own must call the closure and step"
            )
        if self._core.all_done():
            return None
        if self._opened is None:
            self._notes.join_epoch()
            if self._core.position()[1] == 0:
                self._notes.forget_epoch()
            step = session.step()
        else:
            step, self._opened = self._opened, None
        epoch, number = self._core.position()
        self._set_counters(number, session.steps_done)
        loop._data_fetcher.fetched = number
        assert self._loader is not None  # the loader called this
        step.__enter__()
        self._current = GlobalBatch(self._loader.batch(epoch, number), step)
        return self._current

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; a training batch is moved share by share in the training step instead."""
        if isinstance(batch, GlobalBatch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: GlobalBatch, *args: Any) -> Tensor:
        """Run forward and backward passes of this process's logical workers; return the loss of the global batch."""
        if batch.gradients is not None:
            raise RuntimeError("the optimizer called its closure twice: it must go through a batch only once a step")
        self._recorder.clear()
        self._backward_all(batch.step, batch.batch, args)
        # Lightning clears gradients between training_step and backward; backward restores them.
        parameters = list(self.lightning_module.parameters())
        batch.gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        for name, (value, flags) in self._recorder.merged.items():
            self.lightning_module.log(name, value, **flags, batch_size=batch.samples)
        self._notes.join_epoch()
        self.session.log(**{name: value for name, (value, _) in self._recorder.merged.items()})
        return torch.tensor(batch.step.loss, device=self.root_device)

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Set the parameters' gradients to the sums over all logical workers."""
        if not self._is_fitting or self._current is None or self._current.gradients is None:
            raise RuntimeError("ElasticStrategy.backward() is for the training step's own loss")
        for parameter, gradient in zip(self.lightning_module.parameters(), self._current.gradients, strict=True):
            parameter.grad = gradient
        self._hook("on_after_backward")
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Apply the optimizer, and count the step."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        done, self._current = self._current, None
        if done is not None:
            done.step.__exit__(None, None, None)
        return result

    def _backward_all(self, step: Step, batch: Batch, args: tuple[Any, ...]) -> None:
        module, plugin = self.lightning_module, self.precision_plugin
        gradient_step = self._core.gradient_step
        assert gradient_step is not None  # session.step() has created it
        module.zero_grad()
        rehearsing = self.session.is_warming_up
        current, module._current_fx_name = module._current_fx_name, "training_step"
        with self._recorder.listening(module):
            for micro in step.split(batch):
                assert step._weight is not None  # a micro-batch is in progress
                self._recorder.at(len(gradient_step._losses), step._weight)
                content = module._on_before_batch_transfer(plugin.convert_input(micro))
                content = super().batch_to_device(content)
                output = super().training_step(content, *args)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    raise TypeError(
                        f"training_step returned {type(loss).__name__}: ElasticStrategy needs the mean loss of the "
                        "micro-batch, as a tensor or as 'loss' in a dictionary"
                    )
                if not rehearsing:
                    self._hook("on_before_backward", loss)
                step.backward(loss)
        module._current_fx_name = current

    # -- the end ----------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Finish the session: the final checkpoint, with the metrics, becomes the job's result."""
        metrics = self._trainer.callback_metrics
        self._notes.forget_epoch()
        early = "the Trainer was told to stop" if self._trainer.should_stop else None
        self.session.finish({name: float(value) for name, value in metrics.items()}, early=early)

    def on_exception(self, exception: BaseException) -> None:
        """Pass the exception to the open step, so that the session reports it."""
        failed, self._current = self._current, None
        self._may_agree = False
        if failed is not None and isinstance(exception, Exception):
            failed.step.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Tear down; a training that was already complete when it started is finished here."""
        if self._is_fitting and self._may_agree and self._core.all_done() and not self._core.finished:
            self._notes.apply()
            self.on_train_end()
        super().teardown()

    # -- what Lightning requires of a strategy -----------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes files and logs; it may change at a step boundary."""
        return self.session.is_main

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of rank ``src`` (anything that JSON can hold) on every worker."""
        return self._exchange(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  (Lightning's name)
        """Return whether all workers (or any, without ``all``) decided True."""
        votes = self._exchange(bool(decision))
        return bool(min(votes) if all else max(votes))

    def _exchange(self, value: Any) -> list[Any]:
        session = self.session
        if self._core.is_rehearsing or self._core.finished or not self._may_agree or session.world_size == 1:
            return [value] * session.world_size
        try:
            return self._core.group.exchange_values(value)
        except GroupBroken as error:
            session._steps.recover_for_the_dead(error)
            return [value] * session.world_size

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and bool(self._trainer.state.fn == "fit")

    def _hook(self, name: str, *args: Any) -> None:
        _CALL._call_callback_hooks(self._trainer, name, *args)
        _CALL._call_lightning_module_hook(self._trainer, name, *args)

    def _take_rank(self) -> None:
        """Update the rank: which worker writes and prints may have changed. A warming-up worker never does."""
        rank = self.session.rank if self.session.is_main else max(1, self.session.rank)
        self.global_rank = _RANK_ZERO.rank = rank

    def _set_position(self) -> None:
        """Set Lightning's loops to the session's position, before an epoch begins."""
        epoch, number = self._core.position()
        progress = self._trainer.fit_loop.epoch_progress
        _set(progress.current, epoch)
        _set(progress.total, epoch)
        self._set_counters(number, self.session.steps_done)

    def _set_counters(self, in_epoch: int, steps: int) -> None:
        """Set Lightning's counters as if this worker had trained from the start."""
        loop = self._trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        for progress in (loop.batch_progress, optimizer.step, optimizer.zero_grad):
            _set(progress.current, in_epoch)
            _set(progress.total, steps)
        loop._batches_that_stepped = steps


def _set(tracker: Any, value: int) -> None:
    for field in fields(tracker):
        setattr(tracker, field.name, value)
