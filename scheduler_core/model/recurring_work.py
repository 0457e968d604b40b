"""A calendar of recurring work: which runs are expected, when, how large, and how surely. Knows no plan and no clock.

Morpheus (OSDI 2016, section 4) infers deadlines and sizes of recurring jobs from their history and reserves for them;
here the workflow engine says when a run is due, and the history says how late it comes, how long it is, and how often
it comes at all. Histories are kept as distributions and read by quantile (3Sigma, EuroSys 2018, section 3: a mean with
a margin is off by a factor of two for many jobs), never as a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elasticflow_airflow.scheduler_core.model.values import RescaleCosts, ScalingCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarPolicy:
    """How much of the calendar is believed."""

    quantile: float = 0.9
    """Reservations hold for so large a part of the lengths and of the latenesses seen."""
    unseen: float = 0.25
    """With one run seen, the next is taken to be longer and later by this part; with ten, by a tenth of it."""
    sure: float = 0.9
    """Runs that come at least this often are reserved for one by one; the others by what they use on average."""
    early_s: float = 60.0
    """A submission so long before a run is due is that run; a still earlier one is something else."""
    late_factor: float = 2.0
    """A run that is so many times later than any before is taken not to come: its reservation is released ..."""
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
    """A distribution as the values that were seen."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a distribution needs at least one value")
        if not all(math.isfinite(value) for value in self.values):
            raise ValueError(f"a distribution needs finite values; they are {self.values}")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, part: float) -> float:
        """The smallest value that at least ``part`` of the values do not exceed (nearest rank)."""
        return self.values[min(len(self.values), max(1, math.ceil(part * len(self.values) - 1e-9))) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """What one due time of a task brought. ``came`` False: nothing was submitted, and the rest means nothing."""

    due_s: float
    came: bool = True
    late_s: float = 0.0
    """From the time it was due to its submission."""
    steps: float = 0.0
    deadline_after_s: float = 0.0
    """Its deadline, from the time it was due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """A run of a recurring task that is due at ``due_s`` and has not been submitted.

    ``lateness`` is seconds from due to submission, ``steps`` its length, both as seen before. ``deadline_after_s``
    counts from ``due_s``. ``probability``: how surely it comes. ``run_id`` is unique among expected runs. ``latest_s``:
    a later deadline that would do, if the first cannot be promised; only a forecast asks.
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
    """How wrong ``curve`` may be, as :attr:`Job.speed_sigma`."""
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
        """When it has to be done."""
        return self.due_s + self.deadline_after_s

    def forgotten_s(self, policy: CalendarPolicy) -> float:
        """From when on it is taken not to come; at its deadline at the latest."""
        late = max(policy.late_min_s, policy.late_factor * self.lateness.quantile(1.0))
        return min(self.deadline_s, self.due_s + late)


def stand_in_id(run_id: str) -> str:
    """Under which id plans hold the reservation of an expected run; no job has such an id."""
    return f"expected {run_id}"


def how_surely(history: Iterable[PastRun]) -> float:
    """How often a task's runs came. One that nobody has seen yet is expected: its timetable says so."""
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
    """The next run of a task by its history; None when no run with a deadline was seen yet.

    The deadline is that of the last run: its author's choice, not chance.
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
    """The expected runs that a scheduler knows of."""

    def __init__(self, policy: CalendarPolicy | None = None) -> None:
        self.policy = policy or CalendarPolicy()
        self.runs: dict[str, ExpectedRun] = {}
        self._expiry: dict[str, float] = {}

    def expect(self, run: ExpectedRun) -> None:
        """Add a run, or replace what was expected under its id."""
        self.runs[run.run_id] = run
        self._expiry[run.run_id] = run.forgotten_s(self.policy)

    def forget(self, run_id: str) -> bool:
        """Release a run; whether it was known."""
        self._expiry.pop(run_id, None)
        return self.runs.pop(run_id, None) is not None

    def expire(self, now: float) -> list[ExpectedRun]:
        """Release the runs that are so late that they are taken not to come."""
        first = self.next_expiry()
        if first is None or first > now:
            return []
        gone = [self.runs[run_id] for run_id, when in self._expiry.items() if when <= now]
        for run in gone:
            self.forget(run.run_id)
        return gone

    def take(self, task: str, now: float) -> ExpectedRun | None:
        """The expected run that a submission of ``task`` at ``now`` is; it is expected no more."""
        due = [run for run in self.runs.values() if run.task == task and run.due_s - self.policy.early_s <= now]
        if not task or not due:
            return None
        run = min(due, key=lambda run: (run.due_s, run.run_id))
        self.forget(run.run_id)
        return run

    def next_expiry(self) -> float | None:
        """When the next run is released if it does not come."""
        return min(self._expiry.values(), default=None)
