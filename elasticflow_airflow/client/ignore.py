"""Decides which files of a folder are not code: by ``.gitignore`` and ``.airflowignore``, and a built-in list.

Patterns are those of git. A file's patterns apply to its own folder and everything below; ``.gitignore`` files above
the folder apply too, up to the root of the working tree. Reads ignore files only.
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
    """The rules that apply in one folder: pairs (folder of an ignore file, its patterns), outermost first."""

    specs: tuple[tuple[Path, pathspec.GitIgnoreSpec], ...] = ()

    @classmethod
    def for_folder(cls, root: Path) -> IgnoreRules:
        """Return the rules from above ``root``: the ``.gitignore`` files from its git working tree's root on down."""
        above: list[Path] = []
        for folder in (root, *root.parents):
            if folder != root:
                above.append(folder)
            if (folder / ".git").exists():
                break
        else:
            return cls()  # not in a working tree, so no .gitignore above applies to it
        rules = cls()
        for folder in reversed(above):
            if (folder / ".gitignore").is_file():
                rules = rules.entering(folder, (".gitignore",))
        return rules

    def entering(self, folder: Path, names: Sequence[str]) -> IgnoreRules:
        """Return the rules inside ``folder``, whose entries are ``names``."""
        added = tuple(
            (folder, pathspec.GitIgnoreSpec.from_lines((folder / name).read_text(errors="replace").splitlines()))
            for name in IGNORE_FILES
            if name in names and (folder / name).is_file()
        )
        return IgnoreRules(self.specs + added) if added else self

    def ignores(self, path: Path, *, is_folder: bool) -> bool:
        """Whether to leave a path out. The innermost ignore file with a matching pattern decides."""
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
        """Whether a name is always left out, regardless of ignore files, and without being reported."""
        return name in _RUBBISH or name.endswith((".pyc", ".pyo"))
