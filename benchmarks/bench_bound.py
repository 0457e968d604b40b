"""What no schedule can beat: the clairvoyant bound of each public trace, at each pause, and how long it takes to find.

    python benchmarks/bench_bound.py [--traces 195job,cluster10] [--pauses 0,1,30] [--time-limit 120] [--full] [--write]

``alone`` are the jobs that meet their deadline on the empty cluster, ``fixed`` those of them that do so with as many
workers as they asked for (no schedule of fixed sizes meets more), and ``bound`` what can be met beside each other at
most. ``exact`` says that the relaxation was solved to its end; where time ran out before, the bound holds too. ``cuts``
are the inequalities that it took. ``--full`` adds cluster01 on a small cluster, and cluster04. Traces and curves are
those of ../shared/data beside the checkout; without it there is nothing to do, and it says so.
"""

from __future__ import annotations

import sys

from bench_policies import CLUSTER01, CLUSTER04, DATA, OWN_SIZE
from results import parser_of, show, table

from elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant import clairvoyant_bound
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare

TOO_SMALL = [("195job", 8, 8), ("195job", 4, 8), ("t4_195job", 8, 4), ("cluster10", 4, 8), ("cluster10", 2, 8)]
LARGE = [("cluster01", 16, 8), CLUSTER04]


def main() -> None:
    parser = parser_of(__doc__)
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
    found = []
    for trace, nodes, slots in [*OWN_SIZE, CLUSTER01, *TOO_SMALL, *(LARGE if args.full else [])]:
        if wanted and trace not in wanted:
            continue
        rows = read_trace(DATA / "traces" / f"{trace}.csv")
        curves = read_curves(DATA / "throughput" / ("t4" if trace.startswith("t4") else "a100"))
        for pause_s in pauses:
            simulated = prepare(rows, curves, cluster(nodes, slots), Conditions(pause_s=pause_s))
            bound = clairvoyant_bound([item.job for item in simulated], nodes * slots, time_limit_s=args.time_limit)
            counts = (f"{number}" for number in (bound.deadlines, bound.alone, bound.alone_at_fixed_size, bound.met))
            solved = "yes" if bound.exact else "no"
            found.append(
                [
                    f"{trace} {nodes}x{slots}",
                    f"{pause_s:g}",
                    *counts,
                    solved,
                    f"{bound.inequalities}",
                    f"{bound.run_s:.1f}",
                ]
            )
            print("  ", *found[-1], file=sys.stderr, flush=True)
    show(
        "bound",
        table(["trace", "pause s", "deadlines", "alone", "fixed", "bound", "exact", "cuts", "run s"], found),
        args,
    )


if __name__ == "__main__":
    main()
