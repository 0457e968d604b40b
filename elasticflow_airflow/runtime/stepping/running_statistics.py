"""Buffers that a forward pass changes (BatchNorm's running statistics): one copy per logical worker, then merged.

Every logical worker begins a step with the same statistics, and the results are averaged. In consistent mode they are
averaged in the fixed tree, so that the result does not depend on which process computed what, and a change of any other
buffer is detected and rejected.
May import torch and the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elasticflow_airflow.runtime.checkpoints.tensor_bytes import add_tensor
from elasticflow_airflow.runtime.gang.process_group import WorkerGroup, sum_in_tree
from elasticflow_airflow.runtime.logical_workers import is_power_of_two

_MAX_BUFFER_ELEMENTS = 1 << 20
"""Larger buffers are taken for masks and tables, which no forward pass changes."""


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that need at least two values per channel."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def refuse_single_values(layers: Iterable[nn.Module], message: str) -> None:
    """Make the first forward pass raise ValueError if a sample has a single value per channel in these layers.

    Images have many values per sample: for them a batch of one is sufficient.
    """
    handles: dict[int, RemovableHandle] = {}

    def look(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        handle = handles.pop(id(layer), None)
        if handle is None:
            return  # A copy of the layer, or a pass concurrent with the first.
        handle.remove()
        if layer.training and inputs and inputs[0].shape[2:].numel() == 1:
            raise ValueError(message)

    for layer in layers:
        handles[id(layer)] = layer.register_forward_pre_hook(look)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer, referenced by name, because a forward pass may replace its tensor."""

    name: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor | None:
        """The current tensor, or None."""
        buffers = self.owner._buffers
        return buffers[self.key] if self.key in buffers else None  # noqa: SIM401  (a scripted module's has no get)

    @property
    def is_state(self) -> bool:
        """Whether it is part of checkpoints; otherwise it is a cache that any worker can rebuild."""
        return self.key not in self.owner._non_persistent_buffers_set

    def put_back(self, tensor: Tensor) -> None:
        """Restore this tensor in the module; a cache is left as it is."""
        if self.is_state and self.tensor is not tensor:
            self.owner._buffers[self.key] = tensor


