"""The events of the scheduler: the only inputs of ``scheduler_core.scheduler.Scheduler``."""

from __future__ import annotations

from dataclasses import dataclass

from elasticflow_airflow.scheduler_core.model.recurring_work import ExpectedRun
from elasticflow_airflow.scheduler_core.model.values import Job, Node, Placement, RescaleCosts, Slot


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A new job asks for admission (or for profiling first, when its curve is unknown)."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobMeasured:
    """Profiling measured ``steps_per_s`` at ``workers``; ``costs`` replaces the job's costs if not None.

    ``failed`` means that this size cannot be measured (it does not start, or not in time); it is left out.
    """

    job_id: str
    workers: int
    steps_per_s: float | None
    costs: RescaleCosts | None = None
    failed: bool = False

    @property
    def speed(self) -> float | None:
        """The measured steps/s; None if there is no usable measurement."""
        return self.steps_per_s if self.steps_per_s and self.steps_per_s > 0.0 and not self.failed else None


@dataclass(frozen=True, slots=True)
class JobProgressed:
    """``remaining_steps`` were left at ``at_s``; ``steps_per_s`` was measured at the current size, if not None.

    ``measured_s`` is the duration of that measurement, if it exceeds the window within which reports count as one.
    ``total_steps`` reports the length of a job when only the running script knows it. ``expected_steps`` is the
    predicted number of steps left (for a loss to train to: Optimus, EuroSys 2018, section 3.1), at most
    ``remaining_steps``; None: there is no prediction. Promises and their bookings never depend on it. ``at_s``: None is
    now; what a report says is some time old where many are read together.
    """

    job_id: str
    remaining_steps: float | None
    steps_per_s: float | None = None
    total_steps: float | None = None
    expected_steps: float | None = None
    measured_s: float | None = None
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobFinished:
    """All steps are done and the job has released its slots."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job has ended without success and holds no slots any more."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """The job was cancelled and holds no slots any more."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobAmended:
    """The owner changes the deadline and/or the value (None: unchanged; ``best_effort`` drops the deadline).

    ``max_workers`` is sent alone: the most workers that can train the job, if that was unknown at submission.
    """

    job_id: str
    deadline_s: float | None = None
    value: float | None = None
    best_effort: bool = False
    max_workers: int | None = None


@dataclass(frozen=True, slots=True)
class JobParked:
    """The job has no owner at present (its lease ran out): take its slots, but remember the job."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobUnparked:
    """The job has an owner again and competes again; its promise is kept if possible."""

    job_id: str


@dataclass(frozen=True, slots=True)
class GangStarted:
    """The gang ordered by the last Resize makes steps since ``at_s`` (None: now): its start-up or pause is over."""

    job_id: str
    placement: Placement
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class GangLost:
    """The gang died unexpectedly (worker or node failure); its slots are free unless the node is lost."""

    job_id: str


@dataclass(frozen=True, slots=True)
class GangReformed:
    """The gang makes steps now on exactly ``placement``, which the scheduler did not order.

    Either workers have died and the others continue from memory, or a change of slots failed and the gang stays where
    it was. The plan's sizes are ordered anew. Ignored if one of the slots has been given to another job.
    """

    job_id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node has joined, or has changed (its number of slots, or which of them are busy)."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, and with it every gang that has a slot on it."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A node leaves at ``until_s``: nothing may be planned on it after that time."""

    node_id: str
    until_s: float


@dataclass(frozen=True, slots=True)
class SlotSlow:
    """A worker of a job is permanently slow on its slot: nothing is planned on that slot until ``until_s``.

    Without it the job is ``gain`` times as fast as measured at its present size. The slot is treated like one of a
    draining node, for a limited time (EDL, TPDS 2021, section 3).
    """

    job_id: str
    slot: Slot
    until_s: float
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class RunExpected:
    """The calendar expects a run of a recurring task, or updates the run that it expects under this id."""

    run: ExpectedRun


@dataclass(frozen=True, slots=True)
class RunForgotten:
    """A run is no longer expected: it will not be submitted, or its time is past."""

    run_id: str


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The time requested with WakeMeAt has come, or the shell wakes the scheduler for its own reasons."""


JobEnd = JobFinished | JobFailed | JobCancelled
NodeChange = NodeJoined | NodeLost | NodeDraining
OwnerChange = JobParked | JobUnparked
Reported = JobProgressed | JobMeasured | GangStarted

Event = (
    JobSubmitted
    | JobMeasured
    | JobProgressed
    | JobEnd
    | JobAmended
    | JobParked
    | JobUnparked
    | GangStarted
    | GangLost
    | GangReformed
    | NodeJoined
    | NodeLost
    | NodeDraining
    | SlotSlow
    | WakeUp
)

CalendarEvent = RunExpected | RunForgotten
"""Only the scheduler itself has a calendar; other policies never receive these events."""
