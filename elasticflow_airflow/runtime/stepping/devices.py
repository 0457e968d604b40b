"""Choice of a worker's device, and the settings that make its arithmetic reproducible bit for bit.

May import torch and the standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

import torch

from elasticflow_airflow.runtime.protocol import threads_in

DEFAULT_THREADS = 1
"""Default number of torch threads of each worker on a CPU, in consistent mode."""
_GIVEN = ("GPU-", "MIG-")
"""Prefixes of the device names that an engine assigns to workers."""
_CUBLAS_ENV, _CUBLAS_FIXED = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_INDUCTOR_ENV = "TORCHINDUCTOR_DETERMINISTIC"


def pick_device(environ: MutableMapping[str, str] = os.environ) -> torch.device:
    """Return this worker's GPU and make it the current device; return the CPU if there is none.

    Workers of a bare torchrun divide the visible GPUs among themselves, and share one if there are too few. Raises
    RuntimeError if the worker was assigned a GPU that torch does not find: training on the CPU could take days.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    given = environ.get("CUDA_VISIBLE_DEVICES", "")
    if given.startswith(_GIVEN):
        why = (
            "it was built without CUDA: give python= an interpreter whose torch has it"
            if torch.version.cuda is None
            else "look at what nvidia-smi and python -c 'import torch; torch.zeros(1).cuda()' say on this machine"
        )
        raise RuntimeError(
            f"this worker was given a GPU (CUDA_VISIBLE_DEVICES={given}), and torch {torch.__version__} does not find "
            f"it: {why}. To train on CPUs, start the service with CUDA_VISIBLE_DEVICES set to nothing"
        )
    return torch.device("cpu")


def make_repeatable(device: torch.device, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make CUDA's libraries choose the same kernels in every run and on every worker. Does nothing for a CPU.

    Call it before the first matrix product. Nondeterministic operators warn when they are used; if the script has
    asked torch to raise an error instead, that setting is kept. TF32 is left as it is, since it is deterministic.
    """
    if device.type != "cuda":
        return
    environ.setdefault(_CUBLAS_ENV, _CUBLAS_FIXED[0])
    environ.setdefault(_INDUCTOR_ENV, "1")
    # Benchmarking may select another algorithm on each worker.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if not torch.are_deterministic_algorithms_enabled():
        # Unlike use_deterministic_algorithms(), it does not import torch's compiler.
        torch.set_deterministic_debug_mode("warn")
        compiler = sys.modules.get("torch._inductor.config")
        if compiler is not None:
            compiler.deterministic = True  # type: ignore[attr-defined]  # a module of settings


def choose_threads(device: torch.device, *said: int | None, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of torch threads in consistent mode; None keeps torch's own choice.

    Another number changes the bits of convolutions and sums, so it must depend on the task and not on the machine.
    It is the first of ``said`` that is not None; else, on a CPU, ``OMP_NUM_THREADS`` in ``environ``, else one.
    """
    for threads in said:
        if threads is not None:
            return threads
    if device.type != "cpu":
        return None
    return threads_in(environ or {}) or DEFAULT_THREADS


def what_may_not_repeat(device: torch.device, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Return settings under which workers may compute different bits, as sentences for warnings at the start."""
    if device.type != "cuda":
        return []
    found = []
    if torch.backends.cudnn.benchmark:
        found.append(
            "torch.backends.cudnn.benchmark is on: each worker may choose other algorithms, and the weights then depend"
            " on how many there are. Leave it off"
        )
    if environ.get(_CUBLAS_ENV) not in _CUBLAS_FIXED:
        found.append(
            f"{_CUBLAS_ENV}={environ.get(_CUBLAS_ENV, '')}: matrix products may come out otherwise each time. Set it to"
            f" {' or '.join(_CUBLAS_FIXED)} before Python starts"
        )
    if not torch.are_deterministic_algorithms_enabled():
        found.append(
            "torch.use_deterministic_algorithms() was turned off: operators may come out otherwise each time. Leave it"
            " on, or submit with consistency='fast'"
        )
    return found
