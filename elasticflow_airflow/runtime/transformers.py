"""Hugging Face's Trainer on a session: ``callbacks=[ElasticCallback()]`` is all that a script changes.

The Trainer keeps its arguments, collators, loss, optimizer, schedule, callbacks, evaluation and saving. Its pass over
an epoch is replaced by one in which every optimizer step is a step of the session. Logical workers, rescaling, recovery
and checkpoints therefore work exactly as in a script with its own loop; step counts, schedule and losses refer to the
global batch and never depend on the number of workers. The Trainer itself sees a single process. May import torch,
transformers and the standard library only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback, TrainerState

from elasticflow_airflow.runtime import earlier_release

earlier_release.forget_if_unused()

from elasticflow_airflow.runtime.context import detect
from elasticflow_airflow.runtime.frameworks.trainer_limits import (
    refuse_sharding,
    refuse_sharding_at_once,
    refuse_unsupported,
)
from elasticflow_airflow.runtime.frameworks.trainer_loss import divides_by_items, item_count
from elasticflow_airflow.runtime.frameworks.trainer_progress import TrainerProgress
from elasticflow_airflow.runtime.frameworks.trainer_world import hide_world, set_rank
from elasticflow_airflow.runtime.samples.sample_order import Batch, ElasticLoader, steps_per_epoch
from elasticflow_airflow.runtime.session import Session
from elasticflow_airflow.runtime.session_core import SessionCore
from elasticflow_airflow.runtime.stepping.optimizer_step import Step

__all__ = ["ElasticCallback", "ElasticOptions", "ElasticTrainer"]

if not hasattr(Trainer, "_run_epoch"):
    raise ImportError(
        f"ElasticCallback needs a Trainer that trains epoch by epoch (transformers 5; tried with 5.23), and this is "
        f"transformers {transformers.__version__}: pip install -U transformers"
    )

# This must run before a script creates its TrainingArguments, which would otherwise set up a distributed world.
hide_world()
refuse_sharding_at_once()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """Options of ``runtime.init`` that ``TrainingArguments`` lacks; see there. The service's settings override them."""

    logical_workers: int | None = None
    max_workers: int | None = None
    threads: int | None = None
    consistency: str | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_interval_s: float | None = None
    shard_checkpoints_above_gb: float | None = None


class _TrainLoader:
    """Stand-in for the Trainer's training loader; its length is the number of micro-batches of a single process."""

    def __init__(self, dataset: Any, loader: ElasticLoader, micro_batches: int) -> None:
        self.dataset, self.loader, self._micro_batches = dataset, loader, micro_batches

    def __len__(self) -> int:
        return self.loader.plan.steps_per_epoch * self._micro_batches


@dataclass(slots=True)
class _Run:
    """State of one training: the session and what a step needs."""

    session: Session
    data: _TrainLoader
    collate: Any
    progress: TrainerProgress
    prepared: Any = None
    began: bool = False
    """Whether this worker has begun its part of the training; see ``_begin_or_go_on``."""
    opened: Step | None = None
    """The step at whose boundary this worker joined; the others are already in it."""
    step: Step | None = None
    weight: float | None = None
    counts_items: bool = False
    divides: bool = False
    """Whether the loss is already divided by the items of the global batch."""
    evaluation: dict[str, float] = field(default_factory=dict)
    saved_at: int | None = None
    """The step after which the Trainer last saved its own checkpoint."""

    def backward(self, loss: Any, **_options: Any) -> None:
        """Replace ``accelerator.backward``."""
        if self.step is None:
            raise RuntimeError("a backward pass outside of a training step")
        self.step.backward(loss, self.weight)


_Base: Any = object
"""Placeholder base of the mixin; the user's Trainer class follows it in the MRO."""


