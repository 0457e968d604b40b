"""The values the scheduler reasons about: jobs, nodes, scaling curves, plans, placements.

Everything here is immutable and knows no clock, disk, network or thread. Times are UTC seconds as
floats; durations are seconds and end in ``_s``; work is counted in optimizer steps at the job's
global batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Slot(NamedTuple):
    """One place where one worker can run: a GPU, or a share of CPU cores, of a node."""

    node_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index(), which nobody needs of a slot

    @property
    def name(self) -> str:
        """As messages name it: ``node:index``."""
        return f"{self.node_id}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine (or a virtual one) with ``slots`` equal slots.

    ``busy`` are slot indices that somebody else holds and that must not be used.
    ``draining_until_s`` is the time at which the node goes away, if it is known. ``avoided`` are slots (index) on which
    nothing may be planned before a time: a worker was slow there, and whoever holds one is moved. ``gpu_type`` names
    what its slots are, where a cluster has several kinds; no gang stands on two.
    """

    node_id: str
    slots: int
    busy: frozenset[int] = frozenset()
    draining_until_s: float | None = None
    avoided: Mapping[int, float] = field(default_factory=dict)
    gpu_type: str = ""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"node {self.node_id!r} has {self.slots} slots; it needs at least 1")


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Measured speed by number of workers (a power of two each), in steps/s at the global batch size.

    Algorithms plan with :meth:`usable`: made non-decreasing and capped at the knee, never inventing
    a speed nobody measured (ElasticFlow, ASPLOS 2023, section 4.1, without the concavity assumption).
    """

    steps_per_s: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.steps_per_s:
            raise ValueError("a scaling curve needs at least one measured number of workers")
        for workers, speed in self.steps_per_s.items():
            if workers < 1 or workers & (workers - 1):
                raise ValueError(f"scaling curve: {workers} workers is not a power of two")
            if not 0.0 < speed < float("inf"):
                raise ValueError(f"scaling curve: {speed!r} steps/s at {workers} workers is not a positive number")
        object.__setattr__(self, "steps_per_s", dict(sorted(self.steps_per_s.items())))

    def usable(self, min_workers: int, max_workers: int) -> dict[int, float]:
        """Sizes worth running between the two limits, in order, each strictly faster than the one before."""
        best = 0.0
        usable: dict[int, float] = {}
        for workers, speed in self.steps_per_s.items():
            if min_workers <= workers <= max_workers and speed > best:
                usable[workers] = best = speed
        return usable


class SpeedWindow(NamedTuple):
    """The mean speed that was reported in a window of time, in steps/s, and as how many windows it counts."""

    since_s: float
    steps_per_s: float
    windows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """For a job whose global batch size may be chosen: ``batch_size`` is its own, ``curves`` the speeds by batch size.

    ``noise_scale`` is that of its gradients, in samples: the batch from which on larger ones pay little (Pollux, OSDI
    2021, section 3.1).
    """

    batch_size: int
    curves: Mapping[int, ScalingCurve]
    noise_scale: float

    def __post_init__(self) -> None:
        if self.batch_size not in self.curves:
            raise ValueError(f"the job's own batch size {self.batch_size} has no curve; there are {list(self.curves)}")
        if not 0.0 <= self.noise_scale < float("inf"):
            raise ValueError(f"noise scale {self.noise_scale!r}; it must be a number of samples of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleCosts:
    """What is lost around training, in seconds; measured per recurring task.

    ``startup_s``: from the order to start a gang that has none to its first step.
    ``pause_s``: no progress, at every change of a running gang's slots (resize or migration).
    ``join_s``: how long a running gang goes on at its old speed before that, as new workers have to start first.
    ``tail_s``: from the last step to the moment Airflow may use the result (final save, evaluation, wake-up).
    """

    startup_s: float = 0.0
    pause_s: float = 0.0
    tail_s: float = 0.0
    join_s: float = 0.0


class OnReject(StrEnum):
    """What the submitter wants when a deadline cannot be promised."""

    FAIL = "fail"
    BEST_EFFORT = "best_effort"
    WAIT = "wait"
    RENEGOTIATE = "renegotiate"
    """Accept the earliest deadline that can be promised up to ``latest_deadline_s``, for the same value."""
    LATE = "late"
    """The deadline is soft: likewise, for a value that falls evenly to nothing at ``latest_deadline_s``."""

    @property
    def takes_later(self) -> bool:
        """Whether a later deadline will do, up to ``latest_deadline_s``."""
        return self in (OnReject.RENEGOTIATE, OnReject.LATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job as its submitter describes it.

    ``deadline_s`` is None for a best-effort job. ``total_steps`` is None while the length is not known
    (best effort without a length; or until profiling reports it). ``curve`` is None until it is measured:
    the scheduler then profiles the job before it decides.
    """

    job_id: str
    submitted_s: float
    deadline_s: float | None
    total_steps: float | None
    curve: ScalingCurve | None
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    min_workers: int = 1
    max_workers: int | None = None
    value: float = 1.0
    on_reject: OnReject = OnReject.FAIL
    latest_deadline_s: float | None = None
    asked_deadline_s: float | None = None
    """The deadline that it came with, when ``deadline_s`` is a later one that could be promised."""
    profile: bool = True
    """False: never profile (a plain script that reports nothing); it then runs as best effort at ``min_workers``."""
    explore: bool = True
    """False: never try a size that ``curve`` does not name (the user gave the curve, and means it)."""
    partial: bool = False
    """True: ``curve`` is what was measured so far. It may admit; it refuses only when the sizes that it lacks have been
    measured, too, or could not help any more."""
    task: str = ""
    """The recurring task that it is a run of, by which the calendar knows it; empty: none."""
    requested_workers: int | None = None
    """What a fixed-size request would ask for; only policies that do not choose sizes themselves look at it."""
    curves: Mapping[str, ScalingCurve] = field(default_factory=dict)
    """Speed by ``Node.gpu_type``, if that is known; ``curve`` is then one that every type keeps (the slowest)."""
    batches: BatchChoice | None = None
    """None: the batch size stays what it is. Steps are always counted at the job's own."""
    workload: str = ""
    """What it trains, as a table of jobs that share GPUs names it."""
    speed_sigma: float | None = None
    """How wrong ``curve`` may be by what past runs of its task have shown: the sigma of a log-normal factor per size.
    None: nobody knows."""
    speed_sigmas: Mapping[int, float] = field(default_factory=dict)
    """The same at those sizes of which past runs have shown it."""

    @property
    def last_deadline_s(self) -> float | None:
        """The latest end that is still worth something: later than ``deadline_s`` where another may be accepted."""
        soft = self.on_reject.takes_later and self.latest_deadline_s is not None
        return self.latest_deadline_s if soft and self.deadline_s is not None else self.deadline_s

    def value_at(self, end_s: float) -> float:
        """What the job is worth when it ends at ``end_s``: all of ``value``, or a part where its deadline is soft."""
        return self.value * self.part_at(end_s)

    def part_at(self, end_s: float) -> float:
        """Part of its value (0 to 1) that is left at ``end_s``: less than all after a soft deadline."""
        soft_s = self.deadline_s if self.asked_deadline_s is None else self.asked_deadline_s
        if self.on_reject is not OnReject.LATE or soft_s is None or self.latest_deadline_s is None or end_s <= soft_s:
            return 1.0
        if end_s >= self.latest_deadline_s:
            return 0.0
        return (self.latest_deadline_s - end_s) / (self.latest_deadline_s - soft_s)


