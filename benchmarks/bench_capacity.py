"""The smallest cluster on which each policy keeps all the promises: the deadlines that can be met at all.

    python benchmarks/bench_capacity.py [--traces 195job,...] [--policies elasticflow,edf,...] [--times 4] [--write]

Bisects over the number of nodes, up to ``--times`` those of the trace's own cluster. ``--full``: all policies. Data are
those of bench_policies.py.
"""

from __future__ import annotations

import sys

from bench_policies import DATA, OWN_SIZE, parser_of, setting_of
from results import show, table

from elasticflow_airflow.scheduler_core.simulator.experiment import parse_contenders
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES
from elasticflow_airflow.scheduler_core.simulator.smallest_cluster import achievable, smallest_cluster

USUAL = ("elasticflow", "elasticflow:wait", "edf", "edf+elastic", "gang-fifo", "tiresias", "optimus", "pollux", "oasis")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    wanted = {trace for trace in args.traces.split(",") if trace}
    cases = [case for case in OWN_SIZE if not wanted or case.trace in wanted]
    settings = [setting_of(case, args.pause_s, exact=True) for case in cases]
    limits = [args.times * case.nodes for case in cases]
    needed = [len(achievable(setting.resized(limit))) for setting, limit in zip(settings, limits, strict=True)]
    rows = [["*deadlines that can be met*", *(str(number) for number in needed)]]
    for contender in parse_contenders([args.policies] if args.policies else POLICY_NAMES if args.full else USUAL):
        cells = []
        for case, setting, limit in zip(cases, settings, limits, strict=True):
            found = smallest_cluster(setting, contender, limit)
            nodes = f"> {limit}" if found.nodes is None else str(found.nodes)
            cells.append(nodes if found.monotone else f"{nodes} (not each larger one)")
            print(f"  {case.label} {contender.label}: {nodes} of {sorted(found.tried)}", file=sys.stderr, flush=True)
        rows.append([f"`{contender.label}`", *cells])
    heads = [f"{case.trace}, nodes of {case.slots_per_node}" for case in cases]
    lines = ["Smallest number of nodes:", "", *table(["policy", *heads], rows)]
    show("capacity", lines, args)


if __name__ == "__main__":
    main()
