"""Checkpoint folders: how one is published atomically, and how damage in one is found.

A checkpoint is a folder of files and a ``manifest.json`` with the size and SHA-256 of each. It is written under a
temporary name, flushed to disk and renamed: a folder with its final name is complete, or the disk has damaged it
since, which :func:`verify_candidate` finds. The standard library is all that this module may import: the service,
which has no torch, judges candidates with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.protocol import Promotion, candidate_name, promoted_path, write_json_atomic

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY_PREFIX = ".writing-"
_REPLACED_SUFFIX = ".replaced"
_CHUNK_BYTES = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written; the message names the path and says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateInfo:
    """A checkpoint that was verified. ``digest`` covers the manifest, and through it every byte of every file."""

    path: Path
    incarnation: int
    generation: int
    step: int
    digest: str
    size_bytes: int
    created_at_s: float
    metadata: Mapping[str, Any]


@contextmanager
def writing(checkpoints: Path, generation: int, step: int) -> Iterator[Path]:
    """Give a temporary folder to write files into; the caller publishes it with :func:`publish` before leaving.

    Whatever goes wrong inside, the temporary folder is removed, and what was there before stays as it was.
    """
    final = checkpoints / candidate_name(generation, step)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=final.parent))
    except OSError as error:
        raise CheckpointError(
            f"cannot write a checkpoint below {final.parent}: {error.strerror or error}. "
            "Free space there or make it writable; the checkpoints before stay valid."
        ) from error
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(
    temporary: Path,
    checkpoints: Path,
    *,
    incarnation: int,
    generation: int,
    step: int,
    metadata: Mapping[str, Any],
) -> CandidateInfo:
    """Write the manifest, flush everything to disk, and give the folder its final name.

    Raises CheckpointError when the disk does not take it.
    """
    final = checkpoints / candidate_name(generation, step)
    try:
        files = {}
        for file in sorted(temporary.iterdir()):
            digest, size = _digest(file)
            files[file.name] = {"sha256": digest, "size_bytes": size}
            _flush(file)
        body: dict[str, Any] = {
            "format": FORMAT,
            "incarnation": incarnation,
            "generation": generation,
            "step": step,
            "created_at_s": time.time(),
            "files": files,
            "metadata": dict(metadata),
        }
        body["digest"] = _body_digest(body)
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps(body, indent=1, sort_keys=True, allow_nan=False))
        _flush(manifest)
        _flush(temporary)
        if final.exists():
            # The same step of the same generation, written before: ours is as good, and newer.
            os.replace(final, temporary.with_name(temporary.name + _REPLACED_SUFFIX))
        os.replace(temporary, final)
        _flush(final.parent)
        shutil.rmtree(temporary.with_name(temporary.name + _REPLACED_SUFFIX), ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error.strerror or error}. "
            "Free space there; the checkpoints before stay valid."
        ) from error
    return verify_candidate(final, contents=False)


def verify_candidate(path: Path, *, contents: bool = True) -> CandidateInfo:
    """Check a checkpoint folder against its manifest.

    With ``contents`` every byte is read; without, names and sizes only. Raises CheckpointError naming what is damaged.
    """
    try:
        body = json.loads((path / MANIFEST).read_bytes())
        claimed = body["digest"]
        if body["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path}: format {body['format']!r} is not one that this version reads")
        if _body_digest({k: v for k, v in body.items() if k != "digest"}) != claimed:
            raise CheckpointError(f"checkpoint {path}: its manifest is damaged (digest differs)")
        files = {str(name): (str(f["sha256"]), int(f["size_bytes"])) for name, f in body["files"].items()}
        info = CandidateInfo(
            path=path,
            incarnation=int(body["incarnation"]),
            generation=int(body["generation"]),
            step=int(body["step"]),
            digest=str(claimed),
            size_bytes=sum(size for _, size in files.values()),
            created_at_s=float(body["created_at_s"]),
            metadata=dict(body["metadata"]),
        )
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: {Path(error.filename).name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path}: its manifest is damaged ({error})") from error
    for name, expected in files.items():
        _verify_file(path, name, *expected, contents)
    return info


def list_candidates(checkpoints: Path) -> list[Path]:
    """Folders with a final name, newest last (by generation, then step)."""
    return sorted(checkpoints.glob("g[0-9]*/step-[0-9]*"))


def newest_valid(checkpoints: Path, warn: Callable[[str], None]) -> CandidateInfo | None:
    """Find the newest undamaged checkpoint; each damaged one on the way is skipped with a warning."""
    for path in reversed(list_candidates(checkpoints)):
        try:
            return verify_candidate(path)
        except CheckpointError as error:
            warn(f"skipped: {error}")
    return None


def promoted(checkpoints: Path, warn: Callable[[str], None]) -> CandidateInfo | None:
    """Find the checkpoint to resume from: the promoted one, or, where that is damaged, the valid one before it.

    Only what is not newer than the promotion counts: a candidate that nobody promoted may come from a stale
    generation. Where ``promoted.json`` itself is damaged, the newest valid checkpoint is used. None: nothing was
    promoted, or nothing of it is left.
    """
    try:
        promotion = Promotion.read(checkpoints)
        if promotion is None:
            return None
        if promotion.path != candidate_name(promotion.generation, promotion.step):
            raise ValueError(
                f"path {promotion.path!r} is not that of step {promotion.step} of generation {promotion.generation}"
            )
    except (OSError, ValueError, TypeError) as error:
        warn(f"{promoted_path(checkpoints)} is damaged ({error}); the newest valid checkpoint is used instead")
        return newest_valid(checkpoints, warn)
    wanted = checkpoints / promotion.path
    older = [path for path in list_candidates(checkpoints) if path <= wanted]
    if wanted not in older:
        warn(f"the promoted checkpoint {wanted} is missing")
    for path in reversed(older):
        try:
            info = verify_candidate(path)
        except CheckpointError as error:
            warn(f"skipped: {error}")
            continue
        if path == wanted and info.digest != promotion.digest:
            warn(f"skipped: checkpoint {path} is not the one that {promoted_path(checkpoints)} names (digest differs)")
            continue
        return info
    return None


def promote(checkpoints: Path, info: CandidateInfo) -> None:
    """Make a verified checkpoint the one that counts (run alone; under the service only the service does this)."""
    promotion = Promotion(
        path=str(info.path.relative_to(checkpoints)), generation=info.generation, step=info.step, digest=info.digest
    )
    write_json_atomic(promoted_path(checkpoints), asdict(promotion))


def remove_old(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints and the promoted one; returns what was removed."""
    try:
        promotion = Promotion.read(checkpoints)
    except (ValueError, TypeError):
        return []  # Not known which one counts: remove none.
    kept = {checkpoints / promotion.path} if promotion else set()
    removed = [path for path in list_candidates(checkpoints)[: -keep or None] if path not in kept]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    for generation in checkpoints.glob("g[0-9]*"):
        if promotion and generation.name < f"g{promotion.generation:06d}":
            _remove_leftovers(generation)
            with contextlib.suppress(OSError):  # Not empty: a checkpoint in it is kept.
                generation.rmdir()
    return removed


