"""What each improvement over the paper adds: the scheduler beside itself without it, over jittered deadlines.

    python benchmarks/bench_ablation.py [--only prices,ageing] [--traces 195job,...] [--seeds 5] [--processes N]
        [--write]

Every deadline's distance from its submission is scaled by a random factor within a tenth of 1, anew for each seed, so
that nothing depends on the one trace that parameters were tuned on. Groups of tables, each by its name (``--only``):

- *ablation*: the improvements, for each trace on its own cluster and on those that are too small. *Met* are deadlines
  met; *value* counts one for each, and for a job that was promised late what is left: it falls from 1 to nothing over
  half the time from its submission to its deadline;
- *prices*: the settings of the protection price, where it acts: on clusters that are too small; decided at arrival;
- *choices*: what becomes of jobs that cannot be promised what they ask for (``on_reject``);
- *worth*: jobs that are worth 1, 3 or 10, drawn anew for each seed, equally often;
- *default*: the default and its two objectives, decided at arrival and waiting, beside greedy policies, on every
  cluster: paired differences, seed by seed, with a 95 % interval (Student's t);
- *left_out*: the default with the constants of its price that were chosen by looking at results, each chosen on all
  clusters but the one reported, among those of *prices*: what is left of it where it could not be tuned;
- *ageing*: every fourth job, drawn anew for each seed, is best effort: how long such jobs take with and without ageing
  and patience.

All of it is some 1,800 simulations, each done once: 40 minutes on two idle cores. Needs ../shared/data beside the
checkout; without it there is nothing to do.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import NamedTuple
from unittest.mock import patch

from bench_contended import FURTHER, TOO_SMALL
from bench_policies import DATA, OWN_SIZE, Case, setting_of
from results import parser_of, show, table

from elasticflow_airflow.scheduler_core.model.config import Objective, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import OnReject
from elasticflow_airflow.scheduler_core.model.work import Work
from elasticflow_airflow.scheduler_core.planning import planner
from elasticflow_airflow.scheduler_core.planning.minimum_share import ShareShape
from elasticflow_airflow.scheduler_core.planning.proof import Attempt, rescues
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace
from elasticflow_airflow.scheduler_core.simulator.outcome import Result, quantile
from elasticflow_airflow.scheduler_core.simulator.policies import make_policy
from elasticflow_airflow.scheduler_core.simulator.prepare import prepare
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob, Simulation

JITTER = 0.1
PAUSE_S = 30.0
WORTHS = (1.0, 3.0, 10.0)
BEST_EFFORT_PART = 0.25
NEVER = 1e12
OURS = "elasticflow"
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % quantiles, by the number of pairs."""
Rescues = Generator[Attempt, str | None, None]


class Trial(NamedTuple):
    """One simulation. What several groups compare is simulated once."""

    case: Case
    seed: int
    config: SchedulerConfig
    on_reject: OnReject
    rescues: Callable[[Sequence[Work], float, int], Rescues]
    """What is tried before a rejection."""
    alter: Callable[[Trace, random.Random], Trace] | None
    """Makes the trace of a seed, if not as it is."""
    policy: str = OURS


class Variant(NamedTuple):
    """A way of scheduling, and what it is compared with."""

    name: str
    config: SchedulerConfig
    on_reject: OnReject = OnReject.FAIL
    beside: str = ""
    rescues: Callable[[Sequence[Work], float, int], Rescues] = rescues
    policy: str = OURS


class Figures(NamedTuple):
    """Of one run."""

    met: float
    value: float
    late: float
    promised: float
    changes: float
    migrations: float
    completion_h: float
    best_effort_h: float
    best_effort_p95_h: float


@dataclass(frozen=True)
class Group:
    """Variants that are compared, on what, and how it is written."""

    cases: Sequence[Case]
    variants: Sequence[Variant]
    lines: Callable[[Group, Mapping[Case, Sequence[Sequence[Figures]]]], list[str]]
    alter: Callable[[Trace, random.Random], Trace] | None = None

    def trial(self, variant: Variant, case: Case, seed: int) -> Trial:
        return Trial(case, seed, variant.config, variant.on_reject, variant.rescues, self.alter, variant.policy)


def one_level(works: Sequence[Work], now: float, count: int) -> Rescues:
    """The usual orders of filling, without shares of two levels."""
    usual = rescues(works, now, count)
    unfit = None
    attempt: Attempt | None = next(usual)
    while attempt is not None:
        if attempt.shape is ShareShape.FLAT:
            unfit = yield attempt
        try:
            attempt = usual.send(unfit)
        except StopIteration:
            attempt = None


def one_order(works: Sequence[Work], now: float, count: int) -> Rescues:  # noqa: ARG001  (none of them)
    """Shares of two levels, in the usual order of filling alone."""
    return rescues(works, now, 0)


