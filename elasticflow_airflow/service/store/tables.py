"""The tables of the store, as typed ORM classes. Knows nothing of scheduling; times are UTC seconds as floats.

HTTP handlers write the *desired* state, as their callers ask for it (a new incarnation, a claim, a renewal, a cancel,
an amendment). The reconcile loop writes the *actual* state. The two never write the same column of a row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from elasticflow_airflow.api import JobIdentity, JobResult
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.scheduler_core.convergence import LossCurve
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.recurring_work import PastRun
from elasticflow_airflow.service.store.documents.columns import Document, Message, ReasonText
from elasticflow_airflow.service.store.documents.generation_notes import GenerationNotes
from elasticflow_airflow.service.store.documents.job_documents import (
    NO_REASON,
    AmendmentAnswer,
    Ending,
    InPlaceRecord,
    LossTarget,
    MeasuredCosts,
    Sampling,
    StoredVerdict,
    TaskFacts,
)
from elasticflow_airflow.service.store.documents.scheduler_values import StateDocument, StoredState
from elasticflow_airflow.service.store.documents.speed_measurement import SpeedMeasurement
from elasticflow_airflow.service.store.documents.submission import StoredSubmission

SCHEMA_HEAD = "0012"
"""Newest Alembic revision. A database at this revision is opened without loading Alembic."""


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {  # noqa: RUF012  (as SQLAlchemy wants it)
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
        float: Float(53),
    }


class JobRow(Base):
    """One Airflow task instance: its current incarnation, and the counters that are never reset."""

    __tablename__ = "job"

    job_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    identity: Mapped[JobIdentity] = mapped_column(Message(JobIdentity))
    recurring_key: Mapped[str] = mapped_column(Text, index=True)
    dag_id: Mapped[str] = mapped_column(Text, index=True)
    claim: Mapped[int] = mapped_column(Integer, default=0)
    claimed_by: Mapped[list[Any] | None] = mapped_column(default=None)
    """The last submissions by the keys that their clients gave them, each with its claim and incarnation."""
    incarnation: Mapped[int] = mapped_column(Integer, default=0)
    generation: Mapped[int] = mapped_column(Integer, default=0)
    """The last generation number that was used; written by the loop."""
    created_at: Mapped[float]
    owner_known_to: Mapped[str | None] = mapped_column(String(64), default=None)
    """The Airflow that has reported the task instance as existing; only its report of a deletion is accepted."""
    owner_seen_at: Mapped[float | None] = mapped_column(default=None)


class IncarnationRow(Base):
    """One training of a job: its submission, its desired state, and its actual state."""

    __tablename__ = "incarnation"
    __table_args__ = (
        Index("ix_incarnation_terminal", "terminal"),
        Index("ix_incarnation_submitted", "submitted_at"),
        Index("ix_incarnation_drained", "drained"),
        Index("ix_incarnation_finished", "finished_at"),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("job.job_id"), primary_key=True)
    incarnation: Mapped[int] = mapped_column(Integer, primary_key=True)

    # The submission (written once, by handlers).
    submission: Mapped[StoredSubmission] = mapped_column(Message(StoredSubmission))
    secret_env: Mapped[bytes | None] = mapped_column(LargeBinary, default=None)
    """Encrypted. The loop erases it when the job is terminal."""
    equality_key: Mapped[str] = mapped_column(String(64))
    submitted_at: Mapped[float]
    resume_from: Mapped[int | None] = mapped_column(Integer, default=None)
    """The incarnation from whose last valid checkpoint this one resumes."""
    init_from_path: Mapped[str | None] = mapped_column(Text, default=None)

    # The desired state (written by handlers, at any time).
    lease_s: Mapped[float]
    orphan_s: Mapped[float]
    renewals: Mapped[int] = mapped_column(Integer, default=0)
    heard_at: Mapped[float | None] = mapped_column(default=None)
    """When a client last asked for it; for display only. Leases count ``renewals``, because clocks can jump."""
    owner_gone_at: Mapped[float | None] = mapped_column(default=None)
    """When Airflow reported that its owner is gone."""
    cancel_reason: Mapped[str | None] = mapped_column(Text, default=None)
    acknowledged: Mapped[bool] = mapped_column(Boolean, default=False)

    # The actual state (written by the loop).
    introduced: Mapped[bool] = mapped_column(Boolean, default=False)
    """It has been submitted to the scheduler."""
    state: Mapped[str] = mapped_column(String(16), default="submitted")
    terminal: Mapped[bool] = mapped_column(Boolean, default=False)
    drained: Mapped[bool] = mapped_column(Boolean, default=False)
    """It is terminal, and the engine has removed its gangs."""
    state_reason: Mapped[Reason] = mapped_column(ReasonText, default=NO_REASON)
    verdict: Mapped[StoredVerdict] = mapped_column(Document(StoredVerdict), default=StoredVerdict)
    deadline_at: Mapped[float | None]
    best_effort: Mapped[bool] = mapped_column(Boolean)
    value: Mapped[float]
    scheduler_state: Mapped[StoredState | None] = mapped_column(StateDocument(), default=None)
    ending: Mapped[Ending | None] = mapped_column(Document(Ending), default=None)
    parked: Mapped[bool] = mapped_column(Boolean, default=False)
    lease_expires_at: Mapped[float | None] = mapped_column(default=None)
    desired_generation: Mapped[int | None] = mapped_column(Integer, default=None)
    """The generation that should run; None if none should."""
    cleared_generation: Mapped[int] = mapped_column(Integer, default=0)
    micro_batch_size: Mapped[int | None] = mapped_column(Integer, default=None)
    logical_workers: Mapped[int | None] = mapped_column(Integer, default=None)
    """Chosen once, when it is submitted to the scheduler; None in fast mode."""
    seed: Mapped[int | None] = mapped_column(Integer, default=None)
    """The seed from the submission, or the one that the session reported; None if it has not reported one yet."""
    in_place: Mapped[InPlaceRecord] = mapped_column(Document(InPlaceRecord), default=InPlaceRecord)
    target: Mapped[LossTarget | None] = mapped_column(
        Document(LossTarget, none_is_empty=True), nullable=False, default=None
    )
    signature: Mapped[str] = mapped_column(Text, default="")
    step: Mapped[int] = mapped_column(Integer, default=0)
    total_steps: Mapped[int | None] = mapped_column(Integer, default=None)
    loss: Mapped[float | None] = mapped_column(default=None)
    steps_per_s: Mapped[float | None] = mapped_column(default=None)
    speeds: Mapped[dict[int, float]] = mapped_column(Document(dict[int, float]), default=dict)
    """Measured steps/s by number of workers."""
    told_speeds: Mapped[dict[int, float] | None] = mapped_column(Document(dict[int, float]), default=None)
    """The speeds that the decision was based on, before anything was measured in this run."""
    costs: Mapped[MeasuredCosts] = mapped_column(Document(MeasuredCosts), default=MeasuredCosts)
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    last_step_at: Mapped[float | None] = mapped_column(default=None)
    ever_reported: Mapped[bool] = mapped_column(Boolean, default=False)
    projected_finish_at: Mapped[float | None] = mapped_column(default=None)
    at_risk: Mapped[bool] = mapped_column(Boolean, default=False)
    deadline_passed: Mapped[bool] = mapped_column(Boolean, default=False)
    restarts: Mapped[int] = mapped_column(Integer, default=0)
    losses: Mapped[int] = mapped_column(Integer, default=0)
    hangs: Mapped[int] = mapped_column(Integer, default=0)
    restart_step: Mapped[int] = mapped_column(Integer, default=-1)
    """The step at which the last restart after a failure began. A failure without progress since then is final."""
    promoted: Mapped[Promotion | None] = mapped_column(Document(Promotion), default=None)
    result: Mapped[JobResult | None] = mapped_column(Message(JobResult, nullable=True), default=None)
    failure: Mapped[str | None] = mapped_column(Text, default=None)
    finished_at: Mapped[float | None] = mapped_column(default=None)
    last_event_id: Mapped[int] = mapped_column(Integer, default=0)
    set_aside: Mapped[str | None] = mapped_column(Text, default=None)
    """Why the job is set aside (only its workers are kept): the service failed on it. See ``setting_aside.py``."""
    sampling: Mapped[Sampling] = mapped_column(Document(Sampling), default=Sampling)


class GenerationRow(Base):
    """One gang: its slots, the reason for them, and its course."""

    __tablename__ = "generation"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "incarnation"], ["incarnation.job_id", "incarnation.incarnation"]),
        Index("ix_generation_state", "state"),
        Index("ix_generation_handled", "handled"),
        Index("ix_generation_ended", "ended_at"),
    )

    job_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True)
    incarnation: Mapped[int] = mapped_column(Integer)
    placement: Mapped[list[Any]]
    """Slots in rank order, as [node, index]."""
    workers: Mapped[int] = mapped_column(Integer)
    purpose: Mapped[str] = mapped_column(String(16))
    reason: Mapped[Reason] = mapped_column(ReasonText)
    created_at: Mapped[float]
    fresh_start: Mapped[bool] = mapped_column(Boolean)
    """No gang of the job was alive when it was ordered, so its cost is a start-up, not a pause."""
    mode: Mapped[str] = mapped_column(String(16), default="restart")
    """How its workers are started: restart (all are new), or in_place (the living ones continue)."""
    continues: Mapped[int | None] = mapped_column(Integer, default=None)
    """In place: the generation whose workers continue in this one."""
    lost: Mapped[list[Any]] = mapped_column(default=list)
    """In place: ids of workers that are dead or given up; no worker may wait for them."""
    desired: Mapped[str] = mapped_column(String(8), default="run")
    """run or stop."""
    stop_cause: Mapped[str] = mapped_column(Text, default="")
    state: Mapped[str] = mapped_column(String(16), default="ordered")
    """ordered (never seen), then the engine's: pending, starting, running, leaving, ended."""
    outcome: Mapped[str | None] = mapped_column(String(16), default=None)
    judged: Mapped[bool] = mapped_column(Boolean, default=False)
    """It has ended, and all its checkpoints are verified."""
    handled: Mapped[bool] = mapped_column(Boolean, default=False)
    """The consequences of its end for the job have been decided."""
    holding_at: Mapped[float | None] = mapped_column(default=None)
    running_at: Mapped[float | None] = mapped_column(default=None)
    ended_at: Mapped[float | None] = mapped_column(default=None)
    first_step: Mapped[int | None] = mapped_column(Integer, default=None)
    last_step: Mapped[int | None] = mapped_column(Integer, default=None)
    last_step_at: Mapped[float | None] = mapped_column(default=None)
    window: Mapped[SpeedMeasurement] = mapped_column(Document(SpeedMeasurement), default=SpeedMeasurement)
    folded: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """The number of reports of each worker that are already counted: reports are delivered at least once."""
    notes: Mapped[GenerationNotes] = mapped_column(Document(GenerationNotes), default=GenerationNotes)
    log_names: Mapped[list[Any]] = mapped_column(default=list)
    failure: Mapped[str | None] = mapped_column(Text, default=None)


