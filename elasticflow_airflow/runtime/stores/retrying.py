"""Retries operations that may fail temporarily. May import the standard library only."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts, in seconds; an error after the last pause is raised."""


def retried(do: Callable[[], T], on: type[Exception]) -> T:
    """Return the result of ``do``; retry it after growing pauses, up to a limit, while it raises ``on``."""
    for pause_s in PAUSES_S:
        try:
            return do()
        except on:
            sleep(pause_s)
    return do()
