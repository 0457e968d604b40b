"""Checkpoints in an object store, or whatever else fsspec can reach by a URL: nothing counts without its manifest.

Interrupted uploads leave objects without a manifest (or, of multipart uploads, nothing that can be seen); they are
removed once a newer checkpoint is promoted. May import the standard library and fsspec only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

from elasticflow_airflow.runtime import manifest
from elasticflow_airflow.runtime.manifest import MANIFEST, CandidateInfo, CheckpointError, FileEntry
from elasticflow_airflow.runtime.protocol import Promotion, candidate_name
from elasticflow_airflow.runtime.storage import Draft, Part, collect_parts, encode_part, not_written, part_name

_PROMOTED = "promoted.json"


class RemoteStore:
    """Checkpoints behind an fsspec URL. Options (endpoints, keys) come from fsspec's and the vendors' own settings."""

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

    @contextmanager
    def writing(self, generation: int, step: int, part: Part | None) -> Iterator[Draft]:
        """See Store. Leftovers of a save that was killed have no manifest; they are replaced or removed later."""
        name = candidate_name(generation, step)
        if part is None or part.rank == 0:
            # What is written anew must not count meanwhile.
            with _telling(self.where, step):
                self.delete_file(f"{name}/{MANIFEST}")
        draft = _RemoteDraft(self, generation, step, part)
        try:
            yield draft
        except BaseException:
            with contextlib.suppress(
                Exception
            ):  # The place may be what failed; without manifest it counts for nothing.
                for file in draft.created:
                    self.delete_file(f"{name}/{file}")
            raise

    def candidates(self) -> list[str]:
        """See Store."""
        with _telling(self.where):
            self._fs.invalidate_cache()
            found = self._fs.glob(f"{self._root}/g*/step-*/{MANIFEST}")
        return sorted("/".join(str(path).split("/")[-3:-1]) for path in found)

    @contextmanager
    def promoted(self, warn: Callable[[str], None]) -> Iterator[CandidateInfo | None]:
        """See Store."""
        with contextlib.ExitStack() as stack:

            def fetched(name: str) -> CandidateInfo:
                with contextlib.ExitStack() as own:
                    info = own.enter_context(self.fetch(name))
                    stack.push(own.pop_all())
                return info

            yield manifest.choose(self.candidates(), self._promotion, fetched, self.where, warn)

    @contextmanager
    def fetch(self, name: str) -> Iterator[CandidateInfo]:
        """See Store. It is downloaded to the temporary folder of this machine (``TMPDIR``)."""
        with tempfile.TemporaryDirectory(prefix="elasticflow-checkpoint-") as temporary:
            folder = Path(temporary) / name
            folder.mkdir(parents=True)
            with _telling(f"{self.where}/{name}"):
                raw = self.read(f"{name}/{MANIFEST}")
                if raw is None:
                    raise CheckpointError(f"checkpoint {self.where}/{name}: {MANIFEST} is missing")
                _, files = manifest.decode_manifest(raw, Path(f"{self.where}/{name}"))
                (folder / MANIFEST).write_bytes(raw)
                for file in files:
                    self._fs.get_file(f"{self._root}/{name}/{file}", str(folder / file))
            yield manifest.verify_candidate(folder)

    def newest_generation(self) -> int | None:
        """See Store. What has no manifest does not count here either: it may be written over."""
        return max((int(name[1:].split("/")[0]) for name in self.candidates()), default=None)

    def promote(self, info: CandidateInfo) -> None:
        """See Store."""
        promotion = Promotion(path=info.name, generation=info.generation, step=info.step, digest=info.digest)
        with _telling(self.where):
            self.replace(_PROMOTED, json.dumps(asdict(promotion)).encode())

    def remove_old(self, keep: int) -> list[str]:
        """See Store. Uploads that broke off, older than the promoted one, are removed too."""
        try:
            promotion = self._promotion()
        except (ValueError, TypeError):
            return []  # Not known which one counts: remove none.
        names = self.candidates()
        removed = [name for name in names[: -keep or None] if promotion is None or name != promotion.path]
        with _telling(self.where):
            for name in removed:
                # The manifest first: half a checkpoint must not count.
                self.delete_file(f"{name}/{MANIFEST}")
                self._fs.rm(f"{self._root}/{name}", recursive=True)
            if promotion is not None:
                for path in self._fs.glob(f"{self._root}/g*/step-*"):
                    name = "/".join(str(path).rstrip("/").split("/")[-2:])
                    if name < promotion.path and name not in names:
                        self._fs.rm(f"{self._root}/{name}", recursive=True)
        return removed

    def open_for_writing(self, name: str) -> Any:
        """Open an object; what was there stays until the new one is complete, where the store can do so."""
        try:
            return self._fs.open(f"{self._root}/{name}", "wb")
        except FileNotFoundError:
            # A file system, with folders. Not done beforehand: it would make buckets of misspelt names.
            self._fs.makedirs(os.path.dirname(f"{self._root}/{name}"), exist_ok=True)
            return self._fs.open(f"{self._root}/{name}", "wb")

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object whole."""
        with self.open_for_writing(name) as stream:
            stream.write(data)

    def read(self, name: str) -> bytes | None:
        """Read a small object; None where there is none."""
        try:
            return cast(bytes, self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def _promotion(self) -> Promotion | None:
        raw = self.read(_PROMOTED)
        return None if raw is None else Promotion(**json.loads(raw))

    def delete_file(self, name: str) -> None:
        """Remove an object, if it is there."""
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
                self._store.delete_file(f"{self._name}/{part_name(cast(Part, self._part), rank)}")
        info, _ = manifest.decode_manifest(raw, Path(self._name))
        return info


@contextmanager
def _telling(where: str, writing: int | None = None) -> Iterator[None]:
    """Say what fails as one kind of error, whatever the store: ``writing`` a step's checkpoint, or else reading."""
    try:
        yield
    except (CheckpointError, GeneratorExit):
        raise
    except Exception as error:
        if writing is not None:
            raise not_written(writing, where, error) from error
        raise CheckpointError(f"checkpoints at {where} cannot be reached: {error!r}") from error
