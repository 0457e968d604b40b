"""Stores the code of jobs by its hash: checks an uploaded tar, and has it unpacked, read-only.

Knows only paths and bytes. A snapshot folder that exists is complete, because it is renamed into place. Where several
services share a database, the uploaded tars are in it, and the folders are only a cache of one service.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import structlog

from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.service.job_files import unpacking

log = structlog.get_logger(__name__)


_UPLOAD, _UNPACK = ".upload-", ".unpack-"
SHA256 = re.compile(r"^[0-9a-f]{64}$")
_KNOWN_FOR_S = 60.0
"""For how long it is not asked again whether the database has an archive: submits of the same code come together."""
_TOUCH_EVERY_S = 86400.0


class SnapshotRefusedError(Exception):
    """The upload is not acceptable. ``too_large`` distinguishes an exceeded limit from a malformed tar."""

    def __init__(self, message: str, hint: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.too_large = too_large


class SnapshotLostError(Exception):
    """The code of a job is neither in the folder nor in the database; the message says what to do."""


class Archives(Protocol):
    """The uploaded tars in a database that several services share (see ``store/snapshot_archives.py``)."""

    def has(self, sha256: str) -> bool:
        """Whether a tar is stored, and stays so for a day at least."""
        ...

    def put(self, sha256: str, archive: Path) -> None:
        """Store a tar. Idempotent."""
        ...

    def copy_to(self, sha256: str, file: Path) -> bool:
        """Write a tar into a file; returns False if it is not stored."""
        ...

    def discard(self, sha256: str) -> None:
        """Delete a tar that is damaged."""
        ...


class Snapshots:
    """The folder ``snapshots/<sha256>`` of a state directory. Thread-safe; raises what ``archives`` raises."""

    def __init__(self, folder: Path, *, max_bytes: int, max_files: int, archives: Archives | None = None) -> None:
        """``archives``: where the uploaded tars are kept for other services; None if there can be no others."""
        self._folder = folder
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._archives = archives
        self._known_until_s: dict[str, float] = {}
        """Until when the database is known to have a tar, in monotonic time."""

    def path(self, sha256: str) -> Path:
        """Return the folder of a snapshot. Raises ValueError if ``sha256`` is not a hash."""
        if not SHA256.match(sha256):
            raise ValueError(f"{sha256!r} is not a SHA-256 in hexadecimal")
        return self._folder / sha256

    def has(self, sha256: str) -> bool:
        """Whether the code was uploaded, to whichever service, so that a job that is submitted now can run it.

        Code that is in the folder only, and not in the database, does not count: no other service could run the job.
        """
        here = self.path(sha256).is_dir()
        if self._archives is None:
            return here
        now_s = time.monotonic()
        if here and now_s < self._known_until_s.get(sha256, 0.0):
            return True
        stored = self._archives.has(sha256)
        if stored:
            self._known_until_s[sha256] = now_s + _KNOWN_FOR_S
        return stored

    def ensure(self, sha256: str) -> Path:
        """Return the folder of a snapshot; it is unpacked from the database if it is missing.

        Raises SnapshotLostError when it is nowhere, or what is stored is damaged, and OSError for faults of the disk.
        """
        target = self.path(sha256)
        if target.is_dir() and self._note_use(target):
            return target
        if self._archives is None:
            raise SnapshotLostError(f"the code {sha256} is not in {self._folder}: submit the job again")
        incoming = self.incoming()
        try:
            if not self._archives.copy_to(sha256, incoming):
                raise SnapshotLostError(f"the code {sha256} is not in the database: submit the job again")
            found = _digest(incoming)
            if found != sha256:
                self._archives.discard(sha256)
                log.error("the code of jobs is damaged in the database, and was deleted there", sha256=sha256)
                raise SnapshotLostError(
                    f"the code {sha256} is damaged in the database (its SHA-256 is {found}): submit the job again"
                )
            self._unpack_into(target, incoming)
        except SnapshotRefusedError as error:
            raise SnapshotLostError(f"the code {sha256} cannot be unpacked here: {error}") from error
        finally:
            incoming.unlink(missing_ok=True)
        return target

    def incoming(self) -> Path:
        """Create an empty file for an upload, on the same disk as the snapshots."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=_UPLOAD)
        os.close(descriptor)
        return Path(name)

    def accept(self, sha256: str, tar_file: Path) -> None:
        """Unpack an uploaded tar and keep it under its hash, for all services. Raises SnapshotRefusedError; idempotent.

        Where services share a database, it is stored there before this returns.
        """
        target = self.path(sha256)
        here, stored = target.is_dir(), self._archives is None or self._archives.has(sha256)
        if here and stored:
            return
        digest = _digest(tar_file)
        if digest != sha256:
            raise SnapshotRefusedError(f"the uploaded code has the SHA-256 {digest}, not {sha256}", "upload it again")
        if not here:
            self._unpack_into(target, tar_file)
        if self._archives is not None and not stored:
            self._archives.put(sha256, tar_file)

    def _unpack_into(self, target: Path, tar_file: Path) -> None:
        """Unpack a tar beside a folder that is missing, and rename it into place."""
        unpacked = Path(tempfile.mkdtemp(dir=self._folder, prefix=_UNPACK))
        try:
            self._unpack(tar_file, unpacked)
            os.rename(unpacked, target)
        except OSError:
            if not target.is_dir():  # Otherwise another thread was faster with the same code.
                raise
        finally:
            if unpacked.exists():
                remove(unpacked)

    def _unpack(self, tar_file: Path, folder: Path) -> None:
        """Unpack in a separate process, which has its own limits of memory and time, and its own interpreter lock."""
        limits = (str(self.max_bytes), str(self._max_files))
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-X", "utf8", unpacking.__file__, tar_file, folder, *limits],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={},
                start_new_session=True,  # A Ctrl-C that ends the service does not interrupt uploads.
                timeout=unpacking.WALL_LIMIT_S,
                check=False,
            )
            answer = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise SnapshotRefusedError(
                f"the code is no acceptable tar: it was not unpacked with {unpacking.CPU_LIMIT_S} s of processor time"
                f" and {unpacking.MEMORY_LIMIT_BYTES >> 20} MiB of memory",
                "send an uncompressed tar of relative paths",
            ) from error
        if "refused" in answer:
            raise SnapshotRefusedError(answer["refused"], answer["hint"], too_large=answer["too_large"])
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"] or 0))

    def remove_leftovers(self) -> None:
        """Remove the leftovers of uploads that a killed service was handling; failures are logged."""
        for path in sorted(self._folder.glob(f"{_UPLOAD}*")) + sorted(self._folder.glob(f"{_UNPACK}*")):
            try:
                remove(path)
            except OSError as error:
                log.warning("what an upload left could not be removed", path=str(path), error=str(error))

    def share(self, in_use: Collection[str]) -> None:
        """Store the code of jobs that a release without the database's archives has kept in the folder only.

        Its tars are gone. They are made again from the folders, as the client makes them, so that the hash is the same;
        what another program had packed differently is logged, and stays here only.
        """
        for sha256 in sorted(in_use):
            if self._archives is None or not self.path(sha256).is_dir() or self._archives.has(sha256):
                continue
            packed = self.incoming()
            try:
                _pack(self.path(sha256), packed)
                if _digest(packed) == sha256:
                    self._archives.put(sha256, packed)
                    continue
            finally:
                packed.unlink()
            log.warning(
                "the code of a job was not packed by this project's client, so it cannot be stored in the database: no"
                " other service can start the job again, until it is submitted again",
                sha256=sha256,
            )

    def forget_unused(self, in_use: Collection[str], before: float) -> None:
        """Remove folders that are not in use and were last submitted before this time (UTC seconds).

        Only where the database has the code: it is unpacked again when it is needed. Failures are logged.
        """
        if self._archives is None:
            return
        for path in sorted(self._folder.glob("*")):
            if not SHA256.match(path.name) or path.name in in_use:
                continue
            try:
                if path.stat().st_mtime < before:
                    doomed = Path(tempfile.mkdtemp(dir=self._folder, prefix=_UNPACK))
                    os.rename(path, doomed)  # A folder that exists is complete, also while it is removed.
                    remove(doomed)
            except OSError as error:
                log.warning("code that is no longer used could not be removed", path=str(path), error=str(error))
        now_s = time.monotonic()
        self._known_until_s = {one: until_s for one, until_s in list(self._known_until_s.items()) if until_s > now_s}

    def _note_use(self, folder: Path) -> bool:
        """Keep a folder of the cache for longer; returns False if it has just been removed as unused."""
        if self._archives is None:
            return True  # Nothing removes it.
        try:
            if time.time() - folder.stat().st_mtime > _TOUCH_EVERY_S:
                os.utime(folder)
        except FileNotFoundError:
            return False
        return True

    def files(self, sha256: str) -> dict[str, str]:
        """Return the digest of every file of a snapshot by relative path; empty if the snapshot does not exist."""
        root = self.path(sha256)
        return {
            _printable(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def changed_files(self, old: str, new: str) -> list[str]:
        """Return the relative paths of files that differ between two snapshots. Raises as :meth:`ensure` does."""
        self.ensure(old)
        self.ensure(new)
        before, after = self.files(old), self.files(new)
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _pack(folder: Path, tar_file: Path) -> None:
    """Pack a snapshot's folder as the client packs code (``client/snapshot.py``): sorted names, no times, no owners."""
    names = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    with tarfile.open(tar_file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in names:
            member, found = tarfile.TarInfo(name), path.stat()
            member.size = found.st_size
            member.mode = 0o755 if found.st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                archive.addfile(member, file)


def _printable(path: Path) -> str:
    """Return a path as text that can be stored and shown, whatever its bytes are."""
    return os.fsencode(path).decode(errors="backslashreplace")
