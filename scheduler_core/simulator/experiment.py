"""One policy on one trace: the setting that all contenders of a comparison share, and who plays in it.

Knows how to make a policy and a simulation of it; reads and writes no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from elasticflow_airflow.scheduler_core.jobs.learned_speed import sigma_of_errors
from elasticflow_airflow.scheduler_core.model.config import Objective, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node, OnReject
from elasticflow_airflow.scheduler_core.scheduler import Scheduler
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles, disturbances
from elasticflow_airflow.scheduler_core.simulator.expected_runs import CalendarFeed, timetables
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import Curves
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace
from elasticflow_airflow.scheduler_core.simulator.outcome import Result
from elasticflow_airflow.scheduler_core.simulator.policy import Policy
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.registry import POLICY_NAMES, make_policy
from elasticflow_airflow.scheduler_core.simulator.run import Change, SimulatedJob, Simulation

OBJECTIVES = tuple(Objective)
ON_REJECT = (OnReject.FAIL, OnReject.WAIT, OnReject.LATE)
CALENDAR = {"calendar": True, "no-calendar": False}
"""Whether one contender is told of expected runs, where it is not to be as the setting says."""
_REMEMBERED = 20
"""Of how many past runs a task's errors are remembered, as in the service."""
OURS = "elasticflow"
"""The policy that has objectives, as its variants do."""
REPORT_AFTER_S = 60.0
"""Where there is something to report, a gang first does so long after it began to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy as it takes part. ``on_reject`` None: as the conditions say; ``calendar`` None: as the setting says."""

    policy: str
    objective: Objective = Objective.FIRST_COME
    on_reject: OnReject | None = None
    calendar: bool | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise InputError(f"unknown policy {self.policy!r}; there are {', '.join(POLICY_NAMES)}")

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Read ``POLICY[:OBJECTIVE][:fail|wait|late][:calendar|no-calendar]``, such as ``elasticflow:value:wait``.

        Raises:
            InputError: a part is unknown.
        """
        policy, *choices = text.strip().split(":")
        contender = cls(policy=policy)
        for choice in choices:
            if choice in OBJECTIVES:
                contender = replace(contender, objective=Objective(choice))
            elif choice in ON_REJECT:
                contender = replace(contender, on_reject=OnReject(choice))
            elif choice in CALENDAR:
                contender = replace(contender, calendar=CALENDAR[choice])
            else:
                known = ", ".join([*OBJECTIVES, *ON_REJECT, *CALENDAR])
                raise InputError(f"{text!r}: {choice!r} is no choice of a policy; there are {known}")
        return contender

    @property
    def ours(self) -> bool:
        """Whether it is this project's scheduler, or a variant of it (``elasticflow+...``)."""
        return self.policy.split("+")[0] == OURS

    @property
    def knows_calendar(self) -> bool:
        """Whether it can be told of expected runs: one scheduler a type of GPU cannot, nor can other policies."""
        return self.policy == OURS

    @property
    def label(self) -> str:
        """What :meth:`parse` reads, short: what is as usual is left out."""
        parts = [self.policy]
        if self.objective is not Objective.FIRST_COME:
            parts.append(str(self.objective))
        if self.on_reject is not None:
            parts.append(str(self.on_reject))
        parts += [word for word, told in CALENDAR.items() if told is self.calendar]
        return ":".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for every contender: the jobs, the cluster, the costs, and what goes wrong."""

    trace: Trace
    curves: Curves
    nodes: tuple[Node, ...]
    conditions: Conditions
    troubles: Troubles = field(default_factory=Troubles)
    calendar: bool = True
    """Whether our scheduler is told of the runs that the trace says are expected, as far as they are known by then."""
    exact: bool = False
    """Whether speeds are known exactly, so that nobody keeps a margin or waits for reports: the planner's own quality.
    Else our scheduler has the settings of ``elasticflow serve``, and hears reports as the service does."""
    history: bool = False
    """Whether the whole was played once before, so that past runs have shown how wrong the curve of each job is."""

    def __post_init__(self) -> None:
        if self.exact and not self.conditions.as_told:
            raise InputError(
                "exact says that all speeds are known exactly, throughput_error and speed_factor that they are not;"
                " leave one of them out"
            )

    @property
    def config(self) -> SchedulerConfig:
        """The settings of our scheduler."""
        return SchedulerConfig() if self.exact else SchedulerConfig.served()

    @property
    def settings_name(self) -> str:
        """Which settings our scheduler has, for tables."""
        if self.exact:
            return "speeds known exactly"
        return "settings as served, with history" if self.history else "settings as served"

    @property
    def recurring(self) -> int:
        """How many tasks the calendar knows; 0 where it is not to know any."""
        return len(timetables(self.trace.jobs)) if self.calendar else 0

    @property
    def horizon_s(self) -> tuple[float, float]:
        """First submission, and a time by which any sensible schedule is over: trouble is drawn between the two."""
        first = min(job.submitted_s for job in self.trace.jobs)
        last = max(job.deadline_s or job.submitted_s for job in self.trace.jobs)
        return first, last + (last - first)

    @property
    def slots(self) -> int:
        """Slots of the whole cluster."""
        return sum(node.slots for node in self.nodes)

    def facts(self) -> dict[str, float | int | str | None]:
        """What a reader must know to make the same again, for tables and files."""
        conditions, jobs = self.conditions, self.trace.jobs
        return {
            "trace": self.trace.name,
            "jobs": len(jobs),
            "deadlines": sum(job.deadline_s is not None for job in jobs),
            "nodes": len(self.nodes),
            "slots": self.slots,
            "pause_s": conditions.pause_s,
            "startup_s": conditions.pause_s if conditions.startup_s is None else conditions.startup_s,
            "on_reject": str(conditions.on_reject),
            "settings": self.settings_name,
            "throughput_error": conditions.throughput_error,
            "speed_factor": conditions.speed_factor,
            **self.troubles.facts(),
            "calendar": int(self.recurring > 0),
            "seed": conditions.seed,
        }

    def jobs(self, contender: Contender) -> list[SimulatedJob]:
        """The jobs as they are submitted to a contender.

        Raises:
            InputError: a job cannot be simulated.
        """
        conditions = self.conditions
        if contender.on_reject is not None:
            conditions = replace(conditions, on_reject=contender.on_reject)
        return prepare(self.trace, self.curves, self.nodes, conditions)

    def resized(self, nodes: int) -> Setting:
        """The same on a cluster of so many equal nodes."""
        return replace(self, nodes=cluster(nodes, self.nodes[0].slots))


@dataclass(frozen=True, slots=True)
class Played:
    """How one contender did, and every change that it made, in order of time."""

    contender: Contender
    result: Result
    changes: tuple[Change, ...]


def play(
    setting: Setting,
    contender: Contender,
    *,
    config: SchedulerConfig | None = None,
    on_progress: Callable[[int, float], None] | None = None,
    on_change: Callable[[Change], None] | None = None,
) -> Played:
    """Simulate one contender to the last job, with another configuration than the usual one where given.

    Raises:
        InputError: the setting cannot be simulated.
        SimulationError: the policy decided something that cannot be.
    """
    changes: list[Change] = []

    def note(change: Change) -> None:
        changes.append(change)
        if on_change is not None:
            on_change(change)

    jobs = setting.jobs(contender)
    if setting.history and contender.ours:
        before = play(replace(setting, history=False), contender, config=config)
        jobs = with_history(jobs, before.changes, config_for(setting, contender, config))
    trouble = disturbances(setting.nodes, setting.troubles, *setting.horizon_s)
    silent = setting.conditions.as_told and not trouble and (setting.exact or not contender.ours)
    simulation = Simulation(
        name=contender.label,
        policy=policy_for(setting, contender, config),
        nodes=setting.nodes,
        jobs=jobs,
        disturbances=trouble,
        report_after_s=None if silent else REPORT_AFTER_S,
        straggler_after_s=setting.troubles.straggler_named_s,
        on_change=note,
        on_progress=on_progress,
    )
    return Played(contender, simulation.run(), tuple(changes))


def with_history(
    jobs: Sequence[SimulatedJob], changes: Iterable[Change], config: SchedulerConfig
) -> list[SimulatedJob]:
    """The jobs when all of them were submitted once before, and held so many slots as ``changes`` say.

    Who trains the same (model and batch size) is taken for a run of one task: how wrong its curve was is known then.
    """
    sizes: dict[str, set[int]] = {}
    for change in changes:
        sizes.setdefault(change.job_id, set()).add(len(change.slots))
    errors: dict[str, list[float]] = {}
    for one in jobs:
        error = _error_of(one, sizes.get(one.job.job_id, set()))
        if error is not None:
            errors.setdefault(one.job.workload, []).append(error)
    sigmas = {workload: sigma_of_errors(seen[-_REMEMBERED:], config) for workload, seen in errors.items()}
    return [replace(one, job=replace(one.job, speed_sigma=sigmas.get(one.job.workload))) for one in jobs]


def _error_of(one: SimulatedJob, sizes: Iterable[int]) -> float | None:
    """The root mean square of log(real / told) over the sizes that a job ran at; None where it ran at none."""
    told = {} if one.job.curve is None else one.job.curve.steps_per_s
    squares = [math.log(one.truth[size] / told[size]) ** 2 for size in sizes if size in told]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else None


def policy_for(setting: Setting, contender: Contender, base: SchedulerConfig | None = None) -> Policy:
    """A fresh policy; our scheduler behind the calendar of the trace's recurring tasks, where it has one."""
    policy = make_policy(contender.policy, setting.nodes, config_for(setting, contender, base))
    told = setting.calendar if contender.calendar is None else contender.calendar
    if told and isinstance(policy, Scheduler) and timetables(setting.trace.jobs):
        return CalendarFeed.of(policy, setting.trace.jobs)
    return policy


def config_for(setting: Setting, contender: Contender, base: SchedulerConfig | None = None) -> SchedulerConfig:
    """The scheduler's settings: one configuration for all traces, but for what the contender says."""
    return replace(base or setting.config, objective=contender.objective)


def parse_contenders(texts: Sequence[str], objective: Objective = Objective.FIRST_COME) -> tuple[Contender, ...]:
    """Read several, ``all`` being one of each policy; each once, in order. ``objective`` is ours where none is named.

    Raises:
        InputError: one is unknown, or there is none.
    """
    found: dict[str, Contender] = {}
    names = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for name in [one for given in names for one in (POLICY_NAMES if given == "all" else (given,))]:
        contender = Contender.parse(name)
        if contender.ours and not set(name.split(":")) & set(OBJECTIVES):
            contender = replace(contender, objective=objective)
        found[contender.label] = contender
    if not found:
        raise InputError(f"no policy to simulate; there are {', '.join(POLICY_NAMES)}, or all of them: all")
    return tuple(found.values())
