"""Combines the logical workers' backward passes into one step: sums of gradients, losses and running statistics.

May import torch and the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.gang.process_group import WorkerGroup
from elasticflow_airflow.runtime.stepping.measuring import NoiseScale
from elasticflow_airflow.runtime.stepping.reduction import GradientReducer
from elasticflow_airflow.runtime.stepping.running_statistics import RunningStatistics

_BITS = 48
"""Number of presence bits stored in one float64, which is exact up to 53 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums of one step: of this process before the commit, of all processes after it."""

    losses: dict[int, float]
    """Each logical worker's part of the mean loss."""
    squares: dict[int, float] = field(default_factory=dict)
    """The squared norm of each logical worker's gradients in a measured step; otherwise 0 or missing."""
    present: list[bool]
    """For each parameter, whether any logical worker has a gradient for it."""
    counts: list[int]
    """The model's counters (of batches)."""
    statistics: Tensor | None = None
    """The merged running statistics."""
    loss: float = float("nan")


class GradientStep:
    """Sums a model's gradients, losses and statistics step by step over the current group."""

    def __init__(self, registered: Registered, logical_workers: int, *, consistent: bool, alone: bool = False) -> None:
        self.logical_workers = logical_workers
        """Number of logical workers; in fast mode the number of workers, which the session keeps up to date."""
        self.reducer = GradientReducer(list(registered.model.parameters()), tree=consistent, alone=alone)
        self.statistics = RunningStatistics(registered.model, tree=consistent)
        self.group = WorkerGroup()
        self._scaler: Any = registered.others.get("scaler")
        if self.reducer.parameters:
            # The scaler initialises its scale at the first loss, which a worker without samples would not have.
            self.scale(torch.zeros((), device=self.reducer.parameters[0].device))
        self.noise = NoiseScale()
        """Noise scale of the gradients, from the measured steps."""
        self.measures = False
        """Whether the following steps are measured; this has an effect only if it is the same on all workers."""
        self._losses: dict[int, Tensor | None] = {}
        self._samples = 0

    def scale(self, loss: Tensor) -> Any:
        """Scale a loss with the registered gradient scaler, if there is one."""
        return loss if self._scaler is None or not hasattr(self._scaler, "scale") else self._scaler.scale(loss)

    def begin(self, leaves: int, samples: int = 0) -> None:
        """Begin a step, or another attempt at it; ``leaves`` is the number of this process's logical workers.

        ``samples`` is the size of the global batch; without it gradients are not measured.
        """
        self._losses, self._samples = {}, samples
        # Unequal shares, as in an epoch's last batch, cannot be used for the noise scale.
        equal = self.logical_workers > 1 and samples > 0 and samples % self.logical_workers == 0
        self.reducer.norms.begin(enabled=self.measures and equal)
        self.reducer.begin(self.group, leaves)

    def total(self, measured: Mapping[int, Sequence[float]]) -> list[float]:
        """Sum the logical workers' numbers over all processes, in a fixed order. Raises GroupBroken."""
        width = max(map(len, measured.values()), default=0)
        table = torch.zeros(self.logical_workers, width, dtype=torch.float64)
        for logical, numbers in measured.items():
            table[logical] = torch.tensor(list(numbers), dtype=torch.float64)
        # Each logical worker has one owner; the others send zeros.
        gathered = self.group.exchange(table.reshape(-1)).sum(0).view(self.logical_workers, width)
        return [_tree_sum(column) for column in gathered.T.tolist()]

    def leaf_done(self, logical: int, loss: Tensor | None) -> None:
        """Record one logical worker, whose backward passes are done."""
        self._losses[logical] = loss
        self.reducer.leaf_done()
        self.statistics.leaf_done()

    def sum(self) -> Sums:
        """Sum gradients and statistics over all processes. Raises GroupBroken."""
        present = self.reducer.present
        self.reducer.finish()
        return Sums(
            losses={logical: 0.0 if loss is None else float(loss) for logical, loss in self._losses.items()},
            squares=dict(zip(self._losses, self.reducer.norms.leaves(), strict=False)),
            present=present,
            counts=self.statistics.counts,
            statistics=self.statistics.merge(self.group, self.logical_workers),
        )

    def install(self, sums: Sums) -> None:
        """Set the parameters' gradients and the model's merged statistics."""
        self.reducer.install(sums.present)
        self.statistics.install(sums.statistics, sums.counts)
        if self.reducer.norms.enabled:
            self._measure(sums)

    def _measure(self, sums: Sums) -> None:
        """Update the noise scale from the norms of all leaves and of their sum.

        The step is skipped if a norm is missing, since a worker that has just joined may not have measured its own.
        """
        squares = [sums.squares.get(logical, 0.0) for logical in range(self.logical_workers)]
        total = self.reducer.norms.total(p.grad for p in self.reducer.parameters)
        scale = float(self._scaler.get_scale()) if hasattr(self._scaler, "get_scale") else 1.0
        if all(0.0 < square < math.inf for square in (*squares, total)) and scale > 0:
            # A leaf is its share's part of the global mean: multiplied by their number it is the share's own mean.
            whole = (self.logical_workers / scale) ** 2
            self.noise.add([square * whole for square in squares], total / scale**2, big_batch=self._samples)

    def abandon(self) -> None:
        """Discard an attempt: the model is reset to the beginning of the step."""
        self.reducer.abandon()
        self.statistics.begin_again()


def to_row(sums: Sums, flags: list[float], logical_workers: int) -> Tensor:
    """Encode one worker's message at the commit as float64: flags, losses, norms, counters and presence bits."""
    losses = [sums.losses.get(logical, 0.0) for logical in range(logical_workers)]
    squares = [sums.squares.get(logical, 0.0) for logical in range(logical_workers)]
    bits = [
        float(sum(1 << i for i, here in enumerate(sums.present[start : start + _BITS]) if here))
        for start in range(0, len(sums.present), _BITS)
    ]
    return torch.tensor([*flags, *losses, *squares, *map(float, sums.counts), *bits], dtype=torch.float64)


def from_rows(rows: Tensor, own: Sums, flags: int, logical_workers: int) -> tuple[Sums, list[list[float]]]:
    """Decode and combine all workers' messages; return the step's sums and each worker's flags."""
    table: list[list[float]] = rows.tolist()
    # Each logical worker has one owner; the others send zeros.
    leaves = [sum(row[flags + i] for row in table) for i in range(logical_workers)]
    first = flags + logical_workers
    squares = [sum(row[first + i] for row in table) for i in range(logical_workers)]
    first += logical_workers
    counts = [int(max(row[first + i] for row in table)) for i in range(len(own.counts))]
    first += len(own.counts)
    words = [0] * (len(table[0]) - first)
    for row in table:
        words = [word | int(value) for word, value in zip(words, row[first:], strict=True)]
    present = [bool(words[i // _BITS] >> (i % _BITS) & 1) for i in range(len(own.present))]
    sums = replace(
        own,
        losses=dict(enumerate(leaves)),
        squares=dict(enumerate(squares)),
        present=present,
        counts=counts,
        loss=_tree_sum(leaves),
    )
    return sums, [row[:flags] for row in table]


def _tree_sum(leaves: list[float]) -> float:
    """Add numbers in the same tree as the gradients; their count is a power of two, except in fast mode."""
    while len(leaves) > 1:
        pairs = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = pairs + leaves[2 * len(pairs) :]
    return leaves[0]
