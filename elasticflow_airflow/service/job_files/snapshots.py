"""Stores the code of jobs by its hash: checks an uploaded tar, and has it unpacked, read-only.

Knows only paths and bytes. A snapshot folder that exists is complete, because it is renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import structlog

from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.service.job_files import unpacking

log = structlog.get_logger(__name__)


_UPLOAD, _UNPACK = ".upload-", ".unpack-"
SHA256 = re.compile(r"^[0-9a-f]{64}$")


class SnapshotRefusedError(Exception):
    """The upload is not acceptable. ``too_large`` distinguishes an exceeded limit from a malformed tar."""

    def __init__(self, message: str, hint: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.too_large = too_large


class Snapshots:
    """The folder ``snapshots/<sha256>`` of a state directory."""

    def __init__(self, folder: Path, *, max_bytes: int, max_files: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._max_files = max_files

    def path(self, sha256: str) -> Path:
        """Return the folder of a snapshot. Raises ValueError if ``sha256`` is not a hash."""
        if not SHA256.match(sha256):
            raise ValueError(f"{sha256!r} is not a SHA-256 in hexadecimal")
        return self._folder / sha256

    def has(self, sha256: str) -> bool:
        """Whether the code was uploaded."""
        return self.path(sha256).is_dir()

    def incoming(self) -> Path:
        """Create an empty file for an upload, on the same disk as the snapshots."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=_UPLOAD)
        os.close(descriptor)
        return Path(name)

    def accept(self, sha256: str, tar_file: Path) -> None:
        """Unpack an uploaded tar and keep it under its hash. Raises SnapshotRefusedError; idempotent."""
        target = self.path(sha256)
        if target.is_dir():
            return
        digest = hashlib.sha256()
        with tar_file.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != sha256:
            raise SnapshotRefusedError(
                f"the uploaded code has the SHA-256 {digest.hexdigest()}, not {sha256}", "upload it again"
            )
        unpacked = Path(tempfile.mkdtemp(dir=self._folder, prefix=_UNPACK))
        try:
            self._unpack(tar_file, unpacked)
            os.rename(unpacked, target)
        except OSError:
            if not target.is_dir():  # Otherwise another upload of the same code was faster.
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

    def files(self, sha256: str) -> dict[str, str]:
        """Return the digest of every file of a snapshot by relative path; empty if the snapshot does not exist."""
        root = self.path(sha256)
        return {
            _printable(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def changed_files(self, old: str, new: str) -> list[str]:
        """Return the relative paths of files that differ between two snapshots."""
        before, after = self.files(old), self.files(new)
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _printable(path: Path) -> str:
    """Return a path as text that can be stored and shown, whatever its bytes are."""
    return os.fsencode(path).decode(errors="backslashreplace")
