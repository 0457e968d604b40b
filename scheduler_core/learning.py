"""What a job's reports say about its speed, also at sizes that it has not run, and what a promise may rely on.

The curve that a job comes with is off by a factor at each size: log-normal, with ``SchedulerConfig.speed_sigma``, of
which ``speed_shared`` is common to all sizes of a job (a slower kind of node, a busier disk) and the rest is the size's
own. A size that runs is measured; what it says about the others is the best linear prediction under that model
(shrinkage towards the curve as told). Promises rely on a low quantile of what is then still uncertain, per size
(3Sigma, EuroSys 2018, section 3: on the distribution, not on a point): a size that was measured in this run needs no
margin any more. Pure functions; knows no job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from statistics import NormalDist

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.values import ScalingCurve


def believed(told: ScalingCurve, measured: Mapping[int, float], config: SchedulerConfig) -> ScalingCurve:
    """The curve after ``measured`` (steps/s by size, in this run), where ``told`` is the one before any of it.

    With all of the error shared, sizes not measured follow the mean of those that are; with none, they stay as told.
    """
    offsets = [math.log(speed / told.steps_per_s[size]) for size, speed in measured.items() if size in told.steps_per_s]
    share = config.speed_shared
    common = share * math.fsum(offsets) / (1.0 - share + share * len(offsets)) if offsets else 0.0
    factor = math.exp(common)
    return ScalingCurve({size: speed * factor for size, speed in told.steps_per_s.items()} | dict(measured))


def smoothed(known: float | None, reported: float, *, first: bool, config: SchedulerConfig) -> float:
    """The speed at a size after a report, in steps/s; ``first``: ``known`` was never measured, only said.

    Where the error of the curves is stated, a first measurement is believed as far as it is the more exact of the two.
    """
    if known is None:
        return reported
    weight = config.speed_smoothing
    if first and config.speed_sigma > 0.0:
        weight = config.speed_sigma**2 / (config.speed_sigma**2 + config.report_sigma**2)
    return known * (1.0 + weight * (reported / known - 1.0))


def planned(curve: ScalingCurve, measured: Collection[int], config: SchedulerConfig) -> dict[int, float]:
    """Speeds by size, in steps/s, that a promise may rely on."""
    certain = 1.0 - config.speed_error
    if config.speed_sigma == 0.0:
        return {size: speed * certain for size, speed in curve.steps_per_s.items()}
    seen, unseen = _doubts(config, sum(size in measured for size in curve.steps_per_s))
    return {size: speed * certain * (seen if size in measured else unseen) for size, speed in curve.steps_per_s.items()}


@lru_cache(maxsize=1024)
def _doubts(config: SchedulerConfig, measured: int) -> tuple[float, float]:
    """Factors on a measured and on another size, when so many of its sizes are measured."""
    share, sigma = config.speed_shared, config.speed_sigma
    z = NormalDist().inv_cdf(config.speed_confidence)
    left = (1.0 - share) * (1.0 + share / (1.0 - share + share * measured)) if measured else 1.0
    seen = sigma * config.report_sigma / math.hypot(sigma, config.report_sigma)
    return math.exp(-z * seen), math.exp(-z * sigma * math.sqrt(left))
