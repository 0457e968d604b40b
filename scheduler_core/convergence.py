"""Predicts how many steps a training needs to reach a loss: Optimus' convergence model, fitted to the losses so far.

l(k) = 1 / (b0 k + b1) + b2 with b0, b1, b2 >= 0 for the loss after k steps (Peng, Bao, Chen, Wu and Guo, "Optimus",
EuroSys 2018, section 3.1): stochastic gradient descent converges at the rate O(1/k). Early fits are far off, and their
predictions have a large error accordingly: it is measured by refitting. The curve of an earlier run of the same task is
used if its error is smaller. Pure functions over values; knows nothing of jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

POINTS = 64
"""Longer curves are averaged down to this many points before a fit."""
FEWEST_POINTS = 8
_RECENT = 0.5
"""A point this fraction of the run before its end has half the weight."""
_GROUPS = 8
_HUBER = 2.0
_REWEIGHTINGS = 3
_MODEL_ERROR = 0.25
"""Error of the model itself for each factor of e in steps that is predicted. From curves of small trainings."""
_LEAST_ERROR = 0.02
_NO_ERROR_KNOWN = math.inf


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Mean losses of consecutive spans of ``width`` steps each: (0, width], (width, 2 width], and so on.

    Raises ValueError if the width is not positive or a loss is not a finite number.
    """

    width: float
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (self.width > 0 and math.isfinite(self.width)):
            raise ValueError(f"width={self.width}: a span of steps is longer than nothing")
        if not all(math.isfinite(loss) for loss in self.losses):
            raise ValueError("a loss curve may hold finite numbers only: leave the others out")

    @property
    def steps(self) -> float:
        """Steps that the curve covers."""
        return self.width * len(self.losses)

    def coarser(self, most: int) -> LossCurve:
        """Return the curve with at most ``most`` points, of equal width; a remainder at the end is left out."""
        times = -(-len(self.losses) // most)
        if times <= 1:
            return self
        whole = len(self.losses) // times * times
        means = np.asarray(self.losses[:whole]).reshape(-1, times).mean(axis=1)
        return LossCurve(self.width * times, tuple(means.tolist()))


@dataclass(frozen=True, slots=True)
class ConvergenceModel:
    """l(k) = 1 / (b0 k + b1) + b2 (Optimus, section 3.1)."""

    b0: float
    b1: float
    b2: float

    def loss(self, step: float) -> float:
        """Return the loss after ``step`` steps."""
        return 1.0 / (self.b0 * step + self.b1) + self.b2

    def steps_to(self, target_loss: float) -> float:
        """Return the steps from the beginning until the loss is ``target_loss``; infinite if it never is."""
        if target_loss >= self.loss(0.0):
            return 0.0
        if target_loss <= self.b2 or self.b0 <= 0.0:
            return math.inf
        return max(0.0, (1.0 / (target_loss - self.b2) - self.b1) / self.b0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """When a loss will be reached. ``steps`` counts from the beginning of the training and may be infinite.

    ``error`` is the relative standard error as a logarithm: in two cases of three the true number lies between
    ``steps * exp(-error)`` and ``steps * exp(error)``; infinite: unknown. ``source`` is "fit" or "earlier".
    """

    steps: float
    error: float
    source: str

    def steps_left(self, done: float) -> float:
        """Return the steps left after ``done`` steps."""
        return max(0.0, self.steps - done)

    def at_most(self) -> float:
        """Return a pessimistic number of steps, for promises."""
        return math.inf if math.isinf(self.error) else self.steps * math.exp(self.error)


def predict(curve: LossCurve, target_loss: float, *, earlier: LossCurve | None = None) -> Prediction | None:
    """Predict when the smoothed loss will be ``target_loss``; None while no prediction is possible.

    ``earlier`` is the curve of an earlier run of the same task. It is used while its prediction has a smaller error
    than the fit to the run's own curve.
    """
    found = [p for p in (_from_fit(curve, target_loss), _from_earlier(curve, target_loss, earlier)) if p is not None]
    return min(found, key=lambda prediction: (prediction.error, prediction.source == "earlier"), default=None)


# -- the fit to the curve itself ------------------------------------------------------------------------------------


def _from_fit(curve: LossCurve, target_loss: float) -> Prediction | None:
    curve = curve.coarser(POINTS)
    if len(curve.losses) < FEWEST_POINTS:
        return None
    steps, losses = _points(curve)
    weights = _recency(steps)
    model = _fit(steps, losses, weights)
    total = model.steps_to(target_loss)
    if math.isinf(total):
        return Prediction(steps=total, error=_NO_ERROR_KNOWN, source="fit")
    total, done = max(total, curve.width), curve.steps
    error = _error(steps, losses, weights, model, target_loss, total)
    error = math.hypot(error, _MODEL_ERROR * math.log(max(1.0, total / done)))
    if total < done and float(np.average(losses[-3:])) > target_loss:
        # The loss should have been reached by now, and was not.
        error, total = max(error, math.log(done / total)), done
    return Prediction(steps=total, error=error, source="fit")


def _error(
    steps: Floats, losses: Floats, weights: Floats, model: ConvergenceModel, target_loss: float, total: float
) -> float:
    """Return how far refits deviate, as a logarithm: without each part of the points (jackknife), and on prefixes."""
    number = len(steps)
    least = float(steps[0])
    groups = min(_GROUPS, number // 2)
    # Consecutive points, not scattered ones, because the errors of neighbours are correlated.
    parts = np.array_split(np.arange(number), groups)
    logs = []
    for part in parts:
        keep = np.ones(number, dtype=bool)
        keep[part] = False
        logs.append(_log_steps(_fit(steps[keep], losses[keep], weights[keep], model), target_loss, least))
    if not all(map(math.isfinite, logs)):
        return _NO_ERROR_KNOWN
    spread = np.asarray(logs)
    jackknife = math.sqrt((groups - 1) / groups * float(np.square(spread - spread.mean()).sum()))
    # Predictions from a prefix of the run: they drift if the model does not hold.
    drifts = []
    for fraction in (0.6, 0.8):
        first = max(FEWEST_POINTS // 2, int(number * fraction))
        before = _log_steps(_fit(steps[:first], losses[:first], _recency(steps[:first]), model), target_loss, least)
        drifts.append(abs(before - math.log(total)))
    drift = max(drifts) if all(map(math.isfinite, drifts)) else math.log(2.0) + jackknife
    return max(_LEAST_ERROR, jackknife, drift / 2.0)


def _log_steps(model: ConvergenceModel, target_loss: float, least: float) -> float:
    total = model.steps_to(target_loss)
    return math.log(max(total, least))


def _points(curve: LossCurve) -> tuple[Floats, Floats]:
    losses = np.asarray(curve.losses, dtype=np.float64)
    return np.asarray((np.arange(len(losses)) + 0.5) * curve.width, dtype=np.float64), losses


def _recency(steps: Floats) -> Floats:
    return np.asarray(0.5 ** ((steps[-1] - steps) / (_RECENT * steps[-1])), dtype=np.float64)


def _fit(steps: Floats, losses: Floats, weights: Floats, start: ConvergenceModel | None = None) -> ConvergenceModel:
    """Fit by bounded least squares in scaled units: steps relative to the run, losses relative to their range.

    Outliers count little (Huber). b2 is not below zero unless losses are.
    """
    span = float(losses.max() - losses.min())
    if span <= 0.0:
        # A flat curve: the loss stays where it is.
        return ConvergenceModel(0.0, 1.0 / max(1e-12, abs(losses[-1]) * 1e-9), float(losses[-1]))
    length, low = float(steps[-1]), float(losses.min())
    t, y = steps / length, losses / span
    floor = 0.0 if low >= 0.0 else (low - 10.0 * span) / span
    if start is None:
        theta = _start(t, y, weights, floor)
    else:
        theta = np.array([start.b0 * length * span, start.b1 * span, start.b2 / span])
    theta = _descend(t, y, weights, theta, floor)
    for _ in range(_REWEIGHTINGS):
        residuals = y - _values(t, theta)
        scale = 1.4826 * float(np.median(np.abs(residuals)))
        far = np.abs(residuals) / max(_HUBER * scale, 1e-12)
        if far.max() <= 1.0:
            break
        theta = _descend(t, y, weights / np.maximum(1.0, far), theta, floor)
    a, b, c = (float(value) for value in theta)
    return ConvergenceModel(a / (length * span), b / span, c * span)


def _start(t: Floats, y: Floats, weights: Floats, floor: float) -> Floats:
    """Return a start for the fit: the best of several b2, for each of which 1 / (l - b2) is linear in b0 and b1."""
    low = float(y.min())
    best, found = math.inf, np.array([1.0, 1.0, floor])
    for fraction in (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99):
        c = floor + fraction * (low - floor)
        gap = np.maximum(y - c, 1e-6)
        # An error of the loss equals the error of 1 / gap times gap^2.
        w = weights * gap**4
        total, mean_t, mean_z = w.sum(), (w * t).sum(), (w / gap).sum()
        mean_t, mean_z = mean_t / total, mean_z / total
        spread = float((w * (t - mean_t) ** 2).sum())
        slope = max(0.0, float((w * (t - mean_t) * (1.0 / gap - mean_z)).sum()) / spread) if spread > 0 else 0.0
        theta = np.array([slope, max(1e-6, float(mean_z - slope * mean_t)), c])
        error = float((weights * (y - _values(t, theta)) ** 2).sum())
        if error < best:
            best, found = error, theta
    return found


def _values(t: Floats, theta: Floats) -> Floats:
    return np.asarray(1.0 / (theta[0] * t + theta[1]) + theta[2], dtype=np.float64)


def _descend(t: Floats, y: Floats, weights: Floats, theta: Floats, floor: float) -> Floats:
    """Improve ``theta`` by the Levenberg-Marquardt method, with the parameters kept inside their bounds."""
    lowest, highest = np.array([0.0, 1e-6, floor]), np.array([1e9, 1e9, float(y.max())])
    theta = np.clip(theta, lowest, highest)
    damping = 1e-3
    residuals = y - _values(t, theta)
    error = float((weights * residuals**2).sum())
    for _ in range(60):
        inverse_square = (_values(t, theta) - theta[2]) ** 2
        jacobian = np.stack([-t * inverse_square, -inverse_square, np.ones_like(t)], axis=1)
        weighted = jacobian * weights[:, None]
        normal, gradient = jacobian.T @ weighted, weighted.T @ residuals
        # A parameter at its bound that would move beyond it is held.
        free = ~(((theta <= lowest) & (gradient < 0)) | ((theta >= highest) & (gradient > 0)))
        if not free.any():
            break
        part = normal[np.ix_(free, free)]
        step = np.zeros(3)
        step[free] = np.linalg.lstsq(part + damping * np.diag(np.diag(part) + 1e-12), gradient[free], rcond=None)[0]
        trial = np.clip(theta + step, lowest, highest)
        trial_residuals = y - _values(t, trial)
        trial_error = float((weights * trial_residuals**2).sum())
        if trial_error < error:
            small = error - trial_error <= 1e-10 * error
            theta, residuals, error, damping = trial, trial_residuals, trial_error, max(1e-12, damping / 5)
            if small:
                break
        else:
            damping *= 5
            if damping > 1e9:
                break
    return theta


# -- the curve of an earlier run --------------------------------------------------------------------------------------


def _from_earlier(curve: LossCurve, target_loss: float, earlier: LossCurve | None) -> Prediction | None:
    """Predict from the earlier run, scaled by how much longer or shorter this one took to its current loss."""
    if earlier is None or not earlier.losses:
        return None
    theirs = _reached_at(earlier, target_loss)
    error = 0.2
    if theirs is None:
        model = _from_fit(earlier, target_loss)
        if model is None or math.isinf(model.steps):
            return None
        theirs, error = model.steps, error + model.error
    if len(curve.losses) < 2:
        return Prediction(steps=theirs, error=error + 0.3, source="earlier")
    now = float(min(curve.losses))
    done, to_here = curve.steps, _reached_at(earlier, now)
    if now <= target_loss:
        return Prediction(steps=min(done, theirs), error=error, source="earlier")
    if to_here is None or to_here <= 0.0:
        return Prediction(steps=max(theirs, done), error=error + 0.3, source="earlier")
    # Early on the ratio says little: it is weighted by the part of the earlier run that it is taken from.
    ratio = math.log(done / to_here) * min(1.0, 2.0 * to_here / theirs)
    ratio = min(max(ratio, -math.log(4.0)), math.log(4.0))
    total = done + max(0.0, theirs - to_here) * math.exp(ratio)
    return Prediction(steps=total, error=error + abs(ratio) / 2.0, source="earlier")


def _reached_at(curve: LossCurve, loss: float) -> float | None:
    """Return the step at which a curve first reached a loss, by linear interpolation; None if it never did."""
    steps, losses = _points(curve)
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0:
        return float(steps[0])
    high, low = float(losses[first - 1]), float(losses[first])
    return float(steps[first - 1] + (high - loss) / (high - low) * (steps[first] - steps[first - 1]))
