"""Checkpoint folders: how one is published atomically, and how damage in one is found.

A checkpoint is a folder of files and a ``manifest.json`` with the size and digest of each: of containers
(file_format.py) that of the index, of other files that of the whole. It is written under a temporary name, flushed to
disk and renamed: a folder with its final name is complete, or the disk has damaged it since, which
:func:`verify_candidate` finds. The standard library is all that this module may import: the service, which has no
torch, judges candidates with it.
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
"""In format 1 no file is a container: weights and the rest are files of ``torch.save``."""
MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".writing-"
_REPLACED_SUFFIX = ".replaced"
_CHUNK_BYTES = 1 << 20
_LARGEST_BYTES = 1 << 26
"""Of a manifest: it is read as a whole."""
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written; the message names the path and says what is wrong."""


class CheckpointUnreachable(CheckpointError):  # noqa: N818  (it is named for what it is)
    """A checkpoint cannot be read now, which is no damage: an older one in its stead would throw training away."""


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

    @property
    def name(self) -> str:
        """Its path relative to the folder of the checkpoints."""
        return candidate_name(self.generation, self.step)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says about a file. ``sha256`` of a container is that of its index, which covers the rest."""

    sha256: str
    size_bytes: int
    container: bool = False

    def to_json(self) -> dict[str, Any]:
        """As in the manifest."""
        return {k: v for k, v in asdict(self).items() if v is not False}


@contextmanager
def writing(checkpoints: Path, generation: int, step: int) -> Iterator[Path]:
    """Give a temporary folder to write files into; the caller publishes it with :func:`publish` before leaving.

    Whatever goes wrong inside, the temporary folder is removed, and what was there before stays as it was.
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

    ``entries``: what is known about files already; the others are read. Raises CheckpointError when the disk does not
    take it.
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

    With ``contents`` every byte is read; without, names and sizes only. Raises CheckpointError naming what is damaged,
    CheckpointUnreachable where that cannot be said now.
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
    """Make the manifest of a checkpoint. Raises ValueError for metadata that JSON cannot hold."""
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
    """Verify a checkpoint folder; a read that fails is tried again for a while. Raises what that does in the end."""
    return retried(lambda: verify_candidate(path), CheckpointUnreachable)


def decode_manifest(raw: bytes, path: Path) -> tuple[CandidateInfo, dict[str, FileEntry]]:
    """Read the manifest of the checkpoint at ``path``. Raises CheckpointError when it is damaged or from the future."""
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
    """Folders with a final name, newest last (by generation, then step)."""
    return sorted(checkpoints.glob("g[0-9]*/step-[0-9]*"))


def newest_valid(checkpoints: Path, warn: Callable[[str], None]) -> CandidateInfo | None:
    """Find the newest undamaged checkpoint; each damaged one on the way is skipped with a warning."""
    for path in reversed(list_candidates(checkpoints)):
        try:
            return verify_candidate(path)
        except CheckpointUnreachable:
            raise
        except CheckpointError as error:
            warn(f"skipped: {error}")
    return None


def promoted(checkpoints: Path, warn: Callable[[str], None], known: Promotion | None = None) -> CandidateInfo | None:
    """Find the checkpoint to resume from: the promoted one, or, where that is damaged, the valid one before it.

    Only what is not newer than the promotion counts: a candidate that nobody promoted may come from a stale
    generation. ``known`` is what is known to be promoted whatever is found here; the newer of the two counts. Where
    ``promoted.json`` itself is damaged, and nothing is known, the newest valid checkpoint is used. None: nothing was
    promoted. What cannot be read is tried again for a while, and never passed over: raises CheckpointUnreachable; and
    CheckpointError where something was promoted, and nothing of it is left: to begin again would throw it away.
    """
    names = [str(path.relative_to(checkpoints)) for path in list_candidates(checkpoints)]

    def read_promotion() -> Promotion | None:
        try:
            return Promotion.read(checkpoints)
        except NotADirectoryError:
            return None  # Nobody can have promoted anything there; whoever saves says what is in the way.
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
    """Choose from the candidates' names (oldest first) as :func:`promoted` says, wherever they are stored."""
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

    # The promoted one is looked for even where it is not listed: a folder that cannot be read lists nothing.
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
    """Raise ValueError where a promotion's path is not that of its step."""
    if promotion.path != candidate_name(promotion.generation, promotion.step):
        raise ValueError(
            f"path {promotion.path!r} is not that of step {promotion.step} of generation {promotion.generation}"
        )


def _age(promotion: Promotion) -> tuple[int, int]:
    """The greater, the newer."""
    return promotion.generation, promotion.step


def unreadable(what: str, error: OSError) -> CheckpointError:
    """Say that a file cannot be read: because something else is there, which is damage, or because of the machine."""
    if error.errno in _NO_SUCH_FILE:
        return CheckpointError(f"{what} cannot be read: {error}")
    return unreachable(what, error)


def unreachable(what: str, error: Exception) -> CheckpointUnreachable:
    """Say that something cannot be read now, and what to do."""
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


def remove_leftovers(checkpoints: Path, generation: int, *, but: Path | None = None) -> None:
    """Remove what killed writers of this generation, or of earlier ones, left; ``but`` is being written now."""
    newest = Path(candidate_name(generation, 0)).parent.name
    for folder in checkpoints.glob("g[0-9]*"):
        if folder.name <= newest:
            _remove_leftovers(folder, but)


def _remove_leftovers(generation: Path, but: Path | None = None) -> None:
    """Remove what a killed writer left. One checkpoint of a generation is written at a time, none of an earlier one."""
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
    """Copy a checkpoint of an earlier incarnation into another one's folder, as what it begins with (generation 0).

    Raises CheckpointError when the source is damaged, CheckpointUnreachable when it cannot be read now or the disk does
    not take the copy. Idempotent.
    """
    info = verify_candidate(source)
    final = checkpoints / candidate_name(0, info.step)
    if final.exists():
        with contextlib.suppress(CheckpointError):  # Damaged: copied again.
            return verify_candidate(final)
    try:
        return _copy(source, info, checkpoints, incarnation)
    except (CheckpointError, OSError) as error:  # The source is whole: it is the disk that says no.
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
