"""Checks before training that a training set can be distributed exactly: map-style, or a stream that can resume.

A stream is tested: its second sample must be repeated after its state is saved and loaded. This module knows the names
of inexact parts of Hugging Face's ``datasets``, but does not import it. May import torch and the standard library only.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from elasticflow_airflow.runtime.checkpoints.state_tree import flatten
from elasticflow_airflow.runtime.checkpoints.tensor_bytes import add_tensor
from elasticflow_airflow.runtime.samples.fetching import Collate
from elasticflow_airflow.runtime.samples.sample_order import seeded
from elasticflow_airflow.runtime.samples.streams import StreamReader

_INNER = ("_ex_iterable", "ex_iterable", "ex_iterables", "dataset", "datasets", "source")
OTHER_ORDERS = (
    "the workers read the stream in different orders: its first samples are not the same on all of them, so some would "
    "be trained on twice and others never. Give what shuffles it a seed, the same everywhere, and the list of files "
    "an order (sorted())"
)
_LONGEST_SEED = 1 << 64
"""Bound on a seed chosen by the user: without one numpy draws 128 bits."""


def is_stream(dataset: Any) -> bool:
    """Return whether a training set can only be read sequentially. Raises TypeError for a mapping of datasets."""
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"session.dataloader() got a {type(dataset).__name__} of {', '.join(map(str, list(dataset)[:3]))}: give it "
            "one of them"
        )
    if isinstance(dataset, IterableDataset):
        return True
    return not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def refuse_stream_options(transform: Any, samples: int | None) -> None:
    """Raise ValueError for options of streams that are given with a map-style dataset."""
    if transform is not None:
        raise ValueError("transform= is for a stream: a map-style dataset does that in its __getitem__")
    if samples is not None:
        raise ValueError("samples= is for a stream: a map-style dataset has a length")


def stream_reader(
    stream: Any,
    *,
    samples: int | None,
    collate_fn: Collate | None,
    transform: Callable[[Any], Any] | None,
    shuffle: bool | None,
    num_workers: int,
) -> tuple[StreamReader, int]:
    """Check a stream, and return its reader and a fingerprint of its first two samples.

    The second sample is read twice for the check. Workers with different fingerprints read the stream in different
    orders, for example because of a shuffle without a seed.

    Raises TypeError or ValueError, with advice, if an epoch could not be distributed exactly once.
    """
    name = type(stream).__name__
    missing = [f"{method}()" for method in ("__iter__", "state_dict", "load_state_dict") if not _has(stream, method)]
    if missing:
        raise TypeError(
            f"session.dataloader() needs a map-style dataset, with __len__ and __getitem__; {name} has no length or no "
            f"index, and as a stream it lacks {', '.join(missing)}: nobody could say which of its samples were used. "
            "Give it those, so that it resumes where it was (Hugging Face datasets: IterableDataset.from_generator), "
            "or give a map-style dataset"
        )
    if samples is None and hasattr(stream, "__len__"):
        samples = len(stream)
    if samples is None:
        raise ValueError(
            f"{name} has no length: give session.dataloader() samples=, the number of samples in one epoch, or a "
            "map-style dataset"
        )
    if samples < 1:
        raise ValueError(f"samples={samples}: an epoch must have at least one")
    if shuffle:
        raise ValueError(
            f"shuffle=True: {name} can only be read in its own order. Leave it out and shuffle what the stream reads: "
            "the order of its shards or files, by epoch, in set_epoch(); or give a map-style dataset"
        )
    if num_workers > 1:
        raise ValueError(
            f"num_workers={num_workers}: a stream is read in its order by one process at a time. Give num_workers=1, "
            "and what is expensive as transform=, which is done to a worker's own samples only; or a map-style dataset"
        )
    _refuse_inexact(stream)
    _rewind(stream)
    initial = copy.deepcopy(stream.state_dict())
    reader = StreamReader(stream, samples, initial, collate_fn or default_collate, transform)
    return reader, _try(reader, name)


def _has(stream: Any, method: str) -> bool:
    return callable(getattr(stream, method, None))


def _refuse_inexact(stream: Any) -> None:
    """Raise ValueError for features of ``datasets`` whose state is not saved exactly."""
    for part in _parts(stream):
        size = getattr(part, "buffer_size", None)
        if type(part).__name__.startswith("BufferShuffled") and isinstance(size, int) and size > 1:
            raise ValueError(
                f"a shuffle buffer (buffer_size={size}): the samples that wait in it are in no state, and would be "
                "lost at each stop and change. Shuffle the order of shards instead: .shuffle(seed=..., buffer_size=1), "
                "with many shards; or use a map-style dataset"
            )
        entropy = getattr(
            getattr(getattr(getattr(part, "generator", None), "bit_generator", None), "seed_seq", None), "entropy", None
        )
        if isinstance(entropy, int) and entropy >= _LONGEST_SEED:
            raise ValueError(
                f"{type(part).__name__} was given no seed: each worker, and each start, would read another order. Give "
                "shuffle() and interleave_datasets() a seed="
            )
        if getattr(part, "_distributed", None) is not None:
            raise ValueError(
                "the stream was split by split_dataset_by_node(): the session deals samples out to workers, which come "
                "and go; give it the whole stream"
            )


def _rewind(stream: Any) -> None:
    """Reset a Hugging Face stream to its beginning: its state is where it was last read."""
    prepare = getattr(stream, "_prepare_ex_iterable_for_iteration", None)
    if prepare is not None:
        stream.load_state_dict(None)
        prepare()


def _parts(stream: Any) -> Iterator[Any]:
    """Yield a stream and all its sources, each once."""
    todo, seen = [stream], set[int]()
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, str | bytes | torch.Tensor):
            continue
        seen.add(id(part))
        yield part
        for name in _INNER:
            inner = getattr(part, "__dict__", {}).get(name)
            todo += inner if isinstance(inner, list | tuple) else [] if inner is None else [inner]


def _try(reader: StreamReader, name: str) -> int:
    """Read the first two samples and, from the state between them, the second again; return their fingerprint."""
    stream = reader.stream
    with seeded(1):
        coming = reader.open(0, None)
        again = None
        try:
            first = next(coming)
        except StopIteration:
            raise ValueError(
                f"{name} yields nothing: it is empty, or was read to its end before session.dataloader() got it"
            ) from None
        state = copy.deepcopy(stream.state_dict())
        try:
            flatten(state)
        except TypeError as error:
            raise TypeError(f"{name}.state_dict() cannot be kept in a checkpoint: {error}") from error
        if reader.samples > 1:
            again = _second(lambda: next(coming, None))
            resumed = _second(lambda: next(reader.open(0, state), None))
            if not alike(again, resumed):
                raise ValueError(
                    f"{name} does not go on where it was: after its state was saved and loaded, another sample came. "
                    "Its state must tell where the next sample is (a shuffle buffer's does not); random numbers belong "
                    "into transform=, which has a seed of its own; or use a map-style dataset"
                )
        return fingerprint([first, again])


def _second(read: Callable[[], Any]) -> Any:
    with seeded(2):
        return read()


def fingerprint(value: Any) -> int:
    """Return a 52-bit digest of a sample, the same in every process; parts without a comparable value are ignored."""
    digest = hashlib.blake2b(digest_size=8)

    def add(part: Any) -> None:
        digest.update(type(part).__name__.encode() + b":")
        if isinstance(part, torch.Tensor):
            add_tensor(digest, part)
        elif isinstance(part, Mapping):
            for key in part:
                add(key)
                add(part[key])
        elif isinstance(part, list | tuple):
            for one in part:
                add(one)
        elif hasattr(part, "tobytes") and not getattr(getattr(part, "dtype", None), "hasobject", False):
            digest.update(part.tobytes())
        elif hasattr(part, "tolist"):  # An array of objects, whose bytes are addresses.
            add(part.tolist())
        elif isinstance(part, str | bytes | int | float | complex):
            digest.update(repr(part).encode())

    add(value)
    return int.from_bytes(digest.digest()) >> 12


def alike(one: Any, other: Any) -> bool:
    """Return whether two samples are equal; parts without a comparable value count as equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # or both NaN
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if hasattr(one, "tobytes"):  # numpy arrays, images
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, str | bytes | int | float | complex):
        return one == other or (one != one and other != other)  # or both NaN
    return True
