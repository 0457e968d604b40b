"""The samples of each step: a pure function of (seed, epoch, step), independent of which worker computes it.

Every sample of an epoch is used exactly once, whatever the number of workers and however often it changes: the global
batch of a step is fixed, and the current workers divide it. The last batch of an epoch is short, or dropped on request;
nothing is padded or repeated. May import torch and the standard library only.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elasticflow_airflow.runtime.samples.length_groups import SampleLengths, length_grouped_order


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a dataset of ``samples`` is divided into steps of ``global_batch_size``.

    With ``drop_last`` the samples of the short last batch are not used in that epoch. With ``lengths`` samples of
    similar length come into the same batch.
    """

    samples: int
    global_batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool = False
    lengths: SampleLengths | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("the dataset is empty: there is nothing to train on")
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size}: it must be at least 1")
        if not self.steps_per_epoch:
            raise ValueError(
                f"drop_last=True leaves no batch: the dataset has {self.samples} samples, fewer than "
                f"global_batch_size={self.global_batch_size}. Choose a smaller batch, or leave drop_last out"
            )
        if self.lengths is not None and not self.shuffle:
            raise ValueError(
                "lengths= makes batches of shuffled samples: shuffle, or leave lengths= out to keep the dataset's order"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch; the last may be short."""
        return steps_per_epoch(self.samples, self.global_batch_size, drop_last=self.drop_last)

    @property
    def smallest_batch(self) -> int:
        """Number of samples in an epoch's last batch; the others have ``global_batch_size``."""
        return min(self.global_batch_size, self.samples - (self.steps_per_epoch - 1) * self.global_batch_size)

    @property
    def metadata(self) -> dict[str, Any]:
        """The plan as stored in checkpoints, in JSON types; of the lengths only a digest."""
        return {
            "samples": self.samples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "lengths": None if self.lengths is None else f"sha256:{self.lengths.digest:012x}",
        }

    def changes_since(self, metadata: Mapping[str, Any]) -> str:
        """Describe how this plan differs from a checkpoint's metadata; empty if steps have the same samples."""
        before = {**_UNSAID, **metadata} if metadata else {}
        return ", ".join(
            f"{name} was {before[name]}, is {value}"
            for name, value in self.metadata.items()
            if before.get(name, value) != value
        )

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of samples in an epoch, a permutation that depends only on seed, epoch and lengths."""
        if not self.shuffle:
            return range(self.samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        if self.lengths is not None:
            return length_grouped_order(self.lengths.values, self.global_batch_size, generator)
        order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return order

    def global_batch(self, order: Sequence[int], step_in_epoch: int) -> Sequence[int]:
        """Return the samples of one step, over all workers."""
        start = step_in_epoch * self.global_batch_size
        return order[start : start + self.global_batch_size]


_UNSAID: Mapping[str, Any] = {"drop_last": False, "lengths": None}
"""Values for metadata that older checkpoints do not contain."""


def steps_per_epoch(samples: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Return the number of steps in one epoch; without ``drop_last`` the last may be short."""
    return samples // global_batch_size if drop_last else -(-samples // global_batch_size)


def share(batch: Sequence[int], rank: int, world_size: int, fewest: int = 1) -> Sequence[int]:
    """Return a worker's contiguous part of a global batch; parts differ by one sample at most and may be empty.

    A nonempty part has at least ``fewest`` samples, if the batch has that many; more parts are then empty.
    """
    parts = min(world_size, max(1, len(batch) // fewest)) if fewest > 1 else world_size
    part, after = rank * parts // world_size, (rank + 1) * parts // world_size
    return batch[part * len(batch) // parts : after * len(batch) // parts]


@dataclass(frozen=True, slots=True)
class Ticket:
    """One logical worker's share of one step: the unit of fetching. It completely determines the content to fetch.

    ``indices`` are its samples, in order. ``seed`` is set before the fetch, so that random augmentation does not depend
    on which process fetches it, or when.
    """

    epoch: int
    step_in_epoch: int
    logical: int
    indices: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Share:
    """A ticket and its fetched content: the collate function's result, or None if there are no samples."""

    ticket: Ticket
    content: Any

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.ticket.indices)


@dataclass(frozen=True, slots=True)
class Batch:
    """A worker's part of one global batch: the shares of its logical workers, in order."""

    shares: tuple[Share, ...]
    global_samples: int
    epoch: int
    step_in_epoch: int

    @property
    def samples(self) -> int:
        """Number of this worker's samples."""
        return sum(share.samples for share in self.shares)

    @property
    def indices(self) -> tuple[int, ...]:
        """Dataset indices of this worker's samples."""
        return tuple(index for share in self.shares for index in share.ticket.indices)

    @property
    def content(self) -> Any:
        """The fetched content if this worker has a single share, else a list with the content of each."""
        return self.shares[0].content if len(self.shares) == 1 else [share.content for share in self.shares]


class Fetcher(Protocol):
    """Fetches the content of tickets, ahead of time if possible."""

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Announce the tickets that will be requested from now on, in order. This replaces earlier announcements."""
        ...

    def get(self, tickets: Sequence[Ticket]) -> list[Any]:
        """Return the collated contents of any tickets of one step, expected or not."""
        ...

    def close(self) -> None:
        """Release processes and held batches."""
        ...


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch on the CPU, Python, and numpy if it is imported; restore their random state afterwards."""
    with random_state_kept():
        seed_host(seed)
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state of torch on the CPU, Python, and numpy if it is imported, afterwards."""
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def seed_host(seed: int) -> None:
    """Seed torch on the CPU, Python, and numpy if it is imported."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


_OWN_OPTIONS = frozenset({"batch_size", "sampler", "batch_sampler", "in_order", "generator"})
"""Options of ``DataLoader`` that would contradict the plan."""


_MOST_IDLE_PASSES = 10_000
"""Tolerated empty passes of a script whose own loop has more epochs than were submitted."""


class ElasticLoader:
    """Iterates over this worker's part of each remaining batch of the current epoch.

    ``position`` returns the session's (epoch, step in the epoch); it is called at the beginning of each pass. ``owned``
    returns this worker's logical workers; it is called before each batch, and so is ``finished``. A rescale in the
    middle of an epoch therefore changes the next batch; no sample is read twice, since the order is computed, not
    replayed. ``fewest`` returns the least number of samples of a share (2 if single ones cannot be trained on), if the
    batch has that many. The length is the number of steps in one epoch.
    """

    def __init__(
        self,
        plan: BatchPlan,
        fetcher: Fetcher,
        *,
        logical_workers: Callable[[], int],
        position: Callable[[], tuple[int, int]],
        owned: Callable[[], range],
        finished: Callable[[], bool] = lambda: False,
        fewest: Callable[[], int] = lambda: 1,
    ) -> None:
        self.plan = plan
        self._fewest = fewest
        self._logical_workers = logical_workers
        self._fetcher = fetcher
        self._position, self._owned, self._finished = position, owned, finished
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._jumped = False
        self._expected: tuple[int, int, range, int] | None = None
        self._idle_passes = 0

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, step = self._position()
        self._jumped = False
        self._refuse_spinning()
        while not self._finished():
            if self._jumped:
                self._jumped = False
                now, step = self._position()
                if now != epoch:
                    return
            if step >= self.plan.steps_per_epoch:
                return
            yield self.batch(epoch, step)
            step += 1

    def _refuse_spinning(self) -> None:
        """Raise RuntimeError if the script keeps iterating over a loader that has no more batches."""
        self._idle_passes = self._idle_passes + 1 if self._finished() else 0
        if self._idle_passes > _MOST_IDLE_PASSES:
            raise RuntimeError(
                f"the script has gone {_MOST_IDLE_PASSES} times through its loader since the training was done, and"
                " would for ever: all steps that were submitted, or that it gave itself, are made. Loop over"
                " session.epochs(), or until session.steps_done is session.total_steps"
            )

    def jump(self) -> None:
        """Continue from the session's position, which no longer follows from this loader's passes."""
        self._jumped = True
        self._expected = None

    def batch(self, epoch: int, step_in_epoch: int) -> Batch:
        """Fetch this worker's part of any step's batch, under the current ownership."""
        owned, logical_workers = self._owned(), self._logical_workers()
        if self._expected != (epoch, step_in_epoch, owned, logical_workers):
            self._fetcher.expect(self._upcoming(epoch, step_in_epoch, owned))
        self._expected = (epoch, step_in_epoch + 1, owned, logical_workers)
        tickets = self._tickets(epoch, step_in_epoch, owned)
        contents = iter(self._fetcher.get([ticket for ticket in tickets if ticket.indices]))
        shares = tuple(Share(ticket, next(contents) if ticket.indices else None) for ticket in tickets)
        size = len(self.plan.global_batch(self._order[1], step_in_epoch))
        return Batch(shares=shares, global_samples=size, epoch=epoch, step_in_epoch=step_in_epoch)

    def _upcoming(self, epoch: int, step_in_epoch: int, owned: range) -> Iterator[Ticket]:
        """Yield all tickets from a step to the end of its epoch, under the current ownership."""
        for step in range(step_in_epoch, self.plan.steps_per_epoch):
            yield from (ticket for ticket in self._tickets(epoch, step, owned) if ticket.indices)

    def _tickets(self, epoch: int, step: int, owned: range) -> list[Ticket]:
        if self._order[0] != epoch:
            self._order = (epoch, self.plan.order(epoch))
        batch, logical_workers = self.plan.global_batch(self._order[1], step), self._logical_workers()
        fewest = self._fewest()
        return [
            Ticket(
                epoch=epoch,
                step_in_epoch=step,
                logical=logical,
                indices=tuple(share(batch, logical, logical_workers, fewest)),
                seed=mix_seed(self.plan.seed, 0xDA7A, epoch, step, logical),
            )
            for logical in owned
        ]

    def close(self) -> None:
        """Close the fetcher."""
        self._fetcher.close()


def refuse_own_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a DataLoader that would contradict the plan."""
    refused = sorted(options.keys() & _OWN_OPTIONS)
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: the session decides which samples make a batch; leave it out, and give "
            "global_batch_size= and shuffle= to session.dataloader(); with lengths=, samples of similar length come in "
            "the same batch"
        )


def split_content(content: Any, start: int, end: int, samples: int) -> Any:
    """Return samples ``start`` to ``end`` of a collated batch of ``samples`` samples.

    Tensors are sliced along their first dimension; dicts, tuples and lists of tensors are sliced field by field; a list
    of samples is sliced; scalars and strings inside a dict belong to every sample. Raises TypeError for anything else,
    and for parts that do not have ``samples`` samples.
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
    """Put parts into a container of the same type (BatchEncoding, named tuples), or the closest plain type."""
    if hasattr(content, "_fields"):
        return type(content)(*parts)
    try:
        return type(content)(parts)
    except TypeError:
        return tuple(parts) if isinstance(content, tuple) else parts


def _is_common(value: Any) -> bool:
    """Return whether a value inside a dict is shared by all samples rather than a list of them."""
    return value is None or isinstance(value, int | float | str) or (isinstance(value, torch.Tensor) and not value.ndim)


def _is_fields(content: Sequence[Any], samples: int) -> bool:
    """Return whether a sequence holds fields, as in ``[inputs, labels]``, and not samples, as in ``["a", "b"]``."""
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
    """Return whether a part of a batch has that many samples."""
    if isinstance(content, torch.Tensor):
        return content.ndim > 0 and content.shape[0] == samples
    if isinstance(content, Mapping):
        return all(_is_common(value) or _fits(value, samples) for value in content.values())
    if isinstance(content, tuple | list):
        return _is_fields(content, samples) or len(content) == samples
    return False


def mix_seed(*parts: int) -> int:
    """Mix integers into one 63-bit seed (SplitMix64's finalizer over the parts)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
