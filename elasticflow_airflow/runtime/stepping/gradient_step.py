"""What turns the logical workers' backward passes into one step: gradients, losses, running statistics, summed alike.

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
"""Presence bits in one float64: exact up to 53."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What one step comes to: of this process before the commit, of all after it."""

    losses: dict[int, float]
    """By logical worker: its part of the mean loss."""
    squares: dict[int, float] = field(default_factory=dict)
    """By logical worker: the squared norm of its gradients, in a step that is measured; else 0, or missing."""
    present: list[bool]
    """By parameter: whether anybody has a gradient for it."""
    counts: list[int]
    """The model's counters (of batches)."""
    statistics: Tensor | None = None
    """The merged running statistics."""
    loss: float = float("nan")


class GradientStep:
    """The sums of a model's steps, over the group of the moment."""

    def __init__(self, registered: Registered, logical_workers: int, *, consistent: bool, alone: bool = False) -> None:
        self.logical_workers = logical_workers
        """In fast mode the number of workers, which the session keeps up to date."""
        self.reducer = GradientReducer(list(registered.model.parameters()), tree=consistent, alone=alone)
        self.statistics = RunningStatistics(registered.model, tree=consistent)
        self.group = WorkerGroup()
        self._scaler: Any = registered.others.get("scaler")
        if self.reducer.parameters:
            # It makes its scale of the first loss, which a worker without samples in the first step does not have.
            self.scale(torch.zeros((), device=self.reducer.parameters[0].device))
        self.noise = NoiseScale()
        """Of the gradients, from the steps that were measured."""
        self.measures = False
        """Whether the steps that begin from now on are measured; the same on all workers, or it is in vain."""
        self._losses: dict[int, Tensor | None] = {}
        self._samples = 0

    def scale(self, loss: Tensor) -> Any:
        """Scale a loss as the registered gradient scaler says, if there is one."""
        return loss if self._scaler is None or not hasattr(self._scaler, "scale") else self._scaler.scale(loss)

    def begin(self, leaves: int, samples: int = 0) -> None:
        """Open a step, or another attempt at it, with this many logical workers of this process.

        ``samples`` is the size of the global batch; without it gradients are not measured.
        """
        self._losses, self._samples = {}, samples
        # Shares that are not equal say nothing: an epoch's last batch.
        equal = self.logical_workers > 1 and samples > 0 and samples % self.logical_workers == 0
        self.reducer.norms.begin(enabled=self.measures and equal)
        self.reducer.begin(self.group, leaves)

    def total(self, measured: Mapping[int, Sequence[float]]) -> list[float]:
        """Sum numbers of the logical workers of this process over all, in a fixed order. Raises GroupBroken."""
        width = max(map(len, measured.values()), default=0)
        table = torch.zeros(self.logical_workers, width, dtype=torch.float64)
        for logical, numbers in measured.items():
            table[logical] = torch.tensor(list(numbers), dtype=torch.float64)
        # Each logical worker has one owner; the others say zero.
        gathered = self.group.exchange(table.reshape(-1)).sum(0).view(self.logical_workers, width)
        return [_tree_sum(column) for column in gathered.T.tolist()]

    def leaf_done(self, logical: int, loss: Tensor | None) -> None:
        """One logical worker has done its backward passes."""
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
        """Give the parameters their gradients, and the model its merged statistics."""
        self.reducer.install(sums.present)
        self.statistics.install(sums.statistics, sums.counts)
        if self.reducer.norms.enabled:
            self._measure(sums)

    def _measure(self, sums: Sums) -> None:
        """Learn from the norms of all leaves and of their sum; a worker that just joined may not have taken its own."""
        squares = [sums.squares.get(logical, 0.0) for logical in range(self.logical_workers)]
        total = self.reducer.norms.total(p.grad for p in self.reducer.parameters)
        scale = float(self._scaler.get_scale()) if hasattr(self._scaler, "get_scale") else 1.0
        if all(0.0 < square < math.inf for square in (*squares, total)) and scale > 0:
            # A leaf is its share's part of the global mean: one of so many equal parts.
            whole = (self.logical_workers / scale) ** 2
            self.noise.add([square * whole for square in squares], total / scale**2, big_batch=self._samples)

    def abandon(self) -> None:
        """Forget an attempt: the model is as at the beginning of the step."""
        self.reducer.abandon()
        self.statistics.begin_again()


def to_row(sums: Sums, flags: list[float], logical_workers: int) -> Tensor:
    """One worker's word at the commit: flags, losses, norms, counters and presence bits, as float64."""
    losses = [sums.losses.get(logical, 0.0) for logical in range(logical_workers)]
    squares = [sums.squares.get(logical, 0.0) for logical in range(logical_workers)]
    bits = [
        float(sum(1 << i for i, here in enumerate(sums.present[start : start + _BITS]) if here))
        for start in range(0, len(sums.present), _BITS)
    ]
    return torch.tensor([*flags, *losses, *squares, *map(float, sums.counts), *bits], dtype=torch.float64)


def from_rows(rows: Tensor, own: Sums, flags: int, logical_workers: int) -> tuple[Sums, list[list[float]]]:
    """What all workers' words come to: the step's sums, and each worker's flags."""
    table: list[list[float]] = rows.tolist()
    # Each logical worker has one owner; the others say zero.
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
    """Add up as the gradients are; their number is a power of two, except in fast mode."""
    while len(leaves) > 1:
        pairs = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = pairs + leaves[2 * len(pairs) :]
    return leaves[0]
