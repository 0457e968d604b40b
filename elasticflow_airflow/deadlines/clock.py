"""The clock of the Airflow side: the machine's clock, or a simulated clock in a test.

Used only for times that are compared with the service's (deadlines, waiting). Knows nothing about the simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_clock: Callable[[], float] = time.time


def now_s() -> float:
    """Return UTC seconds since the epoch."""
    return _clock()


@contextmanager
def using(clock: Callable[[], float]) -> Iterator[None]:
    """Make :func:`now_s` use another clock inside the context, in the whole process."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
