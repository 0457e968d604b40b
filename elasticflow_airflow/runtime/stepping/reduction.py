"""Sums of gradients: over the logical workers of this process, then over all processes, in one fixed binary tree.

Each logical worker's gradients are a leaf; the sum does not depend on which process computes it (EasyScale, SC 2022,
section 3.3). The sums over processes run bucket by bucket, each as soon as the last backward pass has filled it.
May import torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elasticflow_airflow.runtime.gang.process_group import WorkerGroup, sum_in_tree
from elasticflow_airflow.runtime.stepping.measuring import GradientNorms

BUCKET_BYTES = 25 << 20
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
"""Classes checked by name, like DTensor below: importing them would take every worker most of a second."""

Gradients = list[Tensor | None]


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are communicated together, and the flat buffer for them."""

    parameters: list[nn.Parameter]
    flat: Tensor
    scratch: Tensor
    filled: int = 0
    ready: bool = False
    pending: Future[Any] | None = None
    stream_event: Any = None

    @property
    def views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of the flat buffer."""
        offset = 0
        for parameter in self.parameters:
            yield parameter, _laid_out_as(parameter, self.flat[offset : offset + parameter.numel()])
            offset += parameter.numel()


@dataclass(slots=True)
class _Pass:
    """State of the sums of one attempt at a step."""

    group: WorkerGroup
    leaves: int
    done: int = 0
    subtrees: list[tuple[int, Gradients]] = field(default_factory=list)
    """Finished subtrees of this process: (height, gradients), as in a binary counter."""
    launched: int = 0


class GradientReducer:
    """Sums the gradients of a model's logical workers: with ``tree`` in the fixed order, otherwise by all-reduce.

    ``alone`` means that there is one process and there will never be others. Otherwise gradients that several processes
    could not sum are rejected with a single process, too: in the first step, not when other workers join.

    The calls of one step are ``begin``; for each logical worker of this process its backward passes and ``leaf_done``,
    with ``last_backward`` before the very last backward pass; then ``finish``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, tree: bool, alone: bool = False) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.norms = GradientNorms()
        """Norms of this process's leaves, in a measured step."""
        self._tree, self._alone = tree, alone
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._index = {p: i for i, p in enumerate(self.parameters)}
        self._pass: _Pass | None = None
        self._armed = False
        self._arrived: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        self._stream: Any = None

    def begin(self, group: WorkerGroup, leaves: int) -> None:
        """Begin the sums of a step; this process has ``leaves`` logical workers, a power of two, or none."""
        for parameter in self.parameters:
            parameter.grad = None
        self._pass = _Pass(group, leaves)
        self._armed = False
        self._arrived.clear()
        if group.size > 1 and not self._buckets:
            self._make_buckets()
        for bucket in self._buckets:
            bucket.filled, bucket.ready, bucket.pending = 0, False, None
        if not self._alone and not self._hooks:
            hook: Any = self._arrive
            self._hooks = [_hook(p, hook) for p in self.parameters]

    def last_backward(self) -> None:
        """Announce this process's last backward pass of the step: each bucket is then sent as soon as it is full."""
        self._armed = not self._alone

    def leaf_done(self) -> None:
        """Add the gradients in ``.grad`` as one logical worker's leaf, after all of its backward passes."""
        now = self._now
        now.done += 1
        # Nothing has been added to this leaf yet; the last leaf stays unchanged until ``install``.
        self.norms.leaf(p.grad for p in self.parameters)
        if now.done == now.leaves and now.group.size > 1:
            return  # the last leaf is merged bucket by bucket
        gradients: Gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        height = 0
        while now.subtrees and now.subtrees[-1][0] == height:
            _, left = now.subtrees.pop()
            gradients = [_add(a, b) for a, b in zip(left, gradients, strict=True)]
            height += 1
        now.subtrees.append((height, gradients))
        if now.done == now.leaves:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    @property
    def present(self) -> list[bool]:
        """For each parameter, whether some logical worker of this process has a gradient for it."""
        now = self._now
        found = [p.grad is not None for p in self.parameters]
        for _, gradients in now.subtrees:
            found = [a or g is not None for a, g in zip(found, gradients, strict=True)]
        return found

    def finish(self) -> None:
        """Sum over all processes; the gradients are in the flat buffers until ``install``. Raises GroupBroken."""
        self._armed = False
        if self._now.group.size == 1:
            return
        for bucket in self._buckets:
            bucket.ready = True
        self._launch()
        for bucket in self._buckets:
            assert bucket.pending is not None  # just launched
            self._now.group.wait(bucket.pending)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def install(self, present: Sequence[bool]) -> None:
        """Set the parameters' gradients to the sums, or to None if no logical worker has a gradient."""
        if self._now.group.size > 1:
            for bucket in self._buckets:
                for parameter, view in bucket.views:
                    parameter.grad = view if present[self._index[parameter]] else None
        self._pass = None

    def abandon(self) -> None:
        """Discard a step that will be repeated; buffers that an abandoned operation may still write to are dropped."""
        # Also drop the stream: an operation that waits for a dead worker blocks all that is queued after it.
        self._buckets, self._bucket_of, self._stream = [], {}, None
        self._pass, self._armed = None, False
        for parameter in self.parameters:
            parameter.grad = None

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> _Pass:
        if self._pass is None:
            raise RuntimeError("a gradient came outside of a step")
        return self._pass

    def _make_buckets(self) -> None:
        # Backward passes run from the last layer to the first.
        for parameters in _buckets(list(reversed(self.parameters))):
            size = sum(p.numel() for p in parameters)
            first = parameters[0]
            flat = torch.zeros(size, dtype=first.dtype, device=first.device)
            scratch = torch.zeros((size + 1) // 2, dtype=first.dtype, device=first.device)
            bucket = _Bucket(parameters, flat, scratch)
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(parameters, bucket))
        if self.parameters and self.parameters[0].device.type == "cuda":
            self._stream = torch.cuda.Stream(self.parameters[0].device)  # type: ignore[no-untyped-call]  # torch's own

    def _arrive(self, parameter: nn.Parameter) -> None:
        """Handle an accumulated gradient; it is complete only in the last backward pass."""
        if not self._armed:
            return
        if parameter in self._arrived:
            raise RuntimeError(
                "a parameter got gradients twice in one backward pass, as layers do that are used several times under"
                " reentrant activation checkpointing: sums over workers would begin too early. Use"
                " checkpoint(..., use_reentrant=False)"
            )
        self._arrived.add(parameter)
        if self._now.group.size == 1:
            return
        bucket = self._bucket_of[parameter]
        bucket.filled += 1
        if bucket.filled == len(bucket.parameters):
            bucket.ready = True
            self._launch()

    def _launch(self) -> None:
        """Send the ready buckets, in their fixed order: all processes must queue the same operations."""
        now = self._now
        while now.launched < len(self._buckets) and self._buckets[now.launched].ready:
            bucket = self._buckets[now.launched]
            for parameter, view in bucket.views:
                self._merge(parameter, view)
            if self._stream is not None:
                bucket.stream_event = torch.cuda.current_stream().record_event()
            bucket.pending = now.group.submit(partial(self._sum, bucket))
            now.launched += 1

    def _merge(self, parameter: nn.Parameter, into: Tensor) -> None:
        """Complete this process's tree for one parameter: add the last leaf to the subtrees before it."""
        now, index = self._now, self._index[parameter]
        gradient = parameter.grad
        if now.leaves == 0 or (gradient is None and not now.subtrees):
            into.zero_()
            return
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        for _, left in reversed(now.subtrees):
            gradient = _add(left[index], gradient)
            assert gradient is not None  # a sum of something
        into.copy_(gradient)

    def _sum(self, bucket: _Bucket, group: Any) -> None:
        rank, size, stream = self._now.group.rank, self._now.group.size, self._stream
        if stream is None:
            self._sum_now(group, bucket, rank, size)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(bucket.stream_event)
            self._sum_now(group, bucket, rank, size)

    def _sum_now(self, group: Any, bucket: _Bucket, rank: int, size: int) -> None:
        if self._tree:
            sum_in_tree(bucket.flat, bucket.scratch, group, rank, size)
        else:
            group.allreduce([bucket.flat]).wait()


