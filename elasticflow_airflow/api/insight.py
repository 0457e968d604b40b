"""Details of the service and its jobs beyond their status, as the pages show them. Times are UTC seconds.

May import nothing but pydantic, like the rest of this folder: used by the service, its clients, and the plugin's pages.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from elasticflow_airflow import bounds
from elasticflow_airflow.api import ForecastAnswer, JobStatus, SlotStatus, Verdict, Wire
from elasticflow_airflow.api.fields import HorizonH, MapIndex, Name, NodeCount, UtcSeconds, refuse
from elasticflow_airflow.api.status import Mention, Telling

REDACTED = "***"
"""Replaces a value that is not shown because it may be secret."""


class Span(Telling):
    """A job on its slots for a period of time: one generation of workers, or one segment of a plan.

    ``slots`` are [node, index]; a plan lists only the slots that are already fixed. ``running_at`` is when the workers
    began to train: from ``from_at`` until then, and during ``pause_s``, slots were held without computing. ``purpose``
    is "train", "profile" (the job's speed is measured), "join" (new workers start while the others keep training) or,
    in a plan, "expected" (kept free for a run that has not come; without ``job_id`` and ``run_id``).
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
    """None: the job still holds the slots."""
    workers: int
    slots: list[tuple[str, int]] = Field(default_factory=list)
    pause_s: float = 0.0
    purpose: str = ""
    reason: str = ""


class Admission(Telling):
    """One submission and the decision of admission control."""

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


class ClusterNow(Wire):
    """The current state of the cluster: every slot with its holder, and all live jobs."""

    at: float
    slots: list[SlotStatus]
    jobs: list[JobStatus]
    why: dict[str, str] = Field(default_factory=dict)
    """One sentence by job id, as in ``JobStory.why``."""
    why_names: dict[str, list[Mention]] = Field(default_factory=dict)
    """What the sentence mentions, in order, by job id."""


class DagAsked(Wire):
    """What one DAG requested between two times, and the outcome."""

    namespace: str
    dag_id: str
    runs: int
    rejected: int
    judged: int
    """Number of runs that have ended and had a deadline; ``met`` counts those that met it."""
    met: int
    median_wait_s: float | None
    """Time from submission to the first step, of the runs that started."""


class DagTotals(DagAsked):
    """What one DAG requested and held between two times."""

    slot_s: float


class ClusterHistory(Wire):
    """Past allocations, planned allocations and submissions between two times.

    ``held_slot_s`` and ``computing_slot_s`` are the slot-seconds that were held and that were spent training, for each
    of the equal parts, of ``part_s`` seconds each, of the period from ``from_at`` to ``until_at``.
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
    """False: there were so many ``spans`` or ``admissions`` that the oldest are left out. The sums include all."""
    spans_from_at: float | None = None
    """``spans`` leaves out what began to hold slots before this time; None: nothing is left out."""
    admissions_from_at: float | None = None
    """``admissions`` leaves out what was submitted before this time; None: nothing is left out."""


class Sample(Wire):
    """A job's progress at one time."""

    at: float
    step: int
    loss: float | None = None
    steps_per_s: float | None = None
    workers: int = 0


class WorkerTimes(Wire):
    """How one worker spent the time of its last measurement window; the seconds add up to the window."""

    worker_id: str
    rank: int
    at: float
    window_steps: int
    samples: int | None = None
    """Samples that this worker processed in the window."""
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
    """Speed with a number of workers: as measured, and as the scheduler assumes it."""

    workers: int
    measured_steps_per_s: float | None = None
    reckoned_steps_per_s: float | None = None


class TrainedWith(Wire):
    """What determines a run's weights besides its code and arguments; enough to repeat the run on its own."""

    code_dir: str
    """Folder of the code as it was submitted, on the service's machine."""
    python: str
    submitted: dict[str, Any]
    """The value of ``SessionConfig.submitted``, for the environment variable that ``runtime.init`` reads."""
    threads: int | None = None
    """Number of torch threads in each worker; None: the script does not use the session."""
    threads_differed: bool = False
    """Whether ``threads`` differed between generations, on slots of different kinds."""
    micro_batch_changed: bool = False
    """Whether the micro-batch was halved during the run because memory did not suffice."""


class JobStory(Wire):
    """Everything about one incarnation of a job, for the job's page."""

    status: JobStatus
    incarnations: int
    why: str
    """One sentence: why the job has its size or why it waits, and until when."""
    why_names: list[Mention] = Field(default_factory=list)
    """What the sentence mentions, in order."""
    submission: dict[str, Any]
    """The submission, without secrets and without values of environment variables."""
    generations: list[Span]
    planned: list[Span]
    samples: list[Sample]
    samples_per_s: float | None = None
    """Speed of all workers together, as last reported."""
    noise_scale: float | None = None
    """Gradient noise scale, in samples: the global batch size above which a larger one gains little.

    See arXiv:1812.06162.
    """
    curve: list[CurvePoint]
    workers: list[WorkerTimes]
    checkpoints: list[Checkpoint]
    trained_with: TrainedWith | None = None
    """None: the service is older, or the job has not started."""


class RunOfTask(Wire):
    """One run of a recurring task, for comparison: times of ``samples`` are seconds from the run's start, not UTC."""

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
    """A hypothetical deadline for a live job (``deadline_at`` None: best effort)."""

    job_id: Name
    deadline_at: UtcSeconds | None


class WhatIfRequest(Wire):
    """Request the forecast with other deadlines, or with more or fewer nodes. Nothing is changed."""

    hours: HorizonH = 24.0
    changes: list[DeadlineChange] = Field(default_factory=list, max_length=100)
    without_nodes: list[Name] = Field(default_factory=list, max_length=1000)
    extra_nodes: NodeCount = 0
    """Number of additional nodes, each like the largest existing one."""


class WhatIfVerdict(Wire):
    """The decision that the service would make on one of the changes."""

    job_id: str
    verdict: Verdict


class WhatIf(Wire):
    """The forecast without and with the hypothetical changes."""

    verdicts: list[WhatIfVerdict]
    before: ForecastAnswer
    after: ForecastAnswer


class ReleasableNode(Wire):
    """A node that no job needs until ``until_at``.

    ``idle``: no workers run on it now; otherwise they are moved when it is drained.
    """

    node_id: str
    slots: int
    idle: bool
    reason: str


class CapacityWant(Wire):
    """A job, or an expected run (no ``job_id``), that needs more capacity.

    ``at_risk``: promised, but will probably miss its deadline. ``missed``: an expected run that would be rejected.
    ``waiting``: submitted to wait for capacity. ``unmeasured``: waits for slots on which to measure its speed.
    ``best_effort``: holds no slots. ``rejected``: was rejected recently, would be again, and its deadline is still
    ahead.
    """

    need: Literal["at_risk", "missed", "waiting", "unmeasured", "best_effort", "rejected"]
    task: str
    job_id: str | None = None
    namespace: str | None = None
    """With ``dag_id``, the owner of the task: a caller that shows the answer to users must check what they may read."""
    dag_id: str | None = None
    deadline_at: float | None = None
    reason: str = ""


class CapacityAnswer(Wire):
    """Either the nodes that no job needs until ``until_at``, or the capacity that is missing.

    All of ``releasable`` can be drained and removed together, in this order. ``wanted_nodes`` additional nodes of
    ``slots_per_node`` slots (and of ``gpu_type``) would suffice for all in ``wanted_by``, soonest deadline first; None:
    no number that was tried suffices. ``hopeless`` lists those that no number of nodes would help; no other figure
    includes them.
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
    """The times at which runs of one recurring task are due by its timetable; replaces those reported before."""

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
    """An existing recurring task; ``map_indexes`` None: all instances of it that were ever reported."""

    dag_id: Name
    task_id: Name
    map_indexes: list[MapIndex] | None = None


class WholeNamespace(Wire):
    """All recurring tasks of a namespace as of ``read_at``: no run of any other task in it is due.

    What was reported about a task after that time remains valid.
    """

    namespace: Name = "default"
    read_at: UtcSeconds
    tasks: list[TaskOfNamespace] = Field(max_length=50_000)


class CalendarRequest(Wire):
    """Due runs of many tasks of one Airflow (namespace); with ``whole``, also states that it has no other tasks."""

    tasks: list[DueRuns] = Field(max_length=5000)
    whole: WholeNamespace | None = None


class CalendarAnswer(Wire):
    """How many tasks were stored; ``unknown`` ones have no history here, so no slots can be kept free for them yet.

    ``forgotten`` lists removed tasks for whose future runs slots may have been kept free until now.
    """

    taken: int
    unknown: list[str]
    forgotten: list[str] = Field(default_factory=list)


class StackDump(Wire):
    """The stack of each live worker of a job by worker id, or the reason why it is not available."""

    job_id: str
    at: float
    stacks: dict[str, str]