def unequal(trace: Trace, chaos: random.Random) -> Trace:
    return replace(trace, jobs=tuple(replace(job, value=chaos.choice(WORTHS)) for job in trace.jobs))


def some_best_effort(trace: Trace, chaos: random.Random) -> Trace:
    jobs = [replace(job, deadline_s=None) if chaos.random() < BEST_EFFORT_PART else job for job in trace.jobs]
    return replace(trace, jobs=tuple(jobs))


def told(trial: Trial) -> list[SimulatedJob]:
    """The jobs as they are submitted."""
    setting, choice = setting_of(trial.case, PAUSE_S, exact=True), trial.on_reject
    trace = setting.trace
    if trial.alter is not None:
        trace = trial.alter(trace, random.Random(f"{trial.seed} {trial.case.trace}"))
    # Who renegotiates goes as far as who is late, for the same value.
    known = OnReject.LATE if choice is OnReject.RENEGOTIATE else choice
    conditions = replace(setting.conditions, deadline_jitter=JITTER, seed=trial.seed, on_reject=known)
    jobs = prepare(trace, setting.curves, setting.nodes, conditions)
    return [replace(job, job=replace(job.job, on_reject=choice)) for job in jobs]


def simulate(trial: Trial) -> Figures:
    nodes = setting_of(trial.case, PAUSE_S, exact=True).nodes
    policy = make_policy(trial.policy, nodes, trial.config)
    with patch.object(planner, "rescues", trial.rescues):
        return figures_of(Simulation(name=trial.policy, policy=policy, nodes=nodes, jobs=told(trial)).run())


def figures_of(result: Result) -> Figures:
    found = result.summary()
    waited = sorted(r.completion_s for r in result.records if r.deadline_s is None and r.completion_s is not None)
    return Figures(
        met=float(found["met"]),
        value=float(found["value_kept"]),
        late=float(found["late_though_admitted"]),
        promised=float(sum(record.promised_deadline_s is not None for record in result.records)),
        changes=float(found["changes"]),
        migrations=float(found["migrations"]),
        completion_h=float(found["completion_mean_s"]) / 3600.0,
        best_effort_h=mean(waited) / 3600.0 if waited else 0.0,
        best_effort_p95_h=quantile(waited, 0.95) / 3600.0,
    )


def against(runs: Sequence[Figures], others: Sequence[Figures], what: str = "value") -> str:
    """Seed by seed: the same deadlines with and without."""
    each = [getattr(run, what) - getattr(other, what) for run, other in zip(runs, others, strict=True)]
    return f"{mean(each):+.1f} ({min(each):+.0f} to {max(each):+.0f})"


def per_case(
    found: Mapping[Case, Sequence[Sequence[Figures]]],
    heads: Sequence[str],
    rows_of: Callable[[Sequence[Sequence[Figures]]], list[list[str]]],
) -> list[str]:
    """A table for each case."""
    lines: list[str] = []
    for case, figures in found.items():
        lines += [f"**{case.label}**, {len(figures[0])} seeds:", "", *table(heads, rows_of(figures)), ""]
    return lines[:-1]


def average(runs: Sequence[Figures], what: str, digits: int = 1) -> str:
    return f"{mean(getattr(run, what) for run in runs):.{digits}f}"


def all_late(runs: Sequence[Figures]) -> str:
    return f"{sum(run.late for run in runs):.0f}"


def by_case(group: Group, found: Mapping[Case, Sequence[Sequence[Figures]]]) -> list[str]:
    """A table for each case, a row for each variant."""

    def rows_of(figures: Sequence[Sequence[Figures]]) -> list[list[str]]:
        of = {variant.name: runs for variant, runs in zip(group.variants, figures, strict=True)}
        return [
            [
                variant.name,
                average(runs, "met"),
                average(runs, "value"),
                against(runs, of[variant.beside]) if variant.beside else "",
                all_late(runs),
                average(runs, "changes", 0),
                average(runs, "migrations", 0),
                average(runs, "completion_h", 2),
            ]
            for variant, runs in zip(group.variants, figures, strict=True)
        ]

    heads = ["variant", "met", "value", "against first come, or value", "late", "changes", "migrations", "mean h"]
    return per_case(found, heads, rows_of)


def across(group: Group, found: Mapping[Case, Sequence[Sequence[Figures]]]) -> list[str]:
    """A row for each variant, a column for each case: the value, and what it differs from the first variant's."""
    rows = []
    for number, variant in enumerate(group.variants):
        cells = []
        for figures in found.values():
            runs = figures[number]
            differs = f", {against(runs, figures[0])}" if number else ""
            late = sum(run.late for run in runs)
            cells.append(f"{mean(run.value for run in runs):.1f}{differs}{f', {late:.0f} late' if late else ''}")
        rows.append([variant.name, *cells])
    seeds = len(next(iter(found.values()))[0])
    return [f"Mean of {seeds} seeds:", "", *table(["variant", *(case.label for case in found)], rows)]


