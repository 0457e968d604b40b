"""Which checkpoint all workers resume from. May import torch and the standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from elasticflow_airflow.runtime.manifest import CandidateInfo, CheckpointError, promoted, verify_candidate


def agree_on_checkpoint(checkpoints: Path, incarnation: int, warn: Callable[[str], None]) -> CandidateInfo | None:
    """Return the verified checkpoint to resume from, the same on every worker; None: start afresh.

    Rank 0 chooses: a promotion between two workers' looks must not make them start from different steps. Raises
    CheckpointError where another worker finds the chosen one damaged.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or dist.get_rank() == 0:
        found = _of_incarnation(checkpoints, incarnation, warn)
        if not alone:
            chosen = (str(found.path.relative_to(checkpoints)), found.digest) if found else None
            dist.broadcast_object_list([chosen], src=0, device=torch.device("cpu"))
        return found
    received: list[tuple[str, str] | None] = [None]
    dist.broadcast_object_list(received, src=0, device=torch.device("cpu"))
    if received[0] is None:
        return None
    path, digest = received[0]
    found = verify_candidate(checkpoints / path)
    if found.digest != digest:
        raise CheckpointError(f"checkpoint {found.path} is not the one that rank 0 reads (digest differs)")
    return found


def _of_incarnation(checkpoints: Path, incarnation: int, warn: Callable[[str], None]) -> CandidateInfo | None:
    found = promoted(checkpoints, warn)
    if found is not None and found.incarnation != incarnation:
        warn(
            f"checkpoint {found.path} belongs to incarnation {found.incarnation}, this is {incarnation}: "
            "training starts afresh"
        )
        return None
    return found
