"""The values that the scheduler works with: jobs, nodes, scaling curves, plans, placements.

Everything here is immutable and knows no clock, disk, network or thread. Times are UTC seconds as floats; durations are
seconds and end in ``_s``; work is counted in optimizer steps at the job's global batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Slot(NamedTuple):
    """One place where one worker can run: a GPU, or a share of CPU cores, of a node."""

    node_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index(), which slots do not need

    @property
    def name(self) -> str:
        """The name used in messages: ``node:index``."""
        return f"{self.node_id}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine (or a virtual one) with ``slots`` equal slots.

    ``busy`` are indices of slots that others hold and that must not be used. ``draining_until_s`` is the time at which
    the node leaves, if known. ``avoided`` maps slot indices to the time before which nothing may be planned on them: a
    worker was slow there, and a gang that holds such a slot is moved. ``gpu_type`` names the type of its slots in a
    cluster with several types; no gang spans two types.
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

    Algorithms plan with :meth:`usable`: made non-decreasing and capped at the knee, without inventing speeds that were
    not measured (ElasticFlow, ASPLOS 2023, section 4.1, without the concavity assumption).
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
        """Return the sizes worth running between the two limits, in order, each strictly faster than the one before."""
        best = 0.0
        usable: dict[int, float] = {}
        for workers, speed in self.steps_per_s.items():
            if min_workers <= workers <= max_workers and speed > best:
                usable[workers] = best = speed
        return usable


class SpeedWindow(NamedTuple):
    """The mean speed reported in a time window, in steps/s, and the number of windows that it counts as."""

    since_s: float
    steps_per_s: float
    windows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """For a job whose global batch size may be chosen: ``batch_size`` is its own, ``curves`` the speeds by batch size.

    ``noise_scale`` is the gradient noise scale, in samples: the batch size beyond which larger ones gain little
    (Pollux, OSDI 2021, section 3.1).
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
    """The time lost around training, in seconds; measured per recurring task.

    ``startup_s``: from the order to start a job's gang to its first step.
    ``pause_s``: time without progress at every change of a running gang's slots (resize or migration).
    ``join_s``: how long a running gang continues at its old speed before that, while new workers start.
    ``tail_s``: from the last step until Airflow may use the result (final save, evaluation, wake-up).
    """

    startup_s: float = 0.0
    pause_s: float = 0.0
    tail_s: float = 0.0
    join_s: float = 0.0

    @property
    def repaid_after_s(self) -> float:
        """Return how long a job trains after a change until it may grow: as long as its pause took, if by a restart."""
        return 0.0 if self.join_s else self.pause_s


