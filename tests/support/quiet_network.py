"""Keeps apart, across processes, who changes addresses of this machine and a browser that is bothered by it.

Chromium ends all of its requests (``ERR_NETWORK_CHANGED``) when any interface gets or loses an address.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = Path(tempfile.gettempdir()) / f"elasticflow-tests-{os.getuid()}-addresses.lock"
_OTHERS_S = 0.05
"""For others that wait, between one use and the next."""


@contextmanager
def quiet_network() -> Iterator[None]:
    """Wait for, then hold, the only right to change the addresses of this machine, or to rely on them."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    time.sleep(_OTHERS_S)