def _laid_out_as(parameter: Tensor, part: Tensor) -> Tensor:
    """View a flat buffer in autograd's layout of the parameter's gradients, for example channels last.

    Sums over a gradient, as for clipping, depend on its layout, and must be the same with one worker as with many.
    """
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return part.view_as(parameter)  # Contiguous; or with gaps, which its gradients do not have.
    return part.as_strided(parameter.shape, parameter.stride())


def _hook(parameter: nn.Parameter, hook: Any) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add two gradients, in place where possible; None counts as zeros, and the sum of two Nones is None."""
    if left is None and right is None:
        return None
    if left is None or right is None:
        found = right if left is None else left
        assert found is not None  # one of them is there
        return found.add_(0.0)  # same as adding zeros: -0.0 becomes 0.0, here as between processes
    return left.add_(right)


def refuse_optimizer(name: str, optimizer: object) -> None:
    """Raise TypeError for an optimizer that does not take one step per summed gradients, or is no optimizer.

    ``name`` is the name under which it is registered.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "torch.optim.LBFGS computes the loss several times in a step, each time on one worker's part of the batch:"
            " use an optimizer that takes one step of the gradients, such as AdamW or SGD"
        )
    if isinstance(optimizer, list | tuple | dict) and not hasattr(optimizer, "state_dict"):
        raise TypeError(
            f"{name}= is a {type(optimizer).__name__}: register each by a name of its own, as in"
            " register(model, optimizer=first, second_optimizer=second); parameters of one optimizer may have settings"
            " of their own (torch.optim, per-parameter options)"
        )


