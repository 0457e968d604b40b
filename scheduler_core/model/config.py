"""The tunable settings of the scheduler, each with its unit and its default. Knows nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class Objective(StrEnum):
    """Which jobs to admit when not all of them fit."""

    FIRST_COME = "first-come"
    """Admit every job that fits beside the promised jobs, in order of arrival."""
    VALUE = "value"
    """Admit a job if it is worth more than what it takes from expected arrivals (see :mod:`protection_price`)."""
    AUTO = "auto"
    """As ``VALUE`` for twelve days after a refusal for lack of slots; until then as ``FIRST_COME``, unless long and
    short memories agree that others need the slots."""


EVEN_ODDS = 0.5
"""The confidence at which no margin is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of one :class:`~elasticflow_airflow.scheduler_core.scheduler.Scheduler`.

    The defaults keep no margins, which is right where speeds are known exactly. :meth:`served` returns the settings
    of the service, which are also the default of simulations.
    """

    speed_sigma: float = 0.0
    """Error of a job's curve while no past run of its task has shown it: the sigma of a log-normal factor per job and
    size. 0: exact."""
    speed_shared: float = 0.5
    """Fraction of that error's variance that all sizes of a job share (0: the errors of the sizes are independent)."""
    speed_confidence: float = 0.9
    """Probability that a size that never ran is as fast as planned; a measured size needs no margin."""
    report_sigma: float = 0.0
    """Error of the speed in one window of reports, as a sigma likewise. 0: exact, and trusted at once."""
    report_window_s: float = 15.0
    """Reports within this time cover the same steps and count as one."""
    deadline_margin_s: float = 0.0
    """New promises and new plans end this long before the deadline (delays of wake-ups and of the engine)."""
    offer_margin_s: float = 0.0
    """Added to the earliest feasible deadline that a rejection offers, so that a resubmission soon after fits."""
    offer_round_s: float = 1.0
    """An offered deadline is rounded up to a multiple of this, in UTC, because people copy it."""
    offer_probes: int = 6
    """How many deadlines bisection tries with the full admission test; more is more exact and slower."""
    rescue_orders: int = 12
    """How many alternative filling orders are tried before a rejection."""
    rescue_effort: int = 400
    """... and at most this number divided by the number of jobs, so that decisions stay fast with many jobs."""
    afresh_up_to: int = 64
    """Beside so many jobs everything is planned anew for a newcomer that finds no free slots. Beside more, one of them
    makes room first, if it can: a fresh plan of all takes longer the more there are."""
    afresh_first_up_to: int = 2000
    """Beside more jobs than this, a newcomer is promised slots that others leave later, if it is in time there, before
    everything is planned anew, which takes half a second beside ten thousand."""
    proof_rounds: int = 8
    """How often the filling is repeated with the pauses of the migrations that its placement needed."""
    proof_effort: int = 2000
    """... and in other orders at most this number divided by the number of jobs."""

    objective: Objective = Objective.AUTO
    protection_weight: float = 1.0
    """With ``"value"`` and ``"auto"``: the fraction of cheaper arrivals' expected use that is kept free for them."""
    protection_half_lives_s: tuple[float, ...] = (3600.0, 4 * 3600.0, 36 * 3600.0)
    """... and the half-lives with which past arrivals are forgotten; the largest of the resulting estimates is used."""
    protection_reach: float = 3.0
    """... and how many half-lives ahead each estimate reaches: a burst does not predict the rate of a week."""
    waiting_caution: float = 3.0
    """... and how many times that much a job that waits must leave: it is asked at many moments, and would be admitted
    at the one at which least is expected by chance."""
    waiting_retry_s: float = 1800.0
    """Admission of a job that waits for capacity is retried at least this often."""

    min_saving_pauses: float = 0.5
    """A job grows only if it then ends earlier by at least this many of its pauses, after paying the pause itself."""
    min_saving_s: float = 0.0
    """... and by at least this many seconds."""
    starts_reported: bool = False
    """Whether it is reported when a gang makes steps after a start or a change, as the service does: until then the job
    does not grow, however late that is. Otherwise it may grow from the planned time on."""
    patience_pauses: float = 4.0
    """A job that must wait more pauses than this for its first worker makes others give up slots beyond their share."""
    ageing_s: float = 1800.0
    """A best-effort job that waited this long takes turns with running ones, and newcomers with deadlines cannot take
    its next turn. Also the length of such a turn."""

    profile_budget_s: float = 60.0
    """How long one size may run while its speed is measured, counted from the first step."""
    profile_startup_s: float = 60.0
    """How long a profiled gang may take to reach its first step (longer if the job's known start-up is longer)."""
    profile_min_gain: float = 0.02
    """Profiling stops at a size whose speed exceeds that of the previous size by less than this fraction."""

    explore_gain: float = 0.0
    """Fraction of its remaining time that a job is assumed to save at the next size while that was never measured. The
    size is tried on idle slots if this saving exceeds two pauses. 0: never."""
    explore_window_s: float = 30.0
    """How long such a trial may take, after its pause."""

    deviation_s: float = 1.0
    """A report that moves a job's end by less than this, and by less than ``deviation_fraction`` of the time left, does
    not cause a new plan."""
    deviation_fraction: float = 0.02
    overdue_s: float = 5.0
    """A job that should have ended but has not reported its end keeps its slots; it is rechecked after this time."""

    @classmethod
    def served(cls, **settings: Any) -> Self:
        """Return the defaults of ``elasticflow serve``, overridden by ``settings``."""
        return cls(**{**_SERVED, **settings})

    def __post_init__(self) -> None:
        for name in ("speed_sigma", "report_sigma"):
            if not 0.0 <= getattr(self, name) < 10.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is the sigma of a log-normal factor, say 0.1")
        if not 0.0 <= self.speed_shared <= 1.0:
            raise ValueError(f"speed_shared is {self.speed_shared!r}; it is a fraction between 0 and 1")
        if not EVEN_ODDS <= self.speed_confidence < 1.0:
            raise ValueError(f"speed_confidence is {self.speed_confidence!r}; it is a probability from 0.5 to below 1")
        for name in (
            "deadline_margin_s",
            "offer_margin_s",
            "min_saving_pauses",
            "min_saving_s",
            "patience_pauses",
            "waiting_caution",
        ):
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
