"""One optimizer step: runs the logical workers of this process in turn, and averages gradients over the global batch.

Each logical worker has its own share of the batch, random seeds and running statistics, and its gradients are a leaf of
one fixed tree. The result does not depend on which process computes a leaf, nor on the number of processes (EasyScale,
SC 2022). Each sample has weight 1 / (samples of the global batch), also in the short last batch of an epoch.
May import torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from elasticflow_airflow.runtime.gang.process_group import GroupBroken
from elasticflow_airflow.runtime.samples.sample_order import Batch, Share, mix_seed, seed_host, split_content, to_device
from elasticflow_airflow.runtime.stepping.gradient_step import GradientStep, Sums
from elasticflow_airflow.runtime.stepping.reduction import refuse_leftovers


class StepOwner(Protocol):
    """The interface that a step requires of its session."""

    device: torch.device

    def phase(self, name: str) -> None:
        """Record what this worker is doing."""
        ...

    def batch_of_step(self, batch: Batch) -> Batch:
        """Return this worker's current part of the step's global batch. Raises RuntimeError if it is out of order."""
        ...

    def commit(self, sums: Sums) -> Sums:
        """Tell all workers that the gradients are summed; return the sums over all workers. Raises GroupBroken."""
        ...

    def recover(self, error: GroupBroken, sums: Sums | None) -> Sums | None:
        """Form a new group without the dead workers. Return the step's sums if it counts, None to redo it."""
        ...

    def step_failed(self, error: BaseException, micro_batch_size: int) -> None:
        """Report an exception that ended the step."""
        ...

    def step_done(self, loss: float) -> None:
        """Count the step, whose gradients have been applied."""
        ...