CANDIDATE_IS_THERE = ("new", "valid")
"""Statuses of candidates that are neither damaged nor deleted, as far as is known."""


class CandidateRow(Base):
    """One candidate checkpoint and the result of its verification."""

    __tablename__ = "candidate"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "incarnation"], ["incarnation.job_id", "incarnation.incarnation"]),
    )

    job_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    incarnation: Mapped[int] = mapped_column(Integer, primary_key=True)
    path: Mapped[str] = mapped_column(String(200), primary_key=True)
    """Relative to the checkpoint folder."""
    generation: Mapped[int] = mapped_column(Integer)
    step: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(16), default="new")
    """new, valid, invalid, or deleted."""
    at: Mapped[float | None] = mapped_column(default=None)
    """When it was complete; None if only the folder was found."""
    size_bytes: Mapped[int | None] = mapped_column(BigInteger, default=None)


class SampleRow(Base):
    """The progress of an incarnation at one time. Samples are thinned, so that a job has only a few hundred."""

    __tablename__ = "sample"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "incarnation"], ["incarnation.job_id", "incarnation.incarnation"]),
    )

    job_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    incarnation: Mapped[int] = mapped_column(Integer, primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    at: Mapped[float]
    step: Mapped[int] = mapped_column(Integer)
    loss: Mapped[float | None]
    steps_per_s: Mapped[float | None]
    workers: Mapped[int] = mapped_column(Integer)


class WorkerTimesRow(Base):
    """The time breakdown of one worker in the last window that it reported."""

    __tablename__ = "worker_times"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "incarnation"], ["incarnation.job_id", "incarnation.incarnation"]),
    )

    job_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    incarnation: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker_id: Mapped[str] = mapped_column(String(120), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer)
    rank: Mapped[int] = mapped_column(Integer)
    at: Mapped[float]
    window: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """window_steps, samples, data_s ... other_s, memory_bytes, device_memory_bytes, as far as they were reported."""


