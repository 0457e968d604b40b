"""Snapshots the code that a job runs: the script's folder, or the module's package, as one deterministic tar.

Equal files give equal bytes, and so the same hash, wherever and whenever the snapshot is taken. The service keeps the
snapshot, so every restart of a job runs the submitted code, whatever happens to the DAG bundle meanwhile. Reads files
without importing them.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import io
import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elasticflow_airflow.api.service_card import LOCK_FILE
from elasticflow_airflow.client.errors import SnapshotError
from elasticflow_airflow.client.ignore import IgnoreRules

MAX_BYTES: Final = 64 * 1024 * 1024
MAX_FILES: Final = 4000

_LIMIT_HINT: Final = (
    "put the training code in a folder of its own, or name what it does not need in a .airflowignore or .gitignore"
    " file there; data belongs outside the code"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Code as one uncompressed tar. ``files`` lists (path, SHA-256) in order; ``entry`` is the script's path inside.

    ``ignored`` lists for the log what ignore files excluded (folders end with a slash).
    """

    sha256: str
    tar: bytes = field(repr=False)
    files: tuple[tuple[str, str], ...] = field(repr=False)
    root: Path
    entry: str | None = None
    ignored: tuple[str, ...] = field(default=(), repr=False)


def snapshot_script(script: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> Snapshot:
    """Snapshot the folder of a script. Raises SnapshotError if it is missing, too large, or has links that leave it."""
    script = script.absolute()
    if not script.is_file():
        raise SnapshotError(
            f"script {str(script)!r} is not there",
            "give a path relative to the DAG file, or an absolute one, that this Airflow worker can read",
            "script_missing",
        )
    return snapshot_folder(script.parent, entry=script.name, max_bytes=max_bytes, max_files=max_files)


def snapshot_module(
    module: str,
    search: Sequence[str] | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> Snapshot:
    """Snapshot the package that a module belongs to (``package.train``: the whole of ``package``), or its single file.

    Looks in ``search`` (default: ``sys.path``) without importing anything. Raises SnapshotError.
    """
    path = list(search if search is not None else sys.path)
    top, *inner = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, path)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = spec is not None
    below = locations
    name = top
    for part in inner:
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, below)
        found = found and spec is not None
        below = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not found:
        raise SnapshotError(
            f"module {module!r} is not there",
            "it must be importable by this Airflow worker: in the DAG bundle, in plugins, or installed",
            "script_missing",
        )
    if locations:
        folder = Path(locations[0]).absolute()
        return snapshot_folder(folder, prefix=f"{top}/", max_bytes=max_bytes, max_files=max_files)
    assert spec is not None  # found, and a plain module
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise SnapshotError(
            f"module {module!r} has no source file", "name a module written in Python", "script_missing"
        )
    return _pack(Path(spec.origin).parent, [(Path(spec.origin).name, Path(spec.origin))], "", None, (), max_bytes)


def snapshot_folder(
    folder: Path,
    *,
    entry: str | None = None,
    prefix: str = "",
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> Snapshot:
    """Snapshot a folder: sorted names, no times, no owners. ``entry`` (relative) is included even if ignored.

    ``prefix`` is prepended to every name in the tar. Links inside the folder are followed. A service's state directory
    below the folder is left out. Raises SnapshotError if the folder itself is one, if a link leaves the folder, or if
    there are more than ``max_files`` files or ``max_bytes`` bytes.
    """
    root = folder.resolve()
    found: list[tuple[str, Path]] = []
    ignored: list[str] = []
    for name, path in _walk(root, "", IgnoreRules.for_folder(root), (root,), entry, ignored):
        found.append((name, path))
        if len(found) > max_files:
            raise SnapshotError(f"{folder} holds more than {max_files} files", _LIMIT_HINT, "snapshot_too_large")
    if not found:
        raise SnapshotError(f"{folder} holds no file that is not ignored", _LIMIT_HINT, "snapshot_empty")
    return _pack(root, found, prefix, entry, tuple(ignored), max_bytes)


def _walk(
    folder: Path, below: str, rules: IgnoreRules, way: tuple[Path, ...], entry: str | None, ignored: list[str]
) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of every file to include. ``way`` is the chain of resolved folders down to this."""
    root = way[0]
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise SnapshotError(f"{folder} cannot be read: {error}", "make it readable, or ignore it") from error
    if LOCK_FILE in names and below:
        ignored.append(below)
        return
    if LOCK_FILE in names:
        raise SnapshotError(
            f"{folder} is the state directory of a service, with its keys and its database",
            "keep the training code in a folder of its own, or set ELASTICFLOW_STATE_DIR to another one",
            "snapshot_state",
        )
    rules = rules.entering(folder, names)
    for name in names:
        path, relative = folder / name, f"{below}{name}"
        is_folder = path.is_dir()
        if relative != entry and rules.ignores(path, is_folder=is_folder):
            if not rules.is_rubbish(name):
                ignored.append(relative + "/" * is_folder)
            continue
        if path.is_symlink():
            target = path.resolve()
            if not target.is_relative_to(root):
                raise SnapshotError(
                    f"{path} is a link that leaves {root}: it points to {target}",
                    "copy what it points to into the folder, or ignore the link",
                    "snapshot_link",
                )
            if is_folder and target in way:
                raise SnapshotError(f"{path} is a link to a folder that it stands in", "ignore it", "snapshot_link")
        if is_folder:
            yield from _walk(path, f"{relative}/", rules, (*way, path.resolve()), entry, ignored)
        elif path.is_file():
            yield relative, path
        # Sockets, pipes and dangling links are not code.


def _pack(
    root: Path,
    found: Sequence[tuple[str, Path]],
    prefix: str,
    entry: str | None,
    ignored: tuple[str, ...],
    max_bytes: int,
) -> Snapshot:
    sizes = [(path.stat().st_size, name) for name, path in found]
    total = sum(size for size, _ in sizes)
    if total > max_bytes:
        largest = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for size, name in sorted(sizes, reverse=True)[:3])
        raise SnapshotError(
            f"{root} holds {total / 2**20:.1f} MiB of files, more than the limit of {max_bytes / 2**20:.0f} MiB;"
            f" the largest are {largest}",
            _LIMIT_HINT,
            "snapshot_too_large",
        )
    buffer = io.BytesIO()
    hashes: list[tuple[str, str]] = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted((prefix + name, path) for name, path in found):
            try:
                content = path.read_bytes()
                executable = path.stat().st_mode & 0o100
            except OSError as error:
                raise SnapshotError(f"{path} cannot be read: {error}", "make it readable, or ignore it") from error
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if executable else 0o644
            archive.addfile(member, io.BytesIO(content))
            hashes.append((name, hashlib.sha256(content).hexdigest()))
    tar = buffer.getvalue()
    return Snapshot(
        sha256=hashlib.sha256(tar).hexdigest(),
        tar=tar,
        files=tuple(hashes),
        root=root,
        entry=None if entry is None else prefix + entry,
        ignored=ignored,
    )
