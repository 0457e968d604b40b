"""Atomic file writing: an interrupted run leaves no partial file behind."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Yield a text file (UTF-8, no newline translation) that replaces ``path`` at the end if nothing is raised."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", newline="", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
