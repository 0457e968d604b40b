"""Which samples make which step: a pure function of (seed, epoch, step), independent of who computes it.

Every sample of an epoch is used exactly once, whatever the number of workers and however often it changes: the
global batch of a step is fixed, and the workers of the moment share it. The last batch of an epoch is short; nothing
is padded, repeated or dropped. May import torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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

    def changes_since(self, metadata: Mapping[str, Any]) -> str:
        """Say how this plan differs from that in a checkpoint's metadata; empty: steps mean the same samples."""
        return ", ".join(
            f"{name} was {metadata[name]}, is {value}"
            for name, value in asdict(self).items()
            if metadata.get(name, value) != value
        )

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


_OWN_OPTIONS = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last", "in_order"})
"""Options of ``DataLoader`` that would contradict the plan."""


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
        refused = sorted(options.keys() & _OWN_OPTIONS)
        if refused:
            raise ValueError(
                f"{', '.join(refused)}: the session decides which samples make a batch; leave it out, and give "
                "global_batch_size= and shuffle= to session.dataloader()"
            )
        self.plan = plan
        self._dataset = dataset
        self._position, self._workers, self._finished = position, workers, finished
        self._options = {"collate_fn": collate_fn or default_collate, "num_workers": num_workers, **options}

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, first_step = self._position()
        rank, world_size = self._workers()
        shares = _Shares(self.plan, epoch, first_step, rank, world_size)
        # Loader processes take their seeds from it; without, those of all workers would draw the same augmentation.
        seeds = torch.Generator().manual_seed(mix_seed(self.plan.seed, epoch, first_step, rank))
        loaded = iter(DataLoader(self._dataset, batch_sampler=shares, **{"generator": seeds, **self._options}))
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


def split_content(content: Any, start: int, end: int, samples: int) -> Any:
    """Take samples ``start`` to ``end`` of a collated batch of ``samples``.

    Tensors are cut along their first dimension; dicts, tuples and lists of those field by field; a list of samples is
    sliced; numbers and the like inside a dict belong to every sample. Raises TypeError for anything else, and for parts
    that do not have ``samples`` samples.
    """
    if isinstance(content, torch.Tensor):
        if content.ndim and content.shape[0] == samples:
            return content[start:end]
    elif isinstance(content, Mapping):
        if _fits(content, samples):
            return _like(
                content,
                {
                    key: value if _is_common(value) else split_content(value, start, end, samples)
                    for key, value in content.items()
                },
            )
    elif isinstance(content, tuple | list):
        if _is_fields(content, samples):
            return _like(content, [split_content(value, start, end, samples) for value in content])
        if len(content) == samples and not hasattr(content, "_fields"):
            return content[start:end]
    raise TypeError(
        f"a batch of type {type(content).__name__} cannot be split into micro-batches of its {samples} samples: let "
        "collate_fn return a tensor, or a dict, tuple or list of tensors, whose first dimension counts samples"
    )


def to_device(content: Any, device: torch.device) -> Any:
    """Move every tensor of a collated batch to a device."""
    if isinstance(content, torch.Tensor):
        return content.to(device, non_blocking=True)
    if isinstance(content, Mapping):
        return _like(content, {key: to_device(value, device) for key, value in content.items()})
    if isinstance(content, tuple | list):
        return _like(content, [to_device(value, device) for value in content])
    return content


def _like(content: Any, parts: Any) -> Any:
    """Put parts into a container of the same type (BatchEncoding, named tuples), or the nearest plain one."""
    if hasattr(content, "_fields"):
        return type(content)(*parts)
    try:
        return type(content)(parts)
    except TypeError:
        return tuple(parts) if isinstance(content, tuple) else parts


def _is_common(value: Any) -> bool:
    """Whether a value inside a dict is no list of samples, but the same for all of them."""
    return value is None or isinstance(value, int | float | str) or (isinstance(value, torch.Tensor) and not value.ndim)


def _is_fields(content: Sequence[Any], samples: int) -> bool:
    """Whether a sequence holds fields that hold samples, not samples: ``[inputs, labels]``, not ``["a", "b"]``."""
    return any(_has_tensor(value) for value in content) and all(
        isinstance(value, torch.Tensor | Mapping | tuple | list) and _fits(value, samples) for value in content
    )


def _has_tensor(content: Any) -> bool:
    if isinstance(content, Mapping):
        return any(_has_tensor(value) for value in content.values())
    if isinstance(content, tuple | list):
        return any(_has_tensor(value) for value in content)
    return isinstance(content, torch.Tensor)


def _fits(content: Any, samples: int) -> bool:
    """Whether a part of a batch has that many samples."""
    if isinstance(content, torch.Tensor):
        return content.ndim > 0 and content.shape[0] == samples
    if isinstance(content, Mapping):
        return all(_is_common(value) or _fits(value, samples) for value in content.values())
    if isinstance(content, tuple | list):
        return _is_fields(content, samples) or len(content) == samples
    return False


def mix_seed(*parts: int) -> int:
    """Mix whole numbers into one 63-bit seed (SplitMix64's finalizer over the parts)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