class AmendmentRow(Base):
    """A request to change the deadline or value, and the scheduler's answer."""

    __tablename__ = "amendment"

    amendment_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.job_id"), index=True)
    incarnation: Mapped[int] = mapped_column(Integer)
    deadline_at: Mapped[float | None]
    value: Mapped[float | None]
    best_effort: Mapped[bool] = mapped_column(Boolean)
    answer: Mapped[AmendmentAnswer | None] = mapped_column(Document(AmendmentAnswer), default=None)
    """Written by the loop; of a job that has ended, by the handler."""


class EventRow(Base):
    """One change, and its reason."""

    __tablename__ = "event"
    __table_args__ = (Index("ix_event_job", "job_id", "event_id"), {"sqlite_autoincrement": True})

    event_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str | None] = mapped_column(String(120))
    incarnation: Mapped[int | None] = mapped_column(Integer)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(32))
    reason: Mapped[Reason] = mapped_column(ReasonText)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class DrainRow(Base):
    """A node that goes away at a known time; written by handlers."""

    __tablename__ = "drain"

    node_id: Mapped[str] = mapped_column(Text, primary_key=True)
    until_at: Mapped[float]


DEVICE_FAILED = "the device of slot {slot} failed for {task:task}: {said:text}"
SET_ASIDE = "{node} is set aside: devices failed for {tasks:task}"
"""Why a slot is avoided; the second once this has happened to several tasks: somebody has to look at the node."""


