"""``make demo``: two days of the DAG ``daily_bert_finetune``, with everything real and nothing set up before.

``make demo-cluster``: the same on a Ray cluster of two nodes, one of which is killed meanwhile.

A second process, with a private Airflow in the output folder, runs the DAG with ``dag.test()`` and prints what happens
(:mod:`demo_kit.days`); its first training task starts the scheduler service. This process makes the folder, and ends
what is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_kit.layout import DAGS, SLOTS, DemoPaths, bring_down

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
_TAIL_LINES = 30


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DAGS.parent / "demo-output", help="folder for all it makes")
    parser.add_argument("--cluster", action="store_true", help="on a Ray cluster of two nodes; one is killed meanwhile")
    options = parser.parse_args()
    layout = DemoPaths(options.output)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end, it cleans up as after Ctrl-C
    bring_down(layout)  # what an earlier run left that was killed
    try:
        layout.start_afresh()
    except FileExistsError as error:
        parser.error(str(error))
    console.print("Fine-tuning BERT under deadlines, on two days, on this machine", style="bold")
    console.print(f"Two trainings in parallel on {SLOTS} CPU slots; nobody says how many workers.")
    console.print("About six minutes on a machine of the usual speed.\n")
    environment, cluster = layout.environment(), None
    if options.cluster:
        from demo_kit.ray_cluster import NODES, RayCluster

        console.print(f"starting a Ray cluster of {len(NODES)} nodes with one slot each ...")
        cluster = RayCluster(layout)
        environment = {name: value for name, value in environment.items() if name != "ELASTICFLOW_SLOTS"}
        environment |= cluster.environment()
        cluster.kill_a_node_while_it_trains(lambda said: console.print(said, style="bold red"))
    days = subprocess.Popen(
        [sys.executable, "-m", "demo_kit.days", str(layout.root)],
        cwd=DAGS,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C comes to this process only
    )
    try:
        status = days.wait()
    except KeyboardInterrupt:
        console.print("stopping ...", style="yellow")
        status = INTERRUPTED
        os.killpg(days.pid, signal.SIGKILL)
        days.wait()
    bring_down(layout)
    if cluster is not None:
        cluster.close()
    if status == INTERRUPTED:
        console.print("stopped: no process of the demo is left")
    elif not layout.summary.exists():
        console.print(
            "\n".join(layout.airflow_log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]), style="red"
        )
    console.print(f"\nEverything is in {layout.root}:")
    console.print(f"  the models      {layout.models / 'published'}\n  this summary    {layout.summary}")
    console.print(f"  Airflow's log   {layout.airflow_log}\n  service's log   {layout.state_dir / 'service.log'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
