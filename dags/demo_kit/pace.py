"""How fast is this machine? A second of matrix products of the model's shapes, on all cores.

The demo's deadlines are made for two ordinary cores. Where they are slower, or busy, the same promises could not be
kept: then the deadlines are stretched by as much, and the demo says so. Needs numpy only.
"""

from __future__ import annotations

import time

import numpy as np

REFERENCE_GFLOPS = 60.0
"""What the deadlines are made for: products of this size (float32) on each slot, in GFLOP/s."""
MOST = 5.0
"""Deadlines are stretched by this factor at most."""
EPOCHS, MOST_EPOCHS = 3, 20
"""Epochs of the thorough training on an ordinary machine, and at most on a fast one."""
_SHAPE = (1536, 384, 1536)
_SECONDS = 1.0


def stretch_for(gflops: float) -> float:
    """By how much to stretch the deadlines on a machine of this speed: 1 on an ordinary one, or a faster one."""
    return min(MOST, max(1.0, REFERENCE_GFLOPS / max(gflops, 1.0)))


def epochs_for(gflops: float) -> int:
    """How many epochs keep a training of this speed busy for long enough that there is something to schedule."""
    return min(MOST_EPOCHS, round(EPOCHS * max(1.0, gflops / REFERENCE_GFLOPS) ** 0.7))


def measure(slots: int) -> float:
    """GFLOP/s of each of so many slots that share all cores, when all of them compute."""
    rows, inner, columns = _SHAPE
    left, right = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
    np.matmul(left, right)  # The first product starts the library.
    began = time.perf_counter()
    count = 0
    while (took := time.perf_counter() - began) < _SECONDS:
        np.matmul(left, right)
        count += 1
    return 2.0 * rows * inner * columns * count / took / 1e9 / slots
