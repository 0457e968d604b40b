"""``elasticflow amend`` and ``elasticflow cancel``: change a job's deadline or value, or cancel the job."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from elasticflow_airflow.api import AmendRequest, State
from elasticflow_airflow.api.training_options import MOMENT_FORMS
from elasticflow_airflow.cli.connection import JobId, StateDir, Url, check_name, client, fail, whole_id
from elasticflow_airflow.cli.terminal.lines import say
from elasticflow_airflow.cli.terminal.moments import moment_of
from elasticflow_airflow.cli.unowned import SILENT, cancel_unowned, confirm_cancelling, say_cancelled
from elasticflow_airflow.times import local_moment

_NOT_PROMISED = 3


def amend(
    job_id: str = JobId,
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    deadline: str | None = typer.Option(None, "--deadline", help=f"The new deadline: {MOMENT_FORMS}."),
    best_effort: bool = typer.Option(False, "--best-effort", help="Drop the deadline."),
    value: float | None = typer.Option(None, "--value", min=1e-9, help="What meeting the deadline is worth."),
) -> None:
    """Change a job's deadline or value, if that can be promised; otherwise nothing changes (status 3).

    For a job that was rejected, failed or cancelled, set what its next attempt asks for; then clear its task.
    """
    check_name(job_id)
    if deadline is None and not best_effort and value is None:
        raise typer.BadParameter("nothing to change: give --deadline, --best-effort or --value")
    if deadline is not None and best_effort:
        raise typer.BadParameter("--deadline beside --best-effort: give one of the two")
    wanted_at = None if deadline is None else moment_of(deadline, time.time())
    with client(url, state_dir) as service:
        job_id = whole_id(service, job_id)
        job = service.status(job_id)
        if job.state is State.SUCCEEDED:
            fail(f"job {job_id} is {job.state}: there is nothing left to change")
        keeps = wanted_at is None and not best_effort and not job.state.terminal
        kept_at = job.deadline_at if keeps else wanted_at
        request = AmendRequest(claim=job.claim, deadline_at=kept_at, value=value, best_effort=best_effort)
        answer = service.amend(job_id, request)
    if answer.accepted:
        say(f"{job_id}: {answer.reason}")
        return
    offer = answer.earliest_deadline_at
    more = "" if offer is None else f"; the earliest deadline that can be promised is {local_moment(offer)}"
    fail(f"not promised, and what held before holds on: {answer.reason}{more}", _NOT_PROMISED)


def cancel(
    job_id: str | None = typer.Argument(None, help=JobId.help),
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    reason: str = typer.Option("cancelled on the command line", help="What the event log says."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    unowned: bool = typer.Option(False, "--unowned", help="All jobs that `jobs --unowned` lists, instead of one."),
    silent_s: float = typer.Option(60.0, "--silent", min=1, help=SILENT),
) -> None:
    """Cancel a job, or all unowned jobs; its Airflow task, if one is waiting, fails and says so."""
    if (job_id is None) is not unowned:
        raise typer.BadParameter("give the id of a job, or --unowned for all that nobody wants")
    if job_id is None:
        with client(url, state_dir) as service:
            cancel_unowned(service, silent_s, reason, yes=yes)
        return
    check_name(job_id)
    with client(url, state_dir) as service:
        job_id = whole_id(service, job_id)
        job = service.status(job_id)
        if job.state.terminal:
            say(f"{job_id} is {job.state} already")
            return
        if not yes:
            identity = job.identity
            what = f"{identity.dag_id}.{identity.task_id}, run {identity.run_id}"
            total = "" if job.total_steps is None else f" of {job.total_steps}"
            asked = f"{what}: {job.state}, step {job.step}{total}, {job.workers} workers"
            confirm_cancelling(f"{job.job_id} ({what})", asked)
        job = service.cancel(job_id, service.status(job_id).claim, reason)
    say_cancelled(job)
