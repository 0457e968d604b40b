"""How long a save stops training: ours, beside torch.save and torch.distributed.checkpoint's thread, in one run.

    python benchmarks/bench_checkpoint.py [--megabytes 200] [--saves 5] [--step-s 0.05] [--folder FOLDER]
        [--write]

A training (a multi-layer perceptron with AdamW, one thread) saves every few steps. *Stall* is the time for which the
call stops it, *write* the time until the checkpoint is on disk and flushed, *meanwhile* a step while it is being
written, as a multiple of an undisturbed one. Medians; first saves apart, ours once with memory prepared beforehand, as
sessions do, and once without. torch.save does not flush; we do that for it, so that both mean the same by "on disk".
A writer of low priority takes the longer the busier the machine is: the stall is given as a part of that, and of the
write that the trainer itself makes when it waits.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from results import parser_of, show, table
from torch import nn

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer

WIDTH = 1024


class Training:
    """Something to be disturbed: its state is three times its weights."""

    def __init__(self, megabytes: int, step_s: float) -> None:
        layers = max(1, round(megabytes * 1e6 / (12 * WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.registered = Registered(self.model, {"optimizer": self.optimizer})
        self._inputs = torch.randn(8, WIDTH)
        self.step()
        began_s = time.perf_counter()
        self.step()
        # Large states make long steps here; more of the small ones make up for it.
        self._repeats = max(1, round(step_s / (time.perf_counter() - began_s)))

    @property
    def nbytes(self) -> int:
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def step(self) -> None:
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed_step(self) -> float:
        """Seconds of a step (several of them, where one is short)."""
        began_s = time.perf_counter()
        for _ in range(self._repeats):
            self.step()
        return time.perf_counter() - began_s

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@dataclass
class Measured:
    """Of one way: the first save apart."""

    stalls_s: list[float] = field(default_factory=list)
    writes_s: list[float] = field(default_factory=list)
    meanwhile_s: list[float] = field(default_factory=list)


Begin = Callable[[int], Callable[[], bool]]
"""Starts the nth save, and returns a question: is it on disk?"""


def measure(training: Training, ways: dict[str, Begin], saves: int) -> tuple[float, dict[str, Measured]]:
    """Measure all ways in turn, again and again, so that what else the machine does meets all alike.

    Returns the seconds of an undisturbed step, and what each way took.
    """
    measured = {name: Measured() for name in ways}
    undisturbed_s = []
    for number in range(1 + saves):
        for name, begin in ways.items():
            undisturbed_s += [training.timed_step() for _ in range(3)]
            began_s = time.perf_counter()
            is_done = begin(number)
            measured[name].stalls_s.append(time.perf_counter() - began_s)
            while not is_done():
                measured[name].meanwhile_s.append(training.timed_step())
            measured[name].writes_s.append(time.perf_counter() - began_s)
    return statistics.median(undisturbed_s), measured


def ours(training: Training, folder: Path, *, prepared: bool) -> tuple[Begin, Checkpointer]:
    saver = Checkpointer(folder, incarnation=1, promotes=True, keep=1, buffers=1)
    if prepared:
        saver.prepare(training.registered)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            training.timed_step()

    def begin(number: int) -> Callable[[], bool]:
        saver.save(training.registered, generation=1, step=number, metadata={})

        def is_done() -> bool:
            saver.poll()
            return not saver.is_busy

        return is_done

    return begin, saver


def ours_waiting(training: Training, folder: Path) -> Begin:
    """As before leaving and at the end: written by the trainer itself, at its own priority."""
    saver = Checkpointer(folder, incarnation=1, promotes=True, keep=1)

    def begin(number: int) -> Callable[[], bool]:
        saver.save(training.registered, generation=1, step=number, metadata={}, wait=True)
        return lambda: True

    return begin


def flush_folder(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def by_torch_save(training: Training, folder: Path) -> Begin:
    folder.mkdir()

    def begin(_number: int) -> Callable[[], bool]:
        torch.save(training.state(), folder / "new.pt")
        flush_folder(folder)
        os.replace(folder / "new.pt", folder / "checkpoint.pt")
        return lambda: True

    return begin


def by_dcp_thread(training: Training, folder: Path) -> Begin:
    def begin(_number: int) -> Callable[[], bool]:
        saving = dcp.async_save(training.state(), checkpoint_id=str(folder / "checkpoint"))
        assert isinstance(saving, Future)
        return saving.done

    return begin


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the state")
    parser.add_argument("--saves", type=int, default=5, help="saves after the first one")
    parser.add_argument("--step-s", type=float, default=0.05, help="about how long a step takes")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (a temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    training = Training(options.megabytes, options.step_s)
    with tempfile.TemporaryDirectory(prefix="elasticflow-bench-", dir=options.folder) as temporary:
        folder = Path(temporary)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        prepared, one = ours(training, folder / "prepared", prepared=True)
        unprepared, other = ours(training, folder / "unprepared", prepared=False)
        ways = {
            "ours, prepared": prepared,
            "ours, not prepared": unprepared,
            "ours, wait=True": ours_waiting(training, folder / "waiting"),
            "torch.save + fsync": by_torch_save(training, folder / "torch"),
            "dcp async (thread)": by_dcp_thread(training, folder / "dcp"),
        }
        undisturbed_s, measured = measure(training, ways, options.saves)
        one.close()
        other.close()
        dist.destroy_process_group()

    rows, stalls_s, writes_s = [], {}, {}
    for name, way in measured.items():
        later_s, write_s = statistics.median(way.stalls_s[1:]), statistics.median(way.writes_s[1:])
        meanwhile = statistics.median(way.meanwhile_s) / undisturbed_s if way.meanwhile_s else None
        stalls_s[name], writes_s[name] = later_s, write_s
        rows.append(
            [
                name,
                f"{way.stalls_s[0] * 1e3:.0f}",
                f"{later_s * 1e3:.0f}",
                f"{write_s * 1e3:.0f}",
                f"{100 * later_s / write_s:.1f} %",
                "-" if meanwhile is None else f"x{meanwhile:.2f}",
                f"{later_s / training.nbytes * 1e9:.3f}",
            ]
        )
    ours_s = stalls_s["ours, prepared"]
    times = [f"{name} {stalls_s[name] / ours_s:.1f} times" for name in ("torch.save + fsync", "dcp async (thread)")]
    said = (
        f"A state of {training.nbytes / 1e6:.0f} MB, undisturbed steps of {undisturbed_s * 1e3:.0f} ms, one thread,"
        f" medians of {options.saves} saves:"
    )
    beside = (
        f"Our stall is {ours_s / writes_s['ours, wait=True']:.1%} of a write that the trainer makes itself."
        f" As long as ours stop training: {', '.join(times)}."
    )
    lines = table(["", "first stall ms", "stall ms", "write ms", "of the write", "step meanwhile", "s per GB"], rows)
    show("checkpoint", [said, "", *lines, "", beside], options)


if __name__ == "__main__":
    main()