class AvoidedSlotRow(Base):
    """A slot on which a worker was persistently slow, or whose device, or another of its node, failed.

    The loop writes it, and deletes it when its time is over; a handler ends that time for a node that stays after all.
    """

    __tablename__ = "avoided_slot"

    node_id: Mapped[str] = mapped_column(Text, primary_key=True)
    slot_index: Mapped[int] = mapped_column(Integer, primary_key=True)
    until_at: Mapped[float]
    reason: Mapped[Reason] = mapped_column(ReasonText)

    @property
    def is_for_device(self) -> bool:
        """Whether a device failed."""
        return self.reason.kind in (DEVICE_FAILED, SET_ASIDE)


class HistoryRow(Base):
    """Measurements from past runs of a recurring task, for one signature."""

    __tablename__ = "history"

    recurring_key: Mapped[str] = mapped_column(Text, primary_key=True)
    signature: Mapped[str] = mapped_column(Text, primary_key=True)
    speeds: Mapped[dict[int, float]] = mapped_column(Document(dict[int, float]), default=dict)
    """Steps/s by number of workers."""
    complete: Mapped[bool] = mapped_column(Boolean, default=False)
    """The speeds are a complete scaling curve: profiling was finished."""
    costs: Mapped[MeasuredCosts] = mapped_column(Document(MeasuredCosts), default=MeasuredCosts)
    total_steps: Mapped[int | None] = mapped_column(Integer, default=None)
    """The length of the last run that reported its length only after its start ..."""
    epochs: Mapped[int | None] = mapped_column(Integer, default=None)
    """... and the number of epochs of that run."""
    errors: Mapped[dict[int, tuple[float, ...]] | None] = mapped_column(
        Document(dict[int, tuple[float, ...]]), default=None
    )
    """Errors of the predicted speeds in the last runs, |log(measured / told)|, oldest first; by number of workers."""
    loss_curve: Mapped[LossCurve | None] = mapped_column(Document(LossCurve), default=None)
    """The curve of the last success with a target loss."""
    runs: Mapped[int] = mapped_column(Integer, default=0)
    updated_at: Mapped[float]