def refuse_unsupported(model: nn.Module, *, consistent: bool) -> None:
    """Raise TypeError for models whose gradients cannot be summed here, or whose state is sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model= is a {type(model).__name__}: register one nn.Module; several are one as nn.ModuleList([...]) or"
            " nn.ModuleDict({...})"
        )
    for name, module in model.named_modules():
        where = f"the model's {name} ({type(module).__name__})" if name else f"a model of type {type(module).__name__}"
        if type(module).__name__ in _WRAPPERS:
            raise TypeError(
                f"{where} sums gradients by itself: register the model that it wraps, and train that; the session "
                "sums gradients over the workers"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(f"{where} has sparse gradients, which cannot be summed over workers: leave sparse=True out")
        if consistent and isinstance(module, nn.SyncBatchNorm):
            raise TypeError(
                f"{where} takes statistics over all workers, whose number changes: use BatchNorm, whose statistics "
                "the session keeps per logical worker and merges in a fixed order"
            )
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise TypeError(f"parameter {lazy[0]} has no shape yet: run one batch through the model before registering it")
    sharded = [name for name, parameter in model.named_parameters() if type(parameter.data).__name__ == "DTensor"]
    if sharded:
        raise TypeError(
            f"parameter {sharded[0]} is sharded (DTensor): the session needs the whole model in each worker"
        )


def refuse_leftovers(parameters: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError if there are gradients from before the step: each worker would add them again."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and bool(torch.stack([g.any().to(gradients[0].device) for g in gradients]).any()):
        raise RuntimeError(
            "there are gradients already when a step begins: call optimizer.zero_grad() in every step. To accumulate "
            "gradients, make global_batch_size larger instead; the session cuts it into micro-batches"
        )


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


def broadcast_model(model: nn.Module, group: WorkerGroup) -> None:
    """Give every worker the parameters and buffers of rank 0. Raises GroupBroken."""
    if group.size == 1:
        return
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.numel()]

    def send(process_group: Any) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            options = dist.BroadcastOptions()
            options.rootRank = 0
            process_group.broadcast([whole], options).wait()
            if whole is not tensor:
                tensor.copy_(whole)

    with torch.no_grad():
        group.wait(group.submit(send))