def interval(runs: Sequence[Figures], others: Sequence[Figures]) -> str:
    """The mean of the paired differences in deadlines met, and its 95 % interval."""
    each = [run.met - other.met for run, other in zip(runs, others, strict=True)]
    if len(each) not in STUDENT_T:
        return f"{mean(each):+.1f}"
    half = STUDENT_T[len(each)] * stdev(each) / len(each) ** 0.5
    return f"{mean(each):+.1f} ± {half:.1f}"


def beside_default(group: Group, found: Mapping[Case, Sequence[Sequence[Figures]]]) -> list[str]:
    """A row for each cluster: deadlines met by the default, and by how many each of the others differs from it."""
    rows = []
    for case, figures in found.items():
        default, *others = figures
        late = sum(run.late for run in default)
        rows.append([case.label, average(default, "met"), f"{late:.0f}", *(interval(runs, default) for runs in others)])
    heads = ["cluster", "default", "late", *(variant.name for variant in group.variants[1:])]
    return [f"Deadlines met, mean of {len(next(iter(found.values()))[0])} seeds:", "", *table(heads, rows)]


def left_out(group: Group, found: Mapping[Case, Sequence[Sequence[Figures]]]) -> list[str]:
    """A row for each cluster: the shipped constants, and those that are best on all other clusters."""

    def gained(number: int, cases: Sequence[Case]) -> float:
        """The part of the shipped constants' deadlines that others add, summed over clusters."""
        shipped = [mean(run.met for run in found[case][0]) for case in cases]
        theirs = [mean(run.met for run in found[case][number]) for case in cases]
        return sum(their / ship - 1.0 for their, ship in zip(theirs, shipped, strict=True))

    rows = []
    for case, figures in found.items():
        others = [other for other in found if other != case]
        chosen = max(range(len(figures)), key=lambda number: (gained(number, others), -number))
        best = max(range(len(figures)), key=lambda number: mean(run.met for run in found[case][number]))
        rows.append(
            [
                case.label,
                average(figures[0], "met"),
                group.variants[chosen].name,
                average(figures[chosen], "met"),
                interval(figures[chosen], figures[0]),
                f"{group.variants[best].name}: {average(figures[best], 'met')}",
            ]
        )
    heads = ["cluster", "shipped", "chosen on all others", "met", "difference", "best here, in hindsight"]
    return [f"Deadlines met, mean of {len(next(iter(found.values()))[0])} seeds:", "", *table(heads, rows)]


def by_choice(group: Group, found: Mapping[Case, Sequence[Sequence[Figures]]]) -> list[str]:
    def rows_of(figures: Sequence[Sequence[Figures]]) -> list[list[str]]:
        return [
            [
                variant.name,
                average(runs, "promised"),
                average(runs, "met"),
                average(runs, "value"),
                all_late(runs),
                average(runs, "completion_h", 2),
            ]
            for variant, runs in zip(group.variants, figures, strict=True)
        ]

    return per_case(found, ["`on_reject`", "promised", "met as asked", "value", "late", "mean h"], rows_of)


def of_best_effort(group: Group, found: Mapping[Case, Sequence[Sequence[Figures]]]) -> list[str]:
    def rows_of(figures: Sequence[Sequence[Figures]]) -> list[list[str]]:
        return [
            [
                variant.name,
                average(runs, "met"),
                all_late(runs),
                average(runs, "best_effort_h", 2),
                average(runs, "best_effort_p95_h", 2),
                average(runs, "changes", 0),
            ]
            for variant, runs in zip(group.variants, figures, strict=True)
        ]

    heads = ["variant", "deadlines met", "late", "best effort, mean h", "best effort, p95 h", "changes"]
    return per_case(found, heads, rows_of)


USUAL = SchedulerConfig(objective=Objective.FIRST_COME)
PRICED = replace(USUAL, objective=Objective.VALUE)
DEFAULT = SchedulerConfig()
FIRST_COME, VALUE = "first come", "value, waiting"
WAIT, LATE = OnReject.WAIT, OnReject.LATE


