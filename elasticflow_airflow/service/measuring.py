"""Turns progress reports into speeds and costs. Pure functions over the measurement of one generation.

A measurement is a small JSON object, so that it survives a restart of the service:
``skipped`` steps that do not count (warming up), ``steps`` and ``seconds`` that do, ``recent_steps`` and
``recent_seconds`` decaying over ``_MEMORY_S``, ``done`` steps since the generation began, ``before_at`` the time of
the last step of the generation before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticflow_airflow.bounds import FASTEST_STEPS_PER_S

_MEMORY_S = 15.0
_FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """When a speed counts as measured: so many steps that took a third of ``seconds``, or so many seconds."""

    skip_steps: int
    steps: int
    seconds: float


def add_window(window: Mapping[str, Any], steps: int, seconds: float, enough: Enough) -> dict[str, Any]:
    """The measurement after another ``steps`` steps in ``seconds`` seconds."""
    if steps > seconds * FASTEST_STEPS_PER_S:
        return dict(window)  # Two reports within the resolution of a clock measure nothing.
    new = dict(window)
    new["done"] = new.get("done", 0) + steps
    if new.get("skipped", 0) < enough.skip_steps:
        new["skipped"] = new.get("skipped", 0) + steps
        return new
    fade = math.exp(-seconds / _MEMORY_S)
    for name, value in (("steps", steps), ("seconds", seconds)):
        new[name] = new.get(name, 0) + value
        new[f"recent_{name}"] = new.get(f"recent_{name}", 0.0) * fade + value
    return new


def measured_speed(window: Mapping[str, Any], enough: Enough) -> float | None:
    """Steps/s over the whole generation; None while that is not known well enough."""
    steps, seconds = window.get("steps", 0), window.get("seconds", 0.0)
    if seconds <= 0 or steps < _FEWEST_STEPS:
        return None
    if seconds >= enough.seconds or (steps >= enough.steps and seconds >= enough.seconds / 3):
        return float(steps) / float(seconds)
    return None


def recent_speed(window: Mapping[str, Any], enough: Enough) -> float | None:
    """Steps/s of late; None while :func:`measured_speed` is."""
    if measured_speed(window, enough) is None:
        return None
    return float(window["recent_steps"]) / float(window["recent_seconds"])


def training_began_at(window: Mapping[str, Any], last_step_at: float, speed: float) -> float:
    """When steps would have begun had all of them been as fast as the steady ones: what came before was lost."""
    return last_step_at - float(window.get("done", 0)) / speed
