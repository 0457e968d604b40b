"""The HTTP API's values, shared by the service and its clients. Times are UTC seconds since the epoch, as floats.

May import nothing but pydantic: it is read by Airflow workers (no torch) and by services without Airflow.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

API_VERSION = "v1"
TRACEPARENT = "traceparent"
"""Label of a submission: where the job belongs in a trace (W3C Trace Context)."""
API_HEADER = "ElasticFlow-API"
VERSION_HEADER = "ElasticFlow-Version"
"""Every answer of a service carries the two, so that a client of another version can say so."""


class Wire(BaseModel):
    """Base of all messages: unknown fields are an error on the way in, so that a typing mistake is found at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class JobIdentity(Wire):
    """Which Airflow task instance a job belongs to. The namespace keeps two Airflows apart."""

    namespace: str = "default"
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @property
    def job_id(self) -> str:
        """Deterministic id: readable, safe in a URL and as a folder name, unique by a digest of all parts."""
        parts = [self.namespace, self.dag_id, self.run_id, self.task_id, self.map_index]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        readable = re.sub(r"[^a-z0-9]+", "-", f"{self.dag_id}-{self.task_id}".lower()).strip("-")[:60]
        return f"{readable or 'job'}-{digest}"

    @property
    def recurring_key(self) -> str:
        """The same for every run of this task: what history (scaling curve, costs) is kept under."""
        return json.dumps([self.namespace, self.dag_id, self.task_id, self.map_index])


class Command(Wire):
    """What a worker runs. ``script`` is a path inside the snapshot; or ``module`` is imported from it."""

    snapshot: str = Field(pattern=r"^[0-9a-f]{64}$")
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    python: str | None = None
    working_dir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_entry(self) -> Command:
        if (self.script is None) == (self.module is None):
            raise ValueError("give exactly one of script= and module=")
        return self


