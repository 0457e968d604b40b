"""One policy on one trace: the setting shared by all contenders of a comparison, and the contenders.

Builds a policy and its simulation; reads and writes no files.
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
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES, Policy, make_policy
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Change, SimulatedJob, Simulation

OBJECTIVES = tuple(Objective)
ON_REJECT = (OnReject.FAIL, OnReject.WAIT, OnReject.LATE)
CALENDAR = {"calendar": True, "no-calendar": False}
"""Choices that override, for one contender, whether it is told of expected runs."""
_REMEMBERED = 20
"""Number of past runs whose errors are kept per task, as in the service."""
OURS = "elasticflow"
"""Name of our own policy; it and its variants have objectives."""
REPORT_AFTER_S = 60.0
"""Where reports are enabled, a gang sends its first one this long after it began to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy with its options in a comparison.

    ``on_reject`` None: use that of the conditions; ``calendar`` None: use that of the setting.
    """

    policy: str
    objective: Objective = Objective.AUTO
    on_reject: OnReject | None = None
    calendar: bool | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise InputError(f"unknown policy {self.policy!r}; there are {', '.join(POLICY_NAMES)}")

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Parse ``POLICY[:OBJECTIVE][:fail|wait|late][:calendar|no-calendar]``, such as ``elasticflow:value:wait``.

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
        """Whether this is the project's own scheduler or a variant of it (``elasticflow+...``)."""
        return self.policy.split("+")[0] == OURS

    @property
    def knows_calendar(self) -> bool:
        """Whether it supports expected runs; one scheduler per GPU type does not, nor do other policies."""
        return self.policy == OURS

    @property
    def label(self) -> str:
        """The shortest text that :meth:`parse` accepts: defaults are left out."""
        parts = [self.policy]
        if self.objective is not Objective.AUTO:
            parts.append(str(self.objective))
        if self.on_reject is not None:
            parts.append(str(self.on_reject))
        parts += [word for word, told in CALENDAR.items() if told is self.calendar]
        return ":".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders share: the jobs, the cluster, the costs and the disturbances."""

    trace: Trace
    curves: Curves
    nodes: tuple[Node, ...]
    conditions: Conditions
    troubles: Troubles = field(default_factory=Troubles)
    calendar: bool = True
    """Whether our scheduler is told of the runs that the trace marks as expected, as far as they are known by then."""
    exact: bool = False
    """Whether speeds are known exactly, so that no margin is kept and no report awaited: measures the planner itself.
    Otherwise our scheduler has the settings of ``elasticflow serve`` and receives reports as in the service."""
    history: bool = False
    """Whether the trace has been simulated once before, so that past runs have shown the error of each job's curve."""

    def __post_init__(self) -> None:
        if self.exact and not self.conditions.as_told:
            raise InputError(
                "exact says that all speeds are known exactly, throughput_error and speed_factor that they are not;"
                " leave one of them out"
            )

    @property
    def config(self) -> SchedulerConfig:
        """The configuration of our scheduler."""
        return SchedulerConfig() if self.exact else SchedulerConfig.served()

    @property
    def settings_name(self) -> str:
        """Name of our scheduler's settings, for tables."""
        if self.exact:
            return "speeds known exactly"
        return "settings as served, with history" if self.history else "settings as served"

    @property
    def recurring(self) -> int:
        """Number of tasks in the calendar; 0 if the calendar is off."""
        return len(timetables(self.trace.jobs)) if self.calendar else 0

    @property
    def horizon_s(self) -> tuple[float, float]:
        """First submission, and a time by which any sensible schedule has ended; disturbances are drawn in between."""
        first = min(job.submitted_s for job in self.trace.jobs)
        last = max(job.deadline_s or job.submitted_s for job in self.trace.jobs)
        return first, last + (last - first)

    @property
    def slots(self) -> int:
        """Number of slots in the cluster."""
        return sum(node.slots for node in self.nodes)

    def facts(self) -> dict[str, float | int | str | None]:
        """Return the facts needed to reproduce the setting, for tables and files."""
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
        """Return the jobs as they are submitted to a contender.

        Raises:
            InputError: a job cannot be simulated.
        """
        conditions = self.conditions
        if contender.on_reject is not None:
            conditions = replace(conditions, on_reject=contender.on_reject)
        return prepare(self.trace, self.curves, self.nodes, conditions)

    def resized(self, nodes: int) -> Setting:
        """Return the same setting on a cluster of ``nodes`` equal nodes."""
        return replace(self, nodes=cluster(nodes, self.nodes[0].slots))


@dataclass(frozen=True, slots=True)
class Played:
    """The result of one contender and every change it made, in order of time."""

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
    """Simulate one contender until the last job is over; ``config`` replaces the default configuration.

    Raises:
        InputError: the setting cannot be simulated.
        SimulationError: the policy made an impossible decision.
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
    """Return the jobs as if all had run once before, with the numbers of slots in ``changes``.

    Jobs with the same workload (model and batch size) count as runs of one task, so the error of its curve is known.
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
    """Return the RMS of log(real / given speed) over the sizes a job ran at; None if it never ran."""
    told = {} if one.job.curve is None else one.job.curve.steps_per_s
    squares = [math.log(one.truth[size] / told[size]) ** 2 for size in sizes if size in told]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else None


def policy_for(setting: Setting, contender: Contender, base: SchedulerConfig | None = None) -> Policy:
    """Create a policy; wrap our scheduler in the calendar of the trace's recurring tasks, if there are any."""
    policy = make_policy(contender.policy, setting.nodes, config_for(setting, contender, base))
    told = setting.calendar if contender.calendar is None else contender.calendar
    if told and isinstance(policy, Scheduler) and timetables(setting.trace.jobs):
        return CalendarFeed(policy, setting.trace.jobs)
    return policy


def config_for(setting: Setting, contender: Contender, base: SchedulerConfig | None = None) -> SchedulerConfig:
    """Return the configuration: the same for all traces except for the contender's objective."""
    return replace(base or setting.config, objective=contender.objective)


def parse_contenders(texts: Sequence[str], objective: Objective = Objective.AUTO) -> tuple[Contender, ...]:
    """Parse contenders, in order and without duplicates; ``all`` stands for one of each policy.

    ``objective`` applies to our own policies where none is given.

    Raises:
        InputError: a contender is unknown, or there is none.
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
