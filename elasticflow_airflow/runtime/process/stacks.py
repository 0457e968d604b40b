"""Makes a trainer write the stacks of its threads to a file when it receives a signal.

Works while a thread is blocked in a collective or in native code, because the handler is C and needs no Python lock.
Does not use SIGUSR1 or SIGUSR2, which scripts use themselves. May import the standard library only.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from io import FileIO
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 8
"""Terminates a process that has no handler for it: check for the handler before sending it."""

_file: FileIO | None = None


def register(path: Path) -> None:
    """Append all stacks to ``path`` at each ``SIGNAL``. Registers no handler if the file cannot be opened."""
    global _file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a")
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    except OSError as error:
        sys.stderr.write(f"elasticflow: the stacks of this worker cannot be asked for: {error}\n")
        return
    _file = file  # The handler holds only its descriptor, so the file must stay open.