class RecurringTaskRow(Base):
    """A task whose submissions name its next runs; written by the loop."""

    __tablename__ = "recurring_task"

    recurring_key: Mapped[str] = mapped_column(Text, primary_key=True)
    due: Mapped[list[Any]] = mapped_column(default=list)
    """Due times of the runs that have not been submitted yet (UTC seconds), in order."""
    past: Mapped[tuple[PastRun, ...]] = mapped_column(Document(tuple[PastRun, ...]), default=())
    """Its last runs, oldest first."""
    facts: Mapped[TaskFacts] = mapped_column(Document(TaskFacts), default=TaskFacts)
    next_due_at: Mapped[float | None] = mapped_column(default=None, index=True)
    """The first of ``due``."""
    updated_at: Mapped[float]


class LeaderRow(Base):
    """The lease of who decides: one row. Its times are by the clock of the database.

    Written outside of the writers' lock, always conditional on its epoch (see ``leadership/lease_table.py``).
    """

    __tablename__ = "leader"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """Always 1."""
    epoch: Mapped[int] = mapped_column(BigInteger)
    """Grows by one with each change of the leader; 0: there never was one."""
    holder: Mapped[str | None] = mapped_column(Text, default=None)
    """The replica that leads; None after it has given up its lease."""
    until_at: Mapped[float | None] = mapped_column(default=None)
    """When the lease ends, unless it is renewed."""
    url: Mapped[str | None] = mapped_column(Text, default=None)
    """Where other replicas reach the holder."""
    card: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    """Describes the holder to people."""
    elected_at: Mapped[float | None] = mapped_column(default=None)
    change: Mapped[str | None] = mapped_column(String(16), default=None)
    """How the holder came to lead: "start", "hand-over" or "fail-over"."""
    failed_over_at: Mapped[float | None] = mapped_column(default=None)
    """When a leader was last replaced without having given up its lease."""
    key_id: Mapped[str | None] = mapped_column(Text, default=None)
    """Identifies the key that secrets are encrypted with: replicas with other keys are refused."""
    schema_floor: Mapped[str] = mapped_column(String(32))
    """The oldest revision that a service may know to use this database: later ones only added to it."""


class ReplicaRow(Base):
    """A service on this database, as it last said of itself."""

    __tablename__ = "replica"

    replica_id: Mapped[str] = mapped_column(Text, primary_key=True)
    url: Mapped[str | None] = mapped_column(Text, default=None)
    card: Mapped[dict[str, Any] | None] = mapped_column(default=None)
    seen_at: Mapped[float]
    """By the clock of the database."""


class EngineRecordRow(Base):
    """What the engine must know of the gangs of a job, for the next leader."""

    __tablename__ = "engine_record"

    job_id: Mapped[str] = mapped_column(Text, primary_key=True)
    record: Mapped[dict[str, Any]]
    epoch: Mapped[int] = mapped_column(BigInteger)
    """Of the leader that wrote it."""


class SnapshotRow(Base):
    """The code of jobs by its hash, as an uncompressed tar, where replicas share it."""

    __tablename__ = "snapshot"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    archive: Mapped[bytes] = mapped_column(LargeBinary)
    stored_at: Mapped[float]
