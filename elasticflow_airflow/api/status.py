"""The status of jobs, slots and the service, and the changes that owners may request."""

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
"""An identity in a response: it was validated at submission and is not validated again."""


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
        """Whether the state is final."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.REJECTED)


class Mention(Wire):
    """A part of a sentence that not every user may read: ``length`` characters from ``at``.

    It is the id of a job (``job_id``), the name of a task of a DAG (``namespace``, ``dag_id``), or, with neither, words
    that may name anything, such as an error message. Who shows the sentence must check what the reader may see.
    """

    at: int
    length: int
    job_id: str | None = None
    namespace: str = ""
    dag_id: str = ""


class Telling(Wire):
    """A message with sentences. ``mentions``, by field of a sentence: its parts that not every user may read, in order.

    Of a sentence whose field is missing there, nothing is known: an older service wrote it.
    """

    mentions: dict[str, list[Mention]] = Field(default_factory=dict)


AdmissionDecision = Literal["admitted", "best_effort", "renegotiated", "rejected", "undecided"]


class Verdict(Telling):
    """The decision of admission control."""

    decision: AdmissionDecision
    reason: str = ""
    deadline_at: float | None = None
    earliest_deadline_at: float | None = None
    event_id: int | None = None
    plan: list[dict[str, float]] | None = None
    """Segments of the plan that proves the promise: start_s, end_s, workers, lost_s."""


class JobResult(Wire):
    """The result of a successful (or given up) job."""

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


class JobStatus(Telling):
    """The full status of a job."""

    job_id: str
    identity: StoredIdentity
    incarnation: int
    generation: int
    state: State
    state_reason: str = ""
    set_aside: str | None = None
    """Why the service, having failed on the job, only keeps its workers running. None: it is not set aside."""
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
    """Upper limit of its number of workers; fixed for its lifetime. None: not chosen yet, or consistency="fast"."""
    seed: int | None = None
    """Random seed of the training; None: it has not started, or its script does not use the session."""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    target_loss: float | None = None
    """Training ends when ``smoothed_loss`` reaches this value, or after ``total_steps``."""
    smoothed_loss: float | None = None
    expected_steps: int | None = None
    """The step, counted from the beginning, at which the target is expected; None: it cannot be predicted."""
    expected_steps_at_most: int | None = None
    """``expected_steps`` plus one standard error: what allocation plans with. Promises are based on ``total_steps``."""
    target_reached: bool | None = None
    """None until the training has ended."""
    steps_per_s: float | None = None
    projected_finish_at: float | None = None
    slack_s: float | None = None
    at_risk: bool = False
    lease_expires_at: float | None = None
    acknowledged: bool = False
    orphaned: bool = False
    """Whether it was cancelled because no client polled it any more, and not on request."""
    result: JobResult | None = None
    failure: str | None = None
    log_names: list[str] = Field(default_factory=list)
    last_event_id: int = 0

    @property
    def cursor(self) -> str:
        """Cursor for the page that follows a page whose last job is this one."""
        return f"{self.submitted_at!r},{self.job_id}"


class Attachment(Wire):
    """Response to a submit or attach: the job, and the claim to send with cancel, acknowledge and amend."""

    job: JobStatus
    claim: int
    created: bool
    warnings: list[str] = Field(default_factory=list)


class AttachRequest(Wire):
    """Attach to an existing job, for a task attempt that wants to continue with it."""

    lease_s: DurationS | None = None


class ClaimRequest(Wire):
    """Cancel, acknowledge or renew with a claim; a stale claim changes nothing (409)."""

    claim: Counter
    reason: Sentence = ""


class AmendRequest(Wire):
    """Change the deadline or the value, or drop the deadline."""

    claim: Counter
    deadline_at: UtcSeconds | None = None
    value: Value | None = None
    best_effort: Switch = False
    next_attempt: Switch = False
    """Only what the next attempt of a job that has ended asks for; refused if the job lives again meanwhile."""


class AmendAnswer(Telling):
    """Whether the amendment was accepted; if not, the earliest deadline that would be."""

    accepted: bool
    reason: str = ""
    earliest_deadline_at: float | None = None
    job: JobStatus


class DryRun(Wire):
    """The decision that admission control would make on a submission now; nothing was submitted."""

    job_id: str
    verdict: Verdict
    projected_finish_at: float | None = None


class Event(Telling):
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
    """One slot of the cluster and its holder.

    ``draining_until`` is when its node goes away, if that is known. Until ``avoided_until`` the slot is not used,
    because a worker was slow on it, or because its device or another of its node failed (``avoided_for``).
    """

    node_id: str
    index: int
    job_id: str | None = None
    busy: str | None = None
    draining_until: float | None = None
    avoided_until: float | None = None
    avoided_for: Literal["slow", "device"] | None = None


class Drain(Wire):
    """A node goes away at ``until_at`` (None: it stays after all)."""

    node_id: str
    until_at: float | None = Field(allow_inf_nan=False)


class DrainRequest(Wire):
    """Announce when a node goes away; None: it stays."""

    until_at: UtcSeconds | None


class ReplicaStatus(Wire):
    """One of several services on one database. ``silent_s``: since when it was not heard of, in seconds."""

    replica_id: str
    role: Literal["leader", "follower"]
    url: str | None = None
    host: str = ""
    version: str = ""
    silent_s: float
    is_gone: bool = False
    """It was not heard of for so long that it is taken for gone."""


class LeaderStatus(Wire):
    """Which of several services on one database decides. Times are UTC seconds by the clock of the database."""

    epoch: int
    """Grows by one with each change of the leader."""
    leader: str | None = None
    """Its replica id; None: nobody decides at this moment."""
    elected_at: float | None = None
    change: str | None = None
    """How it came to lead: "start", "hand-over" or "fail-over"."""
    failed_over_at: float | None = None
    """When a leader was last replaced because it was silent; None: never."""
    replicas: list[ReplicaStatus] = Field(default_factory=list)


class Health(Wire):
    """Response to a health request. ``role`` is that of the service that was asked; None: it is the only one."""

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
    role: Literal["leader", "follower"] | None = None
    leadership: LeaderStatus | None = None
