"""How fast is this machine? A second of matrix products of the model's shapes, one process a slot, all at once.

The demo's deadlines are made for two ordinary cores. Where they are slower, or busy, the same promises could not be
kept: then the deadlines are stretched by as much, and the demo says so. Needs numpy only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

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


def measure(processes: int, environment: Mapping[str, str]) -> float:
    """GFLOP/s of the slowest of so many processes that compute at the same time, each with its share of the cores."""
    share = str(max(1, len(os.sched_getaffinity(0)) // processes))
    threads = {"OMP_NUM_THREADS": share, "OPENBLAS_NUM_THREADS": share, "MKL_NUM_THREADS": share}
    running = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env={**environment, **threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    return min(float(process.communicate()[0]) for process in running)


def _compute() -> float:
    import numpy as np

    rows, inner, columns = _SHAPE
    left, right = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
    np.matmul(left, right)  # The first product starts the library.
    began = time.perf_counter()
    count = 0
    while (took := time.perf_counter() - began) < _SECONDS:
        np.matmul(left, right)
        count += 1
    return 2.0 * rows * inner * columns * count / took / 1e9


if __name__ == "__main__":
    print(_compute())
