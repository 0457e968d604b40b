"""What a Trainer may not use when it trains elastically, said before training starts, with what to do instead.

May import torch, transformers and the standard library only; knows nothing of sessions.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from elasticflow_airflow.runtime.protocol import SESSION_ENV

_OURS = ("get_train_dataloader", "_get_train_sampler", "_inner_training_loop", "_run_epoch", "get_batch_samples")
"""Methods of the Trainer in whose place ours come: another override would be lost without a word."""

_LAUNCHER = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""What ``accelerate launch`` says to its workers."""


def refuse_unsupported(trainer: Any, *, ours: type) -> None:
    """Raise TypeError or ValueError for what would not train, or not the same with every number of workers.

    ``ours`` is the class with our part, whether the trainer has it yet or not.
    """
    args = trainer.args
    _refuse_parallelism(trainer)
    _refuse_dataset(trainer.train_dataset)
    if args.train_sampling_strategy not in ("random", "sequential", "group_by_length"):
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} deals samples out by the number of workers, "
            "which changes: use 'random', 'sequential' or 'group_by_length'"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True: the batch is part of the result, and the same for every number of workers; "
            "leave it out. Memory is bounded by per_device_train_batch_size alone: lower it until it fits"
        )
    if args.enable_jit_checkpoint:
        raise ValueError("enable_jit_checkpoint=True: the session saves on SIGTERM already; leave it out")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise ValueError(
            f"optim={optimizer!r} applies gradients during the backward pass, before they are summed over the workers: "
            "choose another optimizer"
        )
    for name in _OURS:
        cls = next(c for c in type(trainer).__mro__ if c is not ours and name in vars(c))
        if cls is not Trainer:
            raise TypeError(
                f"{cls.__name__} overrides {name}(), which is ElasticCallback's to define: put what it does into the "
                "dataset, the collator, compute_loss() or training_step()"
            )


def refuse_sharding_at_once() -> None:
    """Let every ``TrainingArguments`` made from now on refuse what :func:`refuse_sharding` does.

    Later is too late: these arguments look for deepspeed first, and the Trainer, before its callbacks are asked, for
    several processes, which :mod:`trainer_world` hides. Does nothing the second time.
    """
    cls: Any = TrainingArguments
    original = cls.__post_init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        refuse_sharding(self)
        original(self)

    cls.__post_init__ = post_init


def refuse_sharding(args: Any) -> None:
    """Raise ValueError for arguments, or a launcher, that would spread the model over the workers."""
    asked = [f"{name}=" for name in ("deepspeed", "fsdp", "parallelism_config") if getattr(args, name, None)]
    asked += [name for name in _LAUNCHER if os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")]
    if asked:
        raise ValueError(
            f"{asked[0]}: elastic workers have the whole model each, and this shares it out; leave it out (the script "
            "imports elasticflow_airflow.runtime.transformers)"
        )


def _refuse_parallelism(trainer: Any) -> None:
    args = trainer.args
    refuse_sharding(args)
    if trainer.is_model_parallel:
        raise ValueError(
            "the model is spread over several devices: elastic workers have one device each, with the whole model; "
            "leave device_map= out"
        )
    if args.n_gpu > 1:
        if SESSION_ENV not in os.environ and "LOCAL_RANK" not in os.environ:
            raise ValueError(
                f"this process sees {args.n_gpu} GPUs, and a worker uses one: start it with CUDA_VISIBLE_DEVICES=0, or "
                f"with torchrun --nproc-per-node={args.n_gpu}"
            )
        args._n_gpu = 1  # the others are other workers'


def _refuse_dataset(dataset: Any) -> None:
    if dataset is None:
        return  # evaluates only; the Trainer itself says so when it comes to train
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"train_dataset is a {type(dataset).__name__}, which has no length or cannot be indexed: nobody could say "
            "which of its samples were used when workers come and go. Give a map-style dataset, with __len__ and "
            "__getitem__ (for Hugging Face datasets: load it without streaming=True)"
        )