class ElasticMixin(_Base):  # type: ignore[misc]  # any class
    """Overrides that make a Trainer elastic. Not for direct use: see ElasticCallback and ElasticTrainer."""

    _elastic_options = ElasticOptions()
    _elastic: _Run | None = None
    control: Any

    # -- setting up ---------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Begin the session, and distribute the training set to the workers."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if self._elastic is not None:
            raise RuntimeError("an elastic Trainer trains once: a second train() needs a process of its own")
        args = self.args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        session = self._begin_session(size)
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="Training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="Training")
        options: dict[str, Any] = {"num_workers": args.dataloader_num_workers}
        if args.dataloader_num_workers:
            options["pin_memory"] = args.dataloader_pin_memory and torch.cuda.is_available()
            options["multiprocessing_context"] = args.dataloader_multiprocessing_context
            if args.dataloader_prefetch_factor is not None:
                options["prefetch_factor"] = args.dataloader_prefetch_factor
        loader = session.dataloader(
            dataset,
            global_batch_size=size,
            shuffle=args.train_sampling_strategy != "sequential",
            lengths=self._lengths() if args.train_sampling_strategy == "group_by_length" else None,
            collate_fn=collate,
            drop_last=args.dataloader_drop_last,
            **options,
        )
        data = _TrainLoader(dataset, loader, args.gradient_accumulation_steps)
        self._elastic = _Run(session, data, collate, TrainerProgress(self))
        self.accelerator.backward = self._elastic.backward
        return data

    def _lengths(self) -> list[int]:
        """Return the lengths of the training samples, from their column or counted, as the Trainer does."""
        dataset, column = self.train_dataset, self.args.length_column_name
        if column in (getattr(dataset, "column_names", None) or ()):
            return list(dataset[column])
        processing: Any = self.processing_class
        name = "input_ids" if processing is None else processing.model_input_names[0]
        first = dataset[0] if len(dataset) else {}
        if not isinstance(first, Mapping) or (first and name not in first):
            raise ValueError(
                f"train_sampling_strategy='group_by_length' counts what samples have under {name!r}, and these have "
                f"nothing there: give them a column of lengths, and its name as length_column_name= (now {column!r})"
            )
        return [len(dataset[index][name]) for index in range(len(dataset))]

    def _begin_session(self, size: int) -> Session:
        args, options = self.args, self._elastic_options
        context = detect(options.checkpoint_dir)
        seed = args.seed if args.data_seed is None else args.data_seed
        config = context.config
        if config.steps is not None:
            args.max_steps = config.steps
        elif config.epochs is not None:
            args.max_steps, args.num_train_epochs = -1, config.epochs
        steps = args.max_steps
        if steps <= 0:
            per_epoch = steps_per_epoch(
                len(self.train_dataset),
                config.global_batch_size if context.submitted else size,
                drop_last=args.dataloader_drop_last,
            )
            steps = math.ceil(args.num_train_epochs * per_epoch)
        return Session(
            SessionCore(
                context,
                steps=steps,
                micro_batch_size=args.per_device_train_batch_size,
                checkpoint_interval_s=options.checkpoint_interval_s,
                logical_workers=options.logical_workers,
                max_workers=options.max_workers,
                threads=options.threads,
                mixed_with=seed,
                consistency=options.consistency,
                shard_checkpoints_above_gb=options.shard_checkpoints_above_gb,
            )
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of one optimizer step, over all workers."""
        if self._elastic is None:
            return int(super().get_total_train_batch_size(args))
        return self._elastic.data.loader.plan.global_batch_size

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Build all parts, restore them or take over the state of running workers, and return the current epoch."""
        if trial is not None:
            raise ValueError("hyperparameter_search(): an elastic Trainer trains once; submit a job for each trial")
        run = self._run
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        run.prepared = super()._prepare_for_training(max_steps, run.data, resume)
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        run.session.begin_at(self.state.global_step)
        run.session.register(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=getattr(self.accelerator, "scaler", None),
            trainer=run.progress,
        )
        self._look_at_loss()
        if run.session.is_warming_up:
            self._rehearse()
        self._follow_rank()
        if run.progress.stopped or run.session.steps_done >= max_steps:
            return num_train_epochs, 0
        return run.session.epoch, 0

    def _prepare_for_training(self, *_arguments: Any, **_more: Any) -> Any:
        """Return what ``_init_training_state`` has already prepared."""
        return self._run.prepared

    def _look_at_loss(self) -> None:
        run, plan = self._run, self._run.data.loader.plan
        size = min(self.args.per_device_train_batch_size, plan.global_batch_size // run.session.logical_workers)
        run.counts_items, run.divides = divides_by_items(
            self, run.data.dataset, run.collate, plan.order(0), max(1, size), run.session.device
        )

    def _rehearse(self) -> None:
        """Do warm-up steps that do not count, until this worker has joined the running training."""
        run = self._run
        model = run.prepared[0] if isinstance(run.prepared, tuple) else self.model
        for _epoch in run.session.epochs():
            for batch in run.data.loader:
                step = run.session.step()
                if not run.session.is_warming_up:
                    run.opened = step
                    return
                with step:
                    self._share_of_step(model, step, batch)
                    self._clip(model)
                    self.optimizer.step()
                    model.zero_grad()
        run.session.finish()  # the others have finished meanwhile; this exits

    # -- training -----------------------------------------------------------------------------------------------

    def _run_epoch(self, model: Any, epoch: int, start_time: float, **context: Any) -> None:
        """Train the rest of an epoch."""
        run = self._run
        self._begin_or_go_on()
        grad_norm: Any = None
        learning_rate: Any = None
        for batch in run.data.loader:
            step, run.opened = run.opened or run.session.step(), None
            self._follow_rank()
            with step:
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
                self._share_of_step(model, step, batch)
                self._follow_rank()
                grad_norm, learning_rate = self._apply(model)
                self._count(step, epoch)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_save_evaluate(grad_norm, learning_rate, model, epoch, start_time, context)
            if self.control.should_epoch_stop and not self.control.should_training_stop:
                raise RuntimeError(
                    "a callback asked to stop the epoch (should_epoch_stop): every sample of an epoch is used; set "
                    "should_training_stop to end the training"
                )
            if self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_save_evaluate(grad_norm, learning_rate, model, epoch, start_time, context)

    def _share_of_step(self, model: Any, step: Step, batch: Batch) -> None:
        """Run this worker's forward and backward passes; afterwards gradients are those of the global batch."""
        run = self._run
        run.step = step
        # We weight each micro-batch ourselves.
        self.current_gradient_accumulation_steps = 1
        self.accelerator.gradient_state._set_sync_gradients(True)
        for inputs in step.split(batch, self._measure):
            items = max(1.0, step.totals[0])
            run.weight = None
            if run.divides:
                run.weight = 1.0
            elif run.counts_items:
                # The loss is a mean over the items of the micro-batch: weight it by their number.
                run.weight = (item_count(self, inputs) or 0.0) / items
                if run.weight == 0.0:
                    step.backward(torch.zeros((), device=run.session.device, requires_grad=True), 0.0)
                    continue
            total = torch.tensor(items, device=run.session.device) if run.counts_items else None
            self.training_step(model, inputs, total)
        run.step = None

    def _measure(self, content: Any) -> Sequence[float]:
        """Return number of items (that the loss is a mean over), floating-point operations and tokens of a share."""
        if content is None:
            return [0.0, 0.0, 0.0]
        before = self.state.num_input_tokens_seen
        self._track_num_input_tokens(content)
        tokens = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before
        items = item_count(self, content) if self._run.counts_items else None
        return [items or 0.0, float(self.floating_point_ops(content)), float(tokens)]

    def _clip(self, model: Any) -> Any:
        grad_norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        return self._get_grad_norm(model, grad_norm=grad_norm)

    def _apply(self, model: Any) -> tuple[Any, float]:
        grad_norm = self._clip(model)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        learning_rate = float(self._get_learning_rate())
        follows_metric = hasattr(self.lr_scheduler, "patience")
        if not self.accelerator.optimizer_step_was_skipped and not follows_metric:
            self.lr_scheduler.step()
        model.zero_grad()
        return grad_norm, learning_rate

    def _count(self, step: Step, epoch: int) -> None:
        plan = self._run.data.loader.plan
        _items, flos, tokens = step.totals
        self._tr_loss += step.loss
        self.current_flos += flos
        self.state.num_input_tokens_seen += int(tokens)
        self.state.global_step += 1
        done = (self.state.global_step - 1) % plan.steps_per_epoch + 1
        self.state.epoch = epoch + done / plan.steps_per_epoch

    def _log_save_evaluate(
        self,
        grad_norm: Any,
        learning_rate: float | None,
        model: Any,
        epoch: int,
        start_time: float,
        context: dict[str, Any],
    ) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss,
            grad_norm,
            model,
            context.get("trial"),
            epoch,
            context.get("ignore_keys_for_eval"),
            start_time,
            learning_rate=learning_rate,
        )

    def _follow_rank(self) -> None:
        """Let this worker print and write files if it has become rank 0, and stop it if it no longer is."""
        session = self._run.session
        set_rank(0 if session.is_main else max(1, session.rank))
        became = session.is_main and not self.state.is_world_process_zero
        ceased = not session.is_main and self.state.is_world_process_zero
        self.state.is_local_process_zero = self.state.is_world_process_zero = session.is_main
        if not self._run.began or not (became or ceased):
            return
        if became and self._run.saved_at == self.state.global_step:
            self._complete_save()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback):
                bar: Any = callback
                if became:
                    bar.on_train_begin(self.args, self.state, self.control)
                elif bar.training_bar is not None:
                    bar.training_bar.close()
                    bar.training_bar = None

    # -- evaluating, saving, ending -----------------------------------------------------------------------------

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Evaluate the whole set on every worker: decisions based on the metrics are then the same everywhere."""
        if skip_scheduler and self.state.global_step:
            return {}  # eval_on_start, but the training has begun before
        self._run.session._steps.phase("evaluate")
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys, skip_scheduler)
        self._run.evaluation = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add the numbers to the session's next progress report."""
        super().log(logs, start_time)
        if self._elastic is not None and not self._elastic.session.is_warming_up:
            numbers = {
                k: float(v) for k, v in logs.items() if isinstance(v, int | float) and k not in ("loss", "epoch")
            }
            self._elastic.session.log(**numbers)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the Trainer's own checkpoint on rank 0; the other workers only record the same state about it."""
        self._run.saved_at = self.state.global_step
        if self.args.should_save:
            super()._save_checkpoint(model, trial)
            return
        self.store_flos()
        if self.state.best_global_step and self.state.best_global_step == self.state.global_step:
            folder = f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(Path(self._get_output_dir(trial)) / folder)

    def _begin_or_go_on(self) -> None:
        """Restore counters, and complete a partial save of the current step; only the first call does anything."""
        run = self._run
        if run.began:
            return
        run.began = True
        run.progress.resume()
        folder = self._folder_of_step()
        if run.session.is_main and (folder.exists() or self.state.best_model_checkpoint == str(folder)):
            self._complete_save()

    def _folder_of_step(self) -> Path:
        """Return the folder of the Trainer's checkpoint of the current step."""
        return Path(self._get_output_dir(None)) / f"checkpoint-{self.state.global_step}"

    def _complete_save(self) -> None:
        """Complete a save during which rank 0 died. The state is the same: no step has been applied since."""
        folder = self._folder_of_step()
        if not _is_whole(folder / TRAINER_STATE_NAME):  # the file that is written last
            super()._save_checkpoint(self.model, None)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """End the training; the session's final checkpoint holds the best model if that was requested."""
        run = self._run
        self._begin_or_go_on()
        # Rank 0 may still be writing its last checkpoint, or the best model, which all workers load.
        while not run.session.wait_for_all():
            self._follow_rank()
        output = super()._finalize_training(trial, num_train_samples, start_time)
        numbers = {k: float(v) for k, v in output.metrics.items() if isinstance(v, int | float)}
        early = "the Trainer's callbacks have stopped it" if self.control.should_training_stop else None
        run.session.finish(metrics=numbers | run.evaluation, early=early)
        return output

    @property
    def _run(self) -> _Run:
        if self._elastic is None:
            raise RuntimeError("the elastic training has not begun: call train()")
        return self._elastic


