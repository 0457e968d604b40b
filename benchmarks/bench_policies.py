"""Every policy on public traces, side by side, each result beside what no schedule can beat.

    python benchmarks/bench_policies.py                 all policies, on the clusters of the traces
    python benchmarks/bench_policies.py --contended     ours and those that refuse jobs, on clusters that are too small
    python benchmarks/bench_policies.py --full          greedy policies on cluster01, ours on cluster04: hours
    ... [--traces 195job,...] [--policies elasticflow,edf,...] [--plots DIR] [--page docs/explanation/benchmark.md]

Prints a table for each trace and, of several traces, one of all. ``--page`` also puts them into a page, below the line
``<!-- results: NAME -->``. Traces and curves are those of ../shared/data beside the checkout; without it there is
nothing to do, and it says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.policies.registry import POLICY_NAMES
from elasticflow_airflow.scheduler_core.simulator.compare import Comparison, bound_of
from elasticflow_airflow.scheduler_core.simulator.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Played, Setting, parse_contenders, play
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster
from elasticflow_airflow.scheduler_core.simulator.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


class Case(NamedTuple):
    """A trace on a cluster."""

    trace: str
    nodes: int
    slots_per_node: int

    @property
    def label(self) -> str:
        return f"{self.trace} {self.nodes}x{self.slots_per_node}"


OWN_SIZE = (Case("195job", 16, 8), Case("t4_195job", 16, 4), Case("cluster10", 32, 8), Case("poisson_100job", 16, 8))
TOO_SMALL = (
    Case("195job", 4, 8),
    Case("195job", 8, 8),
    Case("t4_195job", 8, 4),
    Case("cluster10", 4, 8),
    Case("cluster10", 2, 8),
)
CLUSTER01, CLUSTER04 = Case("cluster01", 64, 8), Case("cluster04", 128, 8)

OURS = ("elasticflow", "elasticflow:wait", "elasticflow:value", "elasticflow:value:wait")
REFUSING = ("edf+admission", "oasis", "aonline", "chronus")
"""Policies that refuse jobs, too."""
GREEDY = ("edf", "edf+elastic", "edf+admission", "gang-fifo", "gandiva", "tiresias", "themis", "optimus")
"""Policies that scale to thousands of jobs."""

Write = Callable[[float], str]
COLUMNS: tuple[tuple[str, str, Write], ...] = (
    ("met", "met", "{:.0f}".format),
    ("of bound", "of_bound", lambda value: f"{100 * value:.1f} %"),
    ("late", "late_though_admitted", "{:.0f}".format),
    ("refused", "rejected", "{:.0f}".format),
    ("mean h", "completion_mean_s", lambda value: f"{value / 3600:.2f}"),
    ("p95 h", "completion_p95_s", lambda value: f"{value / 3600:.1f}"),
    ("slot-hours", "slot_hours", "{:.0f}".format),
    ("used", "utilisation", lambda value: f"{100 * value:.0f} %"),
    ("changes", "changes", "{:.0f}".format),
    ("migrations", "migrations", "{:.0f}".format),
    ("p50 ms", "decision_p50_ms", "{:.2f}".format),
    ("p99 ms", "decision_p99_ms", "{:.2f}".format),
    ("run s", "run_s", "{:.1f}".format),
)


def setting_of(case: Case, pause_s: float) -> Setting:
    kind = "t4" if case.trace.startswith("t4") else "a100"
    return Setting(
        trace=read_trace(DATA / "traces" / f"{case.trace}.csv"),
        curves=read_curves(DATA / "throughput" / kind),
        nodes=cluster(case.nodes, case.slots_per_node),
        conditions=Conditions(pause_s=pause_s),
    )


def run(case: Case, contenders: Sequence[Contender], pause_s: float, bound_limit_s: float) -> Comparison:
    """Simulate, saying on standard error who is at it: a table appears only when all are done."""
    setting = setting_of(case, pause_s)
    played: list[Played] = []
    bound = bound_of(setting, bound_limit_s) if bound_limit_s else None
    for contender in contenders:
        played.append(play(setting, contender))
        result = played[-1].result
        print(f"  {case.label} {contender.label}: {result.run_s:.1f} s", file=sys.stderr, flush=True)
    return Comparison(setting=setting, played=tuple(played), bound=bound)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table that reads well as text and is Markdown."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [line(heads), rule, *(line(row) for row in rows)]


def one_case(case: Case, comparison: Comparison) -> list[str]:
    rows = []
    for row in comparison.rows():
        cells = [write(float(value)) if (value := row[name]) is not None else "-" for _, name, write in COLUMNS]
        rows.append([f"`{row['policy']}`", *cells])
    deadlines = comparison.setting.facts()["deadlines"]
    bound = comparison.bound
    limit = "" if bound is None else f", bound {bound.met}{'' if bound.exact else ' (may be loose)'}"
    return [
        f"**{case.trace}** on {case.nodes} x {case.slots_per_node} slots: {deadlines} deadlines{limit}.",
        "",
        *table(["policy", *(head for head, _, _ in COLUMNS)], rows),
    ]


def all_cases(done: dict[Case, Comparison]) -> list[str]:
    """Deadlines met, by policy and trace."""
    labels = dict.fromkeys(played.contender.label for comparison in done.values() for played in comparison.played)
    rows = [
        ["*deadlines*", *(str(comparison.setting.facts()["deadlines"]) for comparison in done.values())],
        ["*bound*", *("-" if one.bound is None else str(one.bound.met) for one in done.values())],
    ]
    for label in labels:
        cells = []
        for comparison in done.values():
            found = [row for row in comparison.rows() if row["policy"] == label]
            late = f" ({found[0]['late_though_admitted']} late)" if found and found[0]["late_though_admitted"] else ""
            cells.append(f"{found[0]['met']}{late}" if found else "")
        rows.append([f"`{label}`", *cells])
    return ["Deadlines met:", "", *table(["policy", *(case.label for case in done)], rows)]


def put_into(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between the marker of these results and the next heading."""
    text = page.read_text(encoding="utf-8")
    marker = f"<!-- results: {name} -->"
    if marker not in text:
        sys.exit(f"{page} has no line {marker}")
    before, after = text.split(marker, 1)
    rest = re.search(r"^#", after, re.MULTILINE)
    tail = after[rest.start() :] if rest else ""
    page.write_text(f"{before}{marker}\n\n" + "\n".join(lines) + f"\n\n{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--contended", action="store_true")
    which.add_argument("--full", action="store_true")
    parser.add_argument("--traces", default="", help="only these, with commas between")
    parser.add_argument("--policies", default="", help="only these, with commas between")
    parser.add_argument("--pause-s", type=float, default=30.0)
    parser.add_argument("--bound-limit-s", type=float, default=60.0, help="time for a bound, 0: none")
    parser.add_argument("--plots", type=Path, help="draw each comparison into a folder of this one")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    known = [name for name in REFUSING if name in POLICY_NAMES]
    if args.contended:
        name, plan = "contended", [(case, (*OURS, *known)) for case in TOO_SMALL]
    elif args.full:
        name, plan = "full", [(CLUSTER01, ("elasticflow", *GREEDY)), (CLUSTER04, ("elasticflow",))]
    else:
        name, plan = "policies", [(case, ("elasticflow", "elasticflow:wait", *POLICY_NAMES[1:])) for case in OWN_SIZE]
    wanted = {trace for trace in args.traces.split(",") if trace}
    done: dict[Case, Comparison] = {}
    details: list[str] = []
    for case, policies in plan:
        if not wanted or case.trace in wanted:
            contenders = parse_contenders([args.policies] if args.policies else policies)
            done[case] = run(case, contenders, args.pause_s, args.bound_limit_s)
            lines = one_case(case, done[case])
            print(*lines, "", sep="\n", flush=True)
            details += [*lines, ""]
            if args.plots:
                from elasticflow_airflow.scheduler_core.simulator.plots import draw

                folder = args.plots / case.label.replace(" ", "-")
                folder.mkdir(parents=True, exist_ok=True)
                draw(done[case], folder)
    overview = all_cases(done) if len(done) > 1 else []
    print(*overview, sep="\n")
    if args.page:
        put_into(args.page, name, [*overview, "", *details][:-1])


if __name__ == "__main__":
    main()
