"""What happens to the scheduler: the only inputs of ``scheduler_core.scheduler.Scheduler``."""

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
    """Profiling measured ``steps_per_s`` at ``workers``; ``costs`` if they are known better by now.

    ``failed`` says that this size cannot be measured (it does not start, or not in time): it is left out.
    """

    job_id: str
    workers: int
    steps_per_s: float | None
    costs: RescaleCosts | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class JobProgressed:
    """``remaining_steps`` are left now; ``steps_per_s`` was measured at the current size, if not None.

    ``measured_s``: over how long, if that is more than the window within which reports count as one.
    Also how the length becomes known (``total_steps``) when only the running script knows it. ``expected_steps`` are
    left if a prediction is right (a loss to train to, Optimus, EuroSys 2018, section 3.1), at most ``remaining_steps``;
    None: nobody can say. Promises and what is booked for them never depend on it.
    """

    job_id: str
    remaining_steps: float | None
    steps_per_s: float | None = None
    total_steps: float | None = None
    expected_steps: float | None = None
    measured_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobFinished:
    """All steps are done and the job has let go of its slots."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job has ended without success and holds nothing any more."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """The job was cancelled and holds nothing any more."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobAmended:
    """The owner wants another deadline and/or value (None: unchanged; ``best_effort`` gives the deadline up).

    ``max_workers`` comes alone: so many workers can train it at most, as was not known when it was submitted.
    """

    job_id: str
    deadline_s: float | None = None
    value: float | None = None
    best_effort: bool = False
    max_workers: int | None = None


@dataclass(frozen=True, slots=True)
class JobParked:
    """Nobody owns the job at present (lease run out): take its slots, keep its place in memory."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobUnparked:
    """An owner is back: the job competes again (its promise is kept if it still can be)."""

    job_id: str


@dataclass(frozen=True, slots=True)
class GangStarted:
    """The gang ordered by the last Resize makes steps now: start-up or pause is over."""

    job_id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class GangLost:
    """The gang died without being told to (worker or node failure); the slots are free unless the node is lost."""

    job_id: str


@dataclass(frozen=True, slots=True)
class GangReformed:
    """The gang makes steps now on exactly ``placement``, which the scheduler did not order.

    Workers have died and the others go on from memory, or a change of slots did not come about and the gang stays
    where it was. What the plan says is ordered anew. Ignored when another job has been given one of the slots.
    """

    job_id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is there, or has changed (its number of slots, which of them are busy)."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, and every gang with a slot on it with it."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A node goes away at ``until_s``: nothing may be planned on it past that time."""

    node_id: str
    until_s: float


@dataclass(frozen=True, slots=True)
class SlotSlow:
    """A worker of a job is slow for good where it is: nothing is planned on that slot until ``until_s``.

    Without it the job makes ``gain`` times the steps that were measured with it at its present size. Like a node that
    goes away, for one slot and a while (EDL, TPDS 2021, section 3).
    """

    job_id: str
    slot: Slot
    until_s: float
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class RunExpected:
    """The calendar expects a run of a recurring task (or knows better now what it expects under this id)."""

    run: ExpectedRun


@dataclass(frozen=True, slots=True)
class RunForgotten:
    """A run is no longer expected: it will not come, or its time is past."""

    run_id: str


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The time that the scheduler asked for with WakeMeAt has come (or the shell thinks it is a good time)."""


Event = (
    JobSubmitted
    | JobMeasured
    | JobProgressed
    | JobFinished
    | JobFailed
    | JobCancelled
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
"""Only the scheduler itself knows a calendar; other policies are never told these."""
