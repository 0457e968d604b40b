"""Checks that the service and a node have the same folder for checkpoints, and that both can write there."""

from __future__ import annotations

import secrets
from pathlib import Path


class SharedStorage:
    """The folder that all nodes share. Raises OSError when the service cannot write there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self.name, self.content = f".elasticflow-probe-{secrets.token_hex(8)}", secrets.token_hex(8)
        (self._folder / self.name).write_text(self.content)

    def check_answer(self, instance: str) -> None:
        """Check what an agent has written after it had read the probe. Raises ValueError when it is not here."""
        theirs = self._folder / f"{self.name}.{instance}"
        try:
            theirs.unlink()
        except FileNotFoundError:
            raise ValueError(
                f"what it writes to the shared folder does not arrive in {self._folder}: mount the same storage on all"
            ) from None

    def close(self) -> None:
        """Remove the probe."""
        (self._folder / self.name).unlink(missing_ok=True)
