"""The workers of the moment, as one process group. May import torch and the standard library only."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 600.0


class WorkerGroup:
    """Who this worker is among how many. Joined when it is made, from what torchrun put into the environment."""

    def __init__(self, device: torch.device) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._last = (0, 1)

    @property
    def rank(self) -> int:
        """Rank now; after the end, the last one: a script that saves from ``is_main`` does it once, not everywhere."""
        return dist.get_rank() if dist.is_initialized() else self._last[0]

    @property
    def size(self) -> int:
        """Number of workers now; after the end, the last one."""
        return dist.get_world_size() if dist.is_initialized() else self._last[1]

    def sum(self, numbers: list[float]) -> list[float]:
        """Add up a few numbers over all workers; everybody gets the sums."""
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    def wait_for_all(self) -> None:
        """Return when every worker has come here."""
        self.sum([0.0])

    def disband(self) -> None:
        """Leave the group; rank and size stay what they were."""
        if dist.is_initialized():
            self._last = (self.rank, self.size)
            dist.destroy_process_group()
