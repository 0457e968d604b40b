"""Formats simulations for a terminal: progress bars while they run, then a summary or a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from elasticflow_airflow.scheduler_core.simulator.compare import Comparison
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Played, Setting
from elasticflow_airflow.scheduler_core.simulator.smallest_cluster import Capacity
from elasticflow_airflow.times import duration

T = TypeVar("T")


class _Rate(ProgressColumn):
    """A column with the rate in jobs per second."""

    def render(self, task: Task) -> Text:
        """Render the column; called by rich."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None or task.total is None else f"{speed:,.0f} jobs/s", style="progress.data.speed")


class Bars:
    """Progress on standard error, one line per simulation, with its rate and the time left.

    Prints nothing if standard error is not a terminal. Use as a context manager.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _Rate(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("passed"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[clock]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        """Show the bars."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bars before the summary is printed."""
        self._progress.stop()

    def start(self, label: str) -> Callable[[int, float], None]:
        """Add a bar for one simulation; return a callback for its number of ended jobs and its virtual time."""
        self._finish()
        task = self._task = self._progress.add_task(label, total=self._jobs, clock="")
        first: list[float] = []

        def progressed(over: int, now_s: float) -> None:
            first.append(now_s) if not first else None
            clock = f"simulated {duration(now_s - first[0])}"
            self._progress.update(task, completed=over, clock=clock)

        return progressed

    def wait(self, label: str, call: Callable[[], T]) -> T:
        """Show a line while ``call`` runs, whose progress is unknown; return its result."""
        self._finish()
        self._task = self._progress.add_task(label, total=None, clock="")
        done = call()
        self._finish()
        return done

    @contextmanager
    def trying(self, label: str) -> Iterator[Callable[[int], None]]:
        """Show a line for a search; yield a callback for the number of nodes that is tried."""
        self._finish()
        task = self._task = self._progress.add_task(label, total=None, clock="")
        yield lambda nodes: self._progress.update(task, clock=f"{nodes} nodes")
        self._finish()

    def _finish(self) -> None:
        if self._task is not None:
            task = self._progress.tasks[self._task]
            self._progress.update(self._task, total=task.total or 1, completed=task.total or 1, clock="")
            self._task = None


def simulation_lines(setting: Setting, played: Played, export: Path | None) -> list[str]:
    """Return the result of one simulation, one fact per line."""
    figures = played.result.summary()
    deadlines = int(figures["deadlines"])
    met, value = int(figures["met"]), float(figures["value_met"])
    worth = "" if value == met else f", worth {value:g}"
    lines = [
        f"{played.contender.label}: {facts_text(setting, [played.contender])}",
        "",
        f"deadlines met         {met} of {deadlines} ({100 * met / deadlines:.1f} %){worth}",
        f"late though admitted  {figures['late_though_admitted']}",
        f"rejected              {figures['rejected']}",
        *([f"unfinished            {figures['unfinished']}"] if figures["unfinished"] else []),
        (
            f"completion            mean {duration(float(figures['completion_mean_s']))}, "
            f"95 % within {duration(float(figures['completion_p95_s']))}"
        ),
        f"slot-hours            {figures['slot_hours']:,.0f}, {100 * float(figures['utilisation']):.1f} % of all",
        (
            f"changes               {figures['changes']} of a job's slots, {figures['migrations']} of them migrations; "
            f"{figures['suspensions']} suspensions"
        ),
        f"decisions             p50 {figures['decision_p50_ms']:.2f} ms, p99 {figures['decision_p99_ms']:.2f} ms",
        (
            f"simulated             {duration(played.result.end_s - played.result.begin_s)} in "
            f"{float(figures['run_s']):.1f} s, {figures['events']} events"
        ),
    ]
    if export is not None:
        lines.append(f"schedule              {export}, {len(played.changes)} lines")
    return lines