class ElasticCallback(TrainerCallback):
    """Makes its Trainer elastic: ``Trainer(..., callbacks=[ElasticCallback()])``.

    The arguments are those of ``runtime.init`` that ``TrainingArguments`` does not have. Under the service the
    submitted settings override them. Creating the Trainer raises TypeError or ValueError if it cannot train
    elastically.
    """

    def __init__(
        self,
        *,
        logical_workers: int | None = None,
        max_workers: int | None = None,
        threads: int | None = None,
        consistency: str | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval_s: float | None = None,
        shard_checkpoints_above_gb: float | None = None,
    ) -> None:
        self._options = ElasticOptions(
            logical_workers=logical_workers,
            max_workers=max_workers,
            threads=threads,
            consistency=consistency,
            checkpoint_dir=checkpoint_dir,
            checkpoint_interval_s=checkpoint_interval_s,
            shard_checkpoints_above_gb=shard_checkpoints_above_gb,
        )

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Make the Trainer elastic, now that it is complete: give it a class with the mixin."""
        _make_elastic(self._find_trainer(), self._options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise RuntimeError if the callback was added too late."""
        if not isinstance(self._find_trainer(), ElasticMixin):
            raise RuntimeError(
                "ElasticCallback was added to a Trainer that exists already: give it in Trainer(callbacks=[...])"
            )

    def _find_trainer(self) -> Any:
        """Return the calling Trainer, found on the stack: callbacks do not receive it."""
        frame = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, Trainer):
                return found
            frame = frame.f_back  # type: ignore[assignment]
        raise RuntimeError("ElasticCallback is for transformers.Trainer(callbacks=[ElasticCallback()])")


class ElasticTrainer(ElasticMixin, Trainer):  # type: ignore[misc]  # transformers is not typed for us
    """``Trainer`` with the behavior of :class:`ElasticCallback`, for subclassing; ``elastic`` holds its options."""

    def __init__(self, *args: Any, elastic: ElasticOptions | None = None, **kwargs: Any) -> None:
        refuse_sharding(kwargs["args"] if "args" in kwargs else args[1] if len(args) > 1 else None)
        super().__init__(*args, **kwargs)
        _make_elastic(self, elastic or ElasticOptions())


def _is_whole(state: Path) -> bool:
    """Return whether a Trainer's state file is complete on disk."""
    try:
        TrainerState.load_from_json(str(state))
    except (FileNotFoundError, ValueError):
        return False
    return True


def _make_elastic(trainer: Any, options: ElasticOptions) -> None:
    cls = type(trainer)
    refuse_unsupported(trainer, ours=ElasticMixin)
    if not isinstance(trainer, ElasticMixin):
        trainer.__class__ = type(cls.__name__, (ElasticMixin, cls), {"__module__": cls.__module__})
    trainer._elastic_options = options
