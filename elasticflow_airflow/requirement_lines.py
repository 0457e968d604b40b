"""Requirements of a training: lines as in a requirements file, without pip's options.

Standard library and ``packaging`` only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

_HASH: Final = re.compile(r"\s+--hash=\w+:[0-9a-fA-F]+")
_COMMENT: Final = re.compile(r"(^|\s)#.*$")
_INCLUDE: Final = re.compile(r"(?:-r|--requirement)(?:\s+|=)?(\S.*)")
_PASSWORD: Final = re.compile(r"(?<=://)(?:[^/@\s:]*:[^/@\s]+|(?<=https://)[^/@\s]+|(?<=http://)[^/@\s]+)@")
_DEEPEST: Final = 10


def read_requirements(path: Path) -> tuple[str, ...]:
    """Return the requirements in a file, and in those that it includes by ``-r``, one a line, without comments.

    Raises ValueError that names file and line for what cannot be used, OSError when a file cannot be read.
    """
    return tuple(_read(path, 0))


def _read(path: Path, depth: int) -> list[str]:
    if depth > _DEEPEST:
        raise ValueError(f"{path}: it is included by itself")
    found: list[str] = []
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for raw in text.splitlines():
        line = " ".join(_COMMENT.sub("", raw).split())
        include = _INCLUDE.fullmatch(line)
        if include is not None:
            found += _read(path.parent / include[1], depth + 1)
        elif line:
            problem = requirement_problem(line)
            if problem is not None:
                raise ValueError(f"{path}: {without_passwords(line)!r} {problem}")
            found.append(line)
    return found


def requirement_problem(line: str) -> str | None:
    """Return what is wrong with a requirement like ``accelerate==1.2.3 --hash=sha256:...``, or None."""
    text = _HASH.sub("", line).strip()
    if text.startswith("-"):
        return (
            "is an option of pip: only requirements reach the machines that train; there, uv's own settings say which"
            " index to use (UV_INDEX_URL, or uv.toml)"
        )
    if _PASSWORD.search(text):
        return "has a password in its URL, and others can read it: let uv's own settings on the machines hold it"
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return f"is no requirement like 'accelerate==1.2.3': {str(error).splitlines()[0]}"
    return None


def project_of(line: str) -> str:
    """Return the normalized name of the project that a requirement is for. Raises InvalidRequirement."""
    return canonicalize_name(Requirement(_HASH.sub("", line).strip()).name)


def without_passwords(text: str) -> str:
    """Return a text without the user names and passwords of its URLs."""
    return _PASSWORD.sub("***@", text)
