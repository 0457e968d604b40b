"""Batches of samples of similar length, which need little padding; they depend on lengths, seed and epoch only.

May import torch and the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elasticflow_airflow.runtime.checkpoints.tensor_bytes import add_tensor

_MOST_BATCHES_SORTED = 50
"""Most batches that are sorted by length together: with more, batches would hardly be random."""
_FEWEST_GROUPS = 4
_DIGEST_BYTES = 6
"""Size of the digest; workers exchange it as a float64, which is exact for more bits."""

OTHER_LENGTHS = (
    "the workers were given different lengths=, and would make different batches of the dataset: compute them of the "
    "samples alone, the same on every worker (nothing random, no order of a set or of a folder)"
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampleLengths:
    """Length of each sample of a dataset. ``values`` has shape (samples,) and type int64, on the CPU."""

    values: Tensor
    digest: int
    """Digest that is practically unique to these lengths."""

    @classmethod
    def of(cls, lengths: Iterable[int] | Tensor, samples: int) -> SampleLengths:
        """Convert a script's ``lengths`` for a dataset of ``samples`` samples.

        Raises TypeError if they are not integers, ValueError for a wrong number of them or negative ones.
        """
        found: Any = lengths if isinstance(lengths, Tensor) or hasattr(lengths, "__array__") else list(lengths)
        try:
            tensor = torch.as_tensor(found).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"lengths= must be whole numbers, one for each sample of the dataset: {error}") from error
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"lengths= must be whole numbers, one for each sample of the dataset, not {tensor.dtype}")
        if tensor.shape != (samples,):
            raise ValueError(
                f"lengths= has the shape {tuple(tensor.shape)}, and the dataset {samples} samples: give one number for "
                "each sample, in their order"
            )
        if samples and int(tensor.min()) < 0:
            raise ValueError(f"lengths= has {int(tensor.min())}: a length is 0 or more")
        values = tensor.to(torch.int64)
        digest = hashlib.sha256()
        add_tensor(digest, values)
        return cls(values, int.from_bytes(digest.digest()[:_DIGEST_BYTES], "big"))


def length_grouped_order(lengths: Tensor, global_batch_size: int, generator: torch.Generator) -> list[int]:
    """Return an order of all samples in which each global batch has samples of similar length, the longest first.

    As in Hugging Face's ``group_by_length``, samples are shuffled, and sorted within groups of many batches. Here the
    batches are then shuffled, too, except that the one with the longest sample comes first, so that insufficient memory
    shows in the first step. Randomly chosen samples that do not fill a batch stay at the end.
    """
    shuffled = torch.randperm(len(lengths), generator=generator)
    count = len(lengths) // global_batch_size
    full, rest = shuffled[: count * global_batch_size], shuffled[count * global_batch_size :]
    if count:
        each = max(1, min(_MOST_BATCHES_SORTED, count // _FEWEST_GROUPS))
        size = each * global_batch_size
        groups = [_longest_first(full[start : start + size], lengths) for start in range(0, len(full), size)]
        batches = torch.cat(groups).view(count, global_batch_size)
        batches = batches[torch.randperm(count, generator=generator)]
        longest = int(lengths[batches[:, 0]].argmax())
        if longest:
            batches[[0, longest]] = batches[[longest, 0]]
        full = batches.reshape(-1)
    order: list[int] = torch.cat([full, _longest_first(rest, lengths)]).tolist()
    return order


def _longest_first(samples: Tensor, lengths: Tensor) -> Tensor:
    return samples[lengths[samples].argsort(descending=True, stable=True)]
