"""When reality differs: curves that are wrong, nodes that fail, slots that are slow. What it does to promises.

    python benchmarks/bench_errors.py [--traces 195job,...] [--seeds 5] [--sigma 0.1] [--full] [--processes 2]
        [--page docs/explanation/benchmark.md]

First table: every job's real speed at each size is off by a log-normal factor of its own, seen only through progress
reports. Without a margin promises are made at the speeds as told; with it, at a quantile for sizes that never ran, and
without any for sizes that were measured in this run. "announced" counts the late ones that were said to be at risk
before their deadline passed. ``--full``: other quantiles, too, and a flat margin that nothing ever removes.

Second table: exact curves; nodes fail and come back, go away for maintenance at a known date, or slots become slow.
``--page`` puts both into a page, below the line ``<!-- results: errors -->``. Traces and curves are those of
../shared/data beside the checkout; without it there is nothing to do, and it says so.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from bench_contended import TOO_SMALL
from bench_policies import CLUSTER01, DATA, OWN_SIZE, Case
from results import put_into, table

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.simulator.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles, disturbances
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, aware_of, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Simulation
from elasticflow_airflow.scheduler_core.simulator.trace import read_trace

CELLS = (*OWN_SIZE, CLUSTER01, *TOO_SMALL)
PAUSE_S = 30.0
REPORT_AFTER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One simulation: a row of a table, once for each seed."""

    case: Case
    variant: str
    conditions: Conditions
    config: SchedulerConfig
    troubles: Troubles | None = None
    straggler_after_s: float | None = None


@dataclass(frozen=True)
class Tally:
    """Counts over runs."""

    admitted: int = 0
    met: int = 0
    late: int = 0
    announced: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.admitted + other.admitted,
            self.met + other.met,
            self.late + other.late,
            self.announced + other.announced,
        )

    def cells(self) -> list[str]:
        part = f"{100.0 * self.late / max(1, self.admitted):.2f} %"
        return [str(self.met), str(self.admitted), str(self.late), part, str(self.announced)]


def tally(run: Run) -> Tally:
    """Simulate; among processes, so it takes and gives plain values."""
    trace = read_trace(DATA / "traces" / f"{run.case.trace}.csv")
    curves = read_curves(DATA / "throughput" / ("t4" if run.case.trace.startswith("t4") else "a100"))
    nodes = cluster(run.case.nodes, run.case.slots_per_node)
    last = max(job.deadline_s or job.submitted_s for job in trace.jobs)
    trouble = [] if run.troubles is None else disturbances(nodes, run.troubles, trace.jobs[0].submitted_s, last)
    result = Simulation(
        name="elasticflow",
        policy=Scheduler(run.config, nodes),
        nodes=nodes,
        jobs=prepare(trace, curves, nodes, run.conditions),
        disturbances=trouble,
        report_after_s=REPORT_AFTER_S,
        straggler_after_s=run.straggler_after_s,
    ).run()
    promised = [record for record in result.records if record.promised_deadline_s is not None]
    late = [record for record in promised if record.late_though_admitted]
    announced = [r for r in late if r.at_risk_s is not None and r.at_risk_s < (r.promised_deadline_s or 0.0)]
    return Tally(len(promised), sum(record.met for record in result.records), len(late), len(announced))


def wrong_curves(cells: Sequence[Case], seeds: int, sigma: float, full: bool) -> list[Run]:
    exact = Conditions(pause_s=PAUSE_S)
    stated = aware_of(replace(exact, throughput_error=sigma), SchedulerConfig())
    no_margin = replace(stated, speed_confidence=0.5)
    variants = {"no margin": no_margin, f"margin at {stated.speed_confidence:g}": stated}
    if full:
        for confidence in (0.8, 0.95, 0.99):
            variants[f"margin at {confidence:g}"] = replace(stated, speed_confidence=confidence)
        flat = 1.0 - math.exp(-NormalDist().inv_cdf(stated.speed_confidence) * sigma)
        variants[f"{100 * flat:.0f} % off every size, measured or not"] = replace(no_margin, speed_error=flat)
        variants["margin that takes the error for shared"] = replace(stated, speed_shared=1.0)
    runs = []
    for case in cells:
        runs.append(Run(case=case, variant="exact curves, once", conditions=exact, config=SchedulerConfig()))
        for name, config in variants.items():
            for seed in range(seeds):
                conditions = replace(exact, throughput_error=sigma, seed=seed)
                runs.append(Run(case=case, variant=name, conditions=conditions, config=config))
    return runs


def bad_days(seeds: int, full: bool) -> list[Run]:
    slow = Troubles(straggler_every_h=200.0, straggler_h=4.0)
    cases: Mapping[str, tuple[Troubles, float | None]] = {
        "a node fails every 200 h": (Troubles(mtbf_h=200.0), None),
        "a node fails every 50 h": (Troubles(mtbf_h=50.0), None),
        "maintenance every 50 h, known 2 h before": (Troubles(drain_every_h=50.0), None),
        "the same, known when it begins": (Troubles(drain_every_h=50.0, drain_notice_h=0.0), None),
        "a slot is slow every 200 h, for 4 h": (slow, None),
        "the same, named after 3 min": (slow, 180.0),
    }
    quiet, config = Conditions(pause_s=PAUSE_S), SchedulerConfig()
    runs = []
    for case in CELLS[:2] if full else CELLS[:1]:
        for name, (troubles, after_s) in cases.items():
            for seed in range(seeds):
                given = replace(troubles, seed=seed)
                runs.append(
                    Run(
                        case=case,
                        variant=name,
                        conditions=quiet,
                        config=config,
                        troubles=given,
                        straggler_after_s=after_s,
                    )
                )
    return runs


def tables(runs: Sequence[Run], processes: int, pooled: bool) -> list[str]:
    """Simulate all, and make a Markdown table of what came of it."""
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(tally, runs))
    rows: dict[tuple[str, str], Tally] = {}
    for run, counts in zip(runs, found, strict=True):
        keys = [(run.case.label, run.variant)]
        if pooled and "once" not in run.variant:
            keys.append(("all of them", run.variant))
        for key in keys:
            rows[key] = rows.get(key, Tally()).plus(counts)
    ordered = sorted(rows.items(), key=lambda item: item[0][0] == "all of them")
    columns = ["trace", "", "met", "admitted", "late", "of admitted", "announced"]
    return table(columns, [[*key, *counts.cells()] for key, counts in ordered])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default="", help="only these, separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--page", type=Path, help="a page to put the tables into")
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"skipped: needs the data folder {DATA} beside the checkout")
        return
    seeds = args.seeds
    wanted = {trace for trace in args.traces.split(",") if trace}
    cells = [case for case in CELLS if not wanted or case.trace in wanted]
    lines = [
        f"Curves that are wrong by sigma {args.sigma:g}, {seeds} seeds each; first come, decided at arrival:",
        "",
        *tables(wrong_curves(cells, seeds, args.sigma, args.full), args.processes, pooled=True),
    ]
    print("\n".join(lines), flush=True)
    trouble = [
        "",
        f"Exact curves and other trouble, {seeds} seeds each:",
        "",
        *tables(bad_days(seeds, args.full), args.processes, pooled=False),
    ]
    print("\n".join(trouble))
    if args.page is not None:
        put_into(args.page, "errors", [*lines, *trouble])


if __name__ == "__main__":
    main()
