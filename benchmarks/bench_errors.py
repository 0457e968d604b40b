"""When reality differs: curves that are wrong, nodes that fail, slots that are slow. What it does to promises.

    python benchmarks/bench_errors.py [--seeds 2] [--sigma 0.1] [--full] [--json FILE]

First table: every job's real speed at each size is off by a log-normal factor of its own, seen only through progress
reports. Without a margin promises are made at the speeds as told; with it, at a quantile for sizes that never ran, and
without any for sizes that were measured in this run. "announced" counts the late ones that were said to be at risk
before their deadline passed. ``--full``: five seeds, other quantiles, and a flat margin that nothing ever removes.

Second table: exact curves; nodes fail and come back, go away for maintenance at a known date, or slots become slow.
Needs the data folder ../shared/data beside the checkout.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.simulator.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles, disturbances
from elasticflow_airflow.scheduler_core.simulator.outcome import Result
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, aware_of, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Simulation
from elasticflow_airflow.scheduler_core.simulator.trace import read_trace

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CELLS = (
    ("195job", 16, 8),
    ("t4_195job", 16, 4),
    ("cluster10", 32, 8),
    ("poisson_100job", 16, 8),
    ("195job", 8, 8),
    ("195job", 4, 8),
)
PAUSE_S = 30.0
REPORT_AFTER_S = 60.0


@dataclass
class Tally:
    """Counts over runs."""

    admitted: int = 0
    met: int = 0
    late: int = 0
    announced: int = 0
    changes: int = 0
    lateness_s: list[float] = field(default_factory=list)

    def add(self, result: Result) -> None:
        for record in result.records:
            self.met += record.met
            self.changes += record.changes
            if record.promised_deadline_s is None:
                continue
            self.admitted += 1
            if record.late_though_admitted:
                self.late += 1
                self.announced += record.at_risk_s is not None and record.at_risk_s < record.promised_deadline_s
                if record.finished_s is not None:
                    self.lateness_s.append(record.finished_s - record.promised_deadline_s)

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.admitted + other.admitted,
            self.met + other.met,
            self.late + other.late,
            self.announced + other.announced,
            self.changes + other.changes,
            self.lateness_s + other.lateness_s,
        )

    def text(self) -> str:
        part = 100.0 * self.late / max(1, self.admitted)
        return (
            f"{self.met:5} met  {self.late:3} of {self.admitted:5} late ({part:4.2f} %)  {self.announced:3} announced"
        )


def play(
    cell: tuple[str, int, int],
    conditions: Conditions,
    config: SchedulerConfig,
    troubles: Troubles | None = None,
    straggler_after_s: float | None = None,
) -> Result:
    name, count, slots = cell
    trace = read_trace(DATA / "traces" / f"{name}.csv")
    curves = read_curves(DATA / "throughput" / ("t4" if name.startswith("t4") else "a100"))
    nodes = cluster(count, slots)
    last = max(job.deadline_s or job.submitted_s for job in trace.jobs)
    trouble = [] if troubles is None else disturbances(nodes, troubles, trace.jobs[0].submitted_s, last)
    return Simulation(
        name="elasticflow",
        policy=Scheduler(config, nodes),
        nodes=nodes,
        jobs=prepare(trace, curves, nodes, conditions),
        disturbances=trouble,
        report_after_s=REPORT_AFTER_S,
        straggler_after_s=straggler_after_s,
    ).run()


def wrong_curves(seeds: int, sigma: float, full: bool) -> list[dict[str, object]]:
    exact = Conditions(pause_s=PAUSE_S)
    stated = aware_of(replace(exact, throughput_error=sigma), SchedulerConfig())
    no_margin = replace(stated, speed_confidence=0.5)
    variants = {"no margin": no_margin, f"margin {stated.speed_confidence:g}": stated}
    if full:
        for confidence in (0.8, 0.95, 0.99):
            variants[f"margin {confidence:g}"] = replace(stated, speed_confidence=confidence)
        flat = 1.0 - math.exp(-NormalDist().inv_cdf(stated.speed_confidence) * sigma)
        variants[f"flat margin of {100 * flat:.0f} %"] = replace(no_margin, speed_error=flat)
        variants["all of the error taken as shared"] = replace(stated, speed_shared=1.0)
    totals = {name: Tally() for name in variants}
    rows: list[dict[str, object]] = []
    print(f"Error of the curves: sigma {sigma:g}, {seeds} seeds, pause {PAUSE_S:g} s; first come, decided at arrival")
    for cell in CELLS:
        label = f"{cell[0]} {cell[1]}x{cell[2]}"
        known = Tally()
        known.add(play(cell, exact, SchedulerConfig()))
        print(f"  {label:20} {'exact curves':>32}: {known.text()}", flush=True)
        for name, config in variants.items():
            tally = Tally()
            for seed in range(seeds):
                tally.add(play(cell, replace(exact, throughput_error=sigma, seed=seed), config))
            totals[name] = totals[name].plus(tally)
            print(f"  {label:20} {name:>32}: {tally.text()}", flush=True)
            rows.append({"cell": label, "variant": name, "seeds": seeds, **counts(tally)})
    for name, tally in totals.items():
        print(f"  {'pooled':20} {name:>32}: {tally.text()}")
        rows.append({"cell": "pooled", "variant": name, "seeds": seeds, **counts(tally)})
    return rows


def bad_days(seeds: int, full: bool) -> list[dict[str, object]]:
    cells = CELLS[:2] if full else CELLS[:1]
    slow = Troubles(straggler_every_h=200.0, straggler_h=4.0)
    cases: list[tuple[str, Troubles | None, float | None]] = [
        ("quiet", None, None),
        ("a node fails every 200 h", Troubles(mtbf_h=200.0), None),
        ("a node fails every 50 h", Troubles(mtbf_h=50.0), None),
        ("maintenance every 50 h, 2 h ahead", Troubles(drain_every_h=50.0), None),
        ("slow slots, nobody says where", slow, None),
        ("slow slots, named after 3 min", slow, 180.0),
    ]
    rows: list[dict[str, object]] = []
    print(f"Trouble, exact curves: {seeds} seeds, pause {PAUSE_S:g} s")
    for cell in cells:
        label = f"{cell[0]} {cell[1]}x{cell[2]}"
        for name, troubles, after_s in cases:
            tally = Tally()
            for seed in range(seeds if troubles else 1):
                given = None if troubles is None else replace(troubles, seed=seed)
                config = replace(SchedulerConfig(), speed_smoothing=1.0)
                tally.add(play(cell, Conditions(pause_s=PAUSE_S), config, given, after_s))
            print(f"  {label:20} {name:>34}: {tally.text()}", flush=True)
            rows.append({"cell": label, "variant": name, "seeds": seeds if troubles else 1, **counts(tally)})
    return rows


def counts(tally: Tally) -> dict[str, float]:
    return {
        "admitted": tally.admitted,
        "met": tally.met,
        "late": tally.late,
        "announced": tally.announced,
        "changes": tally.changes,
        "lateness_mean_s": sum(tally.lateness_s) / len(tally.lateness_s) if tally.lateness_s else 0.0,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="default 2; 5 with --full")
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", type=Path, help="write all counts there, with the command")
    args = parser.parse_args(argv)
    if not DATA.is_dir():
        print(f"skipped: needs the data folder {DATA} beside the checkout")
        return 0
    seeds = args.seeds or (5 if args.full else 2)
    begin = time.perf_counter()
    tables = {"wrong_curves": wrong_curves(seeds, args.sigma, args.full), "bad_days": bad_days(seeds, args.full)}
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if args.json is not None:
        command = " ".join(["python", "benchmarks/bench_errors.py", *(sys.argv[1:] if argv is None else argv)])
        args.json.write_text(json.dumps({"command": command, **tables}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
