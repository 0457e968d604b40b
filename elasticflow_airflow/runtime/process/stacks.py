"""A trainer that can be asked what it is doing: it writes the stacks of its threads into a file when it gets a signal.

Works while a thread is blocked in a collective or in native code, as the handler is C and needs no lock of Python. Not
SIGUSR1 or SIGUSR2, which scripts use for themselves. The standard library only.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from io import FileIO
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 8
"""Ends a process that has no handler for it: look before you send it."""

_file: FileIO | None = None


def register(path: Path) -> None:
    """Write all stacks to the end of ``path`` at each ``SIGNAL``. Without room on the disk there is no handler."""
    global _file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a")
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    except OSError as error:
        sys.stderr.write(f"elasticflow: the stacks of this worker cannot be asked for: {error}\n")
        return
    _file = file  # The handler has only its descriptor: it must stay open.
