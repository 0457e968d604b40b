"""What a worker measures of itself while it trains: where its time goes, its peak memory, and how noisy gradients are.

Cheap enough to be always on: a reading of the clock where a step goes from one thing to the next, and norms of
gradients in one step of many. Knows nothing of groups and files. May import torch and the standard library only.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

NORMS_BUDGET = 0.003
"""Fraction of the training's time that norms of gradients may take."""
_FEWEST_STEPS_BETWEEN = 8
_NOISE_MEMORY = 0.9
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024


class Activity(StrEnum):
    """What the main thread of a worker is at; a moment counts for one of them."""

    DATA = "data"
    """Waiting for samples."""
    COMPUTE = "compute"
    """Forward and backward passes, and the optimizer; sums that overlap with them, too."""
    REDUCE = "reduce"
    """Waiting for sums over all workers after the last backward pass, and so for who is slower."""
    WAIT = "wait"
    """Agreeing with the others that a step is done."""
    PAUSE = "pause"
    """Changing workers in place, or going on without who died."""
    SAVE = "save"
    """Making the copy that a checkpoint is written from."""
    OTHER = "other"
    """What the script does between its steps."""


class Stopwatch:
    """Seconds in each activity, from the beginning of the session on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._since = clock()
        self.activity = Activity.OTHER
        """What it is at now."""

    def enter(self, activity: Activity) -> Activity:
        """From now on it is at this; returns what it was at."""
        now = self._clock()
        before = self.activity
        self._seconds[before] += now - self._since
        self._since, self.activity = now, activity
        return before

    def shift(self, source: Activity, target: Activity, seconds: float) -> None:
        """Count seconds of one activity for another: a device was at work while its host already waited."""
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def read(self) -> dict[str, float]:
        """Seconds so far, under the names of reports (``compute_s``, ...)."""
        self.enter(self.activity)
        return {f"{activity}_s": seconds for activity, seconds in self._seconds.items()}


class DeviceTimer:
    """How long a CUDA device has computed in a step: its host queues work, and waits for it only in the sums."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._begin, self._end = make_event(), make_event()
        self._state = "idle"
        self._began_s = 0.0
        self._host_s = 0.0

    @classmethod
    def of(cls, device: torch.device) -> DeviceTimer | None:
        """A timer for a CUDA device; other devices compute while their host waits."""
        if device.type != "cuda":
            return None
        make: Callable[..., Any] = torch.cuda.Event
        return cls(lambda: make(enable_timing=True))

    def begin(self) -> None:
        """A step's passes begin."""
        self._begin.record()
        self._began_s, self._state = time.perf_counter(), "computing"

    def end(self) -> None:
        """The last of them is queued."""
        if self._state == "computing":
            self._end.record()
            self._host_s, self._state = time.perf_counter() - self._began_s, "ended"

    def take(self) -> float:
        """Seconds that the device computed on after :meth:`end`. Once a step, after the device has come to its end."""
        if self._state != "ended":
            return 0.0
        self._state = "idle"
        if not self._end.query():
            return 0.0
        return max(0.0, float(self._begin.elapsed_time(self._end)) / 1000.0 - self._host_s)


@dataclass(slots=True)
class Window:
    """What has grown since the last look: the difference of two readings."""

    _before: dict[str, float] = field(default_factory=dict)

    def take(self, now: Mapping[str, float]) -> dict[str, float]:
        """Growth of each number since the last call."""
        grown = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = dict(now)
        return grown


