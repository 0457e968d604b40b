"""``airflow elasticflow feed``: reports to the services when the runs of all elastic tasks are due; for cron."""

from __future__ import annotations

import sys
from datetime import timedelta

import pendulum
import typer

from elasticflow_airflow.airflow_cli.process_context import reading_the_database
from elasticflow_airflow.recurring.calendar_feed import TaskDue, feed_services, find_due_runs, post_to_service

AWAY = 1


def feed(
    hours: float = typer.Option(48.0, "--hours", min=0.01, max=336.0, help="How far ahead."),
    dag_id: str | None = typer.Option(None, "--dag", help="Only this DAG."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be told; tell nobody."),
) -> None:
    """Tell the services when the elastic tasks of all DAGs are due; for a cron task.

    Ends with status 1 when a service is away, once the others have been told.
    """
    with reading_the_database():
        _feed(hours, dag_id, dry_run=dry_run)


def _feed(hours: float, dag_id: str | None, *, dry_run: bool) -> None:
    from airflow.utils.session import create_session
    from rich.console import Console

    from elasticflow_airflow.cli.terminal.tables import Column, print_table

    console = Console(highlight=False, soft_wrap=True)
    with create_session() as session:
        found = find_due_runs(
            session,
            now=pendulum.now("UTC"),
            window=timedelta(hours=hours),
            dag_ids=[dag_id] if dag_id else None,
        )
    for problem in found.problems:
        console.print(f"warning: {problem}", style="yellow", markup=False)
    if not found.tasks and not found.former:
        console.print("no elastic task was found: nothing to tell")
        return
    if found.tasks:
        columns = [Column("task", key=True), *(Column(name) for name in ("due runs", "next", "last", "connection"))]
        print_table(columns, [_row(task) for task in found.tasks])
    if dry_run:
        console.print("told to nobody (--dry-run)")
        return
    told = feed_services(found, post_to_service, whole=not dag_id)
    for problem in told.warnings():
        console.print(f"warning: {problem}", style="yellow", markup=False)
    due = {name for task in found.tasks if task.due for name in task.names()}
    for conn_id, answer in told.answers.items():
        line = f"{conn_id}: {answer.taken} tasks told"
        if unknown := [name for name in answer.unknown if name in due]:
            line += f"; nothing can be kept free yet for {', '.join(unknown)}: they have not run there"
        if answer.forgotten:
            line += f"; nothing is kept free any more for {', '.join(answer.forgotten)}: they are no more"
        console.print(line, markup=False)
    for conn_id, error in told.errors.items():
        console.print(f"{conn_id}: the service was not told: {error}", style="red", markup=False)
    if told.errors:
        sys.exit(AWAY)


def _row(task: TaskDue) -> tuple[str, ...]:
    name = f"{task.dag_id}.{task.task_id}"
    if task.map_indexes != (-1,):
        name += f" x {len(task.map_indexes)}"
    ends = [f"{due:%a %Y-%m-%d %H:%M} UTC" for due in (task.due[0], task.due[-1])] if task.due else ["-", "-"]
    return name, str(len(task.due)), *ends, task.conn_id
