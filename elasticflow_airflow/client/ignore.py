"""Which files of a folder are no part of the code: what ``.gitignore`` and ``.airflowignore`` say, and rubbish.

Patterns are those of git. A file's patterns hold for the folder it stands in and everything below; a ``.gitignore``
above the folder counts too, up to the root of the working tree. Reads ignore files, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pathspec

IGNORE_FILES: Final = (".gitignore", ".airflowignore")

_RUBBISH: Final = frozenset(
    {
        ".DS_Store",
        ".git",
        ".hg",
        ".hypothesis",
        ".idea",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".svn",
        ".tox",
        ".venv",
        ".vscode",
        "__pycache__",
        "node_modules",
    }
)


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules that hold in one folder: (folder that a file of patterns stands in, its patterns), outermost first."""

    specs: tuple[tuple[Path, pathspec.GitIgnoreSpec], ...] = ()

    @classmethod
    def for_folder(cls, root: Path) -> IgnoreRules:
        """Rules from above ``root``: the ``.gitignore`` files between the root of its git working tree and it."""
        above: list[Path] = []
        for folder in (root, *root.parents):
            if folder != root:
                above.append(folder)
            if (folder / ".git").exists():
                break
        else:
            return cls()  # not in a working tree: nobody's .gitignore above is meant for it
        rules = cls()
        for folder in reversed(above):
            if (folder / ".gitignore").is_file():
                rules = rules.entering(folder, (".gitignore",))
        return rules

    def entering(self, folder: Path, names: Sequence[str]) -> IgnoreRules:
        """Rules inside ``folder``, which holds ``names``."""
        added = tuple(
            (folder, pathspec.GitIgnoreSpec.from_lines((folder / name).read_text(errors="replace").splitlines()))
            for name in IGNORE_FILES
            if name in names and (folder / name).is_file()
        )
        return IgnoreRules(self.specs + added) if added else self

    def ignores(self, path: Path, *, is_folder: bool) -> bool:
        """Whether a path is to be left out. The innermost file that has a pattern for it decides."""
        if self.is_rubbish(path.name):
            return True
        verdict = False
        for folder, spec in self.specs:
            relative = path.relative_to(folder).as_posix() + "/" * is_folder
            result = spec.check_file(relative).include
            if result is not None:
                verdict = result
        return verdict

    @staticmethod
    def is_rubbish(name: str) -> bool:
        """Whether it is left out everywhere, whatever ignore files say, and without a word."""
        return name in _RUBBISH or name.endswith((".pyc", ".pyo"))
