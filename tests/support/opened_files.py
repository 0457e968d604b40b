"""Sees who opens the files of jobs in this process: an engine may, and what it calls; the service itself may not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = "elasticflow_airflow."
_DOORS = (f"{_PACKAGE}engines.", f"{_PACKAGE}testing.")
_SHARED = f"{_PACKAGE}runtime."
"""Whose helpers read files for whoever calls them."""
_EVENTS = frozenset(
    {"open", "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree", "os.symlink"}
    | {f"os.{name}" for name in ("chmod", "link", "listdir", "mkdir", "remove", "rename", "rmdir", "scandir")}
)


class OpenedFiles:
    """An audit hook, which cannot be taken away again: ``jobs`` says whose files it looks at, ``wrong`` what it saw."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.wrong: list[str] = []
        sys.addaudithook(self._see)

    def watch(self, jobs_dir: Path) -> None:
        """Look at what is opened below the folders of these jobs."""
        self.jobs.append(f"{jobs_dir}{os.sep}")

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.jobs or event not in _EVENTS:
            return
        for path in arguments[:2]:
            if isinstance(path, str | os.PathLike) and self._is_of_a_job(str(path)):
                module = _who(sys._getframe(1))
                if module is not None:
                    self.wrong.append(f"{module}: {event} {path}")

    def _is_of_a_job(self, path: str) -> bool:
        return any(path.startswith(jobs) and os.sep in path[len(jobs) :] for jobs in self.jobs)


def _who(frame: FrameType | None) -> str | None:
    """The module of the service that opens it by itself; None: an engine does, or a test."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_PACKAGE) and not module.startswith(_SHARED):
            return None if module.startswith(_DOORS) else module
        frame = frame.f_back
    return None
