"""Refuses what the Lightning strategy does not support, with a message, before training starts.

Uses Lightning's objects by duck typing, so that it need not import Lightning. May import torch and the standard library
only.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Names of the precision plugins whose results do not depend on how a batch is split."""
_CALLBACKS = {
    "GradientAccumulationScheduler": "choose a larger batch_size instead; it is cut into micro-batches",
    "StochasticWeightAveraging": "its averages are in no state that a worker which joins could take over",
    "WeightAveraging": "its averages are in no state that a worker which joins could take over",
    "BatchSizeFinder": "the batch size is part of the result; give ElasticStrategy micro_batch_size= to save memory",
    "LearningRateFinder": "it trains before the training; run it in a script of its own",
}
_PLAIN = (
    "give it dataset, batch_size= and shuffle= only: which samples make a batch must not depend on who trains. Samples "
    "of similar length come into the same batch with ElasticStrategy(lengths=[...])"
)
_SHARDED = ("deepspeed", "fairscale", "colossalai")


def refuse_trainer(trainer: Any, module: Any, plugin: Any) -> None:
    """Raise ValueError if a Trainer or a LightningModule requests what elastic training does not support."""
    connector = trainer._accelerator_connector
    devices, nodes = connector._devices_flag, connector._num_nodes_flag
    count = len(devices) if isinstance(devices, list | tuple) else devices
    # With devices="auto" Lightning lists all visible devices; each worker uses its own, the first.
    if isinstance(count, int) and count > 1 and count != torch.cuda.device_count():
        _refuse(
            f"Trainer(devices={devices})", "each worker trains on one device, and there may be any number: devices=1"
        )
    if nodes > 1:
        _refuse(f"Trainer(num_nodes={nodes})", "leave it out: workers come and go, on as many nodes as it pleases")
    if not module.automatic_optimization:
        _refuse(
            "manual optimization (automatic_optimization=False)",
            "return the loss from training_step and let Lightning step, or write a loop of your own (runtime.init)",
        )
    if trainer.accumulate_grad_batches != 1:
        _refuse(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})",
            "multiply the DataLoader's batch_size by it instead: the batch is cut into micro-batches that fit",
        )
    if trainer.fast_dev_run:
        _refuse("Trainer(fast_dev_run=...)", "give max_steps= for a short try")
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        _refuse("Trainer(limit_train_batches=..., overfit_batches=...)", "give a smaller dataset, or max_steps=")
    if trainer.reload_dataloaders_every_n_epochs:
        _refuse("Trainer(reload_dataloaders_every_n_epochs=...)", "the training set must stay the same")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        _refuse(
            "Trainer(val_check_interval=) as a time", "give a number of batches: the clock is not the same everywhere"
        )
    if type(plugin).__name__ not in PRECISIONS:
        _refuse(
            f"the precision plugin {type(plugin).__name__}",
            "use precision='32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true'; FSDP and "
            "DeepSpeed need strategies of their own, without elasticity",
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                _refuse(f"the callback {kind.__name__}", _CALLBACKS[kind.__name__])
    _refuse_module(module)


def _refuse_module(module: Any) -> None:
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        _refuse("training_step(dataloader_iter)", "take batch and batch_idx")
    if type(module).backward.__module__.split(".")[0] not in ("lightning", "pytorch_lightning"):
        _refuse("a LightningModule with a backward() of its own", "put what it does into the loss")


def refuse_checkpoint(trainer: Any) -> None:
    """Raise ValueError if fit() was given a Lightning checkpoint to resume from."""
    if trainer._checkpoint_connector._loaded_checkpoint:
        _refuse(
            "fit(ckpt_path=...)",
            "leave it out: a training resumes by itself where it was. To start from other weights, load them into the "
            "LightningModule before fit()",
        )


def refuse_number_of_optimizers(number: str) -> NoReturn:
    """Raise ValueError for a number of optimizers other than one."""
    _refuse(
        f"{number} optimizers from configure_optimizers()" if number == "several" else "no optimizer",
        "let configure_optimizers() return exactly one; give it parameter groups where parts of the model differ. Where"
        " they take turns, as in a GAN, write a loop of your own (runtime.init), which may have several",
    )


def refuse_optimizers(optimizers: list[Any]) -> None:
    """Raise ValueError for no or several optimizers, for LBFGS, and for optimizers with sharded state."""
    if len(optimizers) != 1 or type(optimizers[0]).__name__ == "_MockOptimizer":
        refuse_number_of_optimizers("no" if len(optimizers) < 2 else "several")
    kind = type(optimizers[0])
    if isinstance(optimizers[0], torch.optim.LBFGS):
        _refuse(
            "the optimizer LBFGS", "it goes through the batch several times a step; use one that needs a gradient only"
        )
    if kind.__module__.split(".")[0] in _SHARDED or kind.__name__ == "ZeroRedundancyOptimizer":
        _refuse(f"the optimizer {kind.__name__}", "its state is sharded; use one of torch.optim")


def options_of(loader: Any) -> tuple[Any, bool, dict[str, Any]]:
    """Return a DataLoader's dataset, whether it is shuffled, and its other options. Raises ValueError, TypeError."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"ElasticStrategy needs a torch.utils.data.DataLoader for training, not {type(loader).__name__}: it deals "
            "the samples of its dataset out to the workers"
        )
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler) and hasattr(loader.dataset, "__len__"):
        _refuse(f"a DataLoader with the sampler {type(sampler).__name__}", _PLAIN)
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        _refuse("a DataLoader that draws samples more than once, or not all", _PLAIN)
    if type(loader.batch_sampler) is not BatchSampler and hasattr(loader.dataset, "__len__"):
        _refuse("a DataLoader with a batch_sampler, or without batch_size", _PLAIN)
    options: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
    options["drop_last"] = loader.drop_last
    if loader.num_workers:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    kept = {name: value for name, value in options.items() if value}
    return loader.dataset, isinstance(sampler, RandomSampler), kept | {"collate_fn": loader.collate_fn}


def _refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(f"ElasticStrategy cannot train with {what}: {instead}")
