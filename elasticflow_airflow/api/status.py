"""How jobs, slots and the service stand, and what their owners may change."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from elasticflow_airflow.api.base import API_VERSION, Wire
from elasticflow_airflow.api.fields import Counter, DurationS, Sentence, Switch, UtcSeconds, Value
from elasticflow_airflow.api.submission import JobIdentity

StoredIdentity = Annotated[
    JobIdentity, BeforeValidator(lambda raw: JobIdentity.as_stored(raw) if isinstance(raw, dict) else raw)
]
"""In an answer: it was taken in once, and is not looked at again."""


class State(StrEnum):
    """State of a job: submitted, profiling, admitted (or waiting, rejected), running or suspended, then an end."""

    SUBMITTED = "submitted"
    PROFILING = "profiling"
    WAITING = "waiting"
    ADMITTED = "admitted"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"

    @property
    def terminal(self) -> bool:
        """Nothing more happens to the job."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.REJECTED)


AdmissionDecision = Literal["admitted", "best_effort", "renegotiated", "rejected", "undecided"]


class Verdict(Wire):
    """What admission control said."""

    decision: AdmissionDecision
    reason: str = ""
    deadline_at: float | None = None
    earliest_deadline_at: float | None = None
    event_id: int | None = None
    plan: list[dict[str, float]] | None = None
    """Segments of the proving plan: start_s, end_s, workers, lost_s."""


class JobResult(Wire):
    """What a successful (or given up) job leaves."""

    checkpoint_path: str | None = None
    checkpoint_digest: str | None = None
    steps: int = 0
    final_loss: float | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    finished_at: float | None = None
    met: bool | None = None
    slack_s: float | None = None
    gpu_seconds: float = 0.0
    rescales: int = 0


class JobStatus(Wire):
    """Everything about a job that its watcher wants to know."""

    job_id: str
    identity: StoredIdentity
    incarnation: int
    generation: int
    state: State
    state_reason: str = ""
    set_aside: str | None = None
    """Why nothing is done for the job but to keep its workers: the service failed on it. None: it is not set aside."""
    verdict: Verdict
    claim: int
    submitted_at: float
    deadline_at: float | None
    best_effort: bool
    value: float
    workers: int = 0
    slots: list[tuple[str, int]] = Field(default_factory=list)
    consistency: str = "consistent"
    logical_workers: int | None = None
    """The most workers that it can get; fixed for its life. None: not chosen yet, or consistency="fast"."""
    seed: int | None = None
    """Of all that is random in the training; None: it has not begun, or its script knows no session."""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    target_loss: float | None = None
    """Training ends when ``smoothed_loss`` is there, or after ``total_steps``."""
    smoothed_loss: float | None = None
    expected_steps: int | None = None
    """The step, from the beginning, at which the target is expected; None: nobody can say."""
    expected_steps_at_most: int | None = None
    """... with one standard error: what allocation plans with. Promises stand on ``total_steps``."""
    target_reached: bool | None = None
    """None until the training has ended."""
    steps_per_s: float | None = None
    projected_finish_at: float | None = None
    slack_s: float | None = None
    at_risk: bool = False
    lease_expires_at: float | None = None
    acknowledged: bool = False
    orphaned: bool = False
    """Cancelled because nobody asked for it any more, and by nobody's wish."""
    result: JobResult | None = None
    failure: str | None = None
    log_names: list[str] = Field(default_factory=list)
    last_event_id: int = 0

    @property
    def cursor(self) -> str:
        """Where a page of a list ends whose last job this is: what is asked for to have the next page."""
        return f"{self.submitted_at!r},{self.job_id}"


class Attachment(Wire):
    """Answer to a submit or attach: the job, and the claim to show with cancel, acknowledge and amend."""

    job: JobStatus
    claim: int
    created: bool
    warnings: list[str] = Field(default_factory=list)


class AttachRequest(Wire):
    """A task attempt that only wants to go on with a job that it knows to exist."""

    lease_s: DurationS | None = None


class ClaimRequest(Wire):
    """Cancel, acknowledge or renew with a claim; a stale claim changes nothing (409)."""

    claim: Counter
    reason: Sentence = ""


class AmendRequest(Wire):
    """Change the deadline, the value, or give the deadline up."""

    claim: Counter
    deadline_at: UtcSeconds | None = None
    value: Value | None = None
    best_effort: Switch = False


class AmendAnswer(Wire):
    """Whether the amendment holds; if not, what would."""

    accepted: bool
    reason: str = ""
    earliest_deadline_at: float | None = None
    job: JobStatus


class DryRun(Wire):
    """What admission control would say to a submission now; nothing was submitted."""

    job_id: str
    verdict: Verdict
    projected_finish_at: float | None = None


class Event(Wire):
    """One row of the event log: what changed and why."""

    event_id: int
    job_id: str | None
    incarnation: int | None = None
    at: float
    kind: str
    reason: str
    data: dict[str, Any] = Field(default_factory=dict)


class LogPiece(Wire):
    """A piece of a worker's log; ``text`` is decoded with replacement characters, offsets count bytes."""

    text: str
    start_offset: int
    next_offset: int
    end_of_file: bool


class SlotStatus(Wire):
    """One slot of the cluster and who holds it.

    ``draining_until`` is when its node goes away, if that is known; ``avoided_until`` is until when nothing is planned
    on it, as a worker was slow there.
    """

    node_id: str
    index: int
    job_id: str | None = None
    busy: str | None = None
    draining_until: float | None = None
    avoided_until: float | None = None


class Drain(Wire):
    """A node goes away at ``until_at`` (None: it stays after all)."""

    node_id: str
    until_at: float | None = Field(allow_inf_nan=False)


class DrainRequest(Wire):
    """Say when a node goes away, or with None that it stays."""

    until_at: UtcSeconds | None


class Health(Wire):
    """Answer to health and version."""

    status: Literal["ok", "degraded"]
    version: str
    api: str = API_VERSION
    engine: str
    pid: int
    started_at: float
    state_dir: str
    live_jobs: int
    slots: list[SlotStatus] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
