"""What can be tuned in the scheduler, each with its unit and its default. Knows nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class Objective(StrEnum):
    """Whom to admit when not everybody can be."""

    FIRST_COME = "first-come"
    """Whatever fits beside the promises, in order of arrival."""
    VALUE = "value"
    """Whatever is worth more than what it takes from those who are expected (see :mod:`pricing`)."""


EVEN_ODDS = 0.5
"""The confidence with which no margin is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of one :class:`~elasticflow_airflow.scheduler_core.scheduler.Scheduler`.

    The defaults promise to the last second, which is right where speeds are known exactly. :meth:`served` is what the
    service does, and what is simulated unless somebody asks for something else.
    """

    speed_sigma: float = 0.0
    """How wrong the curve of a job may be of whose task no past run has shown it: the sigma of a log-normal factor per
    job and size. 0: exact."""
    speed_shared: float = 0.5
    """Part of that error's variance which is common to all sizes of a job (0: each size is off by itself)."""
    speed_confidence: float = 0.9
    """A size that never ran is as fast as planned with this probability; one that was measured needs no margin."""
    report_sigma: float = 0.0
    """How wrong the speed of one window of reports may be, likewise. 0: exact, and believed at once."""
    report_window_s: float = 15.0
    """Reports within so long see the same steps, and count as one."""
    deadline_margin_s: float = 0.0
    """New promises and new plans end this much before the deadline (delays of wake-ups, of the engine)."""
    offer_margin_s: float = 0.0
    """Added to the earliest feasible deadline that a rejection offers: a resubmit a moment later is admitted, too."""
    offer_round_s: float = 1.0
    """An offered deadline is rounded up to a multiple of this, in UTC: people copy it."""
    offer_probes: int = 6
    """How often bisection tries a deadline with the full admission; more is more exact and slower."""
    rescue_orders: int = 12
    """How many other orders of filling are tried before a rejection."""
    rescue_effort: int = 400
    """... and at most so many divided by the number of jobs, so that a decision among many stays quick."""
    proof_rounds: int = 8
    """How often the filling is repeated with the pauses of the migrations that placing it turned out to need."""

    objective: Objective = Objective.FIRST_COME
    protection_weight: float = 1.0
    """With ``objective="value"``: how much of what cheaper arrivals are expected to use is kept free for them."""
    protection_half_lives_s: tuple[float, ...] = (3600.0, 4 * 3600.0, 36 * 3600.0)
    """... and how fast arrivals are forgotten; the memory that expects more wins."""
    protection_reach: float = 3.0
    """... and for how many of its half-lives ahead each memory predicts: a burst is not the rate of a week."""
    waiting_retry_s: float = 1800.0
    """A job that waits for capacity is asked for again at least this often."""

    min_saving_pauses: float = 0.5
    """A job grows only when it then ends earlier by this many of its pauses, the pause itself already paid."""
    min_saving_s: float = 0.0
    """... and by at least this many seconds."""
    patience_pauses: float = 4.0
    """Who must wait longer than this many pauses for a first worker makes others give up what exceeds their share."""
    ageing_s: float = 1800.0
    """A best-effort job that waited so long takes turns with running ones, and its next turn is kept free of
    newcomers with deadlines; also the length of such a turn."""

    profile_budget_s: float = 60.0
    """How long one size may run while its speed is measured, from the first step."""
    profile_startup_s: float = 60.0
    """How long a gang that is profiled may take to its first step (longer if the job's known start-up is longer)."""
    profile_min_gain: float = 0.02
    """Profiling stops at a size whose speed is not this much (fraction) above the size before."""

    explore_gain: float = 0.0
    """Part of its remaining time that a job may hope to save with the next size, when that was never measured; it is
    tried on idle slots if that is more than two pauses. 0: never."""
    explore_window_s: float = 30.0
    """How long such a try may take, after its pause."""

    deviation_s: float = 1.0
    """A report that moves a job's end by less than this, and by less than ``deviation_fraction`` of what is left, does
    not make a new plan."""
    deviation_fraction: float = 0.02
    overdue_s: float = 5.0
    """A job that should have ended but has not said so keeps its slots; it is looked at again after this time."""

    @classmethod
    def served(cls, **settings: Any) -> Self:
        """As ``elasticflow serve`` promises by default; ``settings`` take the place of its defaults."""
        return cls(**{**_SERVED, **settings})

    def __post_init__(self) -> None:
        for name in ("speed_sigma", "report_sigma"):
            if not 0.0 <= getattr(self, name) < 10.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is the sigma of a log-normal factor, say 0.1")
        if not 0.0 <= self.speed_shared <= 1.0:
            raise ValueError(f"speed_shared is {self.speed_shared!r}; it is a fraction between 0 and 1")
        if not EVEN_ODDS <= self.speed_confidence < 1.0:
            raise ValueError(f"speed_confidence is {self.speed_confidence!r}; it is a probability from 0.5 to below 1")
        for name in ("deadline_margin_s", "offer_margin_s", "min_saving_pauses", "min_saving_s", "patience_pauses"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it cannot be negative")
        for name in ("ageing_s", "profile_budget_s", "overdue_s", "offer_round_s", "report_window_s"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0")


_SERVED: Mapping[str, Any] = {
    "speed_sigma": 0.10,
    "report_sigma": 0.05,
    "deadline_margin_s": 2.0,
    "offer_margin_s": 60.0,
    "offer_round_s": 60.0,
    "profile_startup_s": 120.0,
    "explore_gain": 0.35,
}
