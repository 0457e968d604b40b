"""Test-defined behaviour of simulated trainings: how fast they really are, and what goes wrong. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour

DEFAULT_CURVE: Mapping[int, float] = {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0, 16: 96.0}
"""Steps/s by number of workers, for a training without a speed in the test and without ``scaling_curve=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraining:
    """How a simulated training behaves. By default, nothing goes wrong.

    ``steps_per_s``: its real speed by number of workers; defaults to the operator's ``scaling_curve=``, else to
    ``DEFAULT_CURVE``. ``speed`` multiplies that: 0.5 is a training that turns out half as fast as its author expects.
    """

    steps_per_s: Mapping[int, float] | None = None
    speed: float = 1.0
    startup_s: float = 8.0
    """Time from each start of the workers to their first step."""
    tail_s: float = 2.0
    """Time from the last step to the end of the processes: the final save, an evaluation in the script."""
    samples: int | None = None
    """Epoch size that the script determines, for tasks without ``steps=`` and ``samples=``."""

    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss by step, linearly interpolated; by default the loss falls from 4 to 0.5."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that the script reports at its end and the task returns."""

    fails_at_step: int | None = None
    """A worker raises at this step ..."""
    failure: str = "RuntimeError: simulated failure"
    """... with this message ..."""
    failures: int | None = None
    """... this many times; None: each time that it reaches the step."""
    hangs_at_step: int | None = None
    """The training hangs from this step on."""
    nan_at_step: int | None = None
    """The loss is NaN at this step, and the session fails."""
    ends_at_step: int | None = None
    """The script ends early at this step and reports this as intended (early stopping)."""
    silent: bool = False
    """The training never reports anything: a plain script whose output shows no progress."""

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed={self.speed} must be positive: 1.0 is as fast as its curve says")
        for size, speed in (self.steps_per_s or {}).items():
            if size < 1 or not speed > 0:
                raise ValueError(f"steps_per_s={dict(self.steps_per_s or {})} needs positive speeds by workers")

    def behaviour(self, scaling_curve: Mapping[int, float] | None, *, failed_before: int = 0) -> FakeBehaviour:
        """Return the behaviour of this training's workers; ``scaling_curve`` is that of the operator, if any."""
        curve = self.steps_per_s or scaling_curve or DEFAULT_CURVE
        fails = self.failures is None or failed_before < self.failures
        return FakeBehaviour(
            steps_per_s={size: speed * self.speed for size, speed in curve.items()},
            startup_s=self.startup_s,
            save_s=1.0,
            report_interval_s=math.inf,  # progress is requested at each observation
            reports_a_jump=1,
            tail_s=self.tail_s,
            samples=self.samples,
            losses=self.losses,
            metrics=self.metrics,
            fail_at_step=self.fails_at_step if fails else None,
            failure=self.failure,
            hang_at_step=self.hangs_at_step,
            nan_loss_at_step=self.nan_at_step,
            early_at_step=self.ends_at_step,
            early="the simulated script ended early",
            reports=not self.silent,
        )