def newest_generation(checkpoints: Path) -> int | None:
    """Return the highest generation that has left anything here, or None."""
    names = (path.name[1:] for path in checkpoints.glob("g[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=None)


def _remove_leftovers(generation: Path) -> None:
    """Remove what a killed writer of this generation left: only one worker of a generation writes."""
    for path in generation.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _verify_file(folder: Path, name: str, sha256: str, size_bytes: int, contents: bool) -> None:
    file = folder / name
    if name in ("", "..") or Path(name).name != name:
        raise CheckpointError(f"checkpoint {folder}: its manifest names {name!r}, which is outside the folder")
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"checkpoint {folder}: {name} is not an ordinary file")
        size = status.st_size
        if size != size_bytes:
            raise CheckpointError(
                f"checkpoint {folder}: {name} has {size} bytes, not {size_bytes} (torn or overwritten)"
            )
        if contents and _digest(file)[0] != sha256:
            raise CheckpointError(f"checkpoint {folder}: {name} is damaged (SHA-256 differs)")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder}: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error}") from error


def _digest(file: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def adopt(source: Path, checkpoints: Path, *, incarnation: int) -> CandidateInfo:
    """Copy a checkpoint of an earlier incarnation into another one's folder, as what it begins with (generation 0).

    Raises CheckpointError when the source is damaged or the disk does not take the copy. Idempotent.
    """
    info = verify_candidate(source)
    final = checkpoints / candidate_name(0, info.step)
    if final.exists():
        with contextlib.suppress(CheckpointError):  # Damaged: copied again.
            return verify_candidate(final)
    with writing(checkpoints, 0, info.step) as temporary:
        try:
            for file in source.iterdir():
                if file.name != MANIFEST:
                    shutil.copyfile(file, temporary / file.name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {source} could not be copied to {checkpoints}: {error}") from error
        return publish(
            temporary, checkpoints, incarnation=incarnation, generation=0, step=info.step, metadata=info.metadata
        )
