"""Refuses Trainer features that elastic training does not support, before training starts, and names alternatives.

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
"""Trainer methods that ours replace: any other override would be lost silently."""

_LAUNCHER = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""Environment variables that ``accelerate launch`` sets for its workers."""


def refuse_unsupported(trainer: Any, *, ours: type) -> None:
    """Raise TypeError or ValueError for what would not train, or not identically with every number of workers.

    ``ours`` is the class with our methods, whether or not the trainer already derives from it.
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
    """Make every ``TrainingArguments`` created from now on call :func:`refuse_sharding`.

    Later is too late: the arguments first look for deepspeed, and the Trainer looks for several processes, which
    :mod:`trainer_world` hides, before it calls its callbacks. A second call does nothing.
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
    """Raise ValueError for arguments, or a launcher, that would shard the model over the workers."""
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
        args._n_gpu = 1  # the other GPUs belong to other workers


def _refuse_dataset(dataset: Any) -> None:
    if dataset is None:
        return  # evaluation only; the Trainer itself raises an error if it is to train
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"train_dataset is a {type(dataset).__name__}, which has no length or cannot be indexed: nobody could say "
            "which of its samples were used when workers come and go. Give a map-style dataset, with __len__ and "
            "__getitem__ (for Hugging Face datasets: load it without streaming=True)"
        )
