"""Where checkpoints are kept: a folder, or an fsspec URL (``s3://``, ``gs://``, ``file://``, ``memory://``).

In a folder a checkpoint appears by a rename. Object stores have none: there the manifest is written last, and what has
no manifest does not count. Both hold the same files under the same names. The standard library is all that this module
may import, and fsspec where a URL is given.
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
    """One worker's part of a checkpoint that several write. ``token`` is the same for all of one save, never again.

    All parts must come from equal states, as those of a session in consistent mode are: nothing here finds out whether
    the workers' states are equal.
    """

    rank: int
    size: int
    token: str
    sweeps: bool = False
    """Rank 0 removes what earlier saves left: no worker begins the next one before this one is there or given up."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not self.token.isalnum():
            raise ValueError(f"part {self.rank} of {self.size} with token {self.token!r}: not a part")


class Draft(Protocol):
    """A checkpoint that is being written."""

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of it, to be written from front to back."""
        ...

    def publish(
        self, entries: Mapping[str, FileEntry], *, incarnation: int, metadata: Mapping[str, Any], limit_s: float
    ) -> CandidateInfo | None:
        """Make it count; of a part: hand it in, and for rank 0, wait for the others' and make the whole count.

        None where another worker does that. Raises CheckpointError.
        """
        ...


class Store(Protocol):
    """A place with checkpoints of one training. All names are relative: ``g000003/step-000000000120``."""

    where: str

    def try_writing(self) -> None:
        """Write something where checkpoints will be, and remove it. Raises what the disk or the store says."""
        ...

    def writing(self, generation: int, step: int, part: Part | None) -> AbstractContextManager[Draft]:
        """Begin a checkpoint; what is not published is removed at the end of the context."""
        ...

    def candidates(self) -> list[str]:
        """Names of what counts as a whole checkpoint, oldest first."""
        ...

    def promoted(
        self, warn: Callable[[str], None], known: Promotion | None = None
    ) -> AbstractContextManager[CandidateInfo | None]:
        """Find the one to resume from (see ``manifest.promoted``), verified; ``path`` is where it can be read now.

        Reads that fail are tried again for a while here, and in ``fetch``. Raises CheckpointUnreachable.
        """
        ...

    def fetch(self, name: str) -> AbstractContextManager[CandidateInfo]:
        """Verify one, and have it in a folder while the context lasts. Raises CheckpointError where it is damaged."""
        ...

    def newest_generation(self) -> int | None:
        """Return the highest generation that has left anything here, or None."""
        ...

    def promote(self, info: CandidateInfo) -> None:
        """Make one the one that counts."""
        ...

    def remove_old(self, keep: int) -> list[str]:
        """Remove all but the newest ``keep`` and the promoted one."""
        ...


def is_remote(where: str | Path) -> bool:
    """Whether this is a URL, not a folder."""
    return "://" in str(where)


def not_written(step: int, where: str, error: Exception) -> CheckpointError:
    """Say that a disk or a store does not take a checkpoint."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(
        f"the checkpoint of step {step} could not be written below {where}: {reason}. "
        "Free space there; the checkpoints before stay valid."
    )


class UploadBrokeOff(CheckpointError):  # noqa: N818  (it is named for what happened)
    """A checkpoint could not be written to a store that may take it when it is tried again."""


def broke_off(step: int, where: str, error: Exception) -> UploadBrokeOff:
    """Say that a checkpoint did not get to its store: the network, or the store itself, was away."""
    return UploadBrokeOff(
        f"the checkpoint of step {step} could not be written below {where}, though it was tried again and again: "
        f"{error!r}. Look at the network and at the store; the checkpoints before stay valid."
    )


def is_in_process(where: str | Path) -> bool:
    """Whether other processes cannot see what is stored there."""
    return str(where).startswith("memory://")


class LocalStore:
    """Checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    def try_writing(self) -> None:
        """See Store. The folder itself is not made yet."""
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
    """Writes all of what it is given: an unbuffered file may take less, and a buffered one would copy it all."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while len(view):
            view = view[self._raw.write(view) :]
        return len(data)


def part_name(part: Part, rank: int) -> str:
    """Name of the file in which a worker hands in its part: what it wrote, with digests."""
    return f"part-{rank:05d}-{part.token}.json"


def encode_part(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    """What a worker hands in."""
    return {name: entry.to_json() for name, entry in entries.items()}


def collect_parts(part: Part, read: Callable[[str], bytes | None], limit_s: float) -> dict[str, FileEntry]:
    """Wait until all parts are handed in. Raises CheckpointError naming those that are missing."""
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
