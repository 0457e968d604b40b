"""The ``elasticflow`` command: run the service, inspect jobs and act on them. Parts are imported on first use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import typer
from rich.console import Console

from elasticflow_airflow import __version__
from elasticflow_airflow.api import Event, JobStatus, State, Wire
from elasticflow_airflow.cli import amend, capacity, doctor, forecast, logs, node, reproduce, status, submit
from elasticflow_airflow.cli.connection import JobId, StateDir, Url, check_name, client, whole_id
from elasticflow_airflow.cli.simulator import simulate, synthesize
from elasticflow_airflow.cli.terminal.lines import AsJson, print_json
from elasticflow_airflow.cli.unowned import SILENT

app = typer.Typer(
    name="elasticflow",
    help="Training jobs with deadlines: serve them, and see what the scheduler does and why.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
_POLL_S = 1.0

app.command()(simulate.simulate)
app.command()(simulate.compare)
app.command()(synthesize.synthesize)
app.command()(forecast.forecast)
app.command()(capacity.capacity)
app.command()(submit.submit)
app.command()(logs.logs)
app.command()(reproduce.reproduce)
app.command()(status.status)
app.command()(amend.amend)
app.command()(amend.cancel)
app.command()(doctor.doctor)
app.command()(node.node)


class JobWithEvents(Wire):
    """What ``elasticflow show --json`` prints."""

    job: JobStatus
    events: list[Event]


def _print(*lines: object) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        # Text from jobs is not markup: a log line may contain brackets.
        console.print(line, markup=not isinstance(line, str))


def _print_version(wanted: bool) -> None:
    if wanted:
        _print(f"elasticflow {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


_OwnStateDir = typer.Option(
    None,
    "--state-dir",
    help="State directory of this service: database, log, code, checkpoints. Default: elasticflow in $AIRFLOW_HOME,"
    " else ~/.elasticflow.",
)


@app.command()
def serve(
    host: str | None = typer.Option(
        None, help="Listen on TCP at this address; needs ELASTICFLOW_TOKEN or ELASTICFLOW_TOKEN_FILE."
    ),
    port: int | None = typer.Option(None, min=0, max=65535, help="TCP port; default: 8321."),
    policy: str | None = typer.Option(
        None, help="Must be elasticflow. To try other policies, use elasticflow simulate."
    ),
    objective: str | None = typer.Option(
        None, help="Which jobs to admit when not all fit: auto (default), first-come, or value."
    ),
    state_dir: Path | None = _OwnStateDir,
) -> None:
    """Run the scheduler service in the foreground. Every setting has an environment variable ELASTICFLOW_<NAME>."""
    given = {"HOST": host, "PORT": port, "POLICY": policy, "OBJECTIVE": objective, "STATE_DIR": state_dir}
    for name, value in given.items():
        if value is not None:
            os.environ[f"ELASTICFLOW_{name}"] = str(value)
    from elasticflow_airflow.service.__main__ import main as run

    raise typer.Exit(run([]))


@app.command()
def health(url: str | None = Url, state_dir: Path | None = StateDir, as_json: bool = AsJson) -> None:
    """Show the health of the service, and which job holds which slot."""
    from elasticflow_airflow.cli.terminal.display import health_lines

    with client(url, state_dir) as service:
        found = service.health()
    if as_json:
        print_json(found)
    else:
        _print(*health_lines(found))


@app.command()
def jobs(
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    state: State | None = typer.Option(None, help="Only jobs in this state."),  # noqa: B008
    dag_id: str | None = typer.Option(None, "--dag", help="Only jobs of this DAG."),
    live: bool = typer.Option(False, "--live", help="Only jobs that have not ended."),
    limit: int = typer.Option(50, min=1, max=1000, help="At most this many, newest first."),
    cursor: str | None = typer.Option(None, help="Continue after the previous page, with the cursor that it printed."),
    unowned: bool = typer.Option(
        False, "--unowned", help="Only live jobs whose Airflow task is gone, or that nobody polls; since when, and why."
    ),
    silent_s: float = typer.Option(60.0, "--silent", min=1, help=SILENT),
    as_json: bool = AsJson,
) -> None:
    """List jobs: state, progress, projected finish against the deadline."""
    from elasticflow_airflow.cli.terminal.display import print_jobs
    from elasticflow_airflow.cli.unowned import print_unowned

    with client(url, state_dir) as service:
        if unowned:
            wanted = [
                one
                for one in service.unowned_jobs(silent_s)
                if state in (None, one.job.state) and dag_id in (None, one.job.identity.dag_id)
            ][:limit]
            if as_json:
                print_json(wanted)
            elif wanted:
                print_unowned(wanted)
            else:
                _print("no such jobs")
            return
        found = service.list_jobs(state=state, dag_id=dag_id, live=live or None, limit=limit, cursor=cursor)
    if as_json:
        print_json(found)
    elif found:
        print_jobs(found)
        if len(found) == limit:
            _print(f"the next page: the same with --cursor {found[-1].cursor}")
    else:
        _print("no such jobs")


@app.command()
def show(job_id: str = JobId, url: str | None = Url, state_dir: Path | None = StateDir, as_json: bool = AsJson) -> None:
    """Show one job and its events: what was decided, and why."""
    from elasticflow_airflow.cli.terminal.display import event_line, job_lines

    check_name(job_id)
    with client(url, state_dir) as service:
        job_id = whole_id(service, job_id)
        found = JobWithEvents(job=service.status(job_id), events=service.events(job_id))
    if as_json:
        print_json(found)
    else:
        _print(*job_lines(found.job), *map(event_line, found.events))


@app.command()
def events(
    job_id: str = JobId,
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    follow: bool = typer.Option(False, "--follow", "-f", help="Follow until the job has ended."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, one event per line, instead of text."),
) -> None:
    """Print the events of a job."""
    from elasticflow_airflow.cli.terminal.display import event_line

    check_name(job_id)
    with client(url, state_dir) as service:
        job_id = whole_id(service, job_id)
        after = 0
        while True:
            ended = service.status(job_id).state.terminal
            for event in service.events(job_id, after=after):
                after = event.event_id
                if as_json:
                    typer.echo(event.model_dump_json())
                else:
                    _print(event_line(event))
            if ended or not follow:
                return
            time.sleep(_POLL_S)


@app.command()
def drain(
    node_id: str = typer.Argument(..., help="The node, as `health` names it."),
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    after_s: float = typer.Option(60.0, "--in", min=0, help="The node goes away in this many seconds."),
    undo: bool = typer.Option(
        False, "--undo", help="The node stays after all; its slots that are avoided are used again."
    ),
) -> None:
    """Announce that a node goes away: its workers are moved elsewhere before, without losing a step if possible."""
    check_name(node_id, "name of the node")
    with client(url, state_dir) as service:
        service.drain(node_id, None if undo else time.time() + after_s)
    _print(f"{node_id} stays" if undo else f"{node_id} goes away in {after_s:g} s")


def main() -> None:
    """Entry point of the ``elasticflow`` script."""
    app()
