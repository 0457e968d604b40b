"""Measurements of a training worker: time per activity, peak memory, and the noise of the gradients.

They are cheap enough to be always on: a clock reading whenever the activity changes, and gradient norms in only a few
steps. This module knows nothing of groups and files. May import torch and the standard library only.
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
"""Fraction of the training time that gradient norms may take."""
_FEWEST_STEPS_BETWEEN = 8
_NOISE_MEMORY = 0.9
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024


class Activity(StrEnum):
    """Activity of a worker's main thread; every moment counts for exactly one."""

    DATA = "data"
    """Waiting for samples."""
    COMPUTE = "compute"
    """Forward and backward passes, and the optimizer; includes sums that overlap with them."""
    REDUCE = "reduce"
    """Waiting for sums over all workers after the last backward pass, and thus for slower workers."""
    WAIT = "wait"
    """Agreeing with the other workers that a step is done."""
    PAUSE = "pause"
    """Changing workers in place, or recovering from a worker's death."""
    SAVE = "save"
    """Making the copy that a checkpoint is written from."""
    OTHER = "other"
    """The script's own code between its steps."""


class Stopwatch:
    """Counts the seconds in each activity since the beginning of the session."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._since = clock()
        self.activity = Activity.OTHER
        """The current activity."""

    def enter(self, activity: Activity) -> Activity:
        """Switch to an activity; return the previous one."""
        now = self._clock()
        before = self.activity
        self._seconds[before] += now - self._since
        self._since, self.activity = now, activity
        return before

    def shift(self, source: Activity, target: Activity, seconds: float) -> None:
        """Move seconds from one activity to another, because a device still computed while its host waited."""
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def read(self) -> dict[str, float]:
        """Return the seconds so far, by the names used in reports (``compute_s``, ...)."""
        self.enter(self.activity)
        return {f"{activity}_s": seconds for activity, seconds in self._seconds.items()}


class DeviceTimer:
    """Measures how long a CUDA device computes in a step: the host only queues work, and waits for it in the sums."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._begin, self._end = make_event(), make_event()
        self._state = "idle"
        self._began_s = 0.0
        self._host_s = 0.0

    @classmethod
    def of(cls, device: torch.device) -> DeviceTimer | None:
        """Return a timer for a CUDA device; None for other devices, whose host waits while they compute."""
        if device.type != "cuda":
            return None
        make: Callable[..., Any] = torch.cuda.Event
        return cls(lambda: make(enable_timing=True))

    def begin(self) -> None:
        """Record the beginning of a step's passes."""
        self._begin.record()
        self._began_s, self._state = time.perf_counter(), "computing"

    def end(self) -> None:
        """Record that the last pass is queued."""
        if self._state == "computing":
            self._end.record()
            self._host_s, self._state = time.perf_counter() - self._began_s, "ended"

    def take(self) -> float:
        """Return the seconds that the device still computed after :meth:`end`; 0 if it has not finished.

        Call it once per step, after the device has finished.
        """
        if self._state != "ended":
            return 0.0
        self._state = "idle"
        if not self._end.query():
            return 0.0
        return max(0.0, float(self._begin.elapsed_time(self._end)) / 1000.0 - self._host_s)


