"""Every policy on public traces, side by side, each result beside what no schedule can beat.

    python benchmarks/bench_policies.py           ours as served; then all policies, all speeds known exactly, on the
                                                  clusters of the traces; on cluster01 the greedy ones
    python benchmarks/bench_policies.py --full    ours on cluster04, 15,802 jobs: many minutes
    ... [--exact] [--traces 195job,...] [--policies elasticflow,edf,...] [--plots DIR]
        [--write]

As served our scheduler keeps a margin on what it has not measured, and hears reports. With ``--policies`` only these
are played, as served, or with ``--exact`` with all speeds known exactly.

Prints a table for each trace, of several traces one of all, and why ours did not meet what the bound's choice of jobs
has. ``--write`` also draws the figures that the results' file and the benchmark's page include. Traces and curves are
those of ../shared/data beside the checkout; without it there is nothing to do, and it says so.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from results import DOCS, file_of_command, table, write
from results import parser_of as parser_with_write

from elasticflow_airflow.scheduler_core.simulator.compare import Comparison, bound_of
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Played, Setting, parse_contenders, play
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster

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
CLUSTER01, CLUSTER04 = Case("cluster01", 64, 8), Case("cluster04", 128, 8)

GREEDY = ("edf", "edf+elastic", "edf+admission", "gang-fifo", "gandiva", "tiresias", "themis", "optimus")
"""Policies that scale to thousands of jobs."""

OTHERS = tuple(name for name in POLICY_NAMES if not name.startswith("elasticflow"))
"""Everybody else's, as far as they run without types of GPU."""

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


def setting_of(case: Case, pause_s: float, *, exact: bool = False) -> Setting:
    """As it is served, or with all speeds known exactly: what the planner itself is worth."""
    kind = "t4" if case.trace.startswith("t4") else "a100"
    return Setting(
        trace=read_trace(DATA / "traces" / f"{case.trace}.csv"),
        curves=read_curves(DATA / "throughput" / kind),
        nodes=cluster(case.nodes, case.slots_per_node),
        conditions=Conditions(pause_s=pause_s),
        exact=exact,
    )


def run(
    case: Case, contenders: Sequence[Contender], pause_s: float, bound_limit_s: float, *, exact: bool
) -> Comparison:
    """Simulate, saying on standard error who is at it: a table appears only when all are done."""
    setting = setting_of(case, pause_s, exact=exact)
    played: list[Played] = []
    bound = bound_of(setting, bound_limit_s) if bound_limit_s else None
    for contender in contenders:
        played.append(play(setting, contender))
        result = played[-1].result
        print(f"  {case.label} {contender.label}: {result.run_s:.1f} s", file=sys.stderr, flush=True)
    return Comparison(setting=setting, played=tuple(played), bound=bound)


