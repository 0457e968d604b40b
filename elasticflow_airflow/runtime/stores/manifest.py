"""Checkpoint folders: publishes them atomically and detects damage in them.

A checkpoint is a folder of files and a ``manifest.json`` with the size and digest of each. The digest of a container
(file_format.py) is that of its index; the digest of any other file covers the whole file. A checkpoint is written
under a temporary name, flushed to disk and renamed. A folder with its final name is therefore complete, unless the disk
has damaged it since, which :func:`verify_candidate` detects. May import the standard library only: the service, which
has no torch, verifies candidates with it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elasticflow_airflow import bounds
from elasticflow_airflow.runtime.protocol import (
    Promotion,
    candidate_name,
    open_ordinary,
    promoted_path,
    write_json_atomic,
)
from elasticflow_airflow.runtime.stores.file_format import ContainerError, verify
from elasticflow_airflow.runtime.stores.retrying import retried

FORMAT = 2
READABLE_FORMATS = (1, 2)
"""In format 1 no file is a container: weights and the rest are files written by ``torch.save``."""
MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".writing-"
_REPLACED_SUFFIX = ".replaced"
_CHUNK_BYTES = 1 << 20
_LARGEST_BYTES = 1 << 26
"""Maximum size of a manifest, which is read as a whole."""
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written; the message names the path and the problem."""


class CheckpointUnreachable(CheckpointError):  # noqa: N818  (named after the state)
    """A checkpoint cannot be read now, but is not damaged: using an older one instead would discard progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateInfo:
    """A verified checkpoint. ``digest`` covers the manifest, and thereby every byte of every file."""

    path: Path
    incarnation: int
    generation: int
    step: int
    digest: str
    size_bytes: int
    created_at_s: float
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Path of the checkpoint relative to the folder of the checkpoints."""
        return candidate_name(self.generation, self.step)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A manifest's entry for a file. ``sha256`` of a container is that of its index, which covers the rest."""

    sha256: str
    size_bytes: int
    container: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it is stored in the manifest."""
        return {k: v for k, v in asdict(self).items() if v is not False}


@contextmanager
def writing(checkpoints: Path, generation: int, step: int) -> Iterator[Path]:
    """Yield a temporary folder to write files into; the caller publishes it with :func:`publish` inside the context.

    On any error inside, the temporary folder is removed and existing checkpoints remain unchanged.
    """
    final = checkpoints / candidate_name(generation, step)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(checkpoints, generation)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=final.parent))
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
    entries: Mapping[str, FileEntry] | None = None,
) -> CandidateInfo:
    """Write the manifest, flush everything to disk, and give the folder its final name.

    ``entries``: the entries of files that are already known; other files are read. Raises CheckpointError if the write
    fails.
    """
    final = checkpoints / candidate_name(generation, step)
    try:
        files = {}
        for file in sorted(temporary.iterdir()):
            entry = (entries or {}).get(file.name)
            if entry is None:
                digest, size = _digest(file)
                entry = FileEntry(digest, size)
            files[file.name] = entry
            _flush(file)
        manifest = temporary / MANIFEST
        manifest.write_bytes(encode_manifest(files, incarnation, generation, step, metadata))
        _flush(manifest)
        _flush(temporary)
        if final.exists():
            # The same step of the same generation was written before: ours is equivalent and newer.
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

    With ``contents`` every byte is read; without, only names and sizes are checked. Raises CheckpointError naming the
    damaged file, and CheckpointUnreachable if the checkpoint cannot be read now.
    """
    try:
        if (path / MANIFEST).stat().st_size > _LARGEST_BYTES:
            raise CheckpointError(f"checkpoint {path}: {MANIFEST} has more than {_LARGEST_BYTES} bytes")
        with open_ordinary(path / MANIFEST) as file:
            raw = file.read(_LARGEST_BYTES + 1)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is missing") from error
    except OSError as error:
        raise unreadable(f"checkpoint {path}", error) from error
    info, files = decode_manifest(raw, path)
    for name, entry in files.items():
        _verify_file(path, name, entry, contents)
    return info


