"""What the service tells about itself and its jobs beyond their status: the values behind the pages. Times in UTC s.

May import nothing but pydantic, like the rest of this folder: read by the service, its clients, and the pages of the
plugin.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from elasticflow_airflow import bounds
from elasticflow_airflow.api import ForecastAnswer, JobStatus, SlotStatus, Verdict, Wire
from elasticflow_airflow.api.fields import HorizonH, MapIndex, Name, NodeCount, UtcSeconds, refuse

REDACTED = "***"
"""Stands where a value is not shown because it may be secret."""


class Span(Wire):
    """A job on its slots for a while: one generation of workers, or one segment of a plan.

    ``slots`` are [node, index]; of a plan only as many as it has settled. ``running_at`` is when its workers began to
    train: from ``from_at`` until then, and during ``pause_s``, slots were held without computing. ``purpose``: "train",
    "profile" (its speed is measured), "join" (new workers get ready while the others train on), or, of a plan,
    "expected" (kept free for a run that has not come; without ``job_id`` and ``run_id``).
    """

    job_id: str
    namespace: str = "default"
    dag_id: str
    task_id: str
    run_id: str
    map_index: int = -1
    incarnation: int = 1
    generation: int | None = None
    from_at: float
    running_at: float | None = None
    until_at: float | None = None
    """None: it still holds them."""
    workers: int
    slots: list[tuple[str, int]] = Field(default_factory=list)
    pause_s: float = 0.0
    purpose: str = ""
    reason: str = ""


class Admission(Wire):
    """One submission and what admission control said to it."""

    job_id: str
    namespace: str = "default"
    dag_id: str
    task_id: str
    run_id: str
    map_index: int = -1
    submitted_at: float
    decided_at: float | None = None
    started_at: float | None = None
    decision: Literal["admitted", "best_effort", "renegotiated", "rejected", "undecided"]
    deadline_at: float | None = None
    finished_at: float | None = None
    met: bool | None = None
    reason: str = ""


class NamedTask(Wire):
    """A task that a sentence names, by ``length`` characters from ``at`` on, and whose it is.

    Who shows the sentence to people must know what they may read.
    """

    at: int
    length: int
    namespace: str
    dag_id: str


class ClusterNow(Wire):
    """The cluster at this moment: every slot and who holds it, and all live jobs."""

    at: float
    slots: list[SlotStatus]
    jobs: list[JobStatus]
    why: dict[str, str] = Field(default_factory=dict)
    """By job id, one sentence as in ``JobStory.why``."""
    why_names: dict[str, list[NamedTask]] = Field(default_factory=dict)
    """By job id, the tasks that its sentence names, in order."""


class DagAsked(Wire):
    """What one DAG asked for between two moments, and how it went."""

    namespace: str
    dag_id: str
    runs: int
    rejected: int
    judged: int
    """Runs that have ended and had a deadline; ``met`` are those that kept it."""
    met: int
    median_wait_s: float | None
    """From submission to the first step, of those that began."""


class DagTotals(DagAsked):
    """What one DAG asked for and held between two moments."""

    slot_s: float


class ClusterHistory(Wire):
    """What was, what is planned, and what was asked for, between two moments.

    ``held_slot_s`` and ``computing_slot_s`` add up the slots that were held and those of them that trained, in each of
    the equal parts of the time from ``from_at`` to ``until_at``, of ``part_s`` each.
    """

    from_at: float
    until_at: float
    now: float
    spans: list[Span]
    planned: list[Span]
    admissions: list[Admission]
    part_s: float
    held_slot_s: list[float]
    computing_slot_s: list[float]
    slots: int
    by_dag: list[DagTotals] = Field(default_factory=list)
    complete: bool = True
    """False: so much was going on that the oldest of ``spans`` or ``admissions`` is left out. The sums are of all."""
    spans_from_at: float | None = None
    """What began to hold slots before this moment is left out of ``spans``; None: nothing is."""
    admissions_from_at: float | None = None
    """What was submitted before this moment is left out of ``admissions``; None: nothing is."""


class Sample(Wire):
    """How a job did at one moment."""

    at: float
    step: int
    loss: float | None = None
    steps_per_s: float | None = None
    workers: int = 0


class WorkerTimes(Wire):
    """Where the time of one worker went in its last window; the seconds add up to the window."""

    worker_id: str
    rank: int
    at: float
    window_steps: int
    samples: int | None = None
    """Its own, of that window."""
    data_s: float = 0.0
    compute_s: float = 0.0
    reduce_s: float = 0.0
    wait_s: float = 0.0
    pause_s: float = 0.0
    save_s: float = 0.0
    other_s: float = 0.0
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None


class Checkpoint(Wire):
    """A checkpoint that was written. ``path`` is relative to the job's checkpoint folder."""

    step: int
    generation: int
    path: str
    digest: str
    at: float | None = None
    size_bytes: int | None = None
    promoted: bool = False
    status: str = ""


class CurvePoint(Wire):
    """Speed with a number of workers: as measured, and as the scheduler reckons with."""

    workers: int
    measured_steps_per_s: float | None = None
    reckoned_steps_per_s: float | None = None


class TrainedWith(Wire):
    """What decided on the weights of a run beside its code and arguments: enough to repeat it alone."""

    code_dir: str
    """Folder of the code as it was submitted, on the service's machine."""
    python: str
    submitted: dict[str, Any]
    """As ``SessionConfig.submitted``, for the environment variable that ``runtime.init`` reads."""
    threads: int | None = None
    """Of torch, in each worker; None: the script knows no session."""
    threads_differed: bool = False
    """Between its generations, on slots of several kinds."""
    micro_batch_changed: bool = False
    """It was halved on the way, because memory did not suffice."""


