"""When reality differs: speeds that are not as told, nodes that fail, slots that are slow. What it does to promises.

    python benchmarks/bench_errors.py [--traces 195job,...] [--seeds 10] [--full] [--processes 2]
        [--write]

First table: our scheduler with the settings of ``elasticflow serve``, which is told nothing of how wrong the curves
are: as they say; with a history, as a first play of the same trace has shown it; every real speed at 0.9 of its curve;
and each real speed, for each job and size, off by a log-normal factor of its own. Beside it the same with all speeds
known exactly and no margin. "announced" counts the late ones that were said to be at risk before their deadline passed,
"notice" is how long before, the median of them. ``--full``: other errors and confidences, and all traces.

Second table: curves that are right; nodes fail and come back, go away for maintenance at a known date, or slots become
slow. Traces and curves are those of ../shared/data beside the checkout; without it there is nothing to do, and it says
so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from bench_contended import TOO_SMALL
from bench_policies import CLUSTER01, DATA, OWN_SIZE, Case, setting_of
from results import parser_of, table, write

from elasticflow_airflow.scheduler_core import SchedulerConfig
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, play

PROMISED = (*OWN_SIZE[:3], Case("cluster10", 4, 8))
ALL = (*OWN_SIZE, CLUSTER01, *TOO_SMALL)
PAUSE_S = 30.0
OURS = Contender.parse("elasticflow:first-come")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One simulation; the runs of a ``variant`` stand in one row of a table, with one seed each."""

    case: Case
    variant: str
    conditions: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    confidence: float | None = None


@dataclass(frozen=True)
class Tally:
    """Counts over runs. ``notices_s``: how long before its deadline each late job was said to be at risk."""

    runs: int = 0
    admitted: int = 0
    met: int = 0
    late: int = 0
    notices_s: tuple[float, ...] = ()

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.runs + other.runs,
            self.admitted + other.admitted,
            self.met + other.met,
            self.late + other.late,
            self.notices_s + other.notices_s,
        )

    def cells(self) -> list[str]:
        """As a row; of several runs the means of what was met and admitted."""
        mean = "{:.0f}" if self.runs == 1 else "{:.1f}"
        part = f"{100.0 * self.late / max(1, self.admitted):.2f} %"
        notice = f"{median(self.notices_s) / 60:.0f} min" if self.notices_s else ""
        counts = [mean.format(self.met / self.runs), mean.format(self.admitted / self.runs)]
        return [*counts, str(self.late), part, str(len(self.notices_s)), notice]


def tally(run: Run) -> Tally:
    """Simulate; among processes, so it takes and gives plain values."""
    setting = setting_of(run.case, PAUSE_S)
    setting = replace(setting, conditions=replace(setting.conditions, **run.conditions), **run.setting)
    config = None if run.confidence is None else SchedulerConfig.served(speed_confidence=run.confidence)
    records = play(setting, OURS, config=config).result.records
    promised = [(record, record.promised_deadline_s) for record in records if record.promised_deadline_s is not None]
    late = [(record, by_s) for record, by_s in promised if record.late_though_admitted]
    notices = (by_s - record.at_risk_s for record, by_s in late if record.at_risk_s is not None)
    early = tuple(notice_s for notice_s in notices if notice_s > 0.0)
    return Tally(1, len(promised), sum(record.met for record in records), len(late), early)


def with_seeds(
    cases: Iterable[Case], variant: str, seeds: int, *, confidence: float | None = None, **conditions: Any
) -> list[Run]:
    """The same under so many seeds."""
    return [
        Run(case=case, variant=variant, conditions={**conditions, "seed": seed}, confidence=confidence)
        for case in cases
        for seed in range(seeds)
    ]


def wrong_speeds(cases: Sequence[Case], seeds: int, *, full: bool) -> list[Run]:
    """Speeds that are as told, that are not, and that are known to be."""
    runs = []
    for case in cases:
        runs += [
            Run(case=case, variant="as told"),
            Run(case=case, variant="as told, with history", setting={"history": True}),
            Run(case=case, variant="as told, and known exactly (--exact)", setting={"exact": True}),
            Run(case=case, variant="0.9 of what was told", conditions={"speed_factor": 0.9}),
        ]
        for sigma in (0.05, 0.1, 0.2) if full else (0.1,):
            name = f"off by {sigma:g} (log-normal), {seeds} seeds"
            runs += with_seeds([case], name, seeds, throughput_error=sigma)
        for confidence in (0.5, 0.8, 0.95, 0.99) if full else ():
            name = f"off by 0.1, confidence {confidence:g}, {seeds} seeds"
            runs += with_seeds([case], name, seeds, confidence=confidence, throughput_error=0.1)
    return runs


def bad_days(seeds: int, *, full: bool) -> list[Run]:
    """Nodes and slots that fail."""
    slow = {"straggler_every_h": 200.0, "straggler_h": 4.0}
    kinds: Mapping[str, Mapping[str, Any]] = {
        "a node fails every 200 h": {"mtbf_h": 200.0},
        "a node fails every 50 h": {"mtbf_h": 50.0},
        "maintenance every 50 h, known 2 h before": {"drain_every_h": 50.0},
        "the same, known when it begins": {"drain_every_h": 50.0, "drain_notice_h": 0.0},
        "a slot is slow every 200 h, for 4 h": slow,
        "the same, named after 3 min": {**slow, "straggler_named_s": 180.0},
    }
    return [
        Run(case=case, variant=name, setting={"troubles": Troubles(seed=seed, **given)})
        for case in (OWN_SIZE[:2] if full else OWN_SIZE[:1])
        for name, given in kinds.items()
        for seed in range(seeds)
    ]


def rows_of(runs: Sequence[Run], processes: int) -> list[str]:
    """Simulate all, and make a Markdown table of what came of it."""
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(tally, runs))
    rows: dict[tuple[str, str], Tally] = {}
    for run, counts in zip(runs, found, strict=True):
        key = (run.case.label, run.variant)
        rows[key] = rows.get(key, Tally()).plus(counts)
    columns = ["trace", "speeds", "met", "admitted", "late", "of admitted", "announced", "notice"]
    return table(columns, [[*key, *counts.cells()] for key, counts in rows.items()])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--traces", default="", help="only these, separated by commas")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"skipped: needs the data folder {DATA} beside the checkout")
        return
    wanted = {trace for trace in args.traces.split(",") if trace}
    cases = [case for case in (ALL if args.full else PROMISED) if not wanted or case.trace in wanted]
    means = "of several seeds the means of what was met and admitted, and the sums of the rest"
    speeds = [
        f"Settings as served but where it says exactly; first come, decided at arrival; {means}:",
        "",
        *rows_of(wrong_speeds(cases, args.seeds, full=args.full), args.processes),
    ]
    print("\n".join(speeds), flush=True)
    trouble = [
        "",
        f"Speeds as told and other trouble, settings as served, {args.seeds} seeds each:",
        "",
        *rows_of(bad_days(args.seeds, full=args.full), args.processes),
    ]
    print("\n".join(trouble))
    write("errors", [*speeds, *trouble], args)


if __name__ == "__main__":
    main()
