"""Training to a target loss: the smoothed loss, whether it has reached the target, and the predicted steps left.

Every worker has the same numbers: they depend only on the losses of the global batches, which do not depend on the
number of workers. All workers therefore end the training at the same step without communication. May import the
standard library only, and the scheduler's convergence model if numpy is available.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

SMOOTHING_STEPS = 32
MOST_POINTS = 128
_BUDGET = 0.001
"""Fraction of the training time that predictions may take."""


class LossTrack:
    """The smoothed loss s(k) after k steps: s(k) = s(k-1) + (l(k) - s(k-1)) / min(k, 32), l(k) the loss of step k.

    It is the mean of all losses up to step 32, and after that an exponential moving average with weight 1/32. Steps
    with a non-finite loss are not counted. The target is reached when s(k) <= target at the end of a step k >= 32, so
    that no single lucky batch ends a training. Raises ValueError for a non-finite target.
    """

    def __init__(self, target: float | None) -> None:
        if target is not None and not math.isfinite(target):
            raise ValueError(f"target_loss={target}: give a finite number, the loss at which training may end")
        self.target = target
        self.smoothed: float | None = None
        self._count = 0
        self._width = 1
        self._points: list[float] = []
        self._sum, self._in_sum = 0.0, 0

    def add(self, loss: float) -> None:
        """Add the loss of a completed step."""
        if self.target is None or not math.isfinite(loss):
            return
        self._count += 1
        before = loss if self.smoothed is None else self.smoothed
        self.smoothed = before + (loss - before) / min(self._count, SMOOTHING_STEPS)
        self._sum += loss
        self._in_sum += 1
        if self._in_sum == self._width:
            self._points.append(self._sum / self._width)
            self._sum, self._in_sum = 0.0, 0
        if len(self._points) == MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(a + b) / 2 for a, b in pairs]
            self._width *= 2

    @property
    def reached(self) -> bool:
        """Whether the target is reached and training may end."""
        if self.target is None or self.smoothed is None or self._count < SMOOTHING_STEPS:
            return False
        return self.smoothed <= self.target

    @property
    def curve(self) -> dict[str, Any]:
        """The losses so far: means over ``width`` steps each, at most 128 of them."""
        return {"width": self._width, "losses": [float(f"{point:.6g}") for point in self._points]}

    def state(self) -> dict[str, Any] | None:
        """Return the exact state in JSON types, for checkpoints and joining workers; None without a target."""
        if self.target is None:
            return None
        return {
            "smoothed": self.smoothed,
            "count": self._count,
            "width": self._width,
            "points": self._points,
            "sum": self._sum,
            "in_sum": self._in_sum,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state. If it was trained without a target (None), the curve starts anew."""
        if self.target is None or state is None:
            return
        self.smoothed, self._count = state["smoothed"], int(state["count"])
        self._width, self._points = int(state["width"]), [float(point) for point in state["points"]]
        self._sum, self._in_sum = float(state["sum"]), int(state["in_sum"])


class Outlook:
    """Predicts the steps left to a target from time to time; a fit takes some hundredths of a second."""

    def __init__(self, track: LossTrack) -> None:
        self._track = track
        self._next_s = 0.0
        self._convergence: Any = None
        if track.target is not None:
            try:
                # Import only if the fit is needed, and before training begins.
                from elasticflow_airflow.scheduler_core import convergence
            except ImportError:
                return  # An interpreter without numpy: nothing is predicted.
            self._convergence = convergence

    def look(self) -> dict[str, Any]:
        """Return a report's entries about the target: empty without one; with a prediction only if it is new."""
        track = self._track
        if track.target is None:
            return {}
        found: dict[str, Any] = {"target_loss": track.target, "smoothed_loss": track.smoothed}
        now_s = time.perf_counter()
        if self._convergence is None or now_s < self._next_s:
            return found
        curve = track.curve
        prediction = None
        if curve["losses"]:
            made = self._convergence.LossCurve(float(curve["width"]), tuple(curve["losses"]))
            prediction = self._convergence.predict(made, track.target)
            found["loss_curve"] = curve
        if prediction is not None and math.isfinite(prediction.steps):
            left = prediction.steps_left(made.steps)
            found["steps_left"] = left
            if math.isfinite(prediction.error):
                found["steps_left_error"] = prediction.at_most() - prediction.steps
        self._next_s = now_s + (time.perf_counter() - now_s) / _BUDGET
        return found
