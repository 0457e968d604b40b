"""The structured data of events beside their text: one class for each kind of event that has any.

An older service wrote fewer fields and a newer one may write more, so readers access fields by ``data.get``. Times are
UTC seconds, slots are [node, index].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from elasticflow_airflow.api.event_kinds import EventKind
from elasticflow_airflow.api.status import JobResult, State


@dataclass(frozen=True, kw_only=True)
class EventData:
    """Base class of the data of one ``kind`` of event."""

    kind: ClassVar[EventKind]

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        optional = {one.name for one in fields(self) if one.default is None}
        return {name: value for name, value in values.items() if value is not None or name not in optional}


@dataclass(frozen=True, kw_only=True)
class SubmittedData(EventData):
    """The submitted deadline, and the known scaling curve: steps/s by number of workers (as a string)."""

    kind = EventKind.SUBMITTED
    deadline_at: float | None
    curve: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class WaitingData(EventData):
    """The time until which the job waits at most."""

    kind = EventKind.WAITING
    until: float | None


@dataclass(frozen=True, kw_only=True)
class AdmittedData(EventData):
    """The terms of the admission: ``deadline``, ``renegotiated`` or ``best_effort``."""

    kind = EventKind.ADMITTED
    terms: str
    deadline_at: float | None
    asked_deadline_at: float | None


@dataclass(frozen=True, kw_only=True)
class RejectedData(EventData):
    """The requested deadline, and the earliest that could be promised instead."""

    kind = EventKind.REJECTED
    deadline_at: float | None
    earliest_deadline_at: float | None


@dataclass(frozen=True, kw_only=True)
class AmendedData(EventData):
    """The deadline and value that apply now."""

    kind = EventKind.AMENDED
    deadline_at: float | None
    value: float


@dataclass(frozen=True, kw_only=True)
class AmendRejectedData(EventData):
    """The earliest deadline that could be promised instead."""

    kind = EventKind.AMEND_REJECTED
    earliest_deadline_at: float | None


@dataclass(frozen=True, kw_only=True)
class SeedData(EventData):
    """The job's random seed."""

    kind = EventKind.SEED
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class LengthData(EventData):
    """The total number of optimizer steps."""

    kind = EventKind.LENGTH
    steps: int


@dataclass(frozen=True, kw_only=True)
class LogicalWorkersData(EventData):
    """The number of shares that each step is split into."""

    kind = EventKind.LOGICAL_WORKERS
    logical_workers: int


@dataclass(frozen=True, kw_only=True)
class MeasuredData(EventData):
    """The measured speed with a number of workers."""

    kind = EventKind.MEASURED
    workers: int
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class NotMeasuredData(EventData):
    """The number of workers for which the measurement was attempted."""

    kind = EventKind.NOT_MEASURED
    workers: int


@dataclass(frozen=True, kw_only=True)
class TargetLengthData(EventData):
    """The current step, and the step at which the target loss is expected; None if it cannot be predicted."""

    kind = EventKind.TARGET_LENGTH
    step: int
    expected_step: int | None = None
    at_most_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class TargetReachedData(EventData):
    """The step and the smoothed loss at which the target was reached."""

    kind = EventKind.TARGET_REACHED
    step: int
    target_loss: float
    smoothed_loss: float | None


@dataclass(frozen=True, kw_only=True)
class TargetMissedData(TargetReachedData):
    """The same fields, for a target that was not reached."""

    kind = EventKind.TARGET_MISSED


@dataclass(frozen=True, kw_only=True)
class CheckpointData(EventData):
    """The checkpoint that is valid from now on, and its location."""

    kind = EventKind.CHECKPOINT
    path: str
    generation: int
    step: int
    digest: str
    checkpoint_path: str


@dataclass(frozen=True, kw_only=True)
class CheckpointDamagedData(EventData):
    """The damaged checkpoint's path, relative to the job's checkpoint folder."""

    kind = EventKind.CHECKPOINT_DAMAGED
    path: str


@dataclass(frozen=True, kw_only=True)
class WarningData(EventData):
    """The generation that the warning concerns, or the field of its reports."""

    kind = EventKind.WARNING
    generation: int | None = None
    field: str | None = None


@dataclass(frozen=True, kw_only=True)
class StartedData(EventData):
    """The generation that started, its number of workers, and its first step."""

    kind = EventKind.STARTED
    generation: int
    workers: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ResizedData(EventData):
    """The workers and slots that the job gets from now on."""

    kind = EventKind.RESIZED
    generation: int
    workers: int
    workers_before: int
    slots: Sequence[Any]
    purpose: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class RescaledData(EventData):
    """The number of workers before and after an in-place rescale, and its cost."""

    kind = EventKind.RESCALED
    generation: int
    workers: int
    workers_before: int | None
    step: int
    pause_s: float | None
    state_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class KeptData(EventData):
    """The generation and workers that the job keeps."""

    kind = EventKind.KEPT
    generation: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class ResumedData(EventData):
    """The step from which the job resumes."""

    kind = EventKind.RESUMED
    step: int


