"""Which samples make which step: a pure function of (seed, epoch, step), independent of who computes it.

Every sample of an epoch is used exactly once, whatever the number of workers and however often it changes: the
global batch of a step is fixed, and the workers of the moment share it. The last batch of an epoch is short; nothing
is padded, repeated or dropped. May import torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a dataset of ``samples`` is cut into steps of ``global_batch_size``."""

    samples: int
    global_batch_size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("the dataset is empty: there is nothing to train on")
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size}: it must be at least 1")

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch; the last may be short."""
        return -(-self.samples // self.global_batch_size)

    def order(self, epoch: int) -> list[int]:
        """Order of the samples in an epoch: a permutation that depends on seed and epoch alone."""
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return order

    def global_batch(self, order: Sequence[int], step_in_epoch: int) -> Sequence[int]:
        """Samples of one step, over all workers."""
        start = step_in_epoch * self.global_batch_size
        return order[start : start + self.global_batch_size]


def share(batch: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Give a worker its contiguous part of a global batch; parts differ by one sample at most and may be empty."""
    start = rank * len(batch) // world_size
    return batch[start : (rank + 1) * len(batch) // world_size]


@dataclass(frozen=True, slots=True)
class Batch:
    """A worker's part of one global batch. ``content`` is what the collate function made; None when it is empty."""

    content: Any
    samples: int
    global_samples: int
    indices: tuple[int, ...]
    epoch: int
    step_in_epoch: int


class _Shares:
    """Batch sampler for one pass: the shares of this worker from ``first_step`` on."""

    def __init__(self, plan: BatchPlan, epoch: int, first_step: int, rank: int, world_size: int) -> None:
        self._plan, self._first_step, self._rank, self._world_size = plan, first_step, rank, world_size
        self._order = plan.order(epoch)

    def all(self) -> Iterator[tuple[int, Sequence[int], int]]:
        for step in range(self._first_step, self._plan.steps_per_epoch):
            batch = self._plan.global_batch(self._order, step)
            yield step, share(batch, self._rank, self._world_size), len(batch)

    def __iter__(self) -> Iterator[list[int]]:
        for _, mine, _ in self.all():
            if mine:
                yield list(mine)


class ElasticLoader:
    """Iterates over this worker's part of each remaining batch of the current epoch.

    ``position`` tells where the session stands: (epoch, step in the epoch); ``workers`` who this is: (rank, world
    size); both are asked at the beginning of each pass, and ``finished`` before each batch. Resuming in the middle of
    an epoch reads nothing twice: the order is computed, not replayed. Length: steps in one epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        position: Callable[[], tuple[int, int]],
        workers: Callable[[], tuple[int, int]],
        finished: Callable[[], bool] = lambda: False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        self.plan = plan
        self._dataset = dataset
        self._position, self._workers, self._finished = position, workers, finished
        self._options = {"collate_fn": collate_fn or default_collate, "num_workers": num_workers, **options}

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, first_step = self._position()
        shares = _Shares(self.plan, epoch, first_step, *self._workers())
        loaded = iter(DataLoader(self._dataset, batch_sampler=shares, **self._options))
        for step, mine, global_samples in shares.all():
            if self._finished():
                return
            yield Batch(
                content=next(loaded) if mine else None,
                samples=len(mine),
                global_samples=global_samples,
                indices=tuple(mine),
                epoch=epoch,
                step_in_epoch=step,
            )


def split_content(content: Any, start: int, end: int) -> Any:
    """Take samples ``start`` to ``end`` of a collated batch: tensors, mappings, tuples and lists of samples.

    Raises TypeError for anything else.
    """
    if isinstance(content, torch.Tensor):
        return content[start:end]
    if isinstance(content, Mapping):
        parts = {key: split_content(value, start, end) for key, value in content.items()}
        try:
            return type(content)(parts)  # type: ignore[call-arg]  # keeps BatchEncoding and the like
        except TypeError:
            return parts
    if isinstance(content, tuple):
        parts_list = [split_content(value, start, end) for value in content]
        return type(content)(*parts_list) if hasattr(content, "_fields") else tuple(parts_list)
    if isinstance(content, list):
        if content and all(isinstance(value, torch.Tensor | Mapping | tuple | list) for value in content):
            return [split_content(value, start, end) for value in content]
        return content[start:end]
    raise TypeError(
        f"a batch of type {type(content).__name__} cannot be split into micro-batches: let collate_fn return a tensor, "
        "or a dict, tuple or list of tensors"
    )


def to_device(content: Any, device: torch.device) -> Any:
    """Move every tensor of a collated batch to a device."""
    if isinstance(content, torch.Tensor):
        return content.to(device, non_blocking=True)
    if isinstance(content, Mapping):
        return {key: to_device(value, device) for key, value in content.items()}
    if isinstance(content, tuple):
        parts = [to_device(value, device) for value in content]
        return type(content)(*parts) if hasattr(content, "_fields") else tuple(parts)
    if isinstance(content, list):
        return [to_device(value, device) for value in content]
    return content


def mix_seed(*parts: int) -> int:
    """Mix whole numbers into one 63-bit seed (SplitMix64's finalizer over the parts)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
