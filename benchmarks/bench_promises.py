"""Whether promises hold at other pauses, and what plain admission, without any rescue, makes of the traces.

    python benchmarks/bench_promises.py [--traces 195job,...] [--pauses 0,1,2,10,60,120] [--processes N]
        [--write]

*Plain*: first come, and without rescue, as in ElasticFlow's Algorithm 1, with the pauses in it, beside the usual.
*Pauses*: deadlines met where a start or a change of size takes so many seconds, for each trace on its own cluster and
on those that are too small, and how many were late though admitted; cluster04 takes too long for it. Data are those of
bench_policies.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from bench_contended import TOO_SMALL
from bench_policies import CLUSTER01, DATA, OWN_SIZE, Case, setting_of
from results import parser_of, show, table

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, play

PAUSES_S = "0,1,2,10,60,120"
USUAL_PAUSE_S = 30.0
PLAIN = (*OWN_SIZE, *TOO_SMALL)
FIRST_COME = "elasticflow:first-come"


class Run(NamedTuple):
    """One simulation."""

    case: Case
    contender: str
    pause_s: float
    rescue: bool = True


Figures = Mapping[str, float | int | str]


def simulate(run: Run) -> Figures:
    config = SchedulerConfig()
    if not run.rescue:
        config = replace(config, rescue_orders=0)
    return play(
        setting_of(run.case, run.pause_s, exact=True), Contender.parse(run.contender), config=config
    ).result.summary()


def pauses(cases: Sequence[Case], pauses_s: Sequence[float], pool: ProcessPoolExecutor) -> list[str]:
    rows = [(case, "elasticflow") for case in cases]
    rows += [(case, "elasticflow:value:wait") for case in TOO_SMALL if case in cases]
    runs = [Run(case, contender, pause_s) for case, contender in rows for pause_s in pauses_s]
    found = dict(zip(runs, pool.map(simulate, runs), strict=True))
    cells = []
    for case, contender in rows:
        mine = [found[Run(case, contender, pause_s)] for pause_s in pauses_s]
        late = sum(int(one["late_though_admitted"]) for one in mine)
        cells.append([case.label, f"`{contender}`", *(str(one["met"]) for one in mine), str(late)])
    heads = ["trace", "policy", *(f"{pause_s:g} s" for pause_s in pauses_s), "late though admitted"]
    return ["Deadlines met, by pause:", "", *table(heads, cells)]


def plain(cases: Sequence[Case], pool: ProcessPoolExecutor) -> list[str]:
    ways = {"plain": (FIRST_COME, False), "first come": (FIRST_COME, True), "as usual": ("elasticflow", True)}
    runs = [(name, Run(case, who, USUAL_PAUSE_S, rescue)) for case in cases for name, (who, rescue) in ways.items()]
    cells = []
    for (name, run), one in zip(runs, pool.map(simulate, [run for _, run in runs]), strict=True):
        figures = [str(one[name]) for name in ("met", "late_though_admitted", "changes", "migrations")]
        cells.append([run.case.label, name, *figures])
        cells[-1].append(f"{float(one['completion_mean_s']):,.0f}")
    return table(["trace", "admission", "met", "late", "changes", "migrations", "mean completion s"], cells)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--traces", default="", help="only these, with commas between")
    parser.add_argument("--pauses", default=PAUSES_S, help="seconds, with commas between")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    wanted = {trace for trace in args.traces.split(",") if trace}
    cases = [case for case in (*OWN_SIZE, CLUSTER01, *TOO_SMALL) if not wanted or case.trace in wanted]
    pauses_s = [float(pause) for pause in args.pauses.split(",")]
    with ProcessPoolExecutor(args.processes) as pool:
        tables = (
            ("plain", lambda: plain([case for case in PLAIN if case in cases], pool)),
            ("pauses", lambda: pauses(cases, pauses_s, pool)),
        )
        for name, make in tables:
            lines = make()
            show(name, lines, args)


if __name__ == "__main__":
    main()