def encode_manifest(
    files: Mapping[str, FileEntry], incarnation: int, generation: int, step: int, metadata: Mapping[str, Any]
) -> bytes:
    """Return the manifest of a checkpoint. Raises ValueError for metadata that JSON cannot hold."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "incarnation": incarnation,
        "generation": generation,
        "step": step,
        "created_at_s": time.time(),
        "files": {name: entry.to_json() for name, entry in files.items()},
        "metadata": dict(metadata),
    }
    body["digest"] = _body_digest(body)
    return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode()


def verify_patiently(path: Path) -> CandidateInfo:
    """Verify a checkpoint folder; failed reads are retried for a while. Raises the error of the last attempt."""
    return retried(lambda: verify_candidate(path), CheckpointUnreachable)


def decode_manifest(raw: bytes, path: Path) -> tuple[CandidateInfo, dict[str, FileEntry]]:
    """Decode the manifest of the checkpoint at ``path``. Raises CheckpointError if damaged or of a newer format."""
    try:
        body = json.loads(raw)
        claimed = body["digest"]
        if body["format"] not in READABLE_FORMATS:
            raise CheckpointError(f"checkpoint {path}: format {body['format']!r} is not one that this version reads")
        if _body_digest({k: v for k, v in body.items() if k != "digest"}) != claimed:
            raise CheckpointError(f"checkpoint {path}: its manifest is damaged (digest differs)")
        files = {
            str(name): FileEntry(str(f["sha256"]), int(f["size_bytes"]), bool(f.get("container", False)))
            for name, f in body["files"].items()
        }
        info = CandidateInfo(
            path=path,
            incarnation=int(body["incarnation"]),
            generation=int(body["generation"]),
            step=int(body["step"]),
            digest=str(claimed),
            size_bytes=sum(entry.size_bytes for entry in files.values()),
            created_at_s=float(body["created_at_s"]),
            metadata=dict(body["metadata"]),
        )
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {path}: its manifest is damaged ({error})") from error
    problem = _out_of_bounds(info, files)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path}: its manifest is not one of a training: {problem}")
    for name in files:
        if name in ("", "..") or Path(name).name != name:
            raise CheckpointError(f"checkpoint {path}: its manifest names {name!r}, which is outside the folder")
    return info, files


def _out_of_bounds(info: CandidateInfo, files: Mapping[str, FileEntry]) -> str | None:
    counts = {"incarnation": info.incarnation, "generation": info.generation, "step": info.step}
    sizes = {
        "size_bytes": info.size_bytes,
        **{f"size_bytes of {name}": file.size_bytes for name, file in files.items()},
    }
    problems = {
        **{name: bounds.count_problem(count) for name, count in counts.items()},
        **{name: bounds.count_problem(size, 0, bounds.MOST_BYTES) for name, size in sizes.items()},
        "created_at_s": bounds.time_problem(info.created_at_s),
        "digest": bounds.text_problem(info.digest, bounds.NAME_CHARACTERS),
    }
    return next((f"{name} {problem}" for name, problem in problems.items() if problem is not None), None)


def list_candidates(checkpoints: Path) -> list[Path]:
    """Return the folders with a final name, newest last (by generation, then step)."""
    return sorted(checkpoints.glob("g[0-9]*/step-[0-9]*"))


def promoted(checkpoints: Path, warn: Callable[[str], None], known: Promotion | None = None) -> CandidateInfo | None:
    """Return the checkpoint to resume from: the promoted one or, if that is damaged, the newest valid one before it.

    Checkpoints newer than the promotion are ignored, because a candidate that was never promoted may come from a stale
    generation. ``known`` is a promotion known from elsewhere; the newer of it and ``promoted.json`` applies. If
    ``promoted.json`` is damaged and ``known`` is None, the newest valid checkpoint is used. Returns None if nothing was
    promoted. Failed reads are retried for a while and never skipped: raises CheckpointUnreachable. Raises
    CheckpointError if something was promoted but no usable checkpoint is left, since starting afresh would discard it.
    """
    names = [str(path.relative_to(checkpoints)) for path in list_candidates(checkpoints)]

    def read_promotion() -> Promotion | None:
        try:
            return Promotion.read(checkpoints)
        except NotADirectoryError:
            return None  # Nothing can have been promoted there; the next save reports what is in the way.
        except OSError as error:
            raise unreadable(str(promoted_path(checkpoints)), error) from error

    return choose(
        names,
        lambda: retried(read_promotion, CheckpointUnreachable),
        lambda name: verify_patiently(checkpoints / name),
        str(checkpoints),
        warn,
        known,
    )


def choose(
    names: Sequence[str],
    read_promotion: Callable[[], Promotion | None],
    verify_named: Callable[[str], CandidateInfo],
    where: str,
    warn: Callable[[str], None],
    known: Promotion | None = None,
) -> CandidateInfo | None:
    """Choose from the candidates' names (oldest first) by the rules of :func:`promoted`, for any kind of store."""
    source, advice = f"{where}/promoted.json", "Put it back, or move promoted.json away to begin again at step 0"
    try:
        promotion = read_promotion()
        if promotion is not None:
            _check_path(promotion)
        if known is not None and (promotion is None or _age(promotion) < _age(known)):
            promotion, source = known, "the service"
            advice = "Put it back (is its disk mounted?), or submit the training anew to begin again at step 0"
        if promotion is None:
            return None
    except CheckpointUnreachable:
        raise
    except (ValueError, TypeError) as error:
        instead = "the newest valid checkpoint" if known is None else f"the checkpoint of step {known.step}"
        warn(f"{where}/promoted.json is damaged ({error}); {instead} is used instead")
        promotion = known
    limit = None if promotion is None else promotion.path
    passed_over: list[str] = []

    def pass_over(why: str) -> None:
        passed_over.append(why)
        warn(why)

    # Try the promoted checkpoint even if it is not listed: an unreadable folder lists nothing.
    wanted = list(names) if limit is None else [*(name for name in names if name < limit), limit]
    for name in reversed(wanted):
        try:
            info = verify_named(name)
        except CheckpointUnreachable:
            raise
        except CheckpointError as error:
            pass_over(f"skipped: {error}" if name in names else f"the promoted checkpoint {where}/{name} is missing")
            continue
        if promotion is not None and name == limit and info.digest != promotion.digest:
            pass_over(f"skipped: checkpoint {info.path} is not the one that {source} names (digest differs)")
            continue
        return info
    found = "; ".join(passed_over) or "there is no checkpoint beside it"
    raise CheckpointError(
        f"{source} says that there is a checkpoint to go on from, and none can be used: {found}. {advice}"
    )


