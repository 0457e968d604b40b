"""What each improvement over the paper adds: the scheduler beside itself without it, over jittered deadlines.

    python benchmarks/bench_ablation.py [--seeds 5] [--full] [--processes N] [--page docs/explanation/benchmark.md]

Every deadline's distance from its submission is scaled by a random factor within a tenth of 1, anew for each seed, so
that nothing depends on the one trace that parameters were tuned on. ``--full``: every trace, on its own cluster and on
those that are too small; half an hour on two cores. Soft deadlines: a job
may be promised late, for a value that falls from 1 to nothing over half the time from its submission to its deadline;
*value* counts what is left, else it is *met*. Needs ../shared/data beside the checkout; without it there is
nothing to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench_contended import TOO_SMALL
from bench_policies import DATA, OWN_SIZE, Case, put_into, setting_of, table

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, play

JITTER = 0.1
PAUSE_S = 30.0
QUICK = (OWN_SIZE[0], OWN_SIZE[1], TOO_SMALL[1], TOO_SMALL[4])


class Variant(NamedTuple):
    """A way of scheduling, and what it is compared with."""

    name: str
    contender: str
    config: SchedulerConfig
    beside: str = ""


USUAL = SchedulerConfig()
SHORT = replace(USUAL, protection_half_lives_s=(6 * 3600.0,))
LONG = replace(USUAL, protection_half_lives_s=(12 * 3600.0,))
FIRST_COME, VALUE = "first come", "value, waiting"
VARIANTS = (
    Variant(FIRST_COME, "elasticflow", USUAL),
    Variant("... without rescue", "elasticflow", replace(USUAL, rescue_orders=0), FIRST_COME),
    Variant("... growing for any gain", "elasticflow", replace(USUAL, min_saving_pauses=0.0), FIRST_COME),
    Variant("... waiting", "elasticflow:wait", USUAL, FIRST_COME),
    Variant("... soft deadlines", "elasticflow:late", USUAL, FIRST_COME),
    Variant(VALUE, "elasticflow:value:wait", USUAL, FIRST_COME),
    Variant("... decided at arrival", "elasticflow:value", USUAL, VALUE),
    Variant("... decided at arrival, soft deadlines", "elasticflow:value:late", USUAL, VALUE),
    Variant("... without rescue", "elasticflow:value:wait", replace(USUAL, rescue_orders=0), VALUE),
    Variant("... with the short memory", "elasticflow:value:wait", SHORT, VALUE),
    Variant("... with the long memory", "elasticflow:value:wait", LONG, VALUE),
)


class Figures(NamedTuple):
    """Of one run."""

    met: float
    value: float
    late: float
    changes: float
    migrations: float
    completion_h: float


def simulate(case: Case, number: int, seed: int) -> Figures:
    variant = VARIANTS[number]
    setting = setting_of(case, PAUSE_S)
    setting = replace(setting, conditions=replace(setting.conditions, deadline_jitter=JITTER, seed=seed))
    found = play(setting, Contender.parse(variant.contender), config=variant.config).result.summary()
    return Figures(
        float(found["met"]),
        float(found["value_kept"]),
        float(found["late_though_admitted"]),
        float(found["changes"]),
        float(found["migrations"]),
        float(found["completion_mean_s"]) / 3600.0,
    )


def lines_of(case: Case, found: Sequence[Sequence[Figures]]) -> list[str]:
    rows = []
    of = {variant.name: runs for variant, runs in zip(VARIANTS, found, strict=True) if not variant.name.startswith(".")}
    for variant, runs in zip(VARIANTS, found, strict=True):
        met = [run.met for run in runs]
        differs = ""
        if variant.beside:
            # Seed by seed: the same deadlines with and without.
            each = [run.value - other.value for run, other in zip(runs, of[variant.beside], strict=True)]
            differs = f"{mean(each):+.1f} ({min(each):+.0f} to {max(each):+.0f})"
        rows.append(
            [
                variant.name,
                f"{mean(met):.1f}",
                f"{mean(run.value for run in runs):.1f}",
                differs,
                f"{sum(run.late for run in runs):.0f}",
                f"{mean(run.changes for run in runs):.0f}",
                f"{mean(run.migrations for run in runs):.0f}",
                f"{mean(run.completion_h for run in runs):.2f}",
            ]
        )
    heads = ["variant", "met", "value", "against first come, or value", "late", "changes", "migrations", "mean h"]
    return [f"**{case.label}**, {len(found[0])} seeds:", "", *table(heads, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    seeds = args.seeds
    cases = (*OWN_SIZE, *TOO_SMALL) if args.full else QUICK
    pieces: list[str] = []
    with ProcessPoolExecutor(args.processes) as pool:
        for case in cases:
            runs = [(number, seed) for number in range(len(VARIANTS)) for seed in range(seeds)]
            done = list(pool.map(simulate, [case] * len(runs), *zip(*runs, strict=True)))
            found = [done[number * seeds : (number + 1) * seeds] for number in range(len(VARIANTS))]
            lines = lines_of(case, found)
            print(*lines, "", sep="\n", flush=True)
            pieces += [*lines, ""]
    if args.page:
        put_into(args.page, "ablation", pieces[:-1])


if __name__ == "__main__":
    sys.exit(main())
