"""Which checkpoint all workers resume from. May import torch and the standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elasticflow_airflow.runtime.group import WorkerGroup
from elasticflow_airflow.runtime.manifest import CandidateInfo, CheckpointError, promoted, verify_candidate


def agree_on_checkpoint(
    group: WorkerGroup, checkpoints: Path, incarnation: int, warn: Callable[[str], None]
) -> CandidateInfo | None:
    """Return the verified checkpoint to resume from, the same on every worker; None: start afresh.

    Rank 0 chooses: a promotion between two workers' looks must not make them start from different steps. Raises
    CheckpointError where another worker finds the chosen one damaged.
    """
    found = _of_incarnation(checkpoints, incarnation, warn) if group.rank == 0 else None
    chosen = [str(found.path.relative_to(checkpoints)), found.digest] if found else None
    chosen = group.exchange_values(chosen)[0]
    if group.rank == 0 or chosen is None:
        return found
    path, digest = chosen
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
