"""``elasticflow status``: on one screen, whether all is well, and what needs attention."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.text import Text

from elasticflow_airflow.api import ForecastAnswer, Health, State, Wire
from elasticflow_airflow.cli.connection import BAD_INPUT, StateDir, Url, client
from elasticflow_airflow.cli.terminal.display import leadership_lines, short_id, task_of
from elasticflow_airflow.cli.terminal.lines import AsJson, print_json, say
from elasticflow_airflow.cli.terminal.tables import Column, print_table
from elasticflow_airflow.client import ElasticFlowError
from elasticflow_airflow.client.attention import Attention, needing_attention
from elasticflow_airflow.times import local_moment

NOT_WELL = 1
_MOST_JOBS, _RECENT = 1000, 300
_FORECAST_H = 24.0
_ATTENTION = (Column("job", key=True), Column("task"), Column("trouble"), Column("what"))
_STYLES = {"late": "red", "rejected": "red", "failed": "red"}


class Status(Wire):
    """What ``elasticflow status --json`` prints. ``well``: there is no problem, and no job needs attention.

    ``problems`` are those of the service, and that there is no forecast. ``running`` and ``waiting`` count live jobs;
    ``forecast`` covers 24 hours and is None if it could not be made.
    """

    well: bool
    problems: list[str]
    health: Health
    running: int
    waiting: int
    attention: list[Attention]
    forecast: ForecastAnswer | None = None


def status(url: str | None = Url, state_dir: Path | None = StateDir, as_json: bool = AsJson) -> None:
    """Say on one screen whether all is well: service, slots, jobs that need attention, deadlines of the next day.

    Ends with status 1 if something needs attention, and with 2 if the service could not be asked.
    """
    with client(url, state_dir, refused=BAD_INPUT) as service:
        health = service.health()
        live = service.list_jobs(live=True, limit=_MOST_JOBS)
        ended = service.list_jobs(live=False, limit=_RECENT)
        attention = needing_attention(live, service.unowned_jobs(), ended, time.time())
        forecast, problems = None, list(health.problems)
        try:
            forecast = service.forecast(_FORECAST_H)
        except ElasticFlowError as error:  # All the rest is known.
            problems.append(f"the forecast could not be made: {error}")
    running = sum(job.state is State.RUNNING for job in live)
    missed = forecast is not None and forecast.not_kept > 0
    found = Status(
        well=not (problems or attention or missed),
        problems=problems,
        health=health,
        running=running,
        waiting=len(live) - running,
        attention=attention,
        forecast=forecast,
    )
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found.well:
        raise typer.Exit(NOT_WELL)


def _print(found: Status) -> None:
    health = found.health
    held = sum(bool(slot.job_id or slot.busy) for slot in health.slots)
    mark, style = ("all is well", "green") if found.well else ("needs attention", "yellow")
    say(f"{mark}: elasticflow {health.version}, engine {health.engine}", style)
    say(f"  slots     {held} of {len(health.slots)} in use")
    say(f"  jobs      {found.running} running, {found.waiting} waiting")
    say(f"  next day  {'unknown' if found.forecast is None else found.forecast.summary}")
    for line in [] if health.leadership is None else leadership_lines(health.role, health.leadership):
        say(f"  {line}")
    for problem in found.problems:
        say(f"  problem   {problem}", "red")
    if found.attention:
        _print_attention(found.attention)


def _print_attention(attention: Sequence[Attention]) -> None:
    ids = [one.job.job_id for one in attention]
    rows = [
        (
            short_id(one.job.job_id, ids),
            task_of(one.job),
            Text(one.trouble.replace("_", " "), style=_STYLES.get(one.trouble, "yellow")),
            f"{one.sentence}{_why(one)}",
        )
        for one in attention
    ]
    print_table(_ATTENTION, rows)


def _why(one: Attention) -> str:
    """Return the first clause of the job's own reason; `show` has all of it."""
    job = one.job
    why = {"rejected": job.verdict.reason, "failed": job.failure or job.state_reason, "set_aside": job.set_aside}
    said = re.split(r"\n|; ", why.get(one.trouble) or "", maxsplit=1)[0]
    earliest = job.verdict.earliest_deadline_at if one.trouble == "rejected" else None
    offer = "" if earliest is None else f"; earliest feasible deadline: {local_moment(earliest)}"
    return (f": {said}" if said else "") + offer
