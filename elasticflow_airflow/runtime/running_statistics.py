"""Buffers that a forward pass changes (BatchNorm's running statistics): one copy per logical worker, then merged.

Every logical worker begins a step with the same statistics; what each makes of them is averaged in the fixed tree, so
the result does not depend on who computed what. May import torch and the standard library only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elasticflow_airflow.runtime.group import WorkerGroup, sum_in_tree

_MAX_BUFFER_ELEMENTS = 1 << 20
"""Larger buffers are masks and tables, which no forward pass changes."""


class RunningStatistics:
    """The statistics of one model over one step."""

    def __init__(self, model: nn.Module) -> None:
        found = [b for b in model.buffers() if 0 < b.numel() <= _MAX_BUFFER_ELEMENTS]
        self._floats = [b for b in found if b.is_floating_point()]
        self._counters = [b for b in found if not b.is_floating_point() and b.dtype != torch.bool and b.ndim == 0]
        self._start: list[Tensor] = []
        self._start_counts: list[Tensor] = []
        self._counts: list[int] = []
        self._partial: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Remember what a step begins with."""
        self._partial = []
        self._start = [b.clone() for b in self._floats]
        self._start_counts = [b.clone() for b in self._counters]
        self._counts = []

    @torch.no_grad()
    def reset(self) -> None:
        """Give the model back what the step began with: for the next logical worker, or for another attempt."""
        for buffer, start in zip(self._floats + self._counters, self._start + self._start_counts, strict=True):
            buffer.copy_(start)

    def begin_again(self) -> None:
        """Forget what logical workers made of the statistics: the step is tried again from the same start."""
        self.reset()
        self._partial, self._counts = [], []

    @torch.no_grad()
    def leaf_done(self) -> None:
        """Take one logical worker's statistics in."""
        if self._counters:
            # One copy from a device, not one a buffer: each makes the host wait.
            now = [int(count) for count in torch.stack([b.to(torch.int64) for b in self._counters]).tolist()]
            self._counts = [max(a, b) for a, b in zip(self._counts or now, now, strict=True)]
        if self._floats:
            leaf = torch.cat([b.reshape(-1).to(torch.float64) for b in self._floats]).cpu()
            height = 0
            while self._partial and self._partial[-1][0] == height:
                leaf = self._partial.pop()[1].add_(leaf)
                height += 1
            self._partial.append((height, leaf))

    @property
    def counts(self) -> list[int]:
        """The counters (of batches) as this process's logical workers left them."""
        return self._counts

    @torch.no_grad()
    def merge(self, group: WorkerGroup, logical_workers: int) -> Tensor | None:
        """Average over all logical workers; the merged statistics, for ``install``. Raises GroupBroken."""
        if not self._floats:
            return None
        total = self._partial[-1][1].clone()
        if group.size > 1:
            scratch = torch.empty((total.numel() + 1) // 2, dtype=total.dtype)
            group.wait(group.submit(lambda pg: sum_in_tree(total, scratch, pg, group.rank, group.size)))
        return total / logical_workers

    @torch.no_grad()
    def install(self, merged: Tensor | None, counts: list[int]) -> None:
        """Make the merged statistics the model's."""
        if merged is not None:
            offset = 0
            if self._floats:
                merged = merged.to(self._floats[0].device)
            for buffer in self._floats:
                part = merged[offset : offset + buffer.numel()].view_as(buffer)
                buffer.copy_(part)
                offset += buffer.numel()
        for buffer, count in zip(self._counters, counts, strict=True):
            buffer.fill_(count)