class Phase(StrEnum):
    """Where a job stands in the eyes of the scheduler (the service's states are finer)."""

    PROFILING = "profiling"
    """Its curve is being measured, or it waits for slots on which to measure it."""
    WAITING = "waiting"
    """Not promised yet; asked for ``on_reject="wait"``."""
    ADMITTED = "admitted"
    """Promised by its deadline, or best effort."""
    PARKED = "parked"
    """Its owner is away (lease run out): holds nothing, competes for nothing."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a gang, in rank order. Empty: the job holds nothing."""

    slots: tuple[Slot, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers, one a slot."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """Hold ``workers`` slots from ``start_s`` until ``end_s``, of which the first ``lost_s`` make no progress.

    Where a gang grows, what it lacks of its new speed until its new workers have joined counts as lost, too.
    """

    start_s: float
    end_s: float
    workers: int
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job gets from now to its end; the proof that comes with a promise.

    ``finish_s`` is the end of the last step; ``promised_s`` adds the tail and is compared with the deadline.
    """

    job_id: str
    segments: tuple[PlanSegment, ...]
    finish_s: float
    promised_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that a job's stored plan holds from ``start_s`` until ``end_s`` (its tail included)."""

    start_s: float
    end_s: float
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """All that the scheduler remembers of one live job: enough to restore it after a crash.

    ``remaining_steps`` counts at ``as_of_s``; between reports the scheduler extrapolates with the curve.
    ``no_progress_until_s`` is the end of the start-up or pause that is under way.
    ``measured`` are the speeds seen in this run so far, by size (steps/s).
    """

    job: Job
    phase: Phase
    best_effort: bool
    remaining_steps: float | None
    as_of_s: float
    placement: Placement = field(default_factory=Placement)
    no_progress_until_s: float = 0.0
    measured: Mapping[int, float] = field(default_factory=dict)
    at_risk: bool = False
    ever_started: bool = False
    starting: bool = False
    """Whether ``no_progress_until_s`` ends a start-up (which a change of slots would make it pay again)."""
    joined_s: float = 0.0
    """When the new workers of its last change have joined, at the latest."""
    number: int = 0
    """Order of arrival."""
    promise: int = 0
    """Order of the promises."""
    waiting_since_s: float = 0.0
    """Since when it has had no slots, while it has none."""
    parked_from: Phase | None = None
    """The phase to go back to when its owner is back."""
    failed_sizes: tuple[int, ...] = ()
    """Sizes that profiling could not measure."""
    profile_until_s: float | None = None
    """Until when the size that is being profiled may take."""
    expected_steps: float | None = None
    """At ``as_of_s``: what a prediction says is left, if there is one; less than ``remaining_steps``."""
    trial: int = 0
    """The size that is measured before it is promised; 0: none."""
    foreseen: bool = False
    """The calendar expected it: it has taken the place of its reservation."""
    reserved: tuple[Reservation, ...] = ()
    """The stored plan on its very slots: the proof of its promise. Without it a restore has to find a proof anew."""
    evidence: Mapping[int, tuple[SpeedWindow, ...]] = field(default_factory=dict)
    """The windows on which ``measured`` rests; a size that has none was measured for certain."""
    told: ScalingCurve | None = None
    """The curve before anything was measured; ``job.curve`` is what is believed now. None: the same."""
