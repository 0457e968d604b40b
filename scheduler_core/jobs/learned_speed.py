"""What a job's reports say about its speed, also at sizes that it has not run, and what a promise may rely on.

The curve that a job comes with is off by a factor at each size: log-normal, with a sigma that is the job's own where
past runs of its task have shown it and ``SchedulerConfig.speed_sigma`` where nothing is known; ``speed_shared`` of the
variance is common to all sizes of a job (a slower kind of node, a busier disk) and the rest is the size's own. A size
that runs is measured; what it says about the others is the best linear prediction under that model (shrinkage towards
the curve as told). Promises rely on a low quantile of what is then still uncertain, per size (3Sigma, EuroSys 2018,
section 3: on the distribution, not on a point): a size that was measured in this run needs no margin any more.

A measurement counts once it is solid: so many windows of reports. Their median is believed, so that one noisy window
moves nothing; until then a promise goes on as it was planned. Pure functions; knows no job.
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
"""So many windows make a measurement solid: of three, the median is one that another agrees with or surpasses."""
_KEPT_WINDOWS = 5
_LONG_AGO_S = -1e12
_EQUAL = 1e-9
_MOST_SIGMA = 2.0
"""No more is learned of an error: the quantile would be below a tenth of the speed as told."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The last windows in which a size was measured, oldest first."""

    windows: tuple[SpeedWindow, ...] = ()

    @classmethod
    def certain(cls, steps_per_s: float) -> Evidence:
        """One measurement that is solid by itself."""
        return cls((SpeedWindow(_LONG_AGO_S, steps_per_s, SOLID_WINDOWS),))

    def with_report(
        self, steps_per_s: float, now: float, measured_s: float | None, config: SchedulerConfig
    ) -> Evidence:
        """After a report at ``now``; ``measured_s``: over how long the speed was measured, None for one window at most.

        Reports within one window see the same steps: the last one stands for all of them.
        """
        count = 1.0 if measured_s is None else min(SOLID_WINDOWS, max(1.0, measured_s / config.report_window_s))
        windows = self.windows
        if windows and now < windows[-1].since_s + config.report_window_s:
            last = windows[-1]
            return Evidence((*windows[:-1], SpeedWindow(last.since_s, steps_per_s, max(count, last.windows))))
        return Evidence((*windows, SpeedWindow(now, steps_per_s, count))[-_KEPT_WINDOWS:])

    @property
    def count(self) -> float:
        """Of how many windows it consists."""
        return math.fsum(window.windows for window in self.windows)

    def is_solid(self, config: SchedulerConfig) -> bool:
        """Whether the speed counts as measured. Where reports are exact, one is enough."""
        return bool(self.windows) and (config.report_sigma == 0.0 or self.count >= SOLID_WINDOWS)

    @property
    def median(self) -> float:
        """The speed in the middle of the windows, in steps/s; of two middle ones their geometric mean."""
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
    """What is held of the speed at a size: steps/s, and how uncertain (the sigma of a log-normal factor; 0: solid)."""

    steps_per_s: float
    sigma: float


def belief(told: float | None, sigma: float, evidence: Evidence, config: SchedulerConfig) -> Belief:
    """The speed of a size that runs, where ``told`` with its error ``sigma`` was known of it (None: nothing was)."""
    seen = evidence.median if config.report_sigma > 0.0 else evidence.windows[-1].steps_per_s
    if evidence.is_solid(config):
        return Belief(seen, 0.0)
    noise = config.report_sigma / math.sqrt(evidence.count)
    if told is None:
        return Belief(seen, noise)
    weight = sigma**2 / (sigma**2 + noise**2)
    return Belief(told * math.exp(weight * math.log(seen / told)), math.sqrt(weight) * noise)


def believed(told: ScalingCurve, measured: Mapping[int, float], config: SchedulerConfig) -> ScalingCurve:
    """The curve after ``measured`` (steps/s by size, in this run), where ``told`` is the one before any of it.

    With all of the error shared, sizes not measured follow the mean of those that are; with none, they stay as told.
    Fewer workers are never believed to be as fast as more were measured to be, if they were told to be slower: a job
    that is slow whatever its size would else be given fewer of them, and be slower still.
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
    """Speeds by size, in steps/s, that a promise may rely on. ``curve`` is :func:`believed` of ``told``.

    ``sigma``: how wrong the curve may be at a size.

    While every measured size is at least as fast as it was promised with, the others are planned as they were: a
    promise holds where speeds are at least what was planned with. Bad news of one size counts for the others, good
    news does not: how much of the error they share, nobody knows, and a size that runs is measured soon.
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
    """What to plan with at a size that runs: as it was promised, until a measurement is solid; then as it is."""
    if held.sigma == 0.0:
        return held.steps_per_s
    return held.steps_per_s * _quantile(config, held.sigma) if promised is None else promised


def promised(curve: ScalingCurve, sigma: Callable[[int], float], config: SchedulerConfig) -> ScalingCurve:
    """What a promise may rely on before anything was measured."""
    return ScalingCurve({size: speed * _quantile(config, sigma(size)) for size, speed in curve.steps_per_s.items()})


def sigma_of_errors(errors: Sequence[float], config: SchedulerConfig) -> float:
    """How wrong the next curve of a task may be (the sigma of a log-normal factor) by what was seen in past runs.

    ``errors`` has log(measured / told) of each run (of several sizes the root mean square). Planned with it, a speed
    is kept with ``speed_confidence`` although few runs were seen (Student's t distribution, Biometrika 1908); where
    they were no more exact than is assumed of those of which nothing is known, by the normal one. No errors:
    ``speed_sigma``.
    """
    if not errors:
        return config.speed_sigma
    spread = math.sqrt(math.fsum(error * error for error in errors) / len(errors))
    z = _z(config.speed_confidence)
    few = _student(config.speed_confidence, len(errors)) / z if z > 0.0 else 1.0
    return min(_MOST_SIGMA, few * spread, max(config.speed_sigma, spread))


def sigma_of_margin(margin: float, config: SchedulerConfig) -> float:
    """The sigma with which a speed that was never measured is planned lower by this fraction."""
    z = _z(config.speed_confidence)
    return min(_MOST_SIGMA, -math.log(1.0 - margin) / z) if z > 0.0 else 0.0


@lru_cache(maxsize=16)
def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(confidence)


@lru_cache(maxsize=256)
def _student(confidence: float, freedom: int) -> float:
    """The quantile of Student's t distribution, to three digits (Abramowitz and Stegun, 26.7.5)."""
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
    """The factor that a log-normal one with this sigma exceeds with the confidence that is asked for."""
    return math.exp(-_z(config.speed_confidence) * sigma)


def _rest_of_doubt(share: float, measured: int) -> float:
    """Part of its sigma that is left of a size when so many others are measured."""
    return math.sqrt((1.0 - share) * (1.0 + share / (1.0 - share + share * measured))) if measured else 1.0