def one_case(case: Case, comparison: Comparison) -> list[str]:
    rows = []
    for row in comparison.rows():
        cells = [write(float(value)) if (value := row[name]) is not None else "-" for _, name, write in COLUMNS]
        rows.append([f"`{row['policy']}`", *cells])
    deadlines = comparison.setting.facts()["deadlines"]
    bound = comparison.bound
    limit = "" if bound is None else f", bound {bound.met}{'' if bound.exact else ' (may be loose)'}"
    settings = comparison.setting.settings_name
    return [
        f"**{case.trace}** on {case.nodes} x {case.slots_per_node} slots: {deadlines} deadlines{limit}; {settings}.",
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
    settings = next(iter(done.values())).setting.settings_name
    return [f"Deadlines met, {settings}:", "", *table(["policy", *(case.label for case in done)], rows)]


def reasons(comparison: Comparison) -> list[str]:
    """Why the first contender did not meet what the bound's choice has; times in hours after the first submission."""
    bound, played = comparison.bound, comparison.played[0]
    if bound is None:
        return []
    begin_s = played.result.begin_s

    def hours(match: re.Match[str]) -> str:
        at_s = datetime.fromisoformat(match[1] + "+00:00").timestamp()
        return f"{(at_s - begin_s) / 3600:.1f} h"

    lines = []
    for record in played.result.records:
        if record.job_id in bound.chosen and not record.met:
            reason = record.reject_reason.split("; the earliest deadline")[0] or "it was late"
            reason = re.sub(r"(\d{4}-\d\d-\d\d [\d:]+) UTC", hours, reason)
            lines.append(f"- {record.job_id[:8]}, submitted at {(record.submitted_s - begin_s) / 3600:.1f} h: {reason}")
    if not lines:
        return []
    head = f"The bound's choice has {len(lines)} that `{played.contender.label}` refused:"
    return ["", head, "", *lines]


CAUSES: tuple[tuple[str, str], ...] = (
    (r"\(objective: (auto|value)", "its slots are worth more to others that are expected"),
    (r"hopeless even with", "waited, and in vain"),
    (r"slots (none|at most .*) are available", "for a while too few slots are not promised to others"),
    (r"^$", "was promised, and late"),
)
"""What is said at a rejection (a pattern), and the cause that it is counted under."""


def causes(done: Mapping[Case, Comparison], labels: Sequence[str]) -> list[str]:
    """How many of the bound's choice our schedulers did not meet, by cause and case."""
    rows = []
    for label in labels:
        counts: dict[str, list[int]] = {}
        for number, comparison in enumerate(done.values()):
            bound, played = comparison.bound, [one for one in comparison.played if one.contender.label == label]
            if bound is None or not played:
                return []
            for record in played[0].result.records:
                if record.job_id in bound.chosen and not record.met:
                    said = record.reject_reason
                    cause = next((text for pattern, text in CAUSES if re.search(pattern, said)), "other")
                    counts.setdefault(cause, [0] * len(done))[number] += 1
        rows += [[f"`{label}`: {cause}", *map(str, found)] for cause, found in sorted(counts.items())]
    if not rows:
        return []
    head = "What the bound's choice has and ours does not, by what was said when it was refused for good:"
    return [head, "", *table(["policy, cause", *(case.label for case in done)], rows), ""]


Plan = Sequence[tuple[Case, Sequence[str]]]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    parser = parser_with_write(text)
    parser.add_argument("--traces", default="", help="only these, with commas between")
    parser.add_argument("--policies", default="", help="only these, with commas between")
    parser.add_argument("--pause-s", type=float, default=30.0)
    parser.add_argument("--bound-limit-s", type=float, default=60.0, help="time for a bound, 0: none")
    parser.add_argument("--exact", action="store_true", help="all speeds are known exactly, and no margin is kept")
    parser.add_argument("--plots", type=Path, help="draw each comparison into a folder of this one")
    return parser


def bench(
    name: str, plan: Plan, args: argparse.Namespace, *, why: bool, counted: Sequence[str] = (), brief: bool = False
) -> None:
    """Run the plan, print its tables, and write them under ``name`` (``brief``: that of all cases alone).

    ``why``: what the first policy says of each that it did not meet; ``counted``: whose reasons are counted by cause.
    """
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    wanted = {trace for trace in args.traces.split(",") if trace}
    done: dict[Case, Comparison] = {}
    details: list[str] = []
    for case, policies in plan:
        if wanted and case.trace not in wanted:
            continue
        contenders = parse_contenders([args.policies] if args.policies else policies)
        done[case] = run(case, contenders, args.pause_s, args.bound_limit_s, exact=args.exact)
        lines = [*one_case(case, done[case]), *(reasons(done[case]) if why else [])]
        print(*lines, "", sep="\n", flush=True)
        details += [*lines, ""]
        if args.plots:
            from elasticflow_airflow.scheduler_core.simulator.outputs.plots import draw

            folder = args.plots / case.label.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            draw(done[case], folder)
    overview = [*all_cases(done), ""] if len(done) > 1 else []
    overview += causes(done, counted)
    print(*overview, sep="\n")
    write(name, ([*overview] if brief else [*overview, *details])[:-1], args)
    if args.write:
        for page in (file_of_command(), DOCS / "explanation/benchmark.md"):
            draw_for(page, name, done)


def draw_for(page: Path, name: str, done: Mapping[Case, Comparison]) -> None:
    """Draw those figures of a page whose files are named as it includes them: ``PAGE/NAME-TRACE-FIGURE.svg``."""
    from elasticflow_airflow.scheduler_core.simulator.outputs.plots import draw

    for case, comparison in done.items():
        included = re.findall(rf"\]\({page.stem}/{name}-{case.trace}-([\w-]+)\.svg\)", page.read_text(encoding="utf-8"))
        if included:
            with tempfile.TemporaryDirectory() as drawn:
                for path in draw(comparison, Path(drawn), ("svg",), only=included):
                    folder = page.with_suffix("")
                    folder.mkdir(exist_ok=True)
                    shutil.copy(path, folder / f"{name}-{case.trace}-{path.name}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if args.full:
        args.exact = True  # with reports of 15,802 jobs it takes hours
        bench("full", [(CLUSTER04, ("elasticflow",))], args, why=False, counted=("elasticflow",))
    elif not args.policies and not args.exact:
        plan: Plan = [(case, ("elasticflow", "elasticflow:wait")) for case in OWN_SIZE]
        bench("served", [*plan, (CLUSTER01, ("elasticflow",))], args, why=False, brief=True)
        args.exact = True
    if not args.full:
        policies = ("elasticflow", "elasticflow:wait", *OTHERS)
        plan = [*((case, policies) for case in OWN_SIZE), (CLUSTER01, ("elasticflow", *GREEDY))]
        bench("policies", plan, args, why=True)


if __name__ == "__main__":
    main()
