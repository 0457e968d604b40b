"""``elasticflow capacity``: which nodes nobody needs in the next hours, or how many more are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from elasticflow_airflow.cli.connection import StateDir, Url, client

if TYPE_CHECKING:
    from rich.table import Table

    from elasticflow_airflow.insight import CapacityAnswer, CapacityWant


def capacity(
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    hours: float = typer.Option(24.0, "--hours", min=0.01, max=336.0, help="How far to look."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Say which nodes nobody needs in the next hours, or how many more are wanted, and by whom."""
    with client(url, state_dir) as service:
        answer = service.capacity(hours)
    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    if answer.releasable:
        console.print(_nodes(answer))
    wants = [*((want, "") for want in answer.wanted_by), *((want, "hopeless, ") for want in answer.hopeless)]
    if wants:
        console.print(_wants(wants))
    console.print(answer.summary, markup=False)


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    return table


def _nodes(answer: CapacityAnswer) -> Table:
    table = _table("releasable", "slots", "now", "why")
    for node in answer.releasable:
        table.add_row(
            escape(node.node_id), str(node.slots), "[green]idle[/]" if node.idle else "in use", escape(node.reason)
        )
    return table


def _wants(wants: list[tuple[CapacityWant, str]]) -> Table:
    from elasticflow_airflow.cli.display import moment

    table = _table("deadline", "task", "wants more", "why")
    for want, mark in wants:
        need = mark + want.need.replace("_", " ")
        table.add_row(moment(want.deadline_at), escape(want.task), f"[red]{need}[/]", escape(want.reason))
    return table