@dataclass(slots=True)
class Window:
    """The growth of counters since the last reading."""

    _before: dict[str, float] = field(default_factory=dict)

    def take(self, now: Mapping[str, float]) -> dict[str, float]:
        """Return the growth of each number since the last call."""
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
        """Switch the worker to an activity; return the previous one."""
        return self._watch.enter(activity)

    def step_begins(self, samples: int, own_samples: int) -> None:
        """Begin a step, or another attempt at it, with the samples of the global batch and of this worker's share."""
        self._in_step = (samples, own_samples)
        self._watch.enter(Activity.COMPUTE)
        if self._timer is not None:
            self._timer.begin()

    def reducing(self) -> None:
        """Record that this worker's last backward pass is done, or queued."""
        self._watch.enter(Activity.REDUCE)
        if self._timer is not None:
            self._timer.end()

    def reduced(self) -> None:
        """Record that the sums are complete."""
        self._watch.enter(Activity.WAIT)
        if self._timer is not None:
            self._watch.shift(Activity.REDUCE, Activity.COMPUTE, self._timer.take())

    def step_done(self) -> None:
        """Count a completed step."""
        self._steps += 1
        self._samples += self._in_step[0]
        self._own_samples += self._in_step[1]
        self._in_step = (0, 0)
        self._watch.enter(Activity.OTHER)

    def progress(self) -> dict[str, float]:
        """Return the measurements for PROGRESS since the last call: ``samples`` of all workers, seconds of this one."""
        taken = self._progress.take({"samples": self._samples, **self._watch.read()})
        return {**taken, "samples": int(taken["samples"]), **self._memory()}

    def worker(self) -> dict[str, float] | None:
        """Return the measurements for WORKER since the last call or restart; None if there was no step."""
        self._worker_at_s = self._clock()
        now = {"window_steps": self._steps, "samples": self._own_samples, **self._watch.read()}
        taken = self._worker.take(now)
        steps, samples = int(taken["window_steps"]), int(taken["samples"])
        return {**taken, "window_steps": steps, "samples": samples, **self._memory()} if steps else None

    def worker_is_due(self, interval_s: float) -> bool:
        """Return whether the last WORKER report, or restart, was at least ``interval_s`` ago."""
        return self._clock() - self._worker_at_s >= interval_s

    def restart(self) -> None:
        """Restart the window of WORKER: earlier measurements are not comparable."""
        self.worker()

    def begin(self) -> None:
        """Begin the measurements with the training, without the time of its preparation."""
        self.progress()
        self.restart()

    def _memory(self) -> dict[str, float]:
        found: dict[str, float] = {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT}
        if self._device.type == "cuda":
            found["device_memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return found


class TimedFetcher:
    """Wraps a fetcher and counts the time that callers wait for it as time for data."""

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


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, on the gradients' device; reads each once and copies none."""
    norms = torch._foreach_norm(list(gradients), 2.0)
    device = norms[0].device
    return torch.stack([norm.to(device, torch.float64) for norm in norms]).square().sum()


class NoiseScale:
    """The simple gradient noise scale, tr(Sigma) / |G|^2, in samples: larger batches than this bring little benefit.

    It is computed from gradient norms of a small and a big batch (McCandlish, Kaplan, Amodei et al., "An Empirical
    Model of Large-Batch Training", arXiv:1812.06162, appendix A.1): the small one is a logical worker's share, the big
    one the global batch. Numerator and denominator are averaged separately over the measured steps, because their ratio
    in a single step is biased and far too noisy.
    """

    def __init__(self) -> None:
        self._trace = self._square = 0.0
        self.measured = 0
        """Number of measured steps."""

    def add(self, small_squares: Sequence[float], big_square: float, *, big_batch: int) -> None:
        """Add one step: squared norms of the mean gradients of each share and of the whole batch.

        ``big_batch`` is the global batch in samples. Raises ValueError if there are fewer than two shares, or if they
        cannot be equal.
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
        """The noise scale in samples; None while unknown: not yet measured, or the noise dominates the gradient."""
        return self._trace / self._square if self._square > 0 and self._trace > 0 else None


class NormSchedule:
    """Schedules the steps in which norms are measured, so that they cost at most ``NORMS_BUDGET`` of the time."""

    def __init__(self) -> None:
        self._steps_since = 0
        self._step_s: float | None = None
        self._owed_s = 0.0
        self._at_s: float | None = None

    def step_done(self, norms_s: float) -> None:
        """Count a step that spent ``norms_s`` seconds on norms (0: it was not measured)."""
        now = time.perf_counter()
        if norms_s:
            # Charge at most one step's time: a stalled machine must not stop the measurements for hours.
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
        """Whether the next step should be measured: enough steps have passed to make up for the cost of the last."""
        return self._step_s is not None and self._steps_since >= _FEWEST_STEPS_BETWEEN and self._owed_s <= 0.0


class GradientNorms:
    """Squared norms of the leaves of one step, each measured when it is complete and not yet summed."""

    def __init__(self) -> None:
        self.enabled = False
        """Whether this step is measured."""
        self.seconds = 0.0
        """Seconds that measuring has taken in this step."""
        self._squares: list[Tensor | None] = []

    def begin(self, *, enabled: bool) -> None:
        """Begin a step, or another attempt at it."""
        self.enabled, self.seconds = enabled, 0.0
        self._squares = []

    def leaf(self, gradients: Iterable[Tensor | None]) -> None:
        """Measure a leaf's norm, if this step is measured."""
        if self.enabled:
            self._squares.append(self._take(gradients))

    def leaves(self) -> list[float]:
        """Return the leaves' squared norms, in order; 0 for a leaf without gradients."""
        return [0.0 if square is None else float(square) for square in self._squares]

    def total(self, gradients: Iterable[Tensor | None]) -> float:
        """Return the squared norm of the sum; 0 without gradients."""
        square = self._take(gradients)
        return 0.0 if square is None else float(square)

    def _take(self, gradients: Iterable[Tensor | None]) -> Tensor | None:
        began_s = time.perf_counter()
        here = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        square = squared_norm(here) if here else None
        self.seconds += time.perf_counter() - began_s
        return square
