"""Finds imports of the runtime in a user's source code without running it. May import the standard library only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

RUNTIME = "elasticflow_airflow.runtime"
_MOST_FILES = 500
"""Maximum number of a script's modules to inspect: it must not take long, and each takes about a millisecond."""


def names_runtime(path: Path) -> bool:
    """Return whether a file imports the runtime, even within a function that is never called."""
    return any(_is_runtime(name) for name in _imports(path))


def leads_to_runtime(start: Path, code_dir: Path) -> bool:
    """Return whether a file, or any module below ``code_dir`` that it imports transitively, imports the runtime."""
    found, ahead = {start}, [start]
    while ahead and len(found) <= _MOST_FILES:
        path = ahead.pop()
        for name in _imports(path):
            if _is_runtime(name):
                return True
            new = {file for file in _files(name, path, start.parent, code_dir) if file not in found}
            found |= new
            ahead += sorted(new)
    return False


def file_of_module(module: str, code_dir: Path) -> Path:
    """Return the file that ``python -m`` runs if the module is below ``code_dir``."""
    path = code_dir.joinpath(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _is_runtime(name: str) -> bool:
    return f"{name}.".startswith(f"{RUNTIME}.")


def _imports(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, relative ones with their dots; none if it cannot be parsed as Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (f"{module}{alias.name}" for alias in node.names)


def _files(name: str, importer: Path, script_dir: Path, code_dir: Path) -> Iterator[Path]:
    """Yield the user's files behind a dotted name, including its packages; the last part may be a module or member."""
    level = len(name) - len(name.lstrip("."))
    if level:
        roots, name = [importer.parents[min(level, len(importer.parents)) - 1]], name[level:]
    else:
        roots = [script_dir, code_dir]
    parts = name.split(".")
    for root in roots:
        for end in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:end])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if code_dir in file.parents and file.is_file():
                    yield file
