"""The options that ``elasticflow simulate`` and ``elasticflow compare`` share, and the setting built from them.

Only options are defined at module level: the simulator is imported when a command runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticflow_airflow.cli.terminal.lines import note

if TYPE_CHECKING:
    from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles
    from elasticflow_airflow.scheduler_core.simulator.experiment import Setting

TROUBLES = {
    "mtbf_h": ("repair_h",),
    "drain_every_h": ("drain_notice_h", "drain_away_h"),
    "straggler_every_h": ("straggler_h", "straggler_factor", "straggler_named_s"),
}
"""Kinds of trouble, each with the options that refine it."""


class ObjectiveChoice(StrEnum):
    """Which jobs to prefer if not all fit."""

    AUTO = "auto"
    FIRST_COME = "first-come"
    VALUE = "value"


class WhenRejected(StrEnum):
    """What a job does if its deadline cannot be promised at submission."""

    FAIL = "fail"
    WAIT = "wait"
    LATE = "late"


CurvesFolder = Annotated[
    Path, typer.Option("--curves", help="Folder of measured scaling curves, one CSV table for each model.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOptions:
    """The trace, the cluster, and the model of real speeds, starts and rejections."""

    trace: Annotated[
        Path, typer.Option("--trace", help="Jobs: a CSV file, one a line (docs/reference/simulate.md has its columns).")
    ]
    curves: CurvesFolder
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the cluster.")]
    slots_per_node: Annotated[int, typer.Option("--slots-per-node", min=1, help="Slots (GPUs) of each node.")]
    objective: Annotated[
        ObjectiveChoice,
        typer.Option("--objective", help="Which jobs elasticflow admits: by arrival, by value under a price, or auto."),
    ] = ObjectiveChoice.AUTO
    on_reject: Annotated[
        WhenRejected,
        typer.Option(
            "--on-reject", help="If it cannot be promised: fail at once, wait and try again, or promise it late."
        ),
    ] = WhenRejected.FAIL
    late_by: Annotated[
        float,
        typer.Option(
            "--late-by",
            min=0,
            help="With --on-reject late: value falls to zero over this time, as a fraction of submission to deadline.",
        ),
    ] = 0.5
    pause_s: Annotated[
        float,
        typer.Option(
            "--pause-s", min=0, help="Seconds that each change of a job's slots stops it, including its start."
        ),
    ] = 30.0
    startup_s: Annotated[
        float | None,
        typer.Option("--startup-s", min=0, help="Seconds that a start takes, if not --pause-s."),
    ] = None
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of everything random: speed errors, failures, maintenance, slow slots.")
    ] = 0
    throughput_error: Annotated[
        float,
        typer.Option(
            "--throughput-error",
            min=0,
            help="Sigma of a log-normal factor between each job's real speed at a size and its curve.",
        ),
    ] = 0.0
    speed_factor: Annotated[
        float,
        typer.Option(
            "--speed-factor",
            min=0,
            help="Real speeds are this many times those of the curves: 0.9 makes all a tenth slower.",
        ),
    ] = 1.0
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Speeds are known exactly, and no margin is kept: the planner's own quality. Default: the settings of"
            " elasticflow serve.",
        ),
    ] = False
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Simulate the trace once before: past runs of the same training have shown how wrong its curve is.",
        ),
    ] = False
    calendar: Annotated[
        bool | None,
        typer.Option(
            "--calendar/--no-calendar",
            help="Tell elasticflow of the runs that the trace expects, as they become known; default: where it expects"
            " any.",
        ),
    ] = None

    def setting(self, troubles: TroubleOptions) -> Setting:
        """Read the files and build the setting; print a note on ignored columns and options.

        Raises:
            InputError: a file cannot be simulated, or an option of the troubles is refused.
        """
        from elasticflow_airflow.scheduler_core.model.values import OnReject
        from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting
        from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
        from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
        from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster

        what_goes_wrong = troubles.made(self.seed)
        jobs = read_trace(self.trace)
        if jobs.ignored:
            note(f"note: {self.trace}: columns that are not known are ignored: {', '.join(jobs.ignored)}")
        setting = Setting(
            trace=jobs,
            curves=read_curves(self.curves),
            nodes=cluster(self.nodes, self.slots_per_node),
            conditions=Conditions(
                pause_s=self.pause_s,
                startup_s=self.startup_s,
                on_reject=OnReject(str(self.on_reject)),
                late_by=self.late_by,
                throughput_error=self.throughput_error,
                speed_factor=self.speed_factor,
                seed=self.seed,
            ),
            troubles=what_goes_wrong,
            calendar=self.calendar is not False,
            exact=self.exact,
            history=self.history,
        )
        if self.calendar and not setting.recurring:
            missing = "no task is expected at two due times or more (columns task, expected, due_s)"
            note(f"note: {self.trace}: {missing}: no calendar")
        # Check that each row can be simulated, before anything runs.
        setting.jobs(Contender(policy="elasticflow"))
        return setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleOptions:
    """The simulated disturbances; None means the default of :class:`Troubles`."""

    mtbf_h: Annotated[
        float | None,
        typer.Option("--mtbf-h", min=0, help="Mean hours between failures of one node; default: none fails."),
    ] = None
    repair_h: Annotated[
        float | None, typer.Option("--repair-h", min=0, help="With --mtbf-h: mean hours until it is back; default: 1.")
    ] = None
    drain_every_h: Annotated[
        float | None,
        typer.Option(
            "--drain-every-h", min=0, help="Mean hours between maintenance windows of one node; default: there is none."
        ),
    ] = None
    drain_notice_h: Annotated[
        float | None,
        typer.Option(
            "--drain-notice-h", min=0, help="With --drain-every-h: hours beforehand that the date is known; default: 2."
        ),
    ] = None
    drain_away_h: Annotated[
        float | None,
        typer.Option("--drain-away-h", min=0, help="With --drain-every-h: hours that the node is away; default: 1."),
    ] = None
    straggler_every_h: Annotated[
        float | None,
        typer.Option(
            "--straggler-every-h", min=0, help="Mean hours between slow spells of one slot; default: none is slow."
        ),
    ] = None
    straggler_h: Annotated[
        float | None,
        typer.Option("--straggler-h", min=0, help="With --straggler-every-h: mean hours of a slow spell; default: 2."),
    ] = None
    straggler_factor: Annotated[
        tuple[float, float] | None,
        typer.Option(
            "--straggler-factor",
            help="With --straggler-every-h: least and largest fraction of its speed that a gang has with the slot;"
            " default: 0.4 0.8.",
        ),
    ] = None
    straggler_named_s: Annotated[
        float | None,
        typer.Option(
            "--straggler-named-s",
            min=0,
            help="With --straggler-every-h: a gang is told of its slow slot after this many seconds with it; default:"
            " never.",
        ),
    ] = None

    def made(self, seed: int) -> Troubles:
        """Return the disturbances.

        Raises:
            InputError: a number is out of range, or an option refines a disturbance that is not enabled.
        """
        from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles
        from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError

        given = {name: value for name, value in asdict(self).items() if value is not None}
        for kind, details in TROUBLES.items():
            for name in details:
                if name in given and kind not in given:
                    raise InputError(f"{_option(name)} says nothing without {_option(kind)}; give that, too")
        return Troubles(seed=seed, **given)  # the options are named like its fields


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
