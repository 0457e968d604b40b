"""Chooses the checkpoint that all workers resume from. May import torch and the standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from elasticflow_airflow.runtime.gang.process_group import WorkerGroup
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError
from elasticflow_airflow.runtime.stores.open_store import open_store


@contextmanager
def agree_on_checkpoint(
    group: WorkerGroup,
    checkpoints: str | Path,
    incarnation: int,
    warn: Callable[[str], None],
    known: Promotion | None = None,
) -> Iterator[CandidateInfo | None]:
    """Find the verified checkpoint to resume from, the same on every worker; yields None to start afresh.

    It can be read at its ``path`` inside the context, whether ``checkpoints`` is a folder or a URL. Rank 0 chooses,
    because a promotion between two workers' reads must not make them start from different steps. ``known`` is the
    checkpoint that the service has promoted. Raises CheckpointError if it is gone, or if another worker finds the
    chosen checkpoint damaged.
    """
    store = open_store(checkpoints)
    with ExitStack() as stack:
        found = None
        if group.rank == 0:
            found = _of_incarnation(stack.enter_context(store.promoted(warn, known)), incarnation, warn)
        chosen = group.exchange_values([found.name, found.digest] if found else None)[0]
        if group.rank != 0 and chosen is not None:
            name, digest = chosen
            found = stack.enter_context(store.fetch(name))
            if found.digest != digest:
                raise CheckpointError(f"checkpoint {found.path} is not the one that rank 0 reads (digest differs)")
        yield found


def _of_incarnation(found: CandidateInfo | None, incarnation: int, warn: Callable[[str], None]) -> CandidateInfo | None:
    if found is not None and found.incarnation != incarnation:
        warn(
            f"checkpoint {found.path} belongs to incarnation {found.incarnation}, this is {incarnation}: "
            "training starts afresh"
        )
        return None
    return found
