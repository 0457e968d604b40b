"""``elasticflow capacity``: which nodes no job needs in the next hours, or how many more are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from elasticflow_airflow.cli.connection import StateDir, Url, client
from elasticflow_airflow.cli.forecast import Hours
from elasticflow_airflow.cli.terminal.lines import AsJson, print_json, say
from elasticflow_airflow.cli.terminal.tables import Column, print_table
from elasticflow_airflow.times import local_moment

if TYPE_CHECKING:
    from elasticflow_airflow.api.insight import CapacityWant, ReleasableNode

_NODES = (Column("releasable", key=True), Column("slots"), Column("now"), Column("why"))
_WANTS = (Column("deadline"), Column("task", key=True), Column("wants more"), Column("why"))


def capacity(
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    hours: float = Hours,
    as_json: bool = AsJson,
) -> None:
    """Show which nodes no job needs in the next hours, or how many more are needed, and by which jobs."""
    with client(url, state_dir) as service:
        answer = service.capacity(hours)
    if as_json:
        print_json(answer)
        return
    if answer.releasable:
        print_table(_NODES, [_node_row(node) for node in answer.releasable])
    wants = [*((want, "") for want in answer.wanted_by), *((want, "hopeless, ") for want in answer.hopeless)]
    if wants:
        print_table(_WANTS, [_want_row(want, mark) for want, mark in wants])
    say(answer.summary)


def _node_row(node: ReleasableNode) -> tuple[str | Text, ...]:
    return node.node_id, str(node.slots), Text("idle", style="green") if node.idle else "in use", node.reason


def _want_row(want: CapacityWant, mark: str) -> tuple[str | Text, ...]:
    need = mark + want.need.replace("_", " ")
    return local_moment(want.deadline_at), want.task, Text(need, style="red"), want.reason
