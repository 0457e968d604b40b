"""Whether a user's code names the runtime: of its text, so that nothing of it need run. The standard library only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

RUNTIME = "elasticflow_airflow.runtime"
_MOST_FILES = 500
"""Of a script's modules so many are looked through: it must not take long, and each takes about a millisecond."""


def names_runtime(path: Path) -> bool:
    """Whether a file imports the runtime, also within a function that is never called."""
    return any(_is_runtime(name) for name in _imports(path))


def leads_to_runtime(start: Path, code_dir: Path) -> bool:
    """Whether a file, or a module below ``code_dir`` that it imports, or that one's modules, imports the runtime."""
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
    """The file that ``python -m`` runs, where it is one below ``code_dir``."""
    path = code_dir.joinpath(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _is_runtime(name: str) -> bool:
    return f"{name}.".startswith(f"{RUNTIME}.")


def _imports(path: Path) -> Iterator[str]:
    """What a file imports; of ``from . import x`` with its dots. Nothing where it cannot be read as Python."""
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
    """The user's files behind a name: a module, or the package and the module or member that it ends with."""
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
