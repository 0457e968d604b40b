"""Keeps the code of jobs by its hash: checks an uploaded tar, unpacks it, and makes it read-only.

Knows paths and bytes only. A snapshot folder is complete when it is there: it is renamed into place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tarfile
import tempfile
from pathlib import Path

SHA256 = re.compile(r"^[0-9a-f]{64}$")


class SnapshotRefusedError(Exception):
    """The upload is not acceptable. ``too_large`` tells a limit from a malformed tar."""

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
        """Folder of a snapshot. Raises ValueError for what is no hash."""
        if not SHA256.match(sha256):
            raise ValueError(f"{sha256!r} is not a SHA-256 in hexadecimal")
        return self._folder / sha256

    def has(self, sha256: str) -> bool:
        """Whether the code is there."""
        return self.path(sha256).is_dir()

    def incoming(self) -> Path:
        """A new empty file to write an upload into, on the same disk."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".upload-")
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
        unpacked = Path(tempfile.mkdtemp(dir=self._folder, prefix=".unpack-"))
        try:
            self._unpack(tar_file, unpacked)
            _make_read_only(unpacked)
            os.rename(unpacked, target)
        except OSError:
            if not target.is_dir():  # Else another upload of the same code was faster.
                raise
        finally:
            if unpacked.exists():
                remove_tree(unpacked)

    def _unpack(self, tar_file: Path, folder: Path) -> None:
        try:
            with tarfile.open(tar_file, mode="r:") as tar:
                size = 0
                for files, member in enumerate(tar, start=1):
                    size += member.size
                    if files > self._max_files:
                        raise SnapshotRefusedError(
                            f"the code has more than {self._max_files} files",
                            "put it in a folder of its own, or ignore what it does not need",
                            too_large=True,
                        )
                    if size > self.max_bytes:
                        raise SnapshotRefusedError(
                            f"the code unpacks to more than {self.max_bytes} bytes",
                            "put it in a folder of its own, or ignore what it does not need",
                            too_large=True,
                        )
                    if member.name.startswith("/"):
                        raise SnapshotRefusedError(
                            f"{member.name!r} is an absolute path", "send an uncompressed tar of relative paths"
                        )
                    if not (member.isfile() or member.isdir()):
                        raise SnapshotRefusedError(
                            f"{member.name!r} is neither a file nor a folder", "send files, not links or devices"
                        )
                    tar.extract(member, folder, filter="data")
        except tarfile.TarError as error:
            raise SnapshotRefusedError(
                f"the code is no acceptable tar: {error}", "send an uncompressed tar of relative paths"
            ) from error

    def files(self, sha256: str) -> dict[str, str]:
        """Digest of every file of a snapshot, by its relative path; empty when it is not there."""
        root = self.path(sha256)
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def changed_files(self, old: str, new: str) -> list[str]:
        """Relative paths of files that differ between two snapshots."""
        before, after = self.files(old), self.files(new)
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _make_read_only(folder: Path) -> None:
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(root, name)
            path.chmod(0o500 if path.stat().st_mode & stat.S_IXUSR else 0o400)
        if Path(root) != folder:
            os.chmod(root, 0o500)


def remove_tree(folder: Path) -> None:
    """Remove a folder, read-only parts included."""
    for root, _, _ in os.walk(folder):
        os.chmod(root, 0o700)
    shutil.rmtree(folder)
