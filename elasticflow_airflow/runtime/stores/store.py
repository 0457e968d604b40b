"""Stores for checkpoints: a folder, or an fsspec URL (``s3://``, ``gs://``, ``file://``, ``memory://``).

In a folder a checkpoint appears by a rename. Object stores have no rename: there the manifest is written last, and a
checkpoint without a manifest is ignored. Both hold the same files under the same names. May import the standard
library only, plus fsspec for a URL.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from elasticflow_airflow.runtime.protocol import Promotion, candidate_name, write_json_atomic
from elasticflow_airflow.runtime.stores import manifest
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError, FileEntry

PART_LIMIT_S = 600.0
"""How long rank 0 waits for the other workers' parts of a checkpoint."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One worker's part of a checkpoint that several write. ``token`` is shared by all parts of a save, never reused.

    All parts must come from equal states, as in a session in consistent mode: this module does not check whether the
    workers' states are equal.
    """

    rank: int
    size: int
    token: str
    sweeps: bool = False
    """Rank 0 removes leftovers of earlier saves: no worker starts a save before this one is complete or abandoned."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not self.token.isalnum():
            raise ValueError(f"part {self.rank} of {self.size} with token {self.token!r}: not a part")


class Draft(Protocol):
    """A checkpoint in the process of being written."""

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of the checkpoint, to be written from front to back."""
        ...

    def publish(
        self, entries: Mapping[str, FileEntry], *, incarnation: int, metadata: Mapping[str, Any], limit_s: float
    ) -> CandidateInfo | None:
        """Publish the checkpoint; for a part, submit it, and on rank 0 wait for all parts and publish the whole.

        Returns None if another worker publishes it. Raises CheckpointError.
        """
        ...


class Store(Protocol):
    """A store for the checkpoints of one training. All names are relative: ``g000003/step-000000000120``."""

    where: str

    def try_writing(self) -> None:
        """Write a test file where checkpoints will be stored, and remove it. Raises the error of the disk or store."""
        ...

    def writing(self, generation: int, step: int, part: Part | None) -> AbstractContextManager[Draft]:
        """Begin a checkpoint; unpublished files are removed at the end of the context."""
        ...

    def candidates(self) -> list[str]:
        """Return the names of all complete checkpoints, oldest first."""
        ...

    def promoted(
        self, warn: Callable[[str], None], known: Promotion | None = None
    ) -> AbstractContextManager[CandidateInfo | None]:
        """Find the checkpoint to resume from (see ``manifest.promoted``), verified and readable at its ``path``.

        Failed reads are retried for a while, here and in ``fetch``. Raises CheckpointUnreachable.
        """
        ...

    def fetch(self, name: str) -> AbstractContextManager[CandidateInfo]:
        """Verify a checkpoint and yield it in a folder, within the context. Raises CheckpointError if it is damaged."""
        ...

    def newest_generation(self) -> int | None:
        """Return the highest generation with anything stored here, or None."""
        ...

    def promote(self, info: CandidateInfo) -> None:
        """Make a checkpoint the promoted one."""
        ...

    def remove_old(self, keep: int) -> list[str]:
        """Remove all but the newest ``keep`` checkpoints and the promoted one; returns the removed names."""
        ...


def is_remote(where: str | Path) -> bool:
    """Return whether this is a URL, not a folder."""
    return "://" in str(where)


def not_written(step: int, where: str, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint that could not be written to a disk or store."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(
        f"the checkpoint of step {step} could not be written below {where}: {reason}. "
        "Free space there; the checkpoints before stay valid."
    )


class UploadBrokeOff(CheckpointError):  # noqa: N818  (named after what happened)
    """A checkpoint could not be written to a store, but a retry may succeed."""


def broke_off(step: int, where: str, error: Exception) -> UploadBrokeOff:
    """Return the error for a checkpoint that did not reach its store because the network or the store was down."""
    return UploadBrokeOff(
        f"the checkpoint of step {step} could not be written below {where}, though it was tried again and again: "
        f"{error!r}. Look at the network and at the store; the checkpoints before stay valid."
    )


def is_in_process(where: str | Path) -> bool:
    """Return whether other processes cannot see what is stored there."""
    return str(where).startswith("memory://")


class LocalStore:
    """Checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    def try_writing(self) -> None:
        """See Store. The folder itself is not created yet."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        tempfile.TemporaryFile(dir=there).close()

    @contextmanager
    def writing(self, generation: int, step: int, part: Part | None) -> Iterator[Draft]:
        """See Store."""
        if part is None:
            with manifest.writing(self.folder, generation, step) as temporary:
                yield _LocalDraft(self.folder, temporary, generation, step, None)
            return
        temporary = (self.folder / candidate_name(generation, step)).with_name(
            f"{manifest.TEMPORARY_PREFIX}{part.token}"
        )
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            if part.rank == 0 and part.sweeps:
                manifest.remove_leftovers(self.folder, generation, but=temporary)
        except OSError as error:
            raise not_written(step, self.where, error) from error
        draft = _LocalDraft(self.folder, temporary, generation, step, part)
        try:
            yield draft
        finally:
            if part.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def candidates(self) -> list[str]:
        """See Store."""
        return [str(path.relative_to(self.folder)) for path in manifest.list_candidates(self.folder)]

    @contextmanager
    def promoted(self, warn: Callable[[str], None], known: Promotion | None = None) -> Iterator[CandidateInfo | None]:
        """See Store."""
        yield manifest.promoted(self.folder, warn, known)

    @contextmanager
    def fetch(self, name: str) -> Iterator[CandidateInfo]:
        """See Store."""
        yield manifest.verify_patiently(self.folder / name)

    def newest_generation(self) -> int | None:
        """See Store."""
        return manifest.newest_generation(self.folder)

    def promote(self, info: CandidateInfo) -> None:
        """See Store."""
        manifest.promote(self.folder, info)

    def remove_old(self, keep: int) -> list[str]:
        """See Store."""
        return [str(path.relative_to(self.folder)) for path in manifest.remove_old(self.folder, keep)]


class _LocalDraft:
    def __init__(self, checkpoints: Path, folder: Path, generation: int, step: int, part: Part | None) -> None:
        self._checkpoints, self._folder, self._part = checkpoints, folder, part
        self._generation, self._step = generation, step

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        try:
            with (self._folder / name).open("xb", buffering=0) as raw:
                yield cast(BinaryIO, _Whole(raw))
                os.fsync(raw.fileno())
        except OSError as error:
            raise not_written(self._step, str(self._checkpoints), error) from error

    def publish(
        self, entries: Mapping[str, FileEntry], *, incarnation: int, metadata: Mapping[str, Any], limit_s: float
    ) -> CandidateInfo | None:
        if self._part is not None:
            try:
                write_json_atomic(self._folder / part_name(self._part, self._part.rank), encode_part(entries))
            except OSError as error:
                raise not_written(self._step, str(self._checkpoints), error) from error
            if self._part.rank != 0:
                return None
            entries = collect_parts(self._part, self._read_part, limit_s)
            for rank in range(self._part.size):
                (self._folder / part_name(self._part, rank)).unlink()
        return manifest.publish(
            self._folder,
            self._checkpoints,
            incarnation=incarnation,
            generation=self._generation,
            step=self._step,
            metadata=metadata,
            entries=entries,
        )

    def _read_part(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None


class _Whole:
    """Writes all data of each call: an unbuffered file may write less, and a buffered file would copy everything."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while len(view):
            view = view[self._raw.write(view) :]
        return len(data)


def part_name(part: Part, rank: int) -> str:
    """Return the name of the file with which a worker submits its part: the files it wrote, with digests."""
    return f"part-{rank:05d}-{part.token}.json"


def encode_part(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Return the JSON value with which a worker submits its part."""
    return {name: entry.to_json() for name, entry in entries.items()}


def collect_parts(part: Part, read: Callable[[str], bytes | None], limit_s: float) -> dict[str, FileEntry]:
    """Wait until all parts are submitted. Raises CheckpointError naming the missing ones."""
    until_s = time.monotonic() + limit_s
    missing = set(range(part.size))
    entries: dict[str, FileEntry] = {}
    while True:
        for rank in sorted(missing):
            raw = read(part_name(part, rank))
            if raw is not None:
                entries |= {name: FileEntry(**value) for name, value in json.loads(raw).items()}
                missing.discard(rank)
        if not missing:
            return entries
        if time.monotonic() > until_s:
            ranks = ", ".join(map(str, sorted(missing)))
            raise CheckpointError(
                f"the checkpoint's parts of rank {ranks} (of {part.size} workers) did not come within {limit_s:g} s; "
                "the checkpoints before stay valid"
            )
        time.sleep(_POLL_S)
