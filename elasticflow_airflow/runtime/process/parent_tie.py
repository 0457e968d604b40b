"""Binds a process to its parent: on Linux it dies when the thread that started it ends, for any reason.

A killed supervisor must leave no torchrun agent behind, and a killed agent no trainer. May import the standard library
only; it runs before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_ENV = "ELASTICFLOW_PARENT_PID"
"""Environment variable: pid of the process that must be the parent; set again at each link of the chain."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; exit at once if it died before the request took effect."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; this worker could outlive its supervisor")
    if os.getppid() != parent_pid:
        sys.stderr.write(f"elasticflow: process {parent_pid}, which started this one, is gone; leaving\n")
        sys.stderr.flush()
        os._exit(1)


def pin_to_cores(cores: str) -> None:
    """Pin this process (and its children) to cores given as "0,1"; if empty, do nothing."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