class Step:
    """Context manager of one step. Call :meth:`split` once and :meth:`backward` for every micro-batch it yields."""

    def __init__(
        self, owner: StepOwner, gradient_step: GradientStep, micro_batch_size: int | None, seed: int, fewest: int = 1
    ) -> None:
        self._fewest = fewest
        self._owner, self._gradient_step, self._seed = owner, gradient_step, seed
        self._micro_batch_size, self._tried_size = micro_batch_size, 1
        self._weight: float | None = None
        self._leaf_loss: Tensor | None = None
        self._last = self._split = self._reduced = False
        self.loss = float("nan")
        """Mean loss over the global batch, the same on every worker; known once ``split`` is exhausted."""
        self.batch: Batch | None = None
        """The batch that this step trains, known from the first micro-batch on. If this worker has just joined, or its
        group has lost a worker, it may be another part, or another batch, than the one passed to ``split``."""
        self.totals: list[float] = []
        """Sums of ``measure`` over the global batch, known from the first micro-batch on."""

    def __enter__(self) -> Step:
        seed_everything(mix_seed(self._seed, 0x57E9))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._owner.step_failed(error, self._tried_size)
            return
        if not self._reduced:
            raise RuntimeError("a step must iterate over step.split(batch) to its end")
        self._owner.step_done(self.loss)

    def split(self, batch: Batch, measure: Callable[[Any], Sequence[float]] | None = None) -> Iterator[Any]:
        """Yield this worker's micro-batches on its device; after the last one gradients are summed over all workers.

        ``measure`` returns numbers for a collated share, for example its tokens; for None, an empty share, it must
        return as many zeros. Their sums over the global batch are ``totals``, known before the first micro-batch.

        If a worker dies meanwhile, the others divide the step again, and more micro-batches follow. Yields nothing for
        an empty share. Raises RuntimeError if a micro-batch had no ``backward``, or if gradients of the previous step
        are still present.
        """
        if self._split:
            raise RuntimeError("step.split() may be used once in a step")
        self._split = True
        if not isinstance(batch, Batch):
            raise TypeError(f"step.split() takes what session.dataloader() yields, not {type(batch).__name__}")
        gradient_step = self._gradient_step
        refuse_leftovers(gradient_step.reducer.parameters)
        gradient_step.statistics.begin()
        outcome: Sums | None = None
        while outcome is None:
            self.batch = batch = self._owner.batch_of_step(batch)
            sums: Sums | None = None
            gradient_step.begin(len(batch.shares), batch.global_samples)
            if measure is not None:
                try:
                    measured = {share.ticket.logical: measure(share.content) for share in batch.shares}
                    self.totals = gradient_step.total(measured)
                except GroupBroken as error:
                    self._owner.recover(error, None)
                    gradient_step.abandon()
                    continue
            yield from self._shares(batch)
            self._owner.phase("reduce")
            try:
                sums = gradient_step.sum()
                outcome = self._owner.commit(sums)
            except GroupBroken as error:
                outcome = self._owner.recover(error, sums)
                if outcome is None:
                    gradient_step.abandon()
        gradient_step.install(outcome)
        self.loss = outcome.loss
        # From here on random draws of the script are the same on every worker, whatever their number.
        seed_everything(mix_seed(self._seed, 0xAF7E))
        self._reduced = True

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Add a micro-batch's gradients. ``loss`` is the mean over the samples of the micro-batch.

        ``weight`` is the weight of the loss in the global mean; the default is the micro-batch's fraction of the
        samples. Use 1.0 for a loss that is already divided by a total of the global batch.

        A registered gradient scaler is applied here; do not call ``scaler.scale``.
        """
        if self._weight is None:
            raise RuntimeError(
                "step.backward() is for once per micro-batch of step.split(): add several losses up, and go backward"
                " through their sum"
            )
        weighted = loss * (self._weight if weight is None else weight)
        if self._last:
            self._gradient_step.reducer.last_backward()
        self._gradient_step.scale(weighted).backward()
        part = weighted.detach().double()
        self._leaf_loss = part if self._leaf_loss is None else self._leaf_loss + part
        self._weight = None

    def _shares(self, batch: Batch) -> Iterator[Any]:
        """Run the logical workers of this process one after the other."""
        for number, share in enumerate(batch.shares):
            if number:
                self._gradient_step.statistics.reset()
            self._leaf_loss = None
            yield from self._micro_batches(share, batch.global_samples, last=number == len(batch.shares) - 1)
            self._gradient_step.leaf_done(share.ticket.logical, self._leaf_loss)

    def _micro_batches(self, share: Share, global_samples: int, *, last: bool) -> Iterator[Any]:
        samples = share.samples
        size = self._tried_size = min(self._micro_batch_size or samples or 1, max(1, samples))
        for start, end in micro_batches(samples, size, self._fewest):
            self._weight = (end - start) / global_samples
            self._last = last and end == samples
            whole = end - start == samples
            content = share.content if whole else split_content(share.content, start, end, samples)
            seed_everything(mix_seed(self._seed, share.ticket.logical, start))
            yield to_device(content, self._owner.device)
            if self._weight is not None:
                raise RuntimeError("a micro-batch went by without step.backward(loss)")


def micro_batches(samples: int, size: int, fewest: int = 1) -> list[tuple[int, int]]:
    """Return (start, end) of each micro-batch of a share, with at most ``size`` samples each.

    Each has at least ``fewest`` samples, if the share has that many. If a smaller rest would remain, the share is
    divided evenly instead; one part may then exceed ``size`` (an odd number in twos makes one part of three).
    """
    parts = -(-samples // size)
    if size < fewest or not 0 < samples % size < fewest or parts < 2:
        return [(start, min(start + size, samples)) for start in range(0, samples, size)]
    parts = min(parts, samples // fewest)
    return [(part * samples // parts, (part + 1) * samples // parts) for part in range(parts)]


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), Python, and numpy if it is imported."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        torch.cuda.manual_seed_all(seed)
    elif torch.accelerator.is_available():
        # The device is not initialised yet, so torch stores the seed for later, together with the call stack. That
        # takes longer than a small network's forward pass, so it is skipped if there is no device.
        torch.manual_seed(seed)
    seed_host(seed)
