"""What events carry beside their sentences: a class for each kind that carries anything.

An older service wrote some fields less, and a newer one may write more: readers ask for a field by ``data.get``.
Times are UTC seconds, slots are [node, index].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from elasticflow_airflow.api.event_kinds import EventKind
from elasticflow_airflow.api.status import JobResult, State


@dataclass(frozen=True, kw_only=True)
class EventData:
    """What an event of one ``kind`` carries."""

    kind: ClassVar[EventKind]

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True)
class SubmittedData(EventData):
    """With which deadline it came, and which speeds are known of it: steps/s by workers (as text)."""

    kind = EventKind.SUBMITTED
    deadline_at: float | None
    curve: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class WaitingData(EventData):
    """Until when it waits at most."""

    kind = EventKind.WAITING
    until: float | None


@dataclass(frozen=True, kw_only=True)
class AdmittedData(EventData):
    """On which terms: ``deadline``, ``renegotiated`` or ``best_effort``."""

    kind = EventKind.ADMITTED
    terms: str
    deadline_at: float | None
    asked_deadline_at: float | None


@dataclass(frozen=True, kw_only=True)
class RejectedData(EventData):
    """What it asked for, and what could be promised instead."""

    kind = EventKind.REJECTED
    deadline_at: float | None
    earliest_deadline_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class AmendedData(EventData):
    """What holds now."""

    kind = EventKind.AMENDED
    deadline_at: float | None
    value: float


@dataclass(frozen=True, kw_only=True)
class AmendRejectedData(EventData):
    """What could be promised instead."""

    kind = EventKind.AMEND_REJECTED
    earliest_deadline_at: float | None


@dataclass(frozen=True, kw_only=True)
class SeedData(EventData):
    """The seed."""

    kind = EventKind.SEED
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class LengthData(EventData):
    """Optimizer steps in all."""

    kind = EventKind.LENGTH
    steps: int


@dataclass(frozen=True, kw_only=True)
class LogicalWorkersData(EventData):
    """Into how many shares each step is cut."""

    kind = EventKind.LOGICAL_WORKERS
    logical_workers: int


@dataclass(frozen=True, kw_only=True)
class MeasuredData(EventData):
    """The speed at one number of workers."""

    kind = EventKind.MEASURED
    workers: int
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class NotMeasuredData(EventData):
    """With how many workers it was tried."""

    kind = EventKind.NOT_MEASURED
    workers: int


@dataclass(frozen=True, kw_only=True)
class TargetLengthData(EventData):
    """Where it stands, and where the target loss is expected; None: that cannot be foretold."""

    kind = EventKind.TARGET_LENGTH
    step: int
    expected_step: int | None = None
    at_most_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class TargetReachedData(EventData):
    """After how many steps, and with which loss."""

    kind = EventKind.TARGET_REACHED
    step: int
    target_loss: float
    smoothed_loss: float | None


@dataclass(frozen=True, kw_only=True)
class TargetMissedData(TargetReachedData):
    """The same, of one that was not reached."""

    kind = EventKind.TARGET_MISSED


@dataclass(frozen=True, kw_only=True)
class CheckpointData(EventData):
    """Which checkpoint counts, and where it lies."""

    kind = EventKind.CHECKPOINT
    path: str
    generation: int
    step: int
    digest: str
    checkpoint_path: str


@dataclass(frozen=True, kw_only=True)
class CheckpointDamagedData(EventData):
    """Which checkpoint, below the folder of all of the job."""

    kind = EventKind.CHECKPOINT_DAMAGED
    path: str


@dataclass(frozen=True, kw_only=True)
class WarningData(EventData):
    """Which workers it is about, or which field of their reports."""

    kind = EventKind.WARNING
    generation: int | None = None
    field: str | None = None


@dataclass(frozen=True, kw_only=True)
class StartedData(EventData):
    """Which workers, how many, and from which step."""

    kind = EventKind.STARTED
    generation: int
    workers: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ResizedData(EventData):
    """Which workers it is to have from now on."""

    kind = EventKind.RESIZED
    generation: int
    workers: int
    workers_before: int
    slots: Sequence[Any]
    purpose: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class RescaledData(EventData):
    """What a change in place was from and to, and what it took."""

    kind = EventKind.RESCALED
    generation: int
    workers: int
    workers_before: int | None
    step: int
    pause_s: float | None
    state_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class KeptData(EventData):
    """Which workers."""

    kind = EventKind.KEPT
    generation: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class ResumedData(EventData):
    """From which step."""

    kind = EventKind.RESUMED
    step: int


@dataclass(frozen=True, kw_only=True)
class RestartingData(EventData):
    """From which step."""

    kind = EventKind.RESTARTING
    step: int


@dataclass(frozen=True, kw_only=True)
class RestartInsteadData(EventData):
    """Which workers are started instead."""

    kind = EventKind.RESTART_INSTEAD
    workers: int
    mode: str
    generation: int | None = None
    workers_before: int | None = None
    slots: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class JoinFailedData(EventData):
    """Who trains on, and who could not join."""

    kind = EventKind.JOIN_FAILED
    generation: int
    workers: int
    workers_before: int
    slots: Sequence[Any]
    lost: Sequence[str]
    mode: str


@dataclass(frozen=True, kw_only=True)
class WorkerLostData(EventData):
    """Who was lost, and who goes on."""

    kind = EventKind.WORKER_LOST
    generation: int
    lost: Sequence[str]
    workers: int | None = None
    workers_before: int | None = None
    slots: Sequence[Any] | None = None
    mode: str | None = None


@dataclass(frozen=True, kw_only=True)
class SlowWorkerData(EventData):
    """How slow it is beside the others, by the compute time of a step, and what is done: moved, shrunk, or left."""

    kind = EventKind.SLOW_WORKER
    action: str
    worker: str
    slot: Sequence[Any]
    step_s: float
    median_s: float
    slowdown: float
    until_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class HangData(EventData):
    """Which workers."""

    kind = EventKind.HANG
    generation: int


@dataclass(frozen=True, kw_only=True)
class AtRiskData(EventData):
    """What was promised, and what is expected."""

    kind = EventKind.AT_RISK
    deadline_at: float
    projected_at: float | None


@dataclass(frozen=True, kw_only=True)
class OnTrackData(AtRiskData):
    """The same."""

    kind = EventKind.ON_TRACK


@dataclass(frozen=True, kw_only=True)
class SucceededData(EventData):
    """What the job leaves; of one that was set aside nothing is known."""

    kind = EventKind.SUCCEEDED
    met: bool | None = None
    slack_s: float | None = None
    steps: int | None = None
    final_loss: float | None = None
    gpu_seconds: float | None = None
    rescales: int | None = None
    checkpoint_path: str | None = None
    finished_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class FailedData(SucceededData):
    """The same."""

    kind = EventKind.FAILED


@dataclass(frozen=True, kw_only=True)
class CancelledData(SucceededData):
    """The same."""

    kind = EventKind.CANCELLED


@dataclass(frozen=True, kw_only=True)
class RunExpectedData(EventData):
    """When the next runs are due."""

    kind = EventKind.RUN_EXPECTED
    due_at: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RunMissedData(EventData):
    """When the run was due."""

    kind = EventKind.RUN_MISSED
    due_at: float


@dataclass(frozen=True, kw_only=True)
class SlotBackData(EventData):
    """Which slot."""

    kind = EventKind.SLOT_BACK
    node_id: str
    slot: int


def _all(of: type[EventData]) -> dict[EventKind, type[EventData]]:
    found = {one.kind: one for one in of.__subclasses__()}
    for one in of.__subclasses__():
        found |= _all(one)
    return found


EVENT_DATA: Mapping[EventKind, type[EventData]] = _all(EventData)
"""By kind; an event of any other kind carries nothing."""


def end_data(state: State, result: JobResult | None) -> EventData:
    """What the end of a job in this state carries of its result, as far as there is one."""
    if state is State.REJECTED:
        return RejectedData(deadline_at=None)
    of = {State.SUCCEEDED: SucceededData, State.FAILED: FailedData, State.CANCELLED: CancelledData}[state]
    return of() if result is None else of(**{one.name: getattr(result, one.name) for one in fields(of)})


def kind_and_data(what: EventKind | EventData) -> tuple[EventKind, dict[str, Any]]:
    """The kind of an event, and what it carries. Raises TypeError where that is missing."""
    if isinstance(what, EventData):
        return what.kind, what.as_json()
    if what in EVENT_DATA:
        raise TypeError(f"an event {what.value!r} carries {EVENT_DATA[what].__name__}")
    return what, {}
