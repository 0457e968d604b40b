"""``make demo``: two days of the DAG ``daily_bert_finetune``, with everything real and nothing set up before.

Starts a process with a private Airflow in the output folder, which runs the DAG with ``dag.test()``; its first training
task starts the scheduler service. This process watches both, and says at the end what was asked, what was decided and
why. It fails when the demo does not show what it promises.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_kit import pace
from demo_kit.ending import bring_down
from demo_kit.layout import DAGS, SLOTS, Layout, NotOursError
from demo_kit.summary import broken_promises, summary_lines
from demo_kit.watching import Watcher

DUE_S = ((300, 1000), (300, 1000))
"""Seconds from the start of each day's run to its two deadlines: the quick model's, and publish's. Both could be met by
one worker from the start to the end at half of the usual speed: two cores rarely have only this to do. On a machine
that is slow from the start they are stretched (``pace``)."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
_LOOK_S = 0.5
_LEAVE_S = 20.0


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DAGS.parent / "demo-output", help="folder for all it makes")
    args = parser.parse_args()
    console = Console(soft_wrap=True)
    layout = Layout.below(args.output)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, it cleans up as after Ctrl-C
    bring_down(layout)  # what an earlier run left that was killed
    try:
        layout.start_afresh()
    except NotOursError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 2
    console.print("Fine-tuning BERT under deadlines, on two days, on this machine", style="bold")
    console.print(f"Two trainings in parallel on {SLOTS} CPU slots; nobody says how many workers. About six minutes.\n")
    watcher = Watcher(layout, console)
    status = run(layout, watcher)
    if watcher.jobs and status != INTERRUPTED:
        status = report(layout, watcher, console) or status
    bring_down(layout)
    if status == INTERRUPTED:
        watcher.line("stopped: no process of the demo is left")
    where = {"Airflow's log": layout.airflow_log, "service's log": layout.service_log}
    if layout.summary.exists():
        where = {"the models": layout.models / "published", "this summary": layout.summary} | where
    console.print(f"\nEverything is in {layout.root}:", markup=False)
    for what, path in where.items():
        console.print(f"  {what:<15} {path}", highlight=False, markup=False)
    return status


def run(layout: Layout, watcher: Watcher) -> int:
    """Run all days, watching; Ctrl-C is passed on, and everything comes down."""
    try:
        gflops = pace.measure(SLOTS, os.environ)
    except KeyboardInterrupt:
        return INTERRUPTED
    stretch = pace.stretch_for(gflops)
    watcher.line(f"this machine: {gflops:.0f} GFLOP/s on each of {SLOTS} slots")
    if stretch > 1.1:
        watcher.line(f"  that is slow, or busy: the deadlines are {stretch:.1f} times as far away as usual", "yellow")
    due = [f"{seconds * stretch:.0f}" for day in DUE_S for seconds in day]
    command = [sys.executable, "-m", "demo_kit.days", str(layout.root), datetime.now(UTC).date().isoformat()]
    command += [str(pace.epochs_for(gflops)), *due]
    watcher.line("starting a private Airflow ...")
    with layout.airflow_log.open("wb") as log:
        days = subprocess.Popen(
            command,
            cwd=DAGS,
            env=layout.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        try:
            while days.poll() is None:
                watcher.look()
                time.sleep(_LOOK_S)
            watcher.look()
        except KeyboardInterrupt:
            watcher.line("stopping: the jobs are cancelled ...", "yellow")
            days.send_signal(signal.SIGINT)
            _wait(days)
            return INTERRUPTED
    if days.returncode and not watcher.told_of_failure:
        watcher.line(f"the days ended with status {days.returncode}; the end of {layout.airflow_log}:", "red")
        for line in layout.airflow_log.read_text(errors="replace").splitlines()[-30:]:
            watcher.line(f"  {line}")
    return days.returncode


def report(layout: Layout, watcher: Watcher, console: Console) -> int:
    """Print and keep the summary; 1 when something was not as promised."""
    lines = list(summary_lines(watcher))
    console.rule("Summary")
    for line in lines:
        console.print(line, highlight=False, markup=False)
    layout.summary.write_text("\n".join(lines) + "\n")
    broken = broken_promises(watcher)
    for what in broken:
        console.print(f"demo: {what}", style="red", markup=False)
    if not broken:
        console.print(
            "All deadlines met; the second day was admitted without measuring; workers changed while jobs ran.",
            style="bold green",
        )
    return 1 if broken else 0


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
