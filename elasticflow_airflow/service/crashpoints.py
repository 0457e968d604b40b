"""Named points at which a test may kill this process: before and after every commit and every engine call.

Inert unless ``ELASTICFLOW_CRASH_AT=<n>`` is set when the process starts: then the process is killed at the n-th point
that it passes (``SIGKILL``, so that nothing cleans up). ``ELASTICFLOW_CRASH_LOG`` names a file to log that point in.
"""

from __future__ import annotations

import itertools
import os
import signal

_crash_at = int(os.environ.get("ELASTICFLOW_CRASH_AT", "0"))
_crash_log = os.environ.get("ELASTICFLOW_CRASH_LOG")
_passed = itertools.count(1)


def arm(crash_at: int) -> None:
    """Restart the count, and die at the ``crash_at``-th point (0: never). For tests that fork."""
    global _crash_at, _passed
    _crash_at = crash_at
    _passed = itertools.count(1)


def point(name: str) -> None:
    """Pass a point; does nothing outside tests."""
    if not _crash_at:
        return
    if next(_passed) == _crash_at:
        if _crash_log:
            with open(_crash_log, "a") as log:
                log.write(f"{_crash_at} {name}\n")
        os.kill(os.getpid(), signal.SIGKILL)
