"""What may fail for a while is done again. The standard library is all that this module may import."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between one try and the next; after the last one the error is raised."""


def retried(do: Callable[[], T], on: type[Exception]) -> T:
    """Return what ``do`` returns; it is called again, after growing pauses, as long as it raises ``on``."""
    for pause_s in PAUSES_S:
        try:
            return do()
        except on:
            sleep(pause_s)
    return do()
