"""What the scheduler decides: small values, each with the sentence that a user will read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticflow_airflow.scheduler_core.model.values import Placement, Plan


class Terms(StrEnum):
    """On which terms a job was admitted."""

    DEADLINE = "deadline"
    BEST_EFFORT = "best_effort"
    RENEGOTIATED = "renegotiated"


class Purpose(StrEnum):
    """Why a job gets the slots it gets."""

    PROFILE = "profile"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Admit:
    """The job is promised (``deadline_s``), with the plan that proves it; or taken as best effort (None)."""

    job_id: str
    terms: Terms
    deadline_s: float | None
    plan: Plan | None
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The deadline cannot be promised. ``earliest_deadline_s`` would be admitted at this very moment (None: never).

    The scheduler has forgotten the job: slots that it held (for profiling) count as free, so its gang must be stopped.
    """

    job_id: str
    reason: str
    earliest_deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits for slots to profile on; with ``on_reject="wait"`` for capacity; as best effort for a larger cluster.

    In the last case it was admitted already: no block of the cluster is as large as it needs.
    """

    job_id: str
    reason: str
    until_s: float | None


@dataclass(frozen=True, slots=True)
class Resize:
    """The job's gang is now exactly ``placement`` (start, grow, shrink or migrate; never empty)."""

    job_id: str
    placement: Placement
    purpose: Purpose
    reason: str
    batch_size: int | None = None
    """The global batch size to train with, for a job that lets it be chosen (None: its own)."""
    beside: bool = False
    """Whether it runs on what is left by whoever holds these slots, who never notices (AntMan, OSDI 2020)."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """The job gives up all its slots for now, keeping its state in a checkpoint."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Amended:
    """The amendment holds from now on; ``plan`` proves it when there is a deadline."""

    job_id: str
    deadline_s: float | None
    value: float
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class AmendRejected:
    """The amendment cannot be promised; what held before holds on."""

    job_id: str
    reason: str
    earliest_deadline_s: float | None


@dataclass(frozen=True, slots=True)
class AtRisk:
    """An admitted job no longer fits its deadline; it is finished as soon as possible."""

    job_id: str
    deadline_s: float
    projected_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class OnTrack:
    """A job that was at risk fits its deadline again."""

    job_id: str
    deadline_s: float
    projected_s: float


@dataclass(frozen=True, slots=True)
class WakeMeAt:
    """Send WakeUp at this time, unless another event comes first."""

    at_s: float


JobDecision = Admit | Reject | Wait | Resize | Suspend | Amended | AmendRejected | AtRisk | OnTrack
Decision = JobDecision | WakeMeAt
