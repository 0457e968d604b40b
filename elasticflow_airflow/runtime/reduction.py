"""Sums of gradients over the workers of the moment, in flat buckets. May import torch and the standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
"""By name, as DTensor below: importing those costs every worker most of a second."""


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace each gradient by its sum over all workers, in place.

    A worker with an empty share of the batch takes part with zeros. A parameter that has no gradient on any worker
    keeps none (so that optimizers go on skipping it). Every worker must pass the same parameters in the same order.
    """
    if not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(present)
    used = [p for p, count in zip(parameters, present.tolist(), strict=True) if count]
    for bucket in _buckets(used):
        flat = torch.cat([_gradient(p).reshape(-1) for p in bucket])
        dist.all_reduce(flat)
        offset = 0
        for parameter in bucket:
            size = parameter.numel()
            part = flat[offset : offset + size].view_as(parameter)
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad.copy_(part)
            offset += size


def refuse_unsupported(model: nn.Module) -> None:
    """Raise TypeError for models whose gradients cannot be summed here, or whose state is sharded."""
    for name, module in model.named_modules():
        where = f"the model's {name} ({type(module).__name__})" if name else f"a model of type {type(module).__name__}"
        if type(module).__name__ in _WRAPPERS:
            raise TypeError(
                f"{where} sums gradients by itself: register the model that it wraps, and train that; the session "
                "sums gradients over the workers"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(f"{where} has sparse gradients, which cannot be summed over workers: leave sparse=True out")
    sharded = [name for name, parameter in model.named_parameters() if type(parameter.data).__name__ == "DTensor"]
    if sharded:
        raise TypeError(
            f"parameter {sharded[0]} is sharded (DTensor): the session needs the whole model in each worker"
        )


def refuse_leftovers(parameters: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError when there are gradients from before the step: each worker would add them once more."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and bool(torch.stack([g.any().to(gradients[0].device) for g in gradients]).any()):
        raise RuntimeError(
            "there are gradients already when a step begins: call optimizer.zero_grad() in every step. To accumulate "
            "gradients, make global_batch_size larger instead; the session cuts it into micro-batches"
        )


def broadcast_model(model: nn.Module) -> None:
    """Give every worker the parameters and buffers of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        if bucket and (size + nbytes > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield bucket