class RunningStatistics:
    """The statistics of one model over one step, merged in the fixed order with ``tree``, else by all-reduce."""

    def __init__(self, model: nn.Module, *, tree: bool) -> None:
        self._tree = tree
        self._buffers = list(_buffers_of(model))
        self._floats: list[tuple[_Buffer, Tensor]] = []
        self._counters: list[tuple[_Buffer, Tensor]] = []
        self._watch = _Watch()
        self._misfit: _Buffer | None = None
        self._start: list[Tensor] = []
        self._counts: list[int] = []
        self._partial: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Record the statistics at the beginning of a step."""
        self._floats, self._counters, watched = [], [], []
        for buffer in self._buffers:
            tensor = buffer.tensor
            if tensor is not None and _is_averaged(tensor):
                self._floats.append((buffer, tensor))
            elif tensor is not None and _is_counter(tensor):
                self._counters.append((buffer, tensor))
            elif buffer.is_state:
                watched.append(buffer)
        self._start = [tensor.clone() for _, tensor in self._floats + self._counters]
        self._partial, self._counts, self._misfit = [], [], None
        if self._tree:
            self._watch.begin(watched)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the statistics of the step's beginning, for the next logical worker or another attempt."""
        for (buffer, tensor), start in zip(self._floats + self._counters, self._start, strict=True):
            buffer.put_back(tensor)
            tensor.copy_(start)

    def begin_again(self) -> None:
        """Discard the logical workers' statistics, to repeat the step from the same start."""
        self.reset()
        self._partial, self._counts = [], []

    @torch.no_grad()
    def leaf_done(self) -> None:
        """Add one logical worker's statistics."""
        if self._counters:
            # One copy from the device, not one per buffer: each makes the host wait.
            counters = [self._now(buffer, tensor).to(torch.int64) for buffer, tensor in self._counters]
            now = [int(count) for count in torch.stack(counters).tolist()]
            self._counts = [max(a, b) for a, b in zip(self._counts or now, now, strict=True)]
        if self._floats:
            floats = [self._now(buffer, tensor) for buffer, tensor in self._floats]
            leaf = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in floats]).cpu()
            height = 0
            while self._partial and self._partial[-1][0] == height:
                leaf = self._partial.pop()[1].add_(leaf)
                height += 1
            self._partial.append((height, leaf))

    def _now(self, buffer: _Buffer, before: Tensor) -> Tensor:
        """Return the current tensor of a merged buffer; record a misfit if its shape or dtype has changed."""
        now = buffer.tensor
        if now is before or not buffer.is_state:
            return before
        if now is None or now.shape != before.shape or now.dtype != before.dtype:
            self._misfit = self._misfit or buffer
            return before
        return now

    @property
    def counts(self) -> list[int]:
        """The counters (of batches) after this process's logical workers."""
        return self._counts

    @torch.no_grad()
    def strayed(self) -> int:
        """Return the number, from 1, of a buffer that this process's logical workers changed but that is not merged.

        The next passes would then depend on which worker computed these. Returns 0 if there is none, and always if the
        order is not fixed, since the result depends on that anyway.
        """
        if not self._tree:
            return 0
        found = self._misfit or self._watch.changed()
        return 0 if found is None else self._buffers.index(found) + 1

    def refusal(self, number: int) -> str:
        """Return the error message for a buffer that has strayed on any worker, with advice how to fix it."""
        buffer = self._buffers[number - 1]
        tensor = buffer.tensor
        what = "" if tensor is None else f" ({tensor.dtype}, {tensor.numel()} elements)"
        return (
            f"buffer {buffer.name}{what} is changed by forward passes, and the result would depend on the number of"
            f" workers: only floating point of a fixed shape, up to {_MAX_BUFFER_ELEMENTS} elements, is averaged over"
            " the logical workers, and only single counters are kept. Change it after the step, alike on every worker;"
            " or make it floating point and small enough; or register it with persistent=False, if it is a cache that"
            " every worker can make anew at any time; or train it as a parameter; or use consistency='fast'"
        )

    @torch.no_grad()
    def merge(self, group: WorkerGroup, logical_workers: int) -> Tensor | None:
        """Average over all logical workers; return the merged statistics for ``install``. Raises GroupBroken."""
        if not self._floats:
            return None
        total = self._partial[-1][1].clone()
        if group.size > 1:
            group.wait(group.submit(lambda pg: self._sum(total, pg, group.rank, group.size)))
        return total / logical_workers

    def _sum(self, total: Tensor, group: Any, rank: int, size: int) -> None:
        if self._tree:
            sum_in_tree(total, torch.empty((total.numel() + 1) // 2, dtype=total.dtype), group, rank, size)
        else:
            group.allreduce([total]).wait()  # any number of workers

    @torch.no_grad()
    def install(self, merged: Tensor | None, counts: list[int]) -> None:
        """Write the merged statistics into the model."""
        if merged is not None:
            offset = 0
            if self._floats:
                merged = merged.to(self._floats[0][1].device)
            for buffer, tensor in self._floats:
                part = merged[offset : offset + tensor.numel()].view_as(tensor)
                buffer.put_back(tensor)
                tensor.copy_(part)
                offset += tensor.numel()
        for (buffer, tensor), count in zip(self._counters, counts, strict=True):
            buffer.put_back(tensor)
            tensor.fill_(count)


class _Watch:
    """Detects changes of buffers that no pass should change, mostly masks and tables, at almost no cost.

    Torch counts most changes of a tensor in its version. To find changes that it does not count (through ``.data``),
    the content is hashed as well, in ever fewer steps: 1, 2, 4, 8, ... of this process.
    """

    def __init__(self) -> None:
        self._known: dict[_Buffer, tuple[Tensor | None, int, bytes]] = {}
        """For each buffer its tensor, that tensor's version counter, and a digest of its content."""
        self._steps = 0

    def begin(self, buffers: list[_Buffer]) -> None:
        """Begin a step, and watch these buffers."""
        self._steps += 1
        self._known = {buffer: self._look(buffer) for buffer in buffers}

    def changed(self) -> _Buffer | None:
        """Return the first buffer whose content has changed since the beginning of the step, or None."""
        for buffer, before in self._known.items():
            now = self._look(buffer)
            if now[2] != before[2]:
                return buffer  # not recorded, so that a repeated call gives the same answer
            self._known[buffer] = now
        return None

    def _look(self, buffer: _Buffer) -> tuple[Tensor | None, int, bytes]:
        tensor = buffer.tensor
        if tensor is None:
            return None, 0, b""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(buffer)
        if known is not None and known[0] is tensor and known[1] == version and not is_power_of_two(self._steps):
            return known
        return tensor, version, _digest(tensor)


def _buffers_of(model: nn.Module) -> Iterator[_Buffer]:
    """Yield all buffers, each once, including those that are still None."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or id(tensor) not in seen:
                seen.add(id(tensor))
                yield _Buffer(f"{path}.{key}" if path else key, module, key)


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and 0 < tensor.numel() <= _MAX_BUFFER_ELEMENTS


def _is_counter(tensor: Tensor) -> bool:
    return tensor.ndim == 0 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _digest(tensor: Tensor) -> bytes:
    digest = hashlib.sha256()
    if tensor.layout is torch.strided and not tensor.is_meta:
        add_tensor(digest, tensor)
    else:  # Its content cannot be hashed this way.
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {id(tensor)} {tensor._version}".encode())
    return digest.digest()
