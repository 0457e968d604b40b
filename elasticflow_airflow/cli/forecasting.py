"""``elasticflow forecast``: whether everything that is due soon will make it, and if not, what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from elasticflow_airflow.cli.connection import StateDir, Url, client

if TYPE_CHECKING:
    from rich.table import Table

    from elasticflow_airflow.wire import ForecastAnswer

_NOT_KEPT = 3
_STYLES = {"kept": "green", "at_risk": "red", "missed": "red", "undecided": "yellow", "unknown": "yellow"}


def forecast(
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    hours: float = typer.Option(24.0, "--hours", min=0.01, max=336.0, help="How far to look."),
    check: bool = typer.Option(False, "--check", help=f"End with status {_NOT_KEPT} if a deadline will not be kept."),
) -> None:
    """Say which deadlines of the next hours will be kept, and what is missing for the others."""
    with client(url, state_dir) as service:
        answer = service.forecast(hours)
    console = Console(highlight=False, soft_wrap=True)
    if answer.items:
        console.print(outlook_table(answer))
    console.print(answer.summary, markup=False)
    if check and answer.not_kept:
        raise typer.Exit(_NOT_KEPT)


def outlook_table(answer: ForecastAnswer) -> Table:
    """Every deadline of a forecast, a row each."""
    from rich.table import Table

    from elasticflow_airflow.cli.display import moment

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("deadline", "task", "outlook", "done", "would do", "why"):
        table.add_column(name)
    for item in answer.items:
        outlook = item.outcome.replace("_", " ")
        if item.kind == "expected":
            sure = "" if item.probability > 0.995 else f" (comes {item.probability:.0%})"
            planned = "planned, " if item.planned else ""
            outlook = f"{outlook}, {planned}due {moment(item.due_at)}{sure}"
        table.add_row(
            moment(item.deadline_at),
            item.task,
            f"[{_STYLES[item.outcome]}]{outlook}[/]",
            moment(item.projected_at),
            moment(item.earliest_deadline_at),
            escape(item.reason),
        )
    return table
