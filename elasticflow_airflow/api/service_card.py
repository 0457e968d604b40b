"""The service of a state directory, or the last one: ``service.json``, for people, scripts and clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, ValidationError

from elasticflow_airflow.api.base import Wire

LOCK_FILE = "service.lock"
"""The service of a state directory locks this file in it. The file is never removed, so it marks a state directory."""
_FILE = "service.json"
_NEW = f".{_FILE}.new"  # A fixed name: the writer holds the directory's lock, and replaces what a killed one left.


class ServiceCard(Wire):
    """Describes a service. Times are UTC seconds; ``ended_at`` None: it is running, or it was killed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int
    host: str
    started_at: float
    version: str
    endpoint: str
    embedded: bool = True
    """Whether a client started it on demand, with the client's settings. True for versions without this field."""
    ended_at: float | None = None
    idle: bool | None = None
    """Whether it ended because it was idle, rather than being told to stop. None for versions without this field."""

    @property
    def is_expected(self) -> bool:
        """Whether it was started with ``elasticflow serve`` and has not ended cleanly.

        Such a service is expected to come back, and no other may take its place.
        """
        return not self.embedded and self.ended_at is None

    @property
    def owner(self) -> dict[str, str | int | float]:
        """The fields that identify the service to others."""
        return self.model_dump(include={"pid", "host", "started_at", "version", "endpoint"})

    @classmethod
    def read(cls, state_dir: Path) -> Self | None:
        """Read the card in a state directory; None if there is none, or it cannot be read."""
        try:
            return cls.model_validate_json((state_dir / _FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, state_dir: Path) -> None:
        """Replace the card in a state directory atomically. Raises OSError."""
        (state_dir / _NEW).write_text(self.model_dump_json(indent=1))
        os.replace(state_dir / _NEW, state_dir / _FILE)