class JobStory(Wire):
    """Everything about one incarnation of a job, for a page of its own."""

    status: JobStatus
    incarnations: int
    why: str
    """One sentence: why it has this size or why it waits, and until when."""
    why_names: list[NamedTask] = Field(default_factory=list)
    """The tasks that the sentence names, in order."""
    submission: dict[str, Any]
    """What was asked for: no secret, no environment value."""
    generations: list[Span]
    planned: list[Span]
    samples: list[Sample]
    samples_per_s: float | None = None
    """Of all workers together, as reported last."""
    noise_scale: float | None = None
    """Gradient noise scale, in samples: the global batch from which on larger ones pay little (arXiv:1812.06162)."""
    curve: list[CurvePoint]
    workers: list[WorkerTimes]
    checkpoints: list[Checkpoint]
    trained_with: TrainedWith | None = None
    """None: an older service, or it has not begun."""


class RunOfTask(Wire):
    """One run of a recurring task, to stand beside another: ``samples`` count seconds from its start, not UTC."""

    job_id: str
    run_id: str
    incarnation: int
    state: str
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    deadline_at: float | None
    met: bool | None
    steps: int
    final_loss: float | None
    slot_s: float
    rescales: int
    samples: list[Sample]


class DeadlineChange(Wire):
    """What if this live job had another deadline, or none (``deadline_at`` None: best effort)."""

    job_id: Name
    deadline_at: UtcSeconds | None


class WhatIfRequest(Wire):
    """Ask for the outlook with other deadlines, or with more or fewer nodes. Nothing is changed."""

    hours: HorizonH = 24.0
    changes: list[DeadlineChange] = Field(default_factory=list, max_length=100)
    without_nodes: list[Name] = Field(default_factory=list, max_length=1000)
    extra_nodes: NodeCount = 0
    """So many more nodes, each like the largest that there is."""


class WhatIfVerdict(Wire):
    """What the service would say to one of the changes."""

    job_id: str
    verdict: Verdict


class WhatIf(Wire):
    """The outlook as things are, and as they would be."""

    verdicts: list[WhatIfVerdict]
    before: ForecastAnswer
    after: ForecastAnswer


class ReleasableNode(Wire):
    """A node that nobody needs until ``until_at``.

    ``idle``: nobody stands on it now; who does stand on it moves when it is drained.
    """

    node_id: str
    slots: int
    idle: bool
    reason: str


class CapacityWant(Wire):
    """Somebody who wants capacity: a job, or a run that is expected (no ``job_id``).

    ``at_risk``: promised, and no longer on course. ``missed``: an expected run that would be rejected. ``waiting``: was
    asked to wait. ``unmeasured``: waits for slots to be measured on. ``best_effort``: holds nothing. ``rejected``: was
    rejected lately, would be again, and its deadline is ahead.
    """

    need: Literal["at_risk", "missed", "waiting", "unmeasured", "best_effort", "rejected"]
    task: str
    job_id: str | None = None
    namespace: str | None = None
    """With ``dag_id``, whose task this is: who shows the answer to people must know what they may read."""
    dag_id: str | None = None
    deadline_at: float | None = None
    reason: str = ""


class CapacityAnswer(Wire):
    """What nobody needs until ``until_at``, or what is missing: one of the two at most.

    All of ``releasable`` can go together, drained and removed in this order. ``wanted_nodes`` more nodes, each of
    ``slots_per_node`` (and ``gpu_type``), would do for all in ``wanted_by``, soonest deadline first; None: no number
    that was tried would. ``hopeless``: no number would help them; they are in no other figure.
    """

    asked_at: float
    until_at: float
    releasable: list[ReleasableNode] = Field(default_factory=list)
    releasable_slots: int = 0
    wanted_nodes: int | None = 0
    slots_per_node: int = 0
    gpu_type: str = ""
    wanted_slots: int | None = 0
    wanted_by: list[CapacityWant] = Field(default_factory=list)
    hopeless: list[CapacityWant] = Field(default_factory=list)
    summary: str


class DueRuns(Wire):
    """When the runs of one recurring task are due, as its timetable says; replaces what was said of it before."""

    namespace: Name = "default"
    dag_id: Name
    task_id: Name
    map_index: MapIndex = -1
    due_at: list[UtcSeconds] = Field(max_length=500)

    @model_validator(mode="after")
    def _short_enough(self) -> DueRuns:
        refuse(bounds.key_problem(self.namespace, self.dag_id, self.task_id))
        return self


class TaskOfNamespace(Wire):
    """A recurring task that there is; ``map_indexes`` None: all instances of it that anybody spoke of."""

    dag_id: Name
    task_id: Name
    map_indexes: list[MapIndex] | None = None


class WholeNamespace(Wire):
    """These are all recurring tasks of a namespace as it was ``read_at``: no run of another task there is due.

    What was said of a task later than that still holds.
    """

    namespace: Name = "default"
    read_at: UtcSeconds
    tasks: list[TaskOfNamespace] = Field(max_length=50_000)


class CalendarRequest(Wire):
    """Due runs of many tasks, of one Airflow (namespace); with ``whole``, also that there are no others in it."""

    tasks: list[DueRuns] = Field(max_length=5000)
    whole: WholeNamespace | None = None


class CalendarAnswer(Wire):
    """How many tasks were taken in; ``unknown`` ones have no history here, so nothing can be kept free for them yet.

    ``forgotten``: those that are no more, for whose runs to come something may have been kept free until now.
    """

    taken: int
    unknown: list[str]
    forgotten: list[str] = Field(default_factory=list)


class StackDump(Wire):
    """What each live worker of a job was doing, by worker id; or why that cannot be said."""

    job_id: str
    at: float
    stacks: dict[str, str]
