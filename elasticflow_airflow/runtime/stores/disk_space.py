"""Checks whether a disk has room for checkpoints before training starts. May import the standard library only."""

from __future__ import annotations

import shutil
from pathlib import Path

from elasticflow_airflow.runtime.stores.manifest import CheckpointError, list_candidates


def refuse_full_disk(checkpoints: Path, size_bytes: int) -> None:
    """Raise CheckpointError if there is no room for even one checkpoint of this size."""
    free = _free_bytes(checkpoints)
    if free < size_bytes:
        raise CheckpointError(
            f"a checkpoint of this training takes {_said(size_bytes)}, and the disk of {checkpoints} has {_said(free)} "
            f"free. Free {_said(size_bytes - free)} there, or keep checkpoints elsewhere (checkpoint_dir=, "
            "ELASTICFLOW_CHECKPOINT_DIR; under the service, its state folder)"
        )


def lack_of_room(checkpoints: Path, size_bytes: int, keep: int) -> str | None:
    """Return a warning if there is too little room for all kept checkpoints plus the one being written, else None."""
    needed, free = (keep + 1 - len(list_candidates(checkpoints))) * size_bytes, _free_bytes(checkpoints)
    if free >= needed:
        return None
    return (
        f"the newest {keep} checkpoints are kept while the next one is written: that takes {_said(needed)} more, and "
        f"the disk of {checkpoints} has {_said(free)} free. Free {_said(needed - free)} there, or a save will fail"
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _said(size_bytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"
