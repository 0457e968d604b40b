"""A process group for workers with GPUs: NCCL for tensors on the device, gloo for the small ones on the host.

May import torch and the standard library only; imported only where there is a GPU.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not marked so by torch
    PrefixStore,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)


class CudaGroup:
    """The operations that :mod:`group` uses, each on the backend of its tensors."""

    def __init__(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> None:
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        self._nccl: Any = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)

    def _for(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.device.type == "cuda" else self._gloo

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """Send one tensor."""
        return self._for(tensors[0]).send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Receive one tensor."""
        return self._for(tensors[0]).recv(tensors, source, tag)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Sum over all ranks, in the backend's own order."""
        return self._for(tensors[0]).allreduce(tensors)

    def allgather(self, rows: list[list[Tensor]], row: list[Tensor]) -> Any:
        """Gather a row from every rank."""
        return self._for(row[0]).allgather(rows, row)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        """Send from one rank to all."""
        return self._for(tensors[0]).broadcast(tensors, options)

    def _start_coalescing(self, device: Any) -> None:
        self._nccl._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:
        return self._nccl._end_coalescing(device)