def _check_path(promotion: Promotion) -> None:
    """Raise ValueError if a promotion's path is not that of its step."""
    if promotion.path != candidate_name(promotion.generation, promotion.step):
        raise ValueError(
            f"path {promotion.path!r} is not that of step {promotion.step} of generation {promotion.generation}"
        )


def _age(promotion: Promotion) -> tuple[int, int]:
    """Return a sort key that is greater for newer promotions."""
    return promotion.generation, promotion.step


def unreadable(what: str, error: OSError) -> CheckpointError:
    """Return the error for an unreadable file: damage if it is missing or something else, otherwise unreachable."""
    if error.errno in _NO_SUCH_FILE:
        return CheckpointError(f"{what} cannot be read: {error}")
    return unreachable(what, error)


def unreachable(what: str, error: Exception) -> CheckpointUnreachable:
    """Return the error for something that cannot be read now, with advice."""
    if isinstance(error, PermissionError):
        advice = f"Give uid {os.getuid()}, or the keys that it uses, the right to read it"
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        advice = "Make room on this machine, or set TMPDIR to a folder with room for a whole checkpoint"
    else:
        advice = "See to the disk or the network"
    return CheckpointUnreachable(
        f"{what} cannot be read now: {error!r}. {advice}, and start again. Nothing was deleted, and no older "
        "checkpoint is used in its stead; to go on from an older one, move this one away."
    )


