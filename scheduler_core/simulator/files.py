"""Files that are written whole or not at all: an interrupted run leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8, line ends as written) that takes its place at the end, or never where something is raised."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