class OnReject(StrEnum):
    """What the submitter wants to happen when the deadline cannot be promised."""

    FAIL = "fail"
    BEST_EFFORT = "best_effort"
    WAIT = "wait"
    RENEGOTIATE = "renegotiate"
    """Accept the earliest deadline that can be promised up to ``latest_deadline_s``, for the same value."""
    LATE = "late"
    """The deadline is soft: as above, but the value falls linearly to zero at ``latest_deadline_s``."""

    @property
    def takes_later(self) -> bool:
        """Whether a later deadline is acceptable, up to ``latest_deadline_s``."""
        return self in (OnReject.RENEGOTIATE, OnReject.LATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job as its submitter describes it.

    ``deadline_s`` is None for a best-effort job. ``total_steps`` is None while the length is not known (best effort
    without a length, or until profiling reports it). ``curve`` is None until it is measured: the scheduler then
    profiles the job before it decides.
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
    """The deadline originally requested, if ``deadline_s`` is a later one that could be promised."""
    profile: bool = True
    """False: never profile (a plain script that reports nothing); it then runs as best effort at ``min_workers``."""
    explore: bool = True
    """False: never try a size that is not in ``curve`` (the user specified the curve)."""
    partial: bool = False
    """True: ``curve`` holds only the sizes measured so far. It suffices to admit the job, but the job is refused only
    after the missing sizes have been measured, too, or could not help any more."""
    task: str = ""
    """The recurring task that this is a run of, under which the calendar lists it; empty: none."""
    requested_workers: int | None = None
    """Size of a fixed-size request; used only by policies that do not choose sizes themselves."""
    curves: Mapping[str, ScalingCurve] = field(default_factory=dict)
    """Speed by ``Node.gpu_type``, if known; ``curve`` is then one that every type reaches (the slowest)."""
    batches: BatchChoice | None = None
    """None: the batch size is fixed. Steps are always counted at the job's own batch size."""
    workload: str = ""
    """What it trains, as named in a table of jobs that share GPUs."""
    speed_sigma: float | None = None
    """Error of ``curve`` as observed in past runs of its task: the sigma of a log-normal factor per size.
    None: unknown."""
    speed_sigmas: Mapping[int, float] = field(default_factory=dict)
    """The same by size, for sizes whose error was observed in past runs."""

    @property
    def last_deadline_s(self) -> float | None:
        """The latest end that still has value: later than ``deadline_s`` if a later deadline is acceptable."""
        soft = self.on_reject.takes_later and self.latest_deadline_s is not None
        return self.latest_deadline_s if soft and self.deadline_s is not None else self.deadline_s

    def value_at(self, end_s: float) -> float:
        """Return the job's value if it ends at ``end_s``: all of ``value``, or less after a soft deadline."""
        return self.value * self.part_at(end_s)

    def part_at(self, end_s: float) -> float:
        """Return the fraction of its value (0 to 1) that is left at ``end_s``: below 1 after a soft deadline."""
        soft_s = self.deadline_s if self.asked_deadline_s is None else self.asked_deadline_s
        if self.on_reject is not OnReject.LATE or soft_s is None or self.latest_deadline_s is None or end_s <= soft_s:
            return 1.0
        if end_s >= self.latest_deadline_s:
            return 0.0
        return (self.latest_deadline_s - end_s) / (self.latest_deadline_s - soft_s)


class Phase(StrEnum):
    """The state of a job as the scheduler sees it (the service's states are finer)."""

    PROFILING = "profiling"
    """Its curve is being measured, or it waits for slots to measure it on."""
    WAITING = "waiting"
    """Not promised yet; submitted with ``on_reject="wait"``."""
    ADMITTED = "admitted"
    """Its deadline is promised, or it is best effort."""
    PARKED = "parked"
    """It has no owner (its lease ran out): it holds no slots and competes for none."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a gang, in rank order. Empty: the job holds no slots."""

    slots: tuple[Slot, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers, one per slot."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """Hold ``workers`` slots from ``start_s`` until ``end_s``; the first ``lost_s`` seconds make no progress.

    If a gang grows, the progress that it lacks at its new speed until its new workers have joined counts as lost, too.
    """

    start_s: float
    end_s: float
    workers: int
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The course of a job from now to its end; the proof of a promise.

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
    """Everything that the scheduler remembers about one live job: enough to restore it after a crash.

    ``remaining_steps`` is the number at ``as_of_s``; between reports the scheduler extrapolates with the curve.
    ``no_progress_until_s`` is the end of the current start-up or pause. ``measured`` has the speeds measured in this
    run so far, by size (steps/s).
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
    starting: bool = False
    """Whether ``no_progress_until_s`` ends a start-up, which a change of slots would restart."""
    started: bool = False
    """Whether its gang has reported that it makes steps since the last start or change."""
    joined_s: float = 0.0
    """Latest time at which the new workers of its last change have joined."""
    number: int = 0
    """Order of arrival."""
    promise: int = 0
    """Order of its promise among all promises."""
    waiting_since_s: float = 0.0
    """Since when it has had no slots, if it has none."""
    parked_from: Phase | None = None
    """The phase to return to when it has an owner again."""
    failed_sizes: tuple[int, ...] = ()
    """Sizes that profiling could not measure."""
    profile_until_s: float | None = None
    """Time limit of the size that is being profiled."""
    expected_steps: float | None = None
    """Predicted steps left at ``as_of_s``, if there is a prediction; at most ``remaining_steps``."""
    trial: int = 0
    """The size to measure before the job is promised; 0: none."""
    foreseen: bool = False
    """Whether the calendar expected the job; it has then taken the place of its reservation."""
    reserved: tuple[Reservation, ...] = ()
    """The stored plan with its exact slots: the proof of its promise. Without it a restore must find a new proof."""
    evidence: Mapping[int, tuple[SpeedWindow, ...]] = field(default_factory=dict)
    """The windows that ``measured`` is based on; a size without windows was measured with certainty."""
    told: ScalingCurve | None = None
    """The curve before anything was measured; ``job.curve`` is the current estimate. None: the same."""
