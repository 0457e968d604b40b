"""How fast is this machine? A second of matrix products of the model's shapes, on all cores.

The demo is made for two ordinary cores. Where they are slower, or busy, it trains on fewer texts and for fewer epochs,
so that it takes about as long; what is left cannot shrink, so deadlines are stretched as well. It says so. Needs numpy
only.
"""

from __future__ import annotations

import time

import numpy as np

REFERENCE_GFLOPS = 60.0
"""What the deadlines are made for: products of this size (float32) on each slot, in GFLOP/s."""
MOST = 5.0
"""Deadlines are stretched by this factor at most."""
FEWEST_EPOCHS, EPOCHS, MOST_EPOCHS = 2, 1.5, 12
"""Epochs of the thorough training on a slow machine, on an ordinary one, and at most on a fast one."""
FEWEST_ROWS, ROWS = 576, 1152
"""Texts to train on, on a slow machine and on an ordinary one: with fewer the models would learn too little."""
_ROWS_STEP = 96
"""Texts come in whole batches, as many of each class."""
_SHAPE = (1536, 384, 1536)
_SECONDS = 1.0


def stretch_for(gflops: float) -> float:
    """By how much to stretch the deadlines on a machine of this speed: 1 on an ordinary one, or a faster one."""
    return min(MOST, max(1.0, REFERENCE_GFLOPS / max(gflops, 1.0)))


def epochs_for(gflops: float) -> int:
    """How many epochs keep a training of this speed busy for long enough that there is something to schedule."""
    return max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(EPOCHS * (gflops / REFERENCE_GFLOPS) ** 0.7)))


def rows_for(gflops: float) -> int:
    """How many texts a machine of this speed trains on."""
    fitting = round(ROWS * gflops / REFERENCE_GFLOPS / _ROWS_STEP) * _ROWS_STEP
    return max(FEWEST_ROWS, min(ROWS, fitting))


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
