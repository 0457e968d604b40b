"""``make demo``: two days of the DAG ``daily_bert_finetune``, with everything real and nothing set up before.

Meanwhile a colleague asks for a model, and a worker is killed (:mod:`demo_kit.meanwhile`). Airflow's page shows all of
it; on a terminal it stays there until Ctrl-C.

``make demo-cluster``: the same on a Ray cluster of two nodes, with two replicas of the scheduler service on a private
PostgreSQL. Meanwhile a node is killed, and on the second day the replica that leads. Without PostgreSQL on this machine
it is one service, and the node is all that is killed.

A second process, with a private Airflow in the output folder, runs the DAG with ``dag.test()`` and prints what happens
(:mod:`demo_kit.days`); its first training task starts the scheduler service, where there are no replicas. This process
makes the folder, starts and kills what the cluster needs (:mod:`demo_kit.accidents`), and ends what is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_kit.layout import DAGS, SLOTS, DemoPaths, bring_down

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
_TAIL_LINES = 30
_STAYS_UP_S = 86400
"""How long the service answers a page that nobody closes."""


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DAGS.parent / "demo-output", help="folder for all it makes")
    parser.add_argument("--cluster", action="store_true", help="on a Ray cluster; a node and the leader are killed")
    options = parser.parse_args()
    layout = DemoPaths(options.output)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, it cleans up as after Ctrl-C
    bring_down(layout)  # what an earlier run left that was killed
    try:
        layout.start_afresh()
    except FileExistsError as error:
        parser.error(str(error))
    where = "a Ray cluster of two nodes, made up on this machine" if options.cluster else "this machine"
    console.print(f"Fine-tuning BERT under deadlines, on two days, on {where}", style="bold")
    console.print(f"Two trainings in parallel on {SLOTS} CPU slots; nobody says how many workers.")
    console.print("" if options.cluster else "About four minutes on two cores.\n")
    with ExitStack() as ending:
        ending.callback(bring_down, layout)
        try:
            if options.cluster:
                status = _run_on_a_cluster(layout, console, ending)
            else:
                status = _run_here(layout, console, ending)
            if sys.stdout.isatty():
                _stay_up(layout, console)
        except KeyboardInterrupt:
            console.print("stopping ...", style="yellow")
            status = INTERRUPTED
        # Cleaning up takes seconds, and is not to be interrupted, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if status == INTERRUPTED:
        console.print("stopped: no process of the demo is left")
    elif not layout.summary.exists():
        console.print(
            "\n".join(layout.airflow_log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]), style="red"
        )
    console.print(f"\nEverything is in {layout.root}:")
    console.print(f"  the models      {layout.models / 'published'}\n  this summary    {layout.summary}")
    console.print(f"  Airflow's log   {layout.airflow_log}")
    for log in [*layout.replicas_dir.glob("*/service.log")] or [layout.state_dir / "service.log"]:
        console.print(f"  service's log   {log}")
    return status


def _run_here(layout: DemoPaths, console: Console, ending: ExitStack) -> int:
    """Run the process with Airflow while a colleague asks for slots, and a worker is killed."""
    from demo_kit import pace
    from demo_kit.meanwhile import Meanwhile

    environment = layout.environment()
    if sys.stdout.isatty():
        environment["ELASTICFLOW_IDLE_EXIT_S"] = str(_STAYS_UP_S)
    gflops = pace.measure(SLOTS)
    stretch = pace.stretch_for(gflops)
    meanwhile = Meanwhile(
        layout,
        layout.endpoint(environment),
        stretch,
        lambda what: console.print(f"       {what}", style="bold magenta"),
    )
    ending.callback(meanwhile.end)
    status = _run_days(layout, environment, ending, str(gflops))
    for what in meanwhile.end():
        console.print(f"this machine was too busy to show one thing: {what}", style="yellow")
    return status


def _stay_up(layout: DemoPaths, console: Console) -> None:
    """Keep service and page until Ctrl-C, for whoever wants to look at what happened."""
    from demo_kit import page

    address = page.stay(layout)
    if address is None:
        return
    console.print(f"\nLook at all of it at {address}; Ctrl-C ends the demo.", style="bold")
    with suppress(KeyboardInterrupt):
        page.wait_while_it_runs(layout)


def _run_days(layout: DemoPaths, environment: dict[str, str], ending: ExitStack, *more: str) -> int:
    """Run the process with Airflow, given ``more`` arguments; return its exit status."""
    days = subprocess.Popen(
        [sys.executable, "-m", "demo_kit.days", str(layout.root), *more],
        cwd=DAGS,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C comes to this process only
    )
    ending.callback(_kill_group, days)
    return days.wait()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it runs, with all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run_on_a_cluster(layout: DemoPaths, console: Console, ending: ExitStack) -> int:
    """Run the process with Airflow while accidents happen; 1 if one that was to happen did not."""
    from demo_kit.accidents import Accidents
    from demo_kit.database import why_not
    from demo_kit.ray_cluster import NODES, RayCluster
    from demo_kit.replicas import NAMES, Replicas

    console.print(f"starting a Ray cluster of {len(NODES)} nodes with one slot each ...")
    cluster = RayCluster(layout)
    ending.callback(cluster.close)
    ending.callback(bring_down, layout)  # first: what uses the cluster leaves at once while it is there
    environment = {name: value for name, value in layout.environment().items() if name != "ELASTICFLOW_SLOTS"}
    environment |= cluster.environment()
    replicas, reason = None, why_not()
    if reason is None:
        console.print(f"starting PostgreSQL, and {len(NAMES)} replicas of the scheduler service on it ...")
        replicas = Replicas(layout, environment)
        replicas.start()
        console.print(f"{replicas.leader()} leads")
        environment |= replicas.environment()
    else:
        console.print(f"the leader is not killed, there is one service only: {reason}", style="yellow")
    accidents = Accidents(
        cluster,
        replicas,
        layout.endpoint(environment),
        layout.accidents,
        lambda what: console.print(what, style="bold red"),
    )
    ending.callback(accidents.end)
    status = _run_days(layout, environment, ending)
    missing = accidents.end()
    for what in missing:
        console.print(f"demo: {what}, and that has not happened", style="red")
    return status or (1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
