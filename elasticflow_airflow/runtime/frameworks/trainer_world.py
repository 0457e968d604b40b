"""Keeps accelerate, and with it the Trainer, from forming its own world: each process appears to train alone.

Only the rank remains, by which the Trainer decides which process prints and writes files. May import torch, accelerate
and the standard library only; knows nothing of sessions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import PartialState  # type: ignore[import-untyped]  # without stubs

_NAMES = (
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
"""Environment variables in which accelerate looks for a world."""


def hide_world() -> None:
    """Make every ``PartialState`` created from now on that of a single process. A second call does nothing."""
    if hasattr(PartialState.__init__, "__wrapped__"):
        return
    original = PartialState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        fresh = not PartialState._shared_state
        local_rank = os.environ.get("LOCAL_RANK")
        with _without_world():
            original(self, *args, **kwargs)
        if fresh:
            if self.device.type == "cuda" and local_rank is not None:
                # Workers of a bare torchrun divide the visible GPUs among themselves; several may share one.
                index = int(local_rank) % torch.cuda.device_count()
                PartialState._shared_state["device"] = torch.device("cuda", index)
            set_rank(int(os.environ.get("RANK", "0")))

    PartialState.__init__ = init


def set_rank(rank: int) -> None:
    """Set this process's current rank in accelerate, and thereby in ``TrainingArguments``."""
    state = PartialState._shared_state
    if state:
        state["process_index"] = state["local_process_index"] = rank


@contextmanager
def _without_world() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _NAMES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
