"""Computes speeds and costs from progress reports. Pure functions over the measurement of one generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticflow_airflow.bounds import FASTEST_STEPS_PER_S

_MEMORY_S = 15.0
_FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedMeasurement:
    """The speed measurement of a generation; stored with it, so that it survives a restart of the service."""

    done: int = 0
    """Steps since the generation began."""
    skipped: int = 0
    """Those of them that do not count, because of warm-up ..."""
    skipped_seconds: float = 0.0
    """... and their total duration."""
    steps: int = 0
    """The steps that count ..."""
    seconds: float = 0.0
    """... and their total duration."""
    recent_steps: float = 0.0
    """The same for recent steps, with exponential decay: steps older than ``_MEMORY_S`` hardly count."""
    recent_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """When a speed counts as measured: after ``steps`` steps that took a third of ``seconds``, or after ``seconds``."""

    skip_steps: int
    steps: int
    seconds: float


def add_window(before: SpeedMeasurement, steps: int, seconds: float, enough: Enough) -> SpeedMeasurement:
    """Return the measurement after another ``steps`` steps in ``seconds`` seconds."""
    if steps > seconds * FASTEST_STEPS_PER_S:
        return before  # Two reports closer than the resolution of the clock measure nothing.
    done = before.done + steps
    if before.skipped < enough.skip_steps:
        skipped_seconds = before.skipped_seconds + seconds
        return replace(before, done=done, skipped=before.skipped + steps, skipped_seconds=skipped_seconds)
    fade = math.exp(-seconds / _MEMORY_S)
    return replace(
        before,
        done=done,
        steps=before.steps + steps,
        seconds=before.seconds + seconds,
        recent_steps=before.recent_steps * fade + steps,
        recent_seconds=before.recent_seconds * fade + seconds,
    )


def measured_speed(measurement: SpeedMeasurement, enough: Enough) -> float | None:
    """Return the steps/s over the whole generation; None until it is known well enough."""
    steps, seconds = measurement.steps, measurement.seconds
    if seconds <= 0 or steps < _FEWEST_STEPS:
        return None
    if seconds >= enough.seconds or (steps >= enough.steps and seconds >= enough.seconds / 3):
        return steps / seconds
    return None


def rough_speed(measurement: SpeedMeasurement) -> float | None:
    """Return the steps/s of the few steps that were seen, if need be of those of the warm-up; None without any."""
    for steps, seconds in (
        (measurement.steps, measurement.seconds),
        (measurement.skipped, measurement.skipped_seconds),
    ):
        if steps > 0 and seconds > 0:
            return steps / seconds
    return None


def recent_speed(measurement: SpeedMeasurement, enough: Enough) -> float | None:
    """Return the recent steps/s; None while :func:`measured_speed` returns None."""
    if measured_speed(measurement, enough) is None:
        return None
    return measurement.recent_steps / measurement.recent_seconds


def training_began_at(measurement: SpeedMeasurement, last_step_at: float, speed: float) -> float:
    """Return when training would have begun if all steps had had the steady ``speed``; the time before it was lost."""
    return last_step_at - measurement.done / speed
