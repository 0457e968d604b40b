"""A calendar of recurring work: which runs are expected, when, how large, how likely. Knows no plan and no clock.

Morpheus (OSDI 2016, section 4) infers deadlines and sizes of recurring jobs from their history and reserves slots for
them. Here the workflow engine provides the due times; the history provides the lateness, the length and the frequency
of the runs. Histories are kept as distributions and read by quantile, never as a mean (3Sigma, EuroSys 2018, section 3:
a mean with a margin is off by a factor of two for many jobs).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elasticflow_airflow.scheduler_core.model.values import RescaleCosts, ScalingCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarPolicy:
    """How far the calendar is trusted."""

    quantile: float = 0.9
    """Reservations cover this quantile of the observed lengths and latenesses."""
    unseen: float = 0.25
    """After one observed run, the next is assumed longer and later by this fraction; after ten, by a tenth of it."""
    sure: float = 0.9
    """Runs of at least this probability get a reservation each; the others are reserved for by their average use."""
    early_s: float = 60.0
    """A submission at most this long before a run is due counts as that run; an earlier one does not."""
    late_factor: float = 2.0
    """A run this many times later than any previous one is assumed not to come; its reservation is released ..."""
    late_min_s: float = 600.0
    """... but not before this long after it was due."""

    def __post_init__(self) -> None:
        for name in ("quantile", "sure"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} is {value!r}; it is a fraction above 0 and at most 1")
        for name in ("unseen", "early_s", "late_factor", "late_min_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it cannot be negative")


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, given by its observed values."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a distribution needs at least one value")
        if not all(math.isfinite(value) for value in self.values):
            raise ValueError(f"a distribution needs finite values; they are {self.values}")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, part: float) -> float:
        """Return the smallest value that at least a fraction ``part`` of the values do not exceed (nearest rank)."""
        return self.values[min(len(self.values), max(1, math.ceil(part * len(self.values) - 1e-9))) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """What happened at one due time of a task. If ``came`` is False, nothing was submitted and the rest is unused."""

    due_s: float
    came: bool = True
    late_s: float = 0.0
    """Seconds from the due time to the submission."""
    steps: float = 0.0
    deadline_after_s: float = 0.0
    """Its deadline, in seconds after the due time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """A run of a recurring task that is due at ``due_s`` and has not been submitted.

    ``lateness`` is seconds from due time to submission, ``steps`` the length, both as observed in past runs.
    ``deadline_after_s`` counts from ``due_s``. ``probability`` is that of the run being submitted. ``run_id`` is unique
    among expected runs. ``latest_s`` is a later deadline that is acceptable if the first cannot be promised; only
    forecasts use it.
    """

    run_id: str
    task: str
    due_s: float
    deadline_after_s: float
    steps: Spread
    curve: ScalingCurve
    lateness: Spread = Spread((0.0,))
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    min_workers: int = 1
    max_workers: int | None = None
    probability: float = 1.0
    latest_s: float | None = None
    speed_sigma: float | None = None
    """The error of ``curve``, as :attr:`Job.speed_sigma`."""
    speed_sigmas: Mapping[int, float] = field(default_factory=dict)
    """The same by size, as :attr:`Job.speed_sigmas`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"expected run {self.run_id!r} has probability {self.probability!r}; it is from 0 to 1")
        if not self.deadline_after_s > 0.0:
            raise ValueError(
                f"expected run {self.run_id!r} has its deadline {self.deadline_after_s!r} s after it is due; only a run"
                " with time to its deadline can be reserved for"
            )

    @property
    def deadline_s(self) -> float:
        """The time by which the run has to be done."""
        return self.due_s + self.deadline_after_s

    def forgotten_s(self, policy: CalendarPolicy) -> float:
        """Return the time from which the run is assumed not to come; its deadline at the latest."""
        late = max(policy.late_min_s, policy.late_factor * self.lateness.quantile(1.0))
        return min(self.deadline_s, self.due_s + late)


def stand_in_id(run_id: str) -> str:
    """Return the id under which plans hold the reservation of an expected run; no job has such an id."""
    return f"expected {run_id}"


def how_surely(history: Iterable[PastRun]) -> float:
    """Return the probability that a task's next run comes; 1 without a history, because it is scheduled."""
    came = [run.came for run in history]
    return (1 + sum(came)) / (1 + len(came))


def expect(
    history: Sequence[PastRun],
    *,
    run_id: str,
    task: str,
    due_s: float,
    curve: ScalingCurve,
    costs: RescaleCosts | None = None,
    min_workers: int = 1,
    max_workers: int | None = None,
    speed_sigma: float | None = None,
    speed_sigmas: Mapping[int, float] | None = None,
) -> ExpectedRun | None:
    """Return the next run of a task, from its history; None if it has no past run with a deadline.

    The deadline is that of the last run, because it is chosen by the author and not random.
    """
    seen = [run for run in history if run.came and run.deadline_after_s > 0.0 and run.steps > 0.0]
    if not seen:
        return None
    return ExpectedRun(
        run_id=run_id,
        task=task,
        due_s=due_s,
        deadline_after_s=seen[-1].deadline_after_s,
        steps=Spread(tuple(run.steps for run in seen)),
        lateness=Spread(tuple(max(0.0, run.late_s) for run in seen)),
        curve=curve,
        costs=costs or RescaleCosts(),
        min_workers=min_workers,
        max_workers=max_workers,
        speed_sigma=speed_sigma,
        speed_sigmas=speed_sigmas or {},
        probability=how_surely(history),
    )


class Calendar:
    """The expected runs that a scheduler knows."""

    def __init__(self, policy: CalendarPolicy | None = None) -> None:
        self.policy = policy or CalendarPolicy()
        self.runs: dict[str, ExpectedRun] = {}
        self._expiry: dict[str, float] = {}

    def expect(self, run: ExpectedRun) -> None:
        """Add a run, or replace the one expected under its id."""
        self.runs[run.run_id] = run
        self._expiry[run.run_id] = run.forgotten_s(self.policy)

    def forget(self, run_id: str) -> bool:
        """Release a run. Return whether it was known."""
        self._expiry.pop(run_id, None)
        return self.runs.pop(run_id, None) is not None

    def expire(self, now: float) -> None:
        """Release the runs that are so late that they are assumed not to come."""
        for run_id in [run_id for run_id, when in self._expiry.items() if when <= now]:
            self.forget(run_id)

    def take(self, task: str, now: float) -> ExpectedRun | None:
        """Remove and return the expected run that a submission of ``task`` at ``now`` matches, if any."""
        run = self.match(task, now)
        if run is not None:
            self.forget(run.run_id)
        return run

    def match(self, task: str, now: float) -> ExpectedRun | None:
        """Return the expected run that a submission of ``task`` at ``now`` matches, if any."""
        if not task:
            return None
        due = [run for run in self.runs.values() if run.task == task and run.due_s - self.policy.early_s <= now]
        return min(due, key=lambda run: (run.due_s, run.run_id), default=None)

    def next_expiry(self) -> float | None:
        """Return the time at which the next run is released if it does not come."""
        return min(self._expiry.values(), default=None)
