"""One optimizer step: this worker's share in micro-batches, gradients averaged over the global batch.

The result does not depend on how many workers share the batch, up to the rounding of sums: each sample weighs
1 / (samples of the global batch), in the short last batch of an epoch, too.
May import torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticflow_airflow.runtime.data import Batch, split_content, to_device
from elasticflow_airflow.runtime.reduction import refuse_leftovers, sum_gradients


class StepOwner(Protocol):
    """What a step needs of its session."""

    device: torch.device

    def step_failed(self, error: BaseException, micro_batch_size: int) -> None:
        """An exception ended the step."""
        ...

    def step_done(self, loss: float) -> float:
        """Gradients are reduced and applied; returns the loss over all workers."""
        ...


class Step:
    """Context manager of one step. Use :meth:`split` once and :meth:`backward` for every micro-batch it yields."""

    def __init__(
        self, owner: StepOwner, model: nn.Module, micro_batch_size: int | None, seed: int, position: tuple[int, int]
    ) -> None:
        self._owner, self._model, self._position = owner, model, position
        self._micro_batch_size, self._seed = micro_batch_size, seed
        self._weight: float | None = None
        self._weighted_loss = torch.zeros((), dtype=torch.float64)
        self._reduced = False
        self.loss = float("nan")
        """Mean loss over the global batch, on every worker; known after the step."""

    def __enter__(self) -> Step:
        torch.manual_seed(self._seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._owner.step_failed(error, self._micro_batch_size or 1)
            return
        if not self._reduced:
            raise RuntimeError("a step must iterate over step.split(batch) to its end")
        self.loss = self._owner.step_done(float(self._weighted_loss))

    def split(self, batch: Batch) -> Iterator[Any]:
        """Yield this worker's micro-batches on its device; after the last one gradients are summed over all workers.

        Yields nothing where the share is empty. Raises RuntimeError when a micro-batch had no ``backward``,
        and when gradients of the step before are still there.
        """
        if self._reduced:
            raise RuntimeError("step.split() may be used once in a step")
        if not isinstance(batch, Batch):
            raise TypeError(f"step.split() takes what session.dataloader() yields, not {type(batch).__name__}")
        if (batch.epoch, batch.step_in_epoch) != self._position:
            raise RuntimeError(
                f"batch {batch.step_in_epoch} of epoch {batch.epoch} came to the step for batch {self._position[1]} of "
                f"epoch {self._position[0]}: every batch of the loader needs exactly one session.step(), in order"
            )
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        refuse_leftovers(parameters)
        size = self._micro_batch_size = min(self._micro_batch_size or batch.samples or 1, max(1, batch.samples))
        for start in range(0, batch.samples, size):
            end = min(start + size, batch.samples)
            self._weight = (end - start) / batch.global_samples
            whole = end - start == batch.samples
            content = batch.content if whole else split_content(batch.content, start, end, batch.samples)
            yield to_device(content, self._owner.device)
            if self._weight is not None:
                raise RuntimeError("a micro-batch went by without step.backward(loss)")
        if dist.is_initialized() and dist.get_world_size() > 1:
            sum_gradients(parameters)
        self._reduced = True

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradients. ``loss`` is the mean over the samples of the micro-batch."""
        if self._weight is None:
            raise RuntimeError("step.backward() is for once per micro-batch of step.split()")
        (loss * self._weight).backward()  # type: ignore[no-untyped-call]  # torch's own
        self._weighted_loss += loss.detach().double().cpu() * self._weight
        self._weight = None