class Length(Wire):
    """How much to train: ``steps``, or ``epochs`` (of ``samples`` each, if the submitter knows)."""

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    samples: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _not_both(self) -> Length:
        if self.steps is not None and (self.epochs is not None or self.samples is not None):
            raise ValueError("give steps, or epochs and samples, not both")
        if self.samples is not None and self.epochs is None:
            raise ValueError("samples= needs epochs=")
        return self

    def total_steps(self, global_batch_size: int) -> int | None:
        """Optimizer steps in all, if known: the last batch of an epoch may be short."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None and self.samples is not None:
            return self.epochs * -(-self.samples // global_batch_size)
        return None


PowerOfTwo = Annotated[int, Field(ge=1)]


class JobSubmission(Wire):
    """Everything that a submitter says of a job. ``secret_env`` is never echoed, stored in plain text or logged."""

    identity: JobIdentity
    command: Command
    length: Length
    global_batch_size: int = Field(ge=1)
    deadline_at: float | None = Field(default=None, allow_inf_nan=False)
    best_effort: bool = False
    value: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    on_reject: Literal["fail", "best_effort", "wait", "renegotiate", "late"] = "fail"
    latest_deadline_at: float | None = Field(default=None, allow_inf_nan=False)
    on_miss: Literal["finish", "fail", "use_last_checkpoint"] = "finish"
    init_from: str | None = None
    min_workers: PowerOfTwo = 1
    max_workers: PowerOfTwo | None = None
    consistency: Literal["consistent", "fast"] = "consistent"
    logical_workers: PowerOfTwo | None = None
    """Into how many shares each step is cut for good, whatever the number of workers; None: the service chooses."""
    scaling_curve: dict[int, float] | None = None
    progress_regex: str | None = None
    progress_file: str | None = None
    target_loss: float | None = Field(default=None, allow_inf_nan=False)
    """Training ends when its smoothed loss is there, and at its length at the latest."""
    secret_env: dict[str, SecretStr] = Field(default_factory=dict)
    lease_s: float = Field(default=600.0, gt=0)
    orphan_s: float = Field(default=3600.0, gt=0)
    due_at: float | None = Field(default=None, allow_inf_nan=False)
    """When this run was due by its timetable; without it, what the run before said, or the time of the submission."""
    next_run_at: float | None = Field(default=None, allow_inf_nan=False)
    """When the next run of the same task is due: slots are kept free for it by what its runs were like so far."""
    next_runs_at: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = Field(default=(), max_length=200)
    """More due times, as far as the timetable tells them; those of the next two days are enough."""
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> JobSubmission:
        if self.best_effort == (self.deadline_at is not None):
            raise ValueError("give a deadline or best_effort=True, and not both")
        for size, speed in (self.scaling_curve or {}).items():
            if size < 1 or size & (size - 1) or not 0.0 < speed < math.inf:
                raise ValueError("scaling_curve= gives positive steps/s by number of workers, each a power of two")
        if self.on_reject in ("renegotiate", "late") and self.latest_deadline_at is None:
            raise ValueError(f'on_reject="{self.on_reject}" needs latest_deadline')
        if (self.latest_deadline_at or math.inf) <= (self.deadline_at or -math.inf):
            raise ValueError("latest_deadline is not later than the deadline: nothing could be accepted in its place")
        for name, workers in (("min_workers", self.min_workers), ("max_workers", self.max_workers)):
            if workers is not None and workers & (workers - 1):
                raise ValueError(f"{name}={workers} is not a power of two")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers={self.max_workers} is less than min_workers={self.min_workers}")
        problem = target_problem(
            self.target_loss,
            bounded=self.length.steps is not None or self.length.epochs is not None,
            plain=self.progress_regex is not None or self.progress_file is not None,
        )
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _divisible(self) -> JobSubmission:
        problem = share_problem(
            self.consistency, self.logical_workers, self.global_batch_size, self.min_workers, self.max_workers
        )
        if problem is not None:
            raise ValueError(problem)
        return self

    def equality_key(self) -> str:
        """Digest of what makes two submissions the same training (script, arguments, length, target, batch, init)."""
        same: list[object] = [
            self.command.script,
            self.command.module,
            list(self.command.args),
            self.length.model_dump(),
            self.global_batch_size,
            self.init_from,
        ]
        if self.target_loss is not None:  # Without one the digest is what it was before there were targets.
            same.append(self.target_loss)
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def target_problem(target_loss: float | None, *, bounded: bool, plain: bool) -> str | None:
    """What is wrong with a loss to train to, and what to do about it; None when all is well.

    ``bounded``: ``steps`` or ``epochs`` is given; ``plain``: the script's output is read, it does not use the session.
    """
    if target_loss is None:
        return None
    if not bounded:
        return (
            f"target_loss={target_loss:g} needs steps= or epochs= as well: the most that it may train, on which its"
            " deadline is promised"
        )
    if plain:
        return (
            f"target_loss={target_loss:g} beside progress_regex= or progress_file=: only a script that uses the"
            " session (runtime.init(), the Trainer, Lightning) can be ended by its loss"
        )
    return None


def largest_share(global_batch_size: int, at_most: int) -> int:
    """The largest power of two that divides the global batch and is at most ``at_most``; at least 1."""
    divides = global_batch_size & -global_batch_size
    return min(divides, 1 << (max(1, at_most).bit_length() - 1))


def share_problem(
    consistency: str, logical_workers: int | None, global_batch_size: int, min_workers: int, max_workers: int | None
) -> str | None:
    """What is wrong with how a step is to be cut into shares, and what to do about it; None when all is well.

    In consistent mode every step is cut into ``logical_workers`` equal shares, a power of two of them, and a worker
    computes one or more of them: there cannot be more workers than shares. In fast mode each worker takes a part.
    """
    for name, workers in (("min_workers", min_workers), ("max_workers", max_workers)):
        if workers is not None and workers > global_batch_size:
            return f"{name}={workers} is more than global_batch_size={global_batch_size}: some would have no sample"
    if consistency == "fast":
        if logical_workers is not None:
            return (
                f'logical_workers={logical_workers} beside consistency="fast", where there are none: leave one of the'
                " two out"
            )
        return None
    shares = largest_share(global_batch_size, global_batch_size)
    if logical_workers is None:
        if min_workers > shares:
            return (
                f"min_workers={min_workers} workers cannot share global_batch_size={global_batch_size} equally: choose"
                f' a multiple of {min_workers}, at most {shares} workers, or consistency="fast"'
            )
        return None
    if logical_workers & (logical_workers - 1):
        return f"logical_workers={logical_workers} is not a power of two"
    if global_batch_size % logical_workers:
        return (
            f"logical_workers={logical_workers} does not divide global_batch_size={global_batch_size}: choose a"
            f" multiple of {logical_workers}, or logical_workers={largest_share(global_batch_size, logical_workers)}"
        )
    for name, workers in (("min_workers", min_workers), ("max_workers", max_workers)):
        if workers is not None and workers > logical_workers:
            return (
                f"{name}={workers} is more than logical_workers={logical_workers}: some would have nothing to do;"
                f" give at least {workers} logical workers"
            )
    return None


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


class Verdict(Wire):
    """What admission control said."""

    decision: Literal["admitted", "best_effort", "renegotiated", "rejected", "undecided"]
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
    identity: JobIdentity
    incarnation: int
    generation: int
    state: State
    state_reason: str = ""
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


class Attachment(Wire):
    """Answer to a submit or attach: the job, and the claim to show with cancel, acknowledge and amend."""

    job: JobStatus
    claim: int
    created: bool
    warnings: list[str] = Field(default_factory=list)


class AttachRequest(Wire):
    """A task attempt that only wants to go on with a job that it knows to exist."""

    lease_s: float | None = None


class ClaimRequest(Wire):
    """Cancel, acknowledge or renew with a claim; a stale claim changes nothing (409)."""

    claim: int
    reason: str = ""


class AmendRequest(Wire):
    """Change the deadline, the value, or give the deadline up."""

    claim: int
    deadline_at: float | None = Field(default=None, allow_inf_nan=False)
    value: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    best_effort: bool = False


class AmendAnswer(Wire):
    """Whether the amendment holds; if not, what would."""

    accepted: bool
    reason: str = ""
    earliest_deadline_at: float | None = None
    job: JobStatus


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

    until_at: float | None = Field(allow_inf_nan=False)


class PlannedRun(Wire):
    """A run that the calendar does not know of yet, or not as it will be: of a DAG that is about to change, say."""

    submission: JobSubmission
    due_at: float = Field(allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_deadline(self) -> PlannedRun:
        if self.submission.deadline_at is None:
            raise ValueError("a planned run needs a deadline: nothing is kept free for best effort")
        return self


class ForecastRequest(Wire):
    """Ask what will become of everything that is due in the next ``hours``.

    ``planned`` runs are taken as if they were due too, instead of what the calendar expects of the same tasks.
    """

    hours: float = Field(default=24.0, gt=0, le=24 * 14, allow_inf_nan=False)
    planned: list[PlannedRun] = Field(default_factory=list, max_length=500)


class ForecastItem(Wire):
    """One deadline: of a live job, or of a run that is expected.

    ``kept``: it will be met. ``at_risk``: promised, but no longer on course. ``undecided``: a job that waits, or is
    being measured. ``missed``: an expected run that would be rejected as things stand; ``earliest_deadline_at`` would
    do. ``unknown``: too little is known of the task.
    """

    kind: Literal["job", "expected"]
    outcome: Literal["kept", "at_risk", "undecided", "missed", "unknown"]
    task: str
    planned: bool = False
    """Whether it is one of the request's own runs."""
    job_id: str | None = None
    namespace: str | None = None
    """With ``dag_id``, whose task this is: who shows the answer to people must know what they may read."""
    dag_id: str | None = None
    due_at: float | None = None
    deadline_at: float | None = None
    probability: float = 1.0
    """How surely an expected run comes, by how often it did."""
    projected_at: float | None = None
    earliest_deadline_at: float | None = None
    reason: str = ""


class ForecastAnswer(Wire):
    """The outlook of every deadline until ``until_at``, soonest first; expected runs are those due by then.

    ``missing_slots``: with so many more slots all would be kept; None: no number that was tried would do.
    """

    asked_at: float
    until_at: float
    kept: int
    not_kept: int
    missing_slots: int | None
    summary: str
    items: list[ForecastItem] = Field(default_factory=list)


class DryRun(Wire):
    """What admission control would say to a submission now; nothing was submitted."""

    job_id: str
    verdict: Verdict
    projected_finish_at: float | None = None


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


class Problem(Wire):
    """Body of every error answer: what was wrong, and what to do."""

    error: str
    message: str
    hint: str = ""