def promote(checkpoints: Path, info: CandidateInfo) -> None:
    """Make a verified checkpoint the promoted one (only without the service, which otherwise does this itself)."""
    promotion = Promotion(
        path=str(info.path.relative_to(checkpoints)), generation=info.generation, step=info.step, digest=info.digest
    )
    write_json_atomic(promoted_path(checkpoints), asdict(promotion))


def remove_old(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints and the promoted one; returns the removed folders."""
    try:
        promotion = Promotion.read(checkpoints)
    except (ValueError, TypeError):
        return []  # The promoted one is unknown: remove none.
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
    """Return the highest generation with a folder here, or None."""
    names = (path.name[1:] for path in checkpoints.glob("g[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=None)


def remove_leftovers(checkpoints: Path, generation: int, *, but: Path | None = None) -> None:
    """Remove leftovers of killed writers of this or earlier generations, except ``but``, which is being written."""
    newest = Path(candidate_name(generation, 0)).parent.name
    for folder in checkpoints.glob("g[0-9]*"):
        if folder.name <= newest:
            _remove_leftovers(folder, but)


def _remove_leftovers(generation: Path, but: Path | None = None) -> None:
    """Remove a killed writer's leftovers: one checkpoint of a generation is written at a time, none of earlier ones."""
    for path in generation.glob(f"{TEMPORARY_PREFIX}*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def _verify_file(folder: Path, name: str, entry: FileEntry, contents: bool) -> None:
    file = folder / name
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"checkpoint {folder}: {name} is not an ordinary file")
        if status.st_size != entry.size_bytes:
            raise CheckpointError(
                f"checkpoint {folder}: {name} has {status.st_size} bytes, not {entry.size_bytes} (torn or overwritten)"
            )
        if not contents:
            return
        if entry.container:
            with open_ordinary(file) as stream:
                digest = verify(stream).digest
        else:
            digest, _ = _digest(file)
        if digest != entry.sha256:
            raise CheckpointError(f"checkpoint {folder}: {name} is damaged (SHA-256 differs)")
    except ContainerError as error:
        raise CheckpointError(f"checkpoint {folder}: {name} {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder}: {name} is missing") from error
    except OSError as error:
        raise unreadable(f"checkpoint {folder}: {name}", error) from error


def _digest(file: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with open_ordinary(file) as stream:
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
    """Copy a checkpoint of an earlier incarnation into another one's folder, as its initial checkpoint (generation 0).

    Raises CheckpointError if the source is damaged, and CheckpointUnreachable if it cannot be read now or the copy
    cannot be written. Idempotent.
    """
    info = verify_candidate(source)
    final = checkpoints / candidate_name(0, info.step)
    if final.exists():
        with contextlib.suppress(CheckpointError):  # Damaged: copy it again.
            return verify_candidate(final)
    try:
        return _copy(source, info, checkpoints, incarnation)
    except (CheckpointError, OSError) as error:  # The source is intact, so the target disk failed.
        raise CheckpointUnreachable(f"checkpoint {source} could not be copied to {checkpoints}: {error}") from error


def _copy(source: Path, info: CandidateInfo, checkpoints: Path, incarnation: int) -> CandidateInfo:
    _, files = decode_manifest((source / MANIFEST).read_bytes(), source)
    with writing(checkpoints, 0, info.step) as temporary:
        for name in files:
            shutil.copyfile(source / name, temporary / name)
        return publish(
            temporary,
            checkpoints,
            incarnation=incarnation,
            generation=0,
            step=info.step,
            metadata=info.metadata,
            entries={name: entry for name, entry in files.items() if entry.container},
        )
