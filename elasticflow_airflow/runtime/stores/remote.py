"""Checkpoints in an object store or any other fsspec URL; checkpoints without a manifest are ignored.

Interrupted uploads leave objects without a manifest (or, for multipart uploads, nothing visible); they are removed
once a newer checkpoint is promoted. May import the standard library and fsspec only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from elasticflow_airflow.runtime.protocol import Promotion, candidate_name
from elasticflow_airflow.runtime.stores import manifest
from elasticflow_airflow.runtime.stores.manifest import (
    MANIFEST,
    CandidateInfo,
    CheckpointError,
    CheckpointUnreachable,
    FileEntry,
    unreachable,
)
from elasticflow_airflow.runtime.stores.retrying import retried
from elasticflow_airflow.runtime.stores.store import (
    Draft,
    Part,
    UploadBrokeOff,
    broke_off,
    collect_parts,
    encode_part,
    not_written,
    part_name,
)

_PROMOTED = "promoted.json"
_LASTING = (FileNotFoundError, NotImplementedError, PermissionError)
_LASTING_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
T = TypeVar("T")


class RemoteStore:
    """Checkpoints at an fsspec URL. Options (endpoints, keys) come from fsspec's and the vendors' own settings."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it ships no types
        except ImportError as error:
            raise CheckpointError(f"checkpoints at {url} need fsspec: pip install fsspec") from error
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoints cannot be kept at {url}: {error}. s3:// needs s3fs, gs:// needs gcsfs: install it in the "
                "interpreter that trains"
            ) from error
        self._root = self._root.rstrip("/")
        self.where = url.rstrip("/")

    def try_writing(self) -> None:
        """See Store."""
        name = f".probe-{uuid.uuid4().hex}"

        def probe() -> Exception | None:
            try:
                self.replace(name, b"May be deleted.")
                self._fs.rm_file(f"{self._root}/{name}")
            except Exception as error:
                if _is_lasting(error):
                    return error
                raise
            return None

        error = retried(probe, Exception)
        if error is not None:
            raise error

    @contextmanager
    def writing(self, generation: int, step: int, part: Part | None) -> Iterator[Draft]:
        """See Store. Leftovers of a save that was killed have no manifest; they are replaced or removed later."""
        name = candidate_name(generation, step)
        if part is None or part.rank == 0:
            # A checkpoint that is being rewritten must not count as complete meanwhile.
            with _telling(self.where, step):
                self.delete_file(f"{name}/{MANIFEST}")
        draft = _RemoteDraft(self, generation, step, part)
        try:
            yield draft
        except BaseException:
            with contextlib.suppress(Exception):  # The store may be what failed; without a manifest it is ignored.
                for file in draft.created:
                    self.delete_file(f"{name}/{file}")
            raise

    def candidates(self) -> list[str]:
        """See Store. Does not use ``glob``, which treats a folder that cannot be listed as empty."""
        self._fs.invalidate_cache()
        names = [
            f"{generation}/{step}"
            for generation in self._listed("")
            if re.fullmatch(r"g\d+", generation)
            for step in self._listed(f"/{generation}")
            if step.startswith("step-")
        ]
        return sorted(name for name in names if MANIFEST in self._listed(f"/{name}"))

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none when there is nothing."""
        self._fs.invalidate_cache()
        return sorted(self._listed(f"/{folder}"))

    def _listed(self, folder: str) -> list[str]:
        try:
            paths = self._reading(f"{self.where}{folder}", lambda: self._fs.ls(f"{self._root}{folder}", detail=False))
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths]

    @contextmanager
    def promoted(self, warn: Callable[[str], None], known: Promotion | None = None) -> Iterator[CandidateInfo | None]:
        """See Store."""
        with contextlib.ExitStack() as stack:

            def fetched(name: str) -> CandidateInfo:
                with contextlib.ExitStack() as own:
                    info = own.enter_context(self.fetch(name))
                    stack.push(own.pop_all())
                return info

            yield manifest.choose(self.candidates(), self._promotion, fetched, self.where, warn, known)

    @contextmanager
    def fetch(self, name: str) -> Iterator[CandidateInfo]:
        """See Store. The checkpoint is downloaded to the temporary folder of this machine (``TMPDIR``)."""
        where, raw = f"{self.where}/{name}", self._manifest(name)
        _, files = manifest.decode_manifest(raw, Path(where))
        new = tempfile.TemporaryDirectory
        with self._reading(where, lambda: _made(lambda: new(prefix="elasticflow-checkpoint-"))) as temporary:
            folder = Path(temporary) / name
            self._reading(where, lambda: _made(lambda: _lay(folder, raw)))
            for file, entry in files.items():
                self._download(f"{name}/{file}", folder / file, entry.size_bytes)
            yield manifest.verify_candidate(folder)

    def _manifest(self, name: str) -> bytes:
        raw = self.read(f"{name}/{MANIFEST}")
        if raw is None:
            raise CheckpointError(f"checkpoint {self.where}/{name}: {MANIFEST} is missing")
        return raw

    def _download(self, name: str, target: Path, size_bytes: int) -> None:
        """Download an object. It is damaged if the object itself is too short, not if only the copy is."""

        def download() -> None:
            try:
                self._fs.get_file(f"{self._root}/{name}", str(target))
                got = target.stat().st_size
                if got != size_bytes and got != self._fs.info(f"{self._root}/{name}")["size"]:
                    raise ConnectionError(f"the download of {name} broke off after {got} bytes")
            except FileNotFoundError as error:
                self._fs.invalidate_cache()
                self._fs.info(f"{self._root}/{name}")  # Raises FileNotFoundError if the object is missing.
                raise unreachable(f"{self.where}/{name}", OSError(*error.args)) from error

        try:
            self._reading(f"{self.where}/{name}", download)
        except FileNotFoundError as error:
            folder, _, file = name.rpartition("/")
            raise CheckpointError(f"checkpoint {self.where}/{folder}: {file} is missing") from error

    def look_at(self, name: str) -> CandidateInfo:
        """Check a checkpoint's manifest and the sizes of its objects, and download no more.

        Raises CheckpointError naming the object that is damaged or missing, and CheckpointUnreachable.
        """
        return self._look_at(name)[0]

    def _look_at(self, name: str) -> tuple[CandidateInfo, dict[str, FileEntry]]:
        where = f"{self.where}/{name}"
        info, files = manifest.decode_manifest(self._manifest(name), Path(where))
        for file, entry in files.items():
            path = f"{self._root}/{name}/{file}"
            try:
                size = self._reading(f"{where}/{file}", partial(self._size, path))
            except FileNotFoundError as error:
                raise CheckpointError(f"checkpoint {where}: {file} is missing") from error
            if size != entry.size_bytes:
                raise CheckpointError(f"checkpoint {where}: {file} has {size} bytes, not {entry.size_bytes}")
        return info, files

    def _size(self, path: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.info(path)["size"])

    def adopt(self, source: RemoteStore, name: str, *, incarnation: int) -> CandidateInfo:
        """Copy a checkpoint of another incarnation, as this one's initial checkpoint (generation 0). Idempotent.

        Raises CheckpointError if the source is damaged, and CheckpointUnreachable if it cannot be copied now.
        """
        info, files = source._look_at(name)
        final = candidate_name(0, info.step)
        try:
            return self.look_at(final)
        except CheckpointUnreachable:
            raise
        except CheckpointError:
            pass  # Not there, or half of it.
        try:
            for file in files:
                retried(partial(self._copy, f"{source._root}/{name}/{file}", f"{self._root}/{final}/{file}"), Exception)
            raw = manifest.encode_manifest(files, incarnation, 0, info.step, info.metadata)
            retried(lambda: self.replace(f"{final}/{MANIFEST}", raw), Exception)
        except Exception as error:  # Each store has its own error types.
            raise unreachable(f"a copy of checkpoint {source.where}/{name} at {self.where}", error) from error
        return self.look_at(final)

    def _copy(self, source: str, target: str) -> None:
        try:
            self._fs.cp_file(source, target)
        except FileNotFoundError:
            self._fs.makedirs(os.path.dirname(target), exist_ok=True)  # As in ``open_for_writing``.
            self._fs.cp_file(source, target)

    def remove(self, name: str) -> None:
        """Remove a checkpoint if it is there. Raises CheckpointError."""
        with _telling(self.where):
            # The manifest first: half a checkpoint must not count as complete.
            self.delete_file(f"{name}/{MANIFEST}")
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    def newest_generation(self) -> int | None:
        """See Store. Checkpoints without a manifest are ignored here, too: they may be overwritten."""
        return max((int(name[1:].split("/")[0]) for name in self.candidates()), default=None)

    def promote(self, info: CandidateInfo) -> None:
        """See Store."""
        promotion = Promotion(path=info.name, generation=info.generation, step=info.step, digest=info.digest)

        def replace() -> None:
            try:
                self.replace(_PROMOTED, json.dumps(asdict(promotion)).encode())
            except Exception as error:
                kind = CheckpointError if _is_lasting(error) else UploadBrokeOff
                raise kind(
                    f"the checkpoint of step {info.step} is whole, but {self.where}/{_PROMOTED}, by which it counts, "
                    f"could not be written: {error!r}. Look at the store; what counted before still does."
                ) from error

        retried(replace, UploadBrokeOff)

    def remove_old(self, keep: int) -> list[str]:
        """See Store. Interrupted uploads that are older than the promoted checkpoint are removed, too."""
        try:
            promotion = self._promotion()
        except (ValueError, TypeError):
            return []  # The promoted one is unknown: remove none.
        names = self.candidates()
        removed = [name for name in names[: -keep or None] if promotion is None or name != promotion.path]
        for name in removed:
            self.remove(name)
        with _telling(self.where):
            if promotion is not None:
                for path in self._fs.glob(f"{self._root}/g*/step-*"):
                    name = "/".join(str(path).rstrip("/").split("/")[-2:])
                    if name < promotion.path and name not in names:
                        self._fs.rm(f"{self._root}/{name}", recursive=True)
        return removed

    def open_for_writing(self, name: str) -> Any:
        """Open an object for writing; the old one stays until the new one is complete, if the store supports that."""
        try:
            return self._fs.open(f"{self._root}/{name}", "wb")
        except FileNotFoundError:
            # A file system with folders. Not done in advance, which would create buckets for misspelt names.
            self._fs.makedirs(os.path.dirname(f"{self._root}/{name}"), exist_ok=True)
            return self._fs.open(f"{self._root}/{name}", "wb")

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object as a whole."""
        with self.open_for_writing(name) as stream:
            stream.write(data)

    def read(self, name: str) -> bytes | None:
        """Read a small object; None if it does not exist. Raises CheckpointUnreachable."""
        try:
            raw = self._reading(f"{self.where}/{name}", lambda: self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        return cast(bytes, raw)

    def _reading(self, what: str, read: Callable[[], T]) -> T:
        """Call ``read``, with retries. Raises CheckpointUnreachable, and FileNotFoundError for a missing object."""

        def once() -> T:
            try:
                return read()
            except (CheckpointError, FileNotFoundError):
                raise
            except Exception as error:  # Each store has its own error types.
                raise unreachable(what, error) from error

        return retried(once, CheckpointUnreachable)

    def _promotion(self) -> Promotion | None:
        raw = self.read(_PROMOTED)
        return None if raw is None else Promotion(**json.loads(raw))

    def delete_file(self, name: str) -> None:
        """Remove an object if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")


class _RemoteDraft:
    def __init__(self, store: RemoteStore, generation: int, step: int, part: Part | None) -> None:
        self._store, self._part = store, part
        self._generation, self._step = generation, step
        self._name = candidate_name(generation, step)
        self.created: list[str] = []

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with _telling(self._store.where, self._step):
            self.created.append(name)
            with self._store.open_for_writing(f"{self._name}/{name}") as stream:
                yield stream

    def publish(
        self, entries: Mapping[str, FileEntry], *, incarnation: int, metadata: Mapping[str, Any], limit_s: float
    ) -> CandidateInfo | None:
        with _telling(self._store.where, self._step):
            if self._part is not None:
                handed_in = part_name(self._part, self._part.rank)
                self._store.replace(f"{self._name}/{handed_in}", json.dumps(encode_part(entries)).encode())
                if self._part.rank != 0:
                    return None
                entries = collect_parts(self._part, lambda name: self._store.read(f"{self._name}/{name}"), limit_s)
            raw = manifest.encode_manifest(entries, incarnation, self._generation, self._step, metadata)
            self._store.replace(f"{self._name}/{MANIFEST}", raw)
            for rank in range(self._part.size if self._part else 0):
                # The checkpoint is complete: leftovers are removed with it, and a retry would lack the deleted parts.
                with contextlib.suppress(Exception):
                    self._store.delete_file(f"{self._name}/{part_name(cast(Part, self._part), rank)}")
        info, _ = manifest.decode_manifest(raw, Path(self._name))
        return info


def _is_lasting(error: Exception) -> bool:
    """Return whether a retry would not help."""
    return isinstance(error, _LASTING) or (isinstance(error, OSError) and error.errno in _LASTING_ERRNOS)


def _made(make: Callable[[], T]) -> T:
    """Create something in the local temporary folder, where FileNotFoundError does not mean a missing checkpoint."""
    try:
        return make()
    except FileNotFoundError as error:
        raise unreachable("the temporary folder", OSError(*error.args)) from error


def _lay(folder: Path, raw: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(raw)


@contextmanager
def _telling(where: str, writing: int | None = None) -> Iterator[None]:
    """Convert the errors of any store to CheckpointError; ``writing`` is the step of the checkpoint being written.

    Raises UploadBrokeOff if a retry of the write may help.
    """
    try:
        yield
    except (CheckpointError, GeneratorExit):
        raise
    except Exception as error:
        if writing is not None:
            say = not_written if _is_lasting(error) else broke_off
            raise say(writing, where, error) from error
        raise CheckpointError(f"checkpoints at {where} cannot be reached: {error!r}") from error
