"""``elasticflow synthesize``: generates a trace of synthetic jobs for ``simulate`` and ``compare``."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path

import typer

from elasticflow_airflow.cli.simulator.answering import answering, require_writable
from elasticflow_airflow.cli.simulator.options import CurvesFolder
from elasticflow_airflow.cli.terminal.lines import say


class TraceKind(StrEnum):
    """The kind of jobs in a trace."""

    POISSON = "poisson"
    DIURNAL = "diurnal"
    SHORT = "short"
    RECURRING = "recurring"


OfKind = typer.Argument(
    ...,
    help="poisson: independent arrivals; diurnal: more by day; short: 1 to 10 minutes; recurring: DAGs, and ad-hoc jobs"
    " in between.",
)
Out = typer.Option(..., "--out", help="The trace to write, a CSV file.")


def synthesize(
    curves: CurvesFolder,
    kind: TraceKind = OfKind,
    out: Path = Out,
    seed: int = typer.Option(0, "--seed", help="The same seed makes the same trace."),
    jobs: int = typer.Option(200, "--jobs", min=1, help="How many (poisson, short)."),
    every_s: float = typer.Option(
        600.0, "--every-s", min=0.001, help="Mean time between two arrivals (poisson, short)."
    ),
    days: int = typer.Option(5, "--days", min=1, help="How long (diurnal, recurring)."),
    per_day: float = typer.Option(
        60.0, "--per-day", min=0.001, help="Jobs per day: all (diurnal), or ad hoc (recurring)."
    ),
    slots: int = typer.Option(64, "--slots", min=1, help="Slots that the loads are fractions of (recurring)."),
    startup_s: float = typer.Option(
        30.0, "--startup-s", min=0, help="Start-up time that the deadlines allow for; short with a warm pool."
    ),
) -> None:
    """Write a trace of synthetic jobs: seeded, and each could meet its deadline alone."""
    with answering():
        from elasticflow_airflow.scheduler_core.simulator.inputs import synthetic
        from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
        from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
        from elasticflow_airflow.scheduler_core.simulator.inputs.trace import write_trace

        for name, value in (("--every-s", every_s), ("--per-day", per_day), ("--startup-s", startup_s)):
            if not math.isfinite(value):
                raise InputError(f"{name} is {value}; it must be finite")
        found = read_curves(curves)
        require_writable([out], trace=None, curves=curves)
        shape = synthetic.Shape(startup_s=startup_s)
        match kind:
            case TraceKind.POISSON:
                made = synthetic.poisson(found, jobs=jobs, every_s=every_s, seed=seed, shape=shape)
            case TraceKind.DIURNAL:
                made = synthetic.diurnal(found, days=days, per_day=per_day, seed=seed, shape=shape)
            case TraceKind.SHORT:
                made = synthetic.short_jobs(found, jobs=jobs, every_s=every_s, startup_s=startup_s, seed=seed)
            case TraceKind.RECURRING:
                options = synthetic.RecurringDags(slots=slots, days=days, ad_hoc_per_day=per_day, startup_s=startup_s)
                made = synthetic.recurring(found, options, seed=seed)
        write_trace(out, made)
    expected = sum(job.expected for job in made)
    runs = f", {expected} of them runs of recurring tasks" if expected else ""
    say(f"{out}: {len(made)} jobs{runs}")
