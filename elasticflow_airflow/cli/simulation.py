"""``elasticflow simulate`` and ``elasticflow compare``: traces in, schedules, tables and plots out.

Only options stand here at the top: whatever simulates or draws is imported when a command runs.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from elasticflow_airflow.cli.answering import answering, require_writable

if TYPE_CHECKING:
    from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles
    from elasticflow_airflow.scheduler_core.simulator.experiment import Setting

WIDE = 200
TROUBLES = {
    "mtbf_h": ("repair_h",),
    "drain_every_h": ("drain_notice_h", "drain_away_h"),
    "straggler_every_h": ("straggler_h", "straggler_factor", "straggler_named_s"),
}
"""What can go wrong, and the options that say more of it."""


class ObjectiveChoice(StrEnum):
    """Whom to prefer where not everybody fits."""

    FIRST_COME = "first-come"
    VALUE = "value"


class WhenRejected(StrEnum):
    """What a job does whose deadline cannot be promised when it is submitted."""

    FAIL = "fail"
    WAIT = "wait"
    LATE = "late"


Trace = typer.Option(..., "--trace", help="Jobs: a CSV file, one a line (docs/reference/simulate.md has its columns).")
Curves = typer.Option(..., "--curves", help="Folder of measured scaling curves, one CSV table for each model.")
Nodes = typer.Option(..., "--nodes", min=1, help="Nodes of the cluster.")
SlotsPerNode = typer.Option(..., "--slots-per-node", min=1, help="Slots (GPUs) of each node.")
PauseS = typer.Option(
    30.0, "--pause-s", min=0, help="Seconds that each change of a job's slots stops it, its start included."
)
StartupS = typer.Option(None, "--startup-s", min=0, help="Seconds that a start takes, where that is not --pause-s.")
ObjectiveOf = typer.Option(
    ObjectiveChoice.FIRST_COME,
    "--objective",
    help="Whom elasticflow admits: who comes first, or by value under a price.",
)
OnReject = typer.Option(
    WhenRejected.FAIL,
    "--on-reject",
    help="If it cannot be promised: fail at once, wait and be tried again, or be promised late.",
)
LateBy = typer.Option(
    0.5,
    "--late-by",
    min=0,
    help="With --on-reject late: value falls to nothing by so much later, as a part of submission to deadline.",
)
Seed = typer.Option(0, "--seed", help="Of all that is random: errors of speed, failures, maintenance, slow slots.")
ThroughputError = typer.Option(
    0.0,
    "--throughput-error",
    min=0,
    help="Sigma of a log-normal factor between each job's real speed at a size and its curve.",
)
SpeedFactor = typer.Option(
    1.0,
    "--speed-factor",
    min=0,
    help="Real speeds are so many times those of the curves: 0.9 plays all a tenth slower.",
)
Exact = typer.Option(
    False,
    "--exact",
    help="Speeds are known exactly, and no margin is kept: the planner's own quality. Default: the settings of"
    " elasticflow serve.",
)
History = typer.Option(
    False,
    "--history",
    help="Play the trace once before: past runs of the same training have shown how wrong its curve is.",
)
MtbfH = typer.Option(None, "--mtbf-h", min=0, help="Mean hours between failures of one node; default: none fails.")
RepairH = typer.Option(None, "--repair-h", min=0, help="With --mtbf-h: mean hours until it is back; default: 1.")
DrainEveryH = typer.Option(
    None, "--drain-every-h", min=0, help="Mean hours between maintenance windows of one node; default: there is none."
)
DrainNoticeH = typer.Option(
    None, "--drain-notice-h", min=0, help="With --drain-every-h: hours that the date is known before; default: 2."
)
DrainAwayH = typer.Option(
    None, "--drain-away-h", min=0, help="With --drain-every-h: hours that the node is away; default: 1."
)
StragglerEveryH = typer.Option(
    None, "--straggler-every-h", min=0, help="Mean hours between slow spells of one slot; default: none is slow."
)
StragglerH = typer.Option(
    None, "--straggler-h", min=0, help="With --straggler-every-h: mean hours of a slow spell; default: 2."
)
StragglerFactor = typer.Option(
    None,
    "--straggler-factor",
    help="With --straggler-every-h: least and largest part of its steps that a gang makes with the slot;"
    " default: 0.4 0.8.",
)
StragglerNamedS = typer.Option(
    None,
    "--straggler-named-s",
    min=0,
    help="With --straggler-every-h: a gang is told of its slow slot after so many seconds with it; default: never.",
)
Calendar = typer.Option(
    None,
    "--calendar/--no-calendar",
    help="Tell elasticflow of the runs that the trace expects, as they become known; default: where it expects any.",
)
Export = typer.Option(None, "--export", help="Write the schedule here, one JSON object a line.")
Out = typer.Option(Path("comparison"), "--out", help="Folder for the tables and plots.")
AsJson = typer.Option(False, "--json", help="Print JSON instead of text.")


def simulate(
    trace: Path = Trace,
    curves: Path = Curves,
    nodes: int = Nodes,
    slots_per_node: int = SlotsPerNode,
    policy: str = typer.Option("elasticflow", help="Who schedules; a wrong name lists all."),
    objective: ObjectiveChoice = ObjectiveOf,
    on_reject: WhenRejected = OnReject,
    late_by: float = LateBy,
    pause_s: float = PauseS,
    startup_s: float | None = StartupS,
    seed: int = Seed,
    throughput_error: float = ThroughputError,
    speed_factor: float = SpeedFactor,
    exact: bool = Exact,
    history: bool = History,
    mtbf_h: float | None = MtbfH,
    repair_h: float | None = RepairH,
    drain_every_h: float | None = DrainEveryH,
    drain_notice_h: float | None = DrainNoticeH,
    drain_away_h: float | None = DrainAwayH,
    straggler_every_h: float | None = StragglerEveryH,
    straggler_h: float | None = StragglerH,
    straggler_factor: tuple[float, float] | None = StragglerFactor,
    straggler_named_s: float | None = StragglerNamedS,
    calendar: bool | None = Calendar,
    export: Path | None = Export,
    as_json: bool = AsJson,
) -> None:
    """Simulate a trace under one policy: the very scheduler of the service on a virtual clock."""
    with answering():
        from elasticflow_airflow.cli.simulation_display import Bars, note, simulation_lines
        from elasticflow_airflow.scheduler_core.config import Objective
        from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, play
        from elasticflow_airflow.scheduler_core.simulator.export import write_schedule

        contender = Contender(policy=policy, objective=Objective(objective))
        if export is not None:
            require_writable([export], trace=trace, curves=curves)
        setting = _setting(
            trace,
            curves,
            nodes,
            slots_per_node,
            pause_s=pause_s,
            startup_s=startup_s,
            on_reject=on_reject,
            late_by=late_by,
            seed=seed,
            throughput_error=throughput_error,
            speed_factor=speed_factor,
            exact=exact,
            history=history,
            troubles=_troubles(
                seed,
                mtbf_h=mtbf_h,
                repair_h=repair_h,
                drain_every_h=drain_every_h,
                drain_notice_h=drain_notice_h,
                drain_away_h=drain_away_h,
                straggler_every_h=straggler_every_h,
                straggler_h=straggler_h,
                straggler_factor=straggler_factor,
                straggler_named_s=straggler_named_s,
            ),
            calendar=calendar,
        )
        if objective != ObjectiveChoice.FIRST_COME and not contender.ours:
            note(f"--objective {objective} is elasticflow's; {policy} knows none")
        if calendar and not contender.knows_calendar:
            note(f"--calendar is elasticflow's; {policy} knows none")
        with Bars(len(setting.trace.jobs)) as bars:
            played = play(setting, contender, on_progress=bars.start(contender.label))
        if export is not None:
            write_schedule(export, setting.nodes, played.changes)
    if as_json:
        _print_json({"setting": setting.facts(), "result": played.result.summary()})
    else:
        _print(*simulation_lines(setting, played, export))


def compare(
    trace: Path = Trace,
    curves: Path = Curves,
    nodes: int = Nodes,
    slots_per_node: int = SlotsPerNode,
    policies: str = typer.Option(
        "all",
        help="Names with commas between, or all; elasticflow:value:wait:no-calendar is elasticflow with these choices.",
    ),
    out: Path = Out,
    objective: ObjectiveChoice = ObjectiveOf,
    on_reject: WhenRejected = OnReject,
    late_by: float = LateBy,
    pause_s: float = PauseS,
    startup_s: float | None = StartupS,
    seed: int = Seed,
    throughput_error: float = ThroughputError,
    speed_factor: float = SpeedFactor,
    exact: bool = Exact,
    history: bool = History,
    mtbf_h: float | None = MtbfH,
    repair_h: float | None = RepairH,
    drain_every_h: float | None = DrainEveryH,
    drain_notice_h: float | None = DrainNoticeH,
    drain_away_h: float | None = DrainAwayH,
    straggler_every_h: float | None = StragglerEveryH,
    straggler_h: float | None = StragglerH,
    straggler_factor: tuple[float, float] | None = StragglerFactor,
    straggler_named_s: float | None = StragglerNamedS,
    calendar: bool | None = Calendar,
    bound: bool = typer.Option(True, "--bound/--no-bound", help="Compute what no schedule can beat; needs scipy."),
    capacity_sweep: bool = typer.Option(
        False, "--capacity-sweep", help="Find the smallest cluster on which each policy keeps all the promises."
    ),
    max_nodes: int | None = typer.Option(None, min=1, help="Largest cluster of the sweep; default: 4 times --nodes."),
    plots: bool = typer.Option(True, "--plots/--no-plots", help="Draw PNG and SVG files; needs matplotlib."),
    window_h: tuple[float, float] | None = typer.Option(
        None, help="Window of the Gantt plots: begin and length in hours; default: the six busiest hours."
    ),
    schedules: bool = typer.Option(False, "--schedules", help="Write each policy's schedule, too."),
    as_json: bool = AsJson,
) -> None:
    """Simulate a trace under several policies side by side; print and write tables and plots."""
    with answering():
        from dataclasses import replace

        from elasticflow_airflow.cli.simulation_display import Bars, comparison_lines
        from elasticflow_airflow.scheduler_core.config import Objective
        from elasticflow_airflow.scheduler_core.simulator import compare as comparing
        from elasticflow_airflow.scheduler_core.simulator import plots as drawing
        from elasticflow_airflow.scheduler_core.simulator.capacity import smallest_cluster
        from elasticflow_airflow.scheduler_core.simulator.experiment import parse_contenders
        from elasticflow_airflow.scheduler_core.simulator.problems import InputError

        contenders = parse_contenders([policies], objective=Objective(objective))
        if plots:
            drawing.require_library()
        if bound:
            comparing.require_solver()
        if window_h is not None and not (0 <= window_h[0] < math.inf and 0 < window_h[1] < math.inf):
            raise InputError(f"--window-h is {window_h}; give its begin, at least 0, and its length, above 0")
        limit = 4 * nodes if max_nodes is None else max_nodes
        if capacity_sweep and limit < nodes:
            raise InputError(f"--max-nodes is {limit}, less than --nodes, which is {nodes}")
        names = comparing.file_names(contenders, capacities=capacity_sweep, schedules=schedules)
        if plots:
            names += drawing.file_names(contenders, capacities=capacity_sweep)
        require_writable([out / name for name in names], trace=trace, curves=curves, make=True)
        setting = _setting(
            trace,
            curves,
            nodes,
            slots_per_node,
            pause_s=pause_s,
            startup_s=startup_s,
            on_reject=on_reject,
            late_by=late_by,
            seed=seed,
            throughput_error=throughput_error,
            speed_factor=speed_factor,
            exact=exact,
            history=history,
            troubles=_troubles(
                seed,
                mtbf_h=mtbf_h,
                repair_h=repair_h,
                drain_every_h=drain_every_h,
                drain_notice_h=drain_notice_h,
                drain_away_h=drain_away_h,
                straggler_every_h=straggler_every_h,
                straggler_h=straggler_h,
                straggler_factor=straggler_factor,
                straggler_named_s=straggler_named_s,
            ),
            calendar=calendar,
        )
        with Bars(len(setting.trace.jobs)) as bars:
            limit_met = bars.wait("bound", lambda: comparing.bound_of(setting)) if bound else None
            comparison = comparing.compare(
                setting, contenders, bound=limit_met, on_start=lambda contender: bars.start(contender.label)
            )
            if capacity_sweep:
                found = []
                for contender in contenders:
                    with bars.trying(f"{contender.label} on fewer and more nodes") as tried:
                        found.append(smallest_cluster(setting, contender, limit, tried))
                comparison = replace(comparison, capacities=tuple(found))
            with comparing.whole_or_nothing(out) as folder:
                written = comparing.write_comparison(comparison, folder, schedules=schedules)
                if plots:
                    written += bars.wait("plots", lambda: drawing.draw(comparison, folder, window_h=window_h))
    if as_json:
        _print_json(comparison.as_json())
    else:
        _print(
            *comparison_lines(comparison, _width()),
            f"{len(written)} files in {out}: {', '.join(f.name for f in written)}",
        )


def _setting(
    trace: Path,
    curves: Path,
    nodes: int,
    slots_per_node: int,
    *,
    pause_s: float,
    startup_s: float | None,
    on_reject: WhenRejected,
    late_by: float,
    seed: int,
    throughput_error: float,
    speed_factor: float,
    exact: bool,
    history: bool,
    troubles: Troubles,
    calendar: bool | None,
) -> Setting:
    """Read the files and put everything together; notes what was not understood."""
    from elasticflow_airflow.cli.simulation_display import note
    from elasticflow_airflow.scheduler_core.simulator.curves import read_curves
    from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting
    from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster
    from elasticflow_airflow.scheduler_core.simulator.trace import read_trace
    from elasticflow_airflow.scheduler_core.values import OnReject

    jobs = read_trace(trace)
    if jobs.ignored:
        note(f"{trace}: columns that are not known are ignored: {', '.join(jobs.ignored)}")
    setting = Setting(
        trace=jobs,
        curves=read_curves(curves),
        nodes=cluster(nodes, slots_per_node),
        conditions=Conditions(
            pause_s=pause_s,
            startup_s=startup_s,
            on_reject=OnReject(str(on_reject)),
            late_by=late_by,
            throughput_error=throughput_error,
            speed_factor=speed_factor,
            seed=seed,
        ),
        troubles=troubles,
        calendar=calendar is not False,
        exact=exact,
        history=history,
    )
    if calendar and not setting.recurring:
        note(f"{trace}: no task is expected at two due times or more (columns task, expected, due_s): no calendar")
    setting.jobs(Contender(policy="elasticflow"))  # says of each row whether it can be simulated, before anything runs
    return setting


def _troubles(seed: int, **options: float | tuple[float, float] | None) -> Troubles:
    """What goes wrong; an option that was not given is as :class:`Troubles` has it.

    Raises:
        InputError: a number is out of its range, or an option says more of what never happens.
    """
    from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles
    from elasticflow_airflow.scheduler_core.simulator.problems import InputError

    given = {name: value for name, value in options.items() if value is not None}
    for kind, details in TROUBLES.items():
        for name in details:
            if name in given and kind not in given:
                raise InputError(f"{_option(name)} says nothing without {_option(kind)}; give that, too")
    return Troubles(seed=seed, **given)  # type: ignore[arg-type]  # options by the names of its fields


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _width() -> int:
    """Columns to print to; files and pipes have room."""
    console = Console()
    return console.width if console.is_terminal else WIDE


def _print(*lines: object) -> None:
    console = Console(highlight=False, soft_wrap=True, width=_width())
    for line in lines:
        console.print(line, markup=False)


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))
