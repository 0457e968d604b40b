"""Unpacks an uploaded tar in a process of its own, which ends when an archive exceeds limits no honest one reaches.

Run as a file by an isolated interpreter, so that it starts within a few hundredths of a second. Uses only the standard
library, nothing of this package. Prints the outcome as JSON on standard output; the caller treats any other outcome as
a refusal, too.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import sys
import tarfile
from pathlib import Path

CPU_LIMIT_S = 20
MEMORY_LIMIT_BYTES = 512 << 20
WALL_LIMIT_S = 120
MOST_FOLDERS_A_FILE = 4
DEEPEST = 64
"""Folders above a file; deeper trees exceed the limits of paths sooner or later."""
LARGEST_HEADER_BYTES = 8 << 10
"""For extended headers, which hold long names: Python's parsers need more than linear time in their length."""

_OF_THE_ARCHIVE = frozenset(
    {errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
)
"""Errors that the system raises for invalid or conflicting names. All other errors are faults of the disk."""
_EXTENDED = (
    tarfile.GNUTYPE_LONGLINK,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.XHDTYPE,
)
_IGNORE_HINT = "put it in a folder of its own, or ignore what it does not need"
_TAR_HINT = "send an uncompressed tar of relative paths"


class RefusedError(Exception):
    """The archive is not acceptable. ``too_large`` distinguishes an exceeded limit from a malformed tar."""

    def __init__(self, message: str, hint: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.hint, self.too_large = hint, too_large


class _Member(tarfile.TarInfo):
    """Checks each header before the library reads what the header announces."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Parse a header; refuses extended headers that are too long, and negative lengths."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _EXTENDED and header.size > LARGEST_HEADER_BYTES):
            message = f"the code is no acceptable tar: it has a header of {header.size} bytes"
            raise RefusedError(f"{message}, and at most {LARGEST_HEADER_BYTES} are read", _TAR_HINT)
        return header


def unpack(tar_file: Path, folder: Path, max_bytes: int, max_files: int) -> None:
    """Unpack into an empty folder, and make it read-only. Raises RefusedError, or OSError for faults of the disk."""
    try:
        with tarfile.open(tar_file, mode="r:", tarinfo=_Member) as tar:
            size, folders = 0, set[str]()
            for files, member in enumerate(tar, start=1):
                size += member.size
                _check(member, files, size, folders, max_bytes, max_files)
                tar.extract(member, folder, filter="data")
    except OSError as error:
        if error.errno not in _OF_THE_ARCHIVE:
            raise
        raise RefusedError(f"the code is no acceptable tar: {error.strerror}", _TAR_HINT) from error
    except (tarfile.TarError, ValueError, ArithmeticError, RecursionError) as error:
        raise RefusedError(f"the code is no acceptable tar: {_printable(str(error))}", _TAR_HINT) from error
    _make_read_only(folder)


def _check(member: tarfile.TarInfo, files: int, size: int, folders: set[str], max_bytes: int, max_files: int) -> None:
    if files > max_files:
        raise RefusedError(f"the code has more than {max_files} files", _IGNORE_HINT, too_large=True)
    if member.size < 0:
        raise RefusedError(f"the code is no acceptable tar: a file of {member.size} bytes", _TAR_HINT)
    if size > max_bytes:
        raise RefusedError(f"the code unpacks to more than {max_bytes} bytes", _IGNORE_HINT, too_large=True)
    name = _printable(member.name)
    if member.name.startswith("/"):
        raise RefusedError(f"{name} is an absolute path", _TAR_HINT)
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise RefusedError(f"{name} is neither a file nor a folder", "send files, not links or devices")
    if member.name.count("/") > DEEPEST:
        raise RefusedError(f"{name} is more than {DEEPEST} folders deep", "send code with fewer folders")
    above = os.path.dirname(member.name)
    while above and above not in folders:
        folders.add(above)
        above = os.path.dirname(above)
    if len(folders) > MOST_FOLDERS_A_FILE * max_files:
        raise RefusedError(
            f"the code has more than {MOST_FOLDERS_A_FILE * max_files} folders", _IGNORE_HINT, too_large=True
        )


def _printable(text: str) -> str:
    """Return a text as a literal with every control character escaped, cut to 200 characters."""
    shown = ascii(text)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _make_read_only(folder: Path) -> None:
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(root, name)
            path.chmod(0o500 if path.stat().st_mode & stat.S_IXUSR else 0o400)
        if Path(root) != folder:
            os.chmod(root, 0o500)


def main() -> None:
    """``unpacking.py TAR FOLDER MAX_BYTES MAX_FILES``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.alarm(WALL_LIMIT_S)  # The service kills this process then; this is for the case that the service died.
    os.umask(0o077)
    tar_file, folder, max_bytes, max_files = sys.argv[1:]
    try:
        unpack(Path(tar_file), Path(folder), int(max_bytes), int(max_files))
        answer: dict[str, object] = {"unpacked": True}
    except RefusedError as error:
        answer = {"refused": str(error), "hint": error.hint, "too_large": error.too_large}
    except OSError as error:
        answer = {"errno": error.errno}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
