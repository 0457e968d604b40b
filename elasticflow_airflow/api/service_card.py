"""Who serves a state directory, or did last: ``service.json``, for people, scripts and who looks for the service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, ValidationError

from elasticflow_airflow.api.base import Wire

LOCK_FILE = "service.lock"
"""Whoever serves a state directory holds a lock on this file in it; it stays there, so that it tells one."""
_FILE = "service.json"
_NEW = f".{_FILE}.new"  # One name: who writes holds the directory's lock, and what a killed one left is replaced.


class ServiceCard(Wire):
    """A service. Times are UTC seconds; ``ended_at`` None: it serves, or it was killed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int
    host: str
    started_at: float
    version: str
    endpoint: str
    embedded: bool = True
    """It was started by whoever needed it, with his settings; versions before did not say."""
    ended_at: float | None = None
    idle: bool | None = None
    """Whether it has ended because nobody needed it; else it was told to. None: versions before did not say."""

    @property
    def is_expected(self) -> bool:
        """Somebody serves it, or did until it was killed: it is to come again, and nobody else may take its place."""
        return not self.embedded and self.ended_at is None

    @property
    def owner(self) -> dict[str, str | int | float]:
        """What names it to somebody else."""
        return self.model_dump(include={"pid", "host", "started_at", "version", "endpoint"})

    @classmethod
    def read(cls, state_dir: Path) -> Self | None:
        """The card in a state directory; None where no service has left one that can be read."""
        try:
            return cls.model_validate_json((state_dir / _FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, state_dir: Path) -> None:
        """Replace the card in a state directory atomically. Raises OSError."""
        (state_dir / _NEW).write_text(self.model_dump_json(indent=1))
        os.replace(state_dir / _NEW, state_dir / _FILE)
