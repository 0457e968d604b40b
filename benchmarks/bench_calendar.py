"""What a calendar of recurring work adds: scheduled promises kept, ad-hoc jobs still served, the smallest cluster.

    python benchmarks/bench_calendar.py [--seeds 5] [--days 3] [--nodes 6] [--slots 2] [--processes 2]
        [--write]

Traces: recurring DAGs (daily tasks in the night, hourly ones, some that come three times in ten) with ad-hoc jobs in
between (`simulator/inputs/synthetic.py`), a new one for each seed. Every variant sees the same jobs at the same times
and pays the same 30 s for every start and change. The calendar knows timetables and the runs submitted so far; it never
knows what comes: of each task's first run it knows nothing. Variants:

- *scheduled alone*: the recurring work on an otherwise empty cluster, for comparison;
- *plain*: the scheduler without a calendar;
- *calendar*: expected runs are reserved for, lengths and latenesses at their 0.9 quantile, uncertain ones by their
  summed expected use;
- *calendar, all sure*: every due run is reserved for, however seldom it comes (ablation);
- *calendar, medians*: the median instead of the 0.9 quantile (ablation).

Curves: those of ../shared/data beside the checkout where present, else made up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from results import parser_of, show, table

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy
from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.expected_runs import CalendarFeed
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import Curves, read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.synthetic import RecurringDags, recurring
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Simulation

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "throughput" / "a100"
PAUSE_S = 30.0
POLICIES: dict[str, CalendarPolicy | None] = {
    "scheduled alone": None,
    "plain": None,
    "calendar": CalendarPolicy(),
    "calendar, all sure": CalendarPolicy(sure=0.01),
    "calendar, medians": CalendarPolicy(quantile=0.5),
}


class Case(NamedTuple):
    """One simulation."""

    variant: str
    seed: int
    days: int
    nodes: int
    slots: int


class Found(NamedTuple):
    """What it found."""

    scheduled: int
    scheduled_met: int
    ad_hoc: int
    ad_hoc_met: int
    ad_hoc_slot_hours: float
    late: int
    decision_p50_ms: float


@cache
def curves() -> Curves:
    if DATA.is_dir():
        return read_curves(DATA)
    made_up = {0.6: "small", 0.75: "medium", 0.9: "large"}
    return {(name, 64): ScalingCurve({n: 0.5 * n**power for n in (1, 2, 4, 8, 16)}) for power, name in made_up.items()}


def simulate(case: Case) -> Found:
    options = RecurringDags(
        slots=16,
        days=case.days,
        daily=4,
        hourly=1,
        now_and_then=2,
        ad_hoc_per_day=20,
        ad_hoc_load=1.2,
        daily_load=0.55,
    )
    rows = recurring(curves(), options, seed=case.seed)
    if case.variant == "scheduled alone":
        rows = [row for row in rows if row.task]
    nodes = cluster(case.nodes, case.slots)
    jobs = prepare(Trace(None, tuple(rows)), curves(), nodes, Conditions(pause_s=PAUSE_S))
    policy = POLICIES[case.variant]
    scheduler = Scheduler(SchedulerConfig(objective=Objective.FIRST_COME), nodes, policy)
    told = scheduler if policy is None else CalendarFeed(scheduler, rows)
    result = Simulation(name=case.variant, policy=told, nodes=nodes, jobs=jobs).run()
    task = {row.job_id: row.task for row in rows}
    scheduled = [record for record in result.records if task[record.job_id]]
    ad_hoc = [record for record in result.records if not task[record.job_id]]
    summary = result.summary()
    return Found(
        len(scheduled),
        sum(record.met for record in scheduled),
        len(ad_hoc),
        sum(record.met for record in ad_hoc),
        sum(record.slot_s for record in ad_hoc) / 3600.0,
        int(summary["late_though_admitted"]),
        float(summary["decision_p50_ms"]),
    )


def promises(args: argparse.Namespace, pool: ProcessPoolExecutor) -> tuple[list[str], dict[Case, Found]]:
    """What each variant keeps on the same cluster: as a table, and all of it."""
    cases = [
        Case(variant, seed, args.days, args.nodes, args.slots) for variant in POLICIES for seed in range(args.seeds)
    ]
    found = dict(zip(cases, pool.map(simulate, cases), strict=True))
    rows = []
    for variant in POLICIES:
        mine = [result for case, result in found.items() if case.variant == variant]
        missed = ", ".join(str(one.scheduled - one.scheduled_met) for one in mine)
        ad_hoc = f"{sum(one.ad_hoc_met for one in mine)} of {sum(one.ad_hoc for one in mine)}"
        kept, all_of_them = sum(one.scheduled_met for one in mine), sum(one.scheduled for one in mine)
        hours, late = sum(one.ad_hoc_slot_hours for one in mine) / len(mine), sum(one.late for one in mine)
        p50 = sum(one.decision_p50_ms for one in mine) / len(mine)
        if variant == "scheduled alone":
            ad_hoc, hours = "-", 0.0
        part = f"{kept} of {all_of_them} ({kept / all_of_them:.1%})"
        rows.append([variant, part, missed, ad_hoc, f"{hours:.0f}", str(late), f"{p50:.1f}"])
    heads = ["variant", "scheduled promises kept", "missed by seed", "ad-hoc deadlines met", "ad-hoc slot-hours"]
    shape = f"{args.nodes} x {args.slots} slots, {args.days} days, {args.seeds} seeds, pause {PAUSE_S:g} s:"
    return [shape, "", *table([*heads, "late", "decision p50 ms"], rows)], found


def smallest(args: argparse.Namespace, pool: ProcessPoolExecutor, found: dict[Case, Found]) -> list[str]:
    """The smallest cluster on which each variant keeps the same; ``found`` has the smallest size already."""
    goals: dict[str, Callable[[Found], bool]] = {
        "all scheduled": lambda one: one.scheduled_met == one.scheduled,
        "99 % of scheduled": lambda one: one.scheduled_met >= 0.99 * one.scheduled,
        "99 % of all": lambda one: one.scheduled_met + one.ad_hoc_met >= 0.99 * (one.scheduled + one.ad_hoc),
    }
    sizes = range(args.nodes, args.nodes + 3)
    variants = ("plain", "calendar")
    left = [(variant, seed) for variant in variants for seed in range(args.seeds)]
    for nodes in sizes:
        cases = [Case(variant, seed, args.days, nodes, args.slots) for variant, seed in left]
        missing = [case for case in cases if case not in found]
        found = {**found, **dict(zip(missing, pool.map(simulate, missing), strict=True))}
        # Who reaches every goal here need not be tried on more.
        left = [(case.variant, case.seed) for case in cases if not all(goal(found[case]) for goal in goals.values())]
    rows = []
    for variant in variants:
        cells = []
        for reached in goals.values():
            least = []
            for seed in range(args.seeds):
                tried = ((n, found.get(Case(variant, seed, args.days, n, args.slots))) for n in sizes)
                least.append(next((n for n, one in tried if one is not None and reached(one)), None))
            mean = sum(n for n in least if n is not None) / max(1, sum(n is not None for n in least))
            cells.append(f"{', '.join('-' if n is None else str(n) for n in least)} (mean {mean:.1f})")
        rows.append([variant, *cells])
    head = f"Nodes of {args.slots} slots, by seed ({sizes[0]} to {sizes[-1]} tried; - none):"
    return [head, "", *table(["variant", *goals], rows)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    begin = time.perf_counter()
    print(f"curves: {'a100' if DATA.is_dir() else 'made up'}\n")
    with ProcessPoolExecutor(args.processes) as pool:
        kept, found = promises(args, pool)
        show("calendar", kept, args)
        show("smallest", smallest(args, pool, found), args)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
