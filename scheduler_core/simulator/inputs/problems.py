"""The exception for invalid input: the problem, its file and line, and what to do."""

from __future__ import annotations

from pathlib import Path


class InputError(ValueError):
    """A trace, a curve table or an option that cannot be simulated; the message names file and line."""

    def __init__(self, problem: str, path: Path | None = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}:{line}: " if line is not None else f"{path}: "
        super().__init__(where + problem)
