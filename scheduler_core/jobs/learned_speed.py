"""Estimates a job's speed from its reports, also at sizes that it has not run, and the speed a promise may rely on.

The initial curve of a job is off by a log-normal factor at each size. Its sigma is the job's own if past runs of its
task have shown it, and ``SchedulerConfig.speed_sigma`` otherwise. A fraction ``speed_shared`` of the variance is common
to all sizes of a job (a slower kind of node, a busier disk); the rest is independent per size. A size that runs is
measured; the other sizes are estimated by the best linear prediction under that model (shrinkage towards the initial
curve). Promises rely on a low quantile of the remaining uncertainty per size (3Sigma, EuroSys 2018, section 3: on the
distribution, not on a point). A size that was measured in this run needs no margin.

A measurement counts once it is solid, that is, once it covers enough windows of reports. The median of the windows is
used, so that one noisy window changes nothing; until then a promise stays as planned. Pure functions; knows no job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import ScalingCurve, SpeedWindow

SOLID_WINDOWS = 3
"""Number of windows that make a measurement solid: another of the three is at least as fast as their median."""
_KEPT_WINDOWS = 5
_LONG_AGO_S = -1e12
_EQUAL = 1e-9
_MOST_SIGMA = 2.0
"""Upper bound of a learned sigma: beyond it the quantile would be below a tenth of the initial speed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The last windows in which a size was measured, oldest first."""

    windows: tuple[SpeedWindow, ...] = ()

    @classmethod
    def certain(cls, steps_per_s: float) -> Evidence:
        """Return one measurement that is solid by itself."""
        return cls((SpeedWindow(_LONG_AGO_S, steps_per_s, SOLID_WINDOWS),))

    def with_report(
        self, steps_per_s: float, now: float, measured_s: float | None, config: SchedulerConfig
    ) -> Evidence:
        """Return the evidence after a report at ``now``.

        ``measured_s`` is the duration of the measurement, None for one window at most. Reports within one window cover
        the same steps, so the last one stands for all of them.
        """
        count = 1.0 if measured_s is None else min(SOLID_WINDOWS, max(1.0, measured_s / config.report_window_s))
        windows = self.windows
        if windows and now < windows[-1].since_s + config.report_window_s:
            last = windows[-1]
            return Evidence((*windows[:-1], SpeedWindow(last.since_s, steps_per_s, max(count, last.windows))))
        return Evidence((*windows, SpeedWindow(now, steps_per_s, count))[-_KEPT_WINDOWS:])

    @property
    def count(self) -> float:
        """Number of windows that it counts as."""
        return math.fsum(window.windows for window in self.windows)

    def is_solid(self, config: SchedulerConfig) -> bool:
        """Return whether the speed counts as measured. If reports are exact, one is enough."""
        return bool(self.windows) and (config.report_sigma == 0.0 or self.count >= SOLID_WINDOWS)

    @property
    def median(self) -> float:
        """The median speed of the windows, in steps/s; the geometric mean if there are two middle ones."""
        ordered = sorted((window.steps_per_s, window.windows) for window in self.windows)
        half, below = self.count / 2.0, 0.0
        for index, (speed, count) in enumerate(ordered):
            below += count
            if below > half:
                return speed
            if below == half:
                return math.sqrt(speed * ordered[index + 1][0])
        raise ValueError("no window was measured yet")


@dataclass(frozen=True, slots=True)
class Belief:
    """An estimate of the speed at a size, in steps/s, with its error (sigma of a log-normal factor; 0: solid)."""

    steps_per_s: float
    sigma: float


def belief(told: float | None, sigma: float, evidence: Evidence, config: SchedulerConfig) -> Belief:
    """Return the estimate for a size that runs; ``told`` is its initial speed (None: unknown) with error ``sigma``."""
    seen = evidence.median if config.report_sigma > 0.0 else evidence.windows[-1].steps_per_s
    if evidence.is_solid(config):
        return Belief(seen, 0.0)
    noise = config.report_sigma / math.sqrt(evidence.count)
    if told is None:
        return Belief(seen, noise)
    weight = sigma**2 / (sigma**2 + noise**2)
    return Belief(told * math.exp(weight * math.log(seen / told)), math.sqrt(weight) * noise)


def believed(told: ScalingCurve, measured: Mapping[int, float], config: SchedulerConfig) -> ScalingCurve:
    """Return the curve after ``measured`` (steps/s by size, in this run), where ``told`` is the initial curve.

    If all of the error is shared, sizes that were not measured follow the mean of the measured ones; if none is, they
    keep their initial speeds. A smaller size that was initially slower is never estimated to be as fast as a measured
    larger one: otherwise a job that is slow at every size would get fewer workers and be even slower.
    """
    offsets = [math.log(speed / told.steps_per_s[size]) for size, speed in measured.items() if size in told.steps_per_s]
    share = config.speed_shared
    common = share * math.fsum(offsets) / (1.0 - share + share * len(offsets)) if offsets else 0.0
    speeds = {size: speed * math.exp(common) for size, speed in told.steps_per_s.items()}
    for larger, seen in measured.items():
        most = told.steps_per_s.get(larger, 0.0)
        for size, speed in told.steps_per_s.items():
            if size < larger and speed < most:
                speeds[size] = min(speeds[size], seen * math.sqrt(speed / most))
    return ScalingCurve(speeds | dict(measured))


def planned(
    curve: ScalingCurve,
    told: ScalingCurve,
    measured: Mapping[int, Belief],
    sigma: Callable[[int], float],
    config: SchedulerConfig,
) -> dict[int, float]:
    """Return the speeds by size, in steps/s, that a promise may rely on. ``curve`` is :func:`believed` of ``told``.

    ``sigma`` returns the error of the curve at a size.

    While every measured size is at least as fast as promised, the other sizes keep their planned speeds: a promise
    holds if speeds are at least the planned ones. A slow measurement lowers the other sizes, a fast one does not raise
    them: it is unknown how much of the error they share, and a size that runs is measured soon.
    """
    before = promised(told, sigma, config).steps_per_s
    speeds = {size: _measured(held, before.get(size), config) for size, held in measured.items()}
    known = [size for size in speeds if size in before]
    kept = all(speeds[size] >= before[size] * (1.0 - _EQUAL) for size in known)
    rest = _rest_of_doubt(config.speed_shared, len(known))
    for size, speed in curve.steps_per_s.items():
        if size not in speeds:
            speeds[size] = before.get(size, speed)
            if not kept:
                speeds[size] = min(speeds[size], speed * _quantile(config, sigma(size) * rest))
    return {size: speeds[size] for size in curve.steps_per_s}


def _measured(held: Belief, promised: float | None, config: SchedulerConfig) -> float:
    """Return the planned speed of a size that runs: the promised one until a measurement is solid, then that one."""
    if held.sigma == 0.0:
        return held.steps_per_s
    return held.steps_per_s * _quantile(config, held.sigma) if promised is None else promised


def promised(curve: ScalingCurve, sigma: Callable[[int], float], config: SchedulerConfig) -> ScalingCurve:
    """Return the curve that a promise may rely on before anything was measured."""
    return ScalingCurve({size: speed * _quantile(config, sigma(size)) for size, speed in curve.steps_per_s.items()})


def sigma_of_errors(errors: Sequence[float], config: SchedulerConfig) -> float:
    """Return the error of the next curve of a task (the sigma of a log-normal factor), from its past runs.

    ``errors`` has log(measured / told) of each run (the root mean square if there are several sizes). A speed planned
    with this sigma is reached with probability ``speed_confidence`` even after few runs (Student's t distribution,
    Biometrika 1908). If the observed errors are no smaller than the default ``speed_sigma``, the normal distribution is
    used. Without errors the result is ``speed_sigma``.
    """
    if not errors:
        return config.speed_sigma
    spread = math.sqrt(math.fsum(error * error for error in errors) / len(errors))
    z = _z(config.speed_confidence)
    few = _student(config.speed_confidence, len(errors)) / z if z > 0.0 else 1.0
    return min(_MOST_SIGMA, few * spread, max(config.speed_sigma, spread))


def sigma_of_margin(margin: float, config: SchedulerConfig) -> float:
    """Return the sigma with which a speed that was never measured is planned lower by the fraction ``margin``."""
    z = _z(config.speed_confidence)
    return min(_MOST_SIGMA, -math.log(1.0 - margin) / z) if z > 0.0 else 0.0


@lru_cache(maxsize=16)
def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(confidence)


@lru_cache(maxsize=256)
def _student(confidence: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, to three digits (Abramowitz and Stegun, 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * (confidence - 0.5))
    if freedom == 2:
        return (2.0 * confidence - 1.0) / math.sqrt(2.0 * confidence * (1.0 - confidence))
    z = _z(confidence)
    terms = (
        z,
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def _quantile(config: SchedulerConfig, sigma: float) -> float:
    """Return the factor that a log-normal factor with this sigma exceeds with probability ``speed_confidence``."""
    return math.exp(-_z(config.speed_confidence) * sigma)


def _rest_of_doubt(share: float, measured: int) -> float:
    """Return the fraction of its sigma that a size keeps after ``measured`` others were measured."""
    return math.sqrt((1.0 - share) * (1.0 + share / (1.0 - share + share * measured))) if measured else 1.0