def prices(config: SchedulerConfig, name: str) -> list[Variant]:
    """The protection price as it is, then with other settings, one at a time; decided at arrival."""
    memories = config.protection_half_lives_s
    hours = [f"{memory / 3600:.0f} h" for memory in memories]
    without = [tuple(other for other in memories if other != memory) for memory in memories]
    alone = [(memory,) for memory in memories]

    def remembering(half_lives_s: tuple[float, ...]) -> SchedulerConfig:
        return replace(config, protection_half_lives_s=half_lives_s)

    return [
        Variant(name, config),
        *(Variant(f"without the memory of {h}", remembering(kept)) for h, kept in zip(hours, without, strict=True)),
        *(Variant(f"the memory of {h} alone", remembering(kept)) for h, kept in zip(hours, alone, strict=True)),
        *(Variant(f"weight {weight:g}", replace(config, protection_weight=weight)) for weight in (0.0, 0.5, 2.0)),
        *(Variant(f"reach {reach:g}", replace(config, protection_reach=reach)) for reach in (1.0, 10.0)),
    ]


IMPROVEMENTS = (
    Variant(FIRST_COME, USUAL),
    Variant("... without rescue", replace(USUAL, rescue_orders=0), beside=FIRST_COME),
    Variant("... rescue without two levels", USUAL, beside=FIRST_COME, rescues=one_level),
    Variant("... rescue without other orders", USUAL, beside=FIRST_COME, rescues=one_order),
    Variant("... growing for any gain", replace(USUAL, min_saving_pauses=0.0), beside=FIRST_COME),
    Variant("... waiting", USUAL, WAIT, FIRST_COME),
    Variant("... soft deadlines", USUAL, LATE, FIRST_COME),
    Variant(VALUE, PRICED, WAIT, FIRST_COME),
    Variant("... decided at arrival", PRICED, beside=VALUE),
    Variant("... decided at arrival, soft deadlines", PRICED, LATE, VALUE),
    Variant("... without rescue", replace(PRICED, rescue_orders=0), WAIT, VALUE),
)
CHOICES = (
    Variant("fail", USUAL),
    Variant("best_effort", USUAL, OnReject.BEST_EFFORT),
    Variant("wait", USUAL, WAIT),
    Variant("renegotiate", USUAL, OnReject.RENEGOTIATE),
    Variant("late", USUAL, LATE),
)
WORTH = (Variant(FIRST_COME, USUAL), Variant("value", PRICED), Variant(VALUE, PRICED, WAIT))
DEFAULTS = (
    Variant("default", DEFAULT),
    Variant("waiting", DEFAULT, WAIT),
    Variant("first come", USUAL),
    Variant("value", PRICED),
    Variant("value, waiting", PRICED, WAIT),
    Variant("`edf+elastic`", DEFAULT, policy="edf+elastic"),
    Variant("`edf+admission`", DEFAULT, policy="edf+admission"),
)
AGEING = (
    Variant("as it is", USUAL),
    Variant("... without ageing", replace(USUAL, ageing_s=NEVER)),
    Variant("... without patience: shares are given up at once", replace(USUAL, patience_pauses=0.0)),
    Variant("... with endless patience: shares are never given up", replace(USUAL, patience_pauses=NEVER)),
)
SOME = (TOO_SMALL[0], TOO_SMALL[1], TOO_SMALL[4])
GROUPS: Mapping[str, Group] = {
    "ablation": Group((*OWN_SIZE, *TOO_SMALL), IMPROVEMENTS, by_case),
    "default": Group((*OWN_SIZE, *TOO_SMALL, *FURTHER), DEFAULTS, beside_default),
    "left_out": Group((*OWN_SIZE[:2], *TOO_SMALL, *FURTHER), prices(DEFAULT, "as it is"), left_out),
    "prices": Group(TOO_SMALL, prices(PRICED, "value, as it is"), across),
    "choices": Group(SOME, CHOICES, by_choice),
    "worth": Group(SOME, WORTH, across, unequal),
    "ageing": Group(SOME[:2], AGEING, of_best_effort, some_best_effort),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="only these groups of tables, with commas between")
    parser.add_argument("--traces", default="", help="only these, with commas between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    only, traces = ({one for one in text.split(",") if one} for text in (args.only, args.traces))
    if unknown := only - set(GROUPS):
        parser.error(f"there is no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    groups = {name: group for name, group in GROUPS.items() if not only or name in only}
    trials = {
        (name, case): [[group.trial(variant, case, seed) for seed in range(args.seeds)] for variant in group.variants]
        for name, group in groups.items()
        for case in group.cases
        if not traces or case.trace in traces
    }
    once = list(dict.fromkeys(trial for listed in trials.values() for row in listed for trial in row))
    with ProcessPoolExecutor(args.processes) as pool:
        begun = {trial: pool.submit(simulate, trial) for trial in once}
        for name, group in groups.items():
            found = {
                case: [[begun[trial].result() for trial in row] for row in listed]
                for (of, case), listed in trials.items()
                if of == name
            }
            if not found:
                continue
            lines = group.lines(group, found)
            show(name, lines, args)


if __name__ == "__main__":
    main()