def comparison_lines(comparison: Comparison, width: int) -> list[object]:
    """Return the common setting, the figures, and the smallest clusters if they were searched for."""
    found, bound = comparison.bound, ""
    if found is not None:
        bound = f", of which no schedule can meet more than {found.met}"
        if found.alone_at_fixed_size < found.met:
            bound += (
                f", and none in which each job keeps the size that it asked for more than {found.alone_at_fixed_size}"
            )
    deadlines = sum(job.deadline_s is not None for job in comparison.setting.trace.jobs)
    contenders = [played.contender for played in comparison.played]
    lines: list[object] = [f"{facts_text(comparison.setting, contenders)}; {deadlines} deadlines{bound}", ""]
    whole = _table(comparison, _COLUMNS)
    tables = [whole]
    if Console(width=1000).measure(whole).maximum > width:
        tables = [_table(comparison, _COLUMNS[:_HALF]), _table(comparison, _COLUMNS[_HALF:])]
    for table in tables:
        lines += [table, ""]
    if comparison.capacities:
        needed = comparison.capacities[0].needed
        lines.append(f"smallest cluster on which all {needed} deadlines are met that can be met at all:")
        lines += [_capacity_line(found, comparison.capacities) for found in comparison.capacities]
        lines.append("")
    return lines


def _capacity_line(found: Capacity, beside: Sequence[Capacity]) -> str:
    width = max(len(one.contender.label) for one in beside)
    nodes = f"more than {max(found.tried)} nodes"
    failed: list[int] = []
    if found.nodes is not None:
        nodes = f"{found.nodes} nodes, {found.nodes * found.slots_per_node} slots"
        failed = [tried for tried, kept in found.tried.items() if tried > found.nodes and not kept]
    more = f" (but not on {', '.join(map(str, failed))})" if failed else ""
    return f"  {found.contender.label:<{width}}  {nodes}{more}"


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("met", "met", "{:.0f}".format),
    ("of bound", "of_bound", lambda value: f"{100 * value:.1f} %"),
    ("late", "late_though_admitted", "{:.0f}".format),
    ("rejected", "rejected", "{:.0f}".format),
    ("mean", "completion_mean_s", duration),
    ("95 % within", "completion_p95_s", duration),
    ("slot-hours", "slot_hours", "{:,.0f}".format),
    ("used", "utilisation", lambda value: f"{100 * value:.0f} %"),
    ("changes", "changes", "{:.0f}".format),
    ("migrations", "migrations", "{:.0f}".format),
    ("p50 ms", "decision_p50_ms", "{:.2f}".format),
    ("p99 ms", "decision_p99_ms", "{:.2f}".format),
    ("run s", "run_s", "{:.1f}".format),
)
"""Heading, key of the figure, and its format."""
_HALF = 6
"""Where the columns are split into two tables for a narrow terminal."""


def _table(comparison: Comparison, columns: Sequence[tuple[str, str, Callable[[float], str]]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("policy", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, played in zip(comparison.rows(), comparison.played, strict=True):
        cells = []
        for _, name, write in columns:
            value = row[name]
            cells.append(write(float(value)) if value is not None else "-")
        table.add_row(Text(str(row["policy"])), *cells, style="bold" if played.contender.ours else "")
    return table


def facts_text(setting: Setting, contenders: Sequence[Contender]) -> str:
    """Return the simulated setting in one line; names the calendar only if a contender uses it."""
    conditions, jobs = setting.conditions, setting.trace.jobs
    parts = [
        f"{len(jobs)} jobs of {setting.trace.path or setting.trace.name}",
        f"{len(setting.nodes)} x {setting.nodes[0].slots} slots",
        f"pause {conditions.pause_s:g} s",
    ]
    if conditions.startup_s is not None:
        parts.append(f"start {conditions.startup_s:g} s")
    if conditions.throughput_error:
        parts.append(f"speed error {conditions.throughput_error:g}")
    if conditions.speed_factor != 1.0:
        parts.append(f"speeds {conditions.speed_factor:g} of the curves")
    troubles = setting.troubles.sentences()
    parts += troubles
    if conditions.throughput_error or troubles:
        parts.append(f"seed {conditions.seed}")
    if setting.recurring and any(contender.knows_calendar for contender in contenders):
        parts.append(f"calendar of {setting.recurring} recurring task{'s' if setting.recurring > 1 else ''}")
    if any(contender.ours for contender in contenders):
        parts.append(setting.settings_name)
    return ", ".join(parts)
