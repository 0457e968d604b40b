"""What time it is for the Airflow side: the machine's clock, or in a test that simulates, the simulated one.

Only what is compared with times of the service asks here (deadlines, waiting); knows nothing of who simulates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_clock: Callable[[], float] = time.time


def now_s() -> float:
    """UTC seconds since the epoch."""
    return _clock()


@contextmanager
def using(clock: Callable[[], float]) -> Iterator[None]:
    """Have :func:`now_s` ask another clock for a while, in this whole process."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
