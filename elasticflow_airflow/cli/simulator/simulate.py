"""``elasticflow simulate`` and ``elasticflow compare``: traces in, schedules, tables and plots out.

The simulator and the plotting code are imported when a command runs.
"""

from __future__ import annotations

import math
from pathlib import Path

import typer
from rich.console import Console

from elasticflow_airflow.cli.simulator.answering import answering, require_writable
from elasticflow_airflow.cli.simulator.options import ObjectiveChoice, SettingOptions, TroubleOptions
from elasticflow_airflow.cli.terminal.lines import AsJson, note
from elasticflow_airflow.cli.terminal.signatures import with_option_groups

WIDE = 200


@with_option_groups
def simulate(
    policy: str = typer.Option("elasticflow", help="The scheduling policy; a wrong name lists all."),
    *,
    options: SettingOptions,
    troubles: TroubleOptions,
    export: Path | None = typer.Option(  # noqa: B008
        None, "--export", help="Write the schedule here, one JSON object per line."
    ),
    as_json: bool = AsJson,
) -> None:
    """Simulate a trace under one policy: the service's own scheduler on a virtual clock."""
    with answering():
        from elasticflow_airflow.cli.simulator.display import Bars, simulation_lines
        from elasticflow_airflow.scheduler_core.model.config import Objective
        from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, play
        from elasticflow_airflow.scheduler_core.simulator.outputs.export import write_schedule

        contender = Contender(policy=policy, objective=Objective(options.objective))
        if export is not None:
            require_writable([export], trace=options.trace, curves=options.curves)
        setting = options.setting(troubles)
        if options.objective != ObjectiveChoice.AUTO and not contender.ours:
            note(f"note: --objective {options.objective} is elasticflow's; {policy} knows none")
        if options.calendar and not contender.knows_calendar:
            note(f"note: --calendar is elasticflow's; {policy} knows none")
        with Bars(len(setting.trace.jobs)) as bars:
            played = play(setting, contender, on_progress=bars.start(contender.label))
        if export is not None:
            write_schedule(export, setting.nodes, played.changes)
    if as_json:
        _print_json({"setting": setting.facts(), "result": played.result.summary()})
    else:
        _print(*simulation_lines(setting, played, export))


@with_option_groups
def compare(
    policies: str = typer.Option(
        "all",
        help="Names separated by commas, or all; elasticflow:value:wait:no-calendar is elasticflow with these choices.",
    ),
    out: Path = typer.Option(Path("comparison"), "--out", help="Folder for the tables and plots."),  # noqa: B008
    *,
    options: SettingOptions,
    troubles: TroubleOptions,
    bound: bool = typer.Option(True, "--bound/--no-bound", help="Compute what no schedule can beat; needs scipy."),
    capacity_sweep: bool = typer.Option(
        False, "--capacity-sweep", help="Find the smallest cluster on which each policy keeps all the promises."
    ),
    max_nodes: int | None = typer.Option(None, min=1, help="Largest cluster of the sweep; default: 4 times --nodes."),
    plots: bool = typer.Option(True, "--plots/--no-plots", help="Draw PNG and SVG files; needs matplotlib."),
    window_h: tuple[float, float] | None = typer.Option(
        None, help="Window of the Gantt plots: begin and length in hours; default: the six busiest hours."
    ),
    schedules: bool = typer.Option(False, "--schedules", help="Also write each policy's schedule."),
    as_json: bool = AsJson,
) -> None:
    """Simulate a trace under several policies side by side; print and write tables and plots."""
    with answering():
        from dataclasses import replace

        from elasticflow_airflow.cli.simulator.display import Bars, comparison_lines
        from elasticflow_airflow.scheduler_core.model.config import Objective
        from elasticflow_airflow.scheduler_core.simulator import compare as comparing
        from elasticflow_airflow.scheduler_core.simulator.experiment import parse_contenders
        from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
        from elasticflow_airflow.scheduler_core.simulator.outputs import plots as drawing
        from elasticflow_airflow.scheduler_core.simulator.smallest_cluster import smallest_cluster

        contenders = parse_contenders([policies], objective=Objective(options.objective))
        if plots:
            drawing.require_library()
        if bound:
            comparing.require_solver()
        if window_h is not None and not (0 <= window_h[0] < math.inf and 0 < window_h[1] < math.inf):
            raise InputError(f"--window-h is {window_h}; give its begin, at least 0, and its length, above 0")
        limit = 4 * options.nodes if max_nodes is None else max_nodes
        if capacity_sweep and limit < options.nodes:
            raise InputError(f"--max-nodes is {limit}, less than --nodes, which is {options.nodes}")
        names = comparing.file_names(contenders, capacities=capacity_sweep, schedules=schedules)
        if plots:
            names += drawing.file_names(contenders, capacities=capacity_sweep)
        require_writable([out / name for name in names], trace=options.trace, curves=options.curves, make=True)
        setting = options.setting(troubles)
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


def _width() -> int:
    """Return the number of columns to print; wide for files and pipes."""
    console = Console()
    return console.width if console.is_terminal else WIDE


def _print(*lines: object) -> None:
    console = Console(highlight=False, soft_wrap=True, width=_width())
    for line in lines:
        console.print(line, markup=False)


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))