@dataclass(frozen=True, kw_only=True)
class RestartingData(EventData):
    """The step from which the job restarts."""

    kind = EventKind.RESTARTING
    step: int


@dataclass(frozen=True, kw_only=True)
class RestartInsteadData(EventData):
    """The workers that are started instead."""

    kind = EventKind.RESTART_INSTEAD
    workers: int
    mode: str
    generation: int | None = None
    workers_before: int | None = None
    slots: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class JoinFailedData(EventData):
    """The workers that continue training, and those that could not join (``lost``)."""

    kind = EventKind.JOIN_FAILED
    generation: int
    workers: int
    workers_before: int
    slots: Sequence[Any]
    lost: Sequence[str]
    mode: str


@dataclass(frozen=True, kw_only=True)
class WorkerLostData(EventData):
    """The workers that were lost, and those that continue."""

    kind = EventKind.WORKER_LOST
    generation: int
    lost: Sequence[str]
    workers: int | None = None
    workers_before: int | None = None
    slots: Sequence[Any] | None = None
    mode: str | None = None


@dataclass(frozen=True, kw_only=True)
class SlowWorkerData(EventData):
    """How slow the worker is compared to the others (compute time of a step), and the action: moved, shrunk or left."""

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
    """The generation that hung."""

    kind = EventKind.HANG
    generation: int


@dataclass(frozen=True, kw_only=True)
class AtRiskData(EventData):
    """The promised deadline, and the projected finish."""

    kind = EventKind.AT_RISK
    deadline_at: float
    projected_at: float | None


@dataclass(frozen=True, kw_only=True)
class OnTrackData(AtRiskData):
    """The same fields as for a job at risk."""

    kind = EventKind.ON_TRACK


@dataclass(frozen=True, kw_only=True)
class SucceededData(EventData):
    """The job's result; all None for a job that was set aside, of which nothing is known."""

    kind = EventKind.SUCCEEDED
    met: bool | None
    slack_s: float | None
    steps: int | None
    final_loss: float | None
    gpu_seconds: float | None
    rescales: int | None
    checkpoint_path: str | None
    finished_at: float | None


@dataclass(frozen=True, kw_only=True)
class FailedData(SucceededData):
    """The same fields as for a success."""

    kind = EventKind.FAILED


@dataclass(frozen=True, kw_only=True)
class CancelledData(SucceededData):
    """The same fields as for a success."""

    kind = EventKind.CANCELLED


@dataclass(frozen=True, kw_only=True)
class RunExpectedData(EventData):
    """The times at which the next runs are due."""

    kind = EventKind.RUN_EXPECTED
    due_at: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RunMissedData(EventData):
    """The time at which the run was due."""

    kind = EventKind.RUN_MISSED
    due_at: float


@dataclass(frozen=True, kw_only=True)
class DeviceFaultData(EventData):
    """The slot of the device, and until when it is avoided; ``set_aside``: so is its node."""

    kind = EventKind.DEVICE_FAULT
    node_id: str
    slot: int
    until_at: float
    set_aside: bool


@dataclass(frozen=True, kw_only=True)
class SlotBackData(EventData):
    """The slot that is used again."""

    kind = EventKind.SLOT_BACK
    node_id: str
    slot: int


def _all(of: type[EventData]) -> dict[EventKind, type[EventData]]:
    found = {one.kind: one for one in of.__subclasses__()}
    for one in of.__subclasses__():
        found |= _all(one)
    return found


EVENT_DATA: Mapping[EventKind, type[EventData]] = _all(EventData)
"""Data class by kind; events of any other kind carry no data."""


_ENDS = {EventKind[state.name] for state in State if state.terminal}
"""Ends of jobs: nothing may be known of what a job leaves."""


def end_data(state: State, result: JobResult | None) -> EventKind | EventData:
    """Return the data of the event that ends a job in this state, filled from its result if there is one."""
    if result is None or state is State.REJECTED:
        return EventKind[state.name]
    of = {State.SUCCEEDED: SucceededData, State.FAILED: FailedData, State.CANCELLED: CancelledData}[state]
    return of(**{one.name: getattr(result, one.name) for one in fields(of)})


def kind_and_data(what: EventKind | EventData) -> tuple[EventKind, dict[str, Any]]:
    """Return the kind of an event and its data. Raises TypeError if a kind that carries data is given without."""
    if isinstance(what, EventData):
        return what.kind, what.as_json()
    if what in EVENT_DATA and what not in _ENDS:
        raise TypeError(f"an event {what.value!r} carries {EVENT_DATA[what].__name__}")
    return what, {}
