"""The decisions of the scheduler: small values, each with the reason that is shown to users."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Placement, Plan


class Terms(StrEnum):
    """The terms on which a job was admitted."""

    DEADLINE = "deadline"
    BEST_EFFORT = "best_effort"
    RENEGOTIATED = "renegotiated"


class Purpose(StrEnum):
    """What a job uses its slots for."""

    PROFILE = "profile"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Admit:
    """The deadline ``deadline_s`` is promised, with the plan that proves it; None: the job is taken as best effort."""

    job_id: str
    terms: Terms
    deadline_s: float | None
    plan: Plan | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reject:
    """The deadline cannot be promised. ``earliest_deadline_s`` would be admitted at this moment (None: none would).

    The scheduler has forgotten the job: slots that it held for profiling count as free, so its gang must be stopped.
    """

    job_id: str
    reason: Reason
    earliest_deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """The job waits: for slots to profile on, for capacity (``on_reject="wait"``), or for a larger cluster.

    The last case is a best-effort job that is admitted already, while no block of the cluster is large enough for it.
    """

    job_id: str
    reason: Reason
    until_s: float | None


@dataclass(frozen=True, slots=True)
class Resize:
    """The job's gang is now exactly ``placement`` (start, grow, shrink or migrate; never empty)."""

    job_id: str
    placement: Placement
    purpose: Purpose
    reason: Reason
    batch_size: int | None = None
    """The global batch size to train with, for a job whose batch size may be chosen (None: the job's own)."""
    beside: bool = False
    """Whether it runs on what the holder of these slots leaves unused, without affecting it (AntMan, OSDI 2020)."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """The job gives up all its slots for now, keeping its state in a checkpoint."""

    job_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Amended:
    """The amendment holds from now on; ``plan`` proves it when there is a deadline."""

    job_id: str
    deadline_s: float | None
    value: float
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class AmendRejected:
    """The amendment cannot be promised; the previous terms stay in force."""

    job_id: str
    reason: Reason
    earliest_deadline_s: float | None


@dataclass(frozen=True, slots=True)
class AtRisk:
    """An admitted job can no longer meet its deadline; it is finished as soon as possible."""

    job_id: str
    deadline_s: float
    projected_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class OnTrack:
    """A job that was at risk can meet its deadline again."""

    job_id: str
    deadline_s: float
    projected_s: float


@dataclass(frozen=True, slots=True)
class WakeMeAt:
    """Send WakeUp at this time, unless another event comes first."""

    at_s: float


JobDecision = Admit | Reject | Wait | Resize | Suspend | Amended | AmendRejected | AtRisk | OnTrack
Decision = JobDecision | WakeMeAt
