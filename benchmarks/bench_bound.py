"""What no schedule can beat: the clairvoyant bound of each public trace, at each pause, and how long it takes to find.

    python benchmarks/bench_bound.py [--traces 195job,cluster10] [--pauses 0,1,30] [--time-limit 120] [--full]

``alone`` are the jobs that meet their deadline on the empty cluster, ``bound`` what can be met beside each other at
most. ``exact`` says that the relaxation was solved to its end; where time ran out before, the bound holds too. ``cuts``
are the inequalities that it took. ``--full`` adds cluster01 on a small cluster, and cluster04. Traces and curves are
those of ../shared/data beside the checkout; without it there is nothing to do, and it says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant import clairvoyant_bound
from elasticflow_airflow.scheduler_core.simulator.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.trace import read_trace

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
OWN_SIZE = [
    ("195job", 16, 8),
    ("t4_195job", 16, 4),
    ("cluster10", 32, 8),
    ("poisson_100job", 16, 8),
    ("cluster01", 64, 8),
]
TOO_SMALL = [("195job", 8, 8), ("195job", 4, 8), ("t4_195job", 8, 4), ("cluster10", 4, 8), ("cluster10", 2, 8)]
LARGE = [("cluster01", 16, 8), ("cluster04", 128, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default="", help="only these, separated by commas")
    parser.add_argument("--pauses", default="0,1,30", help="seconds, separated by commas")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for each bound")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"nothing to do: there are no traces in {DATA}")
        return
    wanted = set(filter(None, args.traces.split(",")))
    pauses = [float(pause) for pause in args.pauses.split(",")]
    print(f"$ python benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}".rstrip())
    print(f"{'trace':16}{'cluster':>8}{'pause s':>9}{'deadlines':>11}{'alone':>7}{'bound':>7}", end="")
    print(f"{'exact':>7}{'cuts':>6}{'run s':>8}")
    for trace, nodes, slots in [*OWN_SIZE, *TOO_SMALL, *(LARGE if args.full else [])]:
        if wanted and trace not in wanted:
            continue
        rows = read_trace(DATA / "traces" / f"{trace}.csv")
        curves = read_curves(DATA / "throughput" / ("t4" if trace.startswith("t4") else "a100"))
        for pause_s in pauses:
            simulated = prepare(rows, curves, cluster(nodes, slots), Conditions(pause_s=pause_s))
            bound = clairvoyant_bound([item.job for item in simulated], nodes * slots, time_limit_s=args.time_limit)
            shape, solved = f"{nodes}x{slots}", "yes" if bound.exact else "no"
            print(
                f"{trace:16}{shape:>8}{pause_s:9g}{bound.deadlines:11}{bound.alone:7}{bound.met:7}"
                f"{solved:>7}{bound.inequalities:6}{bound.run_s:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