class Meter:
    """The measurements of one worker: activities, steps, samples, memory."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._watch = device, Stopwatch(clock)
        self._timer = DeviceTimer.of(device)
        self._steps = self._samples = self._own_samples = 0
        self._in_step = (0, 0)
        self._progress, self._worker = Window(), Window()
        self._clock, self._worker_at_s = clock, clock()

    def enter(self, activity: Activity) -> Activity:
        """From now on the worker is at this; returns what it was at."""
        return self._watch.enter(activity)

    def step_begins(self, samples: int, own_samples: int) -> None:
        """A step, or another attempt at it, begins: samples of the global batch, and this worker's share of them."""
        self._in_step = (samples, own_samples)
        self._watch.enter(Activity.COMPUTE)
        if self._timer is not None:
            self._timer.begin()

    def reducing(self) -> None:
        """The last backward pass of this worker is done, or queued."""
        self._watch.enter(Activity.REDUCE)
        if self._timer is not None:
            self._timer.end()

    def reduced(self) -> None:
        """The sums are there."""
        self._watch.enter(Activity.WAIT)
        if self._timer is not None:
            self._watch.shift(Activity.REDUCE, Activity.COMPUTE, self._timer.take())

    def step_done(self) -> None:
        """A step counts."""
        self._steps += 1
        self._samples += self._in_step[0]
        self._own_samples += self._in_step[1]
        self._in_step = (0, 0)
        self._watch.enter(Activity.OTHER)

    def progress(self) -> dict[str, float]:
        """What PROGRESS says of the time since the last call: ``samples`` of all workers, seconds of this one."""
        taken = self._progress.take({"samples": self._samples, **self._watch.read()})
        return {**taken, "samples": int(taken["samples"]), **self._memory()}

    def worker(self) -> dict[str, float] | None:
        """What WORKER says of the time since the last call or restart; None when there was no step."""
        self._worker_at_s = self._clock()
        now = {"window_steps": self._steps, "samples": self._own_samples, **self._watch.read()}
        taken = self._worker.take(now)
        steps, samples = int(taken["window_steps"]), int(taken["samples"])
        return {**taken, "window_steps": steps, "samples": samples, **self._memory()} if steps else None

    def worker_is_due(self, interval_s: float) -> bool:
        """Whether the last WORKER, or restart, was so long ago."""
        return self._clock() - self._worker_at_s >= interval_s

    def restart(self) -> None:
        """Begin the window of WORKER anew: what was before is not comparable."""
        self.worker()

    def begin(self) -> None:
        """Training begins: what was before was getting ready."""
        self.progress()
        self.restart()

    def _memory(self) -> dict[str, float]:
        found: dict[str, float] = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT}
        if self._device.type == "cuda":
            found["device_memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return found


class TimedFetcher:
    """A fetcher whose caller's waiting counts as time for data."""

    def __init__(self, fetcher: Any, meter: Meter) -> None:
        self._fetcher, self._meter = fetcher, meter

    def close(self) -> None:
        """See :class:`elasticflow_airflow.runtime.samples.sample_order.Fetcher`."""
        self._fetcher.close()

    def expect(self, tickets: Any) -> None:
        """See :class:`elasticflow_airflow.runtime.samples.sample_order.Fetcher`."""
        before = self._meter.enter(Activity.DATA)
        try:
            self._fetcher.expect(tickets)
        finally:
            self._meter.enter(before)

    def get(self, tickets: Any) -> Any:
        """See :class:`elasticflow_airflow.runtime.samples.sample_order.Fetcher`."""
        before = self._meter.enter(Activity.DATA)
        try:
            return self._fetcher.get(tickets)
        finally:
            self._meter.enter(before)

    def __getattr__(self, name: str) -> Any:
        """All else is the fetcher's own."""
        return getattr(self._fetcher, name)


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, on the gradients' device; reads each once and copies none."""
    norms = torch._foreach_norm(list(gradients), 2.0)
    device = norms[0].device
    return torch.stack([norm.to(device, torch.float64) for norm in norms]).square().sum()


class NoiseScale:
    """The simple gradient noise scale, tr(Sigma) / |G|^2, in samples: the batch from which on larger ones pay little.

    From norms of gradients of a small and of a big batch (McCandlish, Kaplan, Amodei et al., "An Empirical Model of
    Large-Batch Training", arXiv:1812.06162, appendix A.1): the small one is a logical worker's share, the big one the
    global batch. Numerator and denominator are averaged each for itself over the steps that were measured: their ratio
    in a single step is biased, and far too noisy.
    """

    def __init__(self) -> None:
        self._trace = self._square = 0.0
        self.measured = 0
        """Steps that were measured."""

    def add(self, small_squares: Sequence[float], big_square: float, *, big_batch: int) -> None:
        """Take one step in: squared norms of the mean gradients of each share, and of the whole batch, in samples.

        Raises ValueError when there are less than two shares, or they cannot be equal.
        """
        shares = len(small_squares)
        if shares < 2 or big_batch % shares:
            raise ValueError(f"{big_batch} samples in {shares} shares: the shares must be equal, and two at least")
        small_batch = big_batch / shares
        small_square = sum(small_squares) / shares
        square = (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)
        trace = (small_square - big_square) / (1.0 / small_batch - 1.0 / big_batch)
        fresh = 1.0 - _NOISE_MEMORY if self.measured else 1.0
        self._square += fresh * (square - self._square)
        self._trace += fresh * (trace - self._trace)
        self.measured += 1

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None while unknown: not measured, or the noise hides the gradient altogether."""
        return self._trace / self._square if self._square > 0 and self._trace > 0 else None


class NormSchedule:
    """In which steps norms are taken, so that all of them together cost ``NORMS_BUDGET`` of the time at most."""

    def __init__(self) -> None:
        self._steps_since = 0
        self._step_s: float | None = None
        self._owed_s = 0.0
        self._at_s: float | None = None

    def step_done(self, norms_s: float) -> None:
        """A step is over; ``norms_s`` of it went into norms (0: none were taken)."""
        now = time.perf_counter()
        if norms_s:
            # No more than a step's time: a machine that stood still meanwhile must not end the measuring for hours.
            self._owed_s += min(norms_s, self._step_s or norms_s)
            self._steps_since = 0
        elif self._at_s is not None:
            took_s = now - self._at_s
            self._step_s = took_s if self._step_s is None else min(self._step_s * 1.1, took_s)
        self._steps_since += 1
        self._owed_s = max(0.0, self._owed_s - NORMS_BUDGET * (self._step_s or 0.0))
        self._at_s = now

    @property
    def due(self) -> bool:
        """Whether the next step should be measured: some steps are done since, and what norms cost is made up for."""
        return self._step_s is not None and self._steps_since >= _FEWEST_STEPS_BETWEEN and self._owed_s <= 0.0


class GradientNorms:
    """Squared norms of the leaves of one step, taken where each is whole and still alone."""

    def __init__(self) -> None:
        self.enabled = False
        """Whether this step is measured."""
        self.seconds = 0.0
        """What that has cost in this step."""
        self._squares: list[Tensor | None] = []

    def begin(self, *, enabled: bool) -> None:
        """Another step, or attempt at it."""
        self.enabled, self.seconds = enabled, 0.0
        self._squares = []

    def leaf(self, gradients: Iterable[Tensor | None]) -> None:
        """Take a leaf's norm, if this step is measured."""
        if self.enabled:
            self._squares.append(self._take(gradients))

    def leaves(self) -> list[float]:
        """The leaves' squared norms, in their order; 0 for one without gradients."""
        return [0.0 if square is None else float(square) for square in self._squares]

    def total(self, gradients: Iterable[Tensor | None]) -> float:
        """The squared norm of the sum."""
        square = self._take(gradients)
        return 0.0 if square is None else float(square)

    def _take(self, gradients: Iterable[Tensor | None]) -> Tensor | None:
        began_s = time.perf_counter()
        here = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        square = squared_norm(here) if here else None
        self.seconds += time.perf_counter() - began_s
        return square
