"""The process with Airflow: runs the example DAG for two days, one after the other, with ``dag.test()``.

It shows what happens, and keeps Airflow's own output in a log. Whoever uses Airflow already needs none of this: the
DAG file is all.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.listeners import hookimpl
from airflow.sdk.listener import get_listener_manager
from airflow.utils.db import initdb
from rich.console import Console

from demo_kit import pace, page
from demo_kit.layout import SLOTS, DemoPaths
from demo_kit.summary import Day, broken_promises, summary_lines
from demo_kit.watching import Watcher, clock

DUE_S = ((300, 1000), (300, 1000))
"""Seconds from the start of each day's run to its two deadlines: the quick model's, and publish's. Both could be met by
one worker from the start to the end at half of the usual speed: two cores rarely have only this to do. On a machine
that is slow from the start they are stretched (``pace``)."""


class TaskNews:
    """Airflow listener: shows that a task has ended."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    @hookimpl
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None:  # noqa: ARG002 - by name
        """Show a success."""
        self._watcher.line(f"task {task_instance.task_id}: success", "green")

    @hookimpl
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any, error: Any) -> None:  # noqa: ARG002
        """Show a failure, with its reason."""
        self._watcher.line(f"task {task_instance.task_id}: failed\n  {error or ''}", "red")


def run_days(watcher: Watcher, layout: DemoPaths, gflops: float) -> list[Day]:
    """Run the DAG for each day, until one fails; today is the last one. ``gflops``: this machine's, on each slot."""
    stretch, rows, epochs = pace.stretch_for(gflops), pace.rows_for(gflops), pace.epochs_for(gflops)
    slow = (
        f": slow, or busy, so it trains on {rows} texts instead of {pace.ROWS},"
        f" and deadlines are {stretch:.1f} times as far away as usual"
        if stretch > 1.1
        else ""
    )
    watcher.line(f"this machine: {gflops:.0f} GFLOP/s on each of {SLOTS} slots{slow}")
    watcher.line("starting a private Airflow ...")
    initdb()
    watcher.line(f"watch it at {page.start(layout)} (it answers in some seconds)", "bold")
    # Now that there is a database: parsing the DAG looks up the provider.
    from daily_bert_finetune import dag

    get_listener_manager().add_listener(TaskNews(watcher))
    today = datetime.now(UTC).replace(hour=2, minute=0, second=0, microsecond=0)
    days: list[Day] = []
    for number, due_s in enumerate(DUE_S, start=1):
        run_of = today - timedelta(days=len(DUE_S) - number)
        quick_by, publish_by = (datetime.now(UTC) + timedelta(seconds=stretch * s) for s in due_s)
        watcher.line(f"Day {number}: the run of {run_of:%Y-%m-%d}", "bold")
        watcher.line(f"  due: finetune_quick {clock(quick_by)}, publish (after finetune_thorough) {clock(publish_by)}")
        if number == 2:
            before, epochs = epochs, max(1, epochs // 2)
            watcher.line(f"  finetune_thorough goes on from day 1: its epochs are {epochs} instead of {before}")
        due = {"quick_by": quick_by.isoformat(), "publish_by": publish_by.isoformat()}
        run = dag.test(logical_date=run_of, run_conf={**due, "train_rows": rows, "thorough_epochs": epochs})
        watcher.look()
        watcher.line(f"the DAG run of {run_of:%Y-%m-%d} has ended: {run.state}", "bold")
        days.append(Day(f"{run_of:%Y-%m-%d}", str(run.state), watcher.outcomes_of(run.run_id)))
        if run.state != "success":
            break
    return days


def main(root: str, gflops: str | None = None) -> int:
    """Run the days and say what they have shown; 1 when that is not what the demo promises.

    ``gflops`` is the speed of this machine, if it has been measured already.
    """
    layout = DemoPaths(Path(root))
    console = Console(file=os.fdopen(os.dup(1), "w"), soft_wrap=True, highlight=False, markup=False)
    with layout.airflow_log.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    watcher = Watcher(layout, layout.endpoint(os.environ), console)
    watcher.follow()
    days = run_days(watcher, layout, pace.measure(SLOTS) if gflops is None else float(gflops))
    text = "\n".join(summary_lines(days, layout, watcher.readable))
    layout.summary.write_text(f"{text}\n")
    console.rule("Summary")
    console.print(text)
    broken = list(broken_promises(days))
    for what in broken:
        console.print(f"demo: {what}", style="red")
    if not broken:
        said = "All deadlines met; the second day was admitted without measuring; workers changed while jobs ran."
        console.print(said, style="bold green")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
