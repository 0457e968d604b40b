"""``elasticflow forecast``: whether everything that is due soon will meet its deadline; if not, what is missing."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.text import Text

from elasticflow_airflow.api import ForecastAnswer, ForecastItem
from elasticflow_airflow.cli.connection import BAD_INPUT, StateDir, Url, client
from elasticflow_airflow.cli.terminal.lines import AsJson, print_json, say
from elasticflow_airflow.cli.terminal.tables import Column, print_table
from elasticflow_airflow.times import local_moment

MISSED, NOT_KEPT = 1, 3
"""Exit statuses for ``--fail-on-miss`` and ``--check``; 2 if the service could not be asked."""
Hours = typer.Option(24.0, "--hours", min=0.01, max=336.0, help="How far to look.")
FailOnMiss = typer.Option(
    False, "--fail-on-miss", help=f"End with status {MISSED} if a deadline will not be kept; for CI."
)
Check = typer.Option(False, "--check", help=f"End with status {NOT_KEPT} if a deadline will not be kept.")
_OUTLOOK = (
    Column("deadline"),
    Column("task", key=True),
    *(Column(name) for name in ("outlook", "done", "earliest feasible", "why")),
)
_STYLES = {"kept": "green", "at_risk": "red", "missed": "red", "undecided": "yellow", "unknown": "yellow"}


def forecast(
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    hours: float = Hours,
    fail_on_miss: bool = FailOnMiss,
    check: bool = Check,
    as_json: bool = AsJson,
) -> None:
    """Say which deadlines of the next hours will be kept, and what is missing for the others.

    Ends with status 2 if the service could not be asked.
    """
    with client(url, state_dir, refused=BAD_INPUT) as service:
        answer = service.forecast(hours)
    if as_json:
        print_json(answer)
    else:
        print_outlook(answer)
        say(answer.summary)
    if answer.not_kept and (fail_on_miss or check):
        raise typer.Exit(MISSED if fail_on_miss else NOT_KEPT)


def print_outlook(answer: ForecastAnswer) -> None:
    """Print a table with one row for each deadline of a forecast; nothing if there is none."""
    if answer.items:
        print_table(_OUTLOOK, [_outlook_row(item) for item in answer.items])


def _outlook_row(item: ForecastItem) -> tuple[str | Text, ...]:
    outlook = item.outcome.replace("_", " ")
    if item.kind == "expected":
        sure = "" if item.probability > 0.995 else f" (comes {item.probability:.0%})"
        planned = "planned, " if item.planned else ""
        outlook = f"{outlook}, {planned}due {local_moment(item.due_at)}{sure}"
    return (
        local_moment(item.deadline_at),
        item.task,
        Text(outlook, style=_STYLES[item.outcome]),
        local_moment(item.projected_at),
        local_moment(item.earliest_deadline_at),
        item.reason,
    )
