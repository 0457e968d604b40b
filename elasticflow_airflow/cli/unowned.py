"""``jobs --unowned`` and ``cancel --unowned``: the live jobs that seem to have no owner."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.api.owners import UnownedJob
from elasticflow_airflow.api.submission import name_of
from elasticflow_airflow.cli.connection import fail
from elasticflow_airflow.cli.terminal.lines import say
from elasticflow_airflow.cli.terminal.tables import Column, print_table
from elasticflow_airflow.client import ElasticFlowClient, JobNotFound, StaleClaim
from elasticflow_airflow.times import local_moment

SILENT = "With --unowned: count a job as unowned once nobody has polled it for this many seconds."
_COLUMNS = (
    Column("job", key=True),
    Column("task"),
    Column("state"),
    Column("workers", number=True),
    Column("since"),
    Column("why"),
)


def print_unowned(jobs: Sequence[UnownedJob]) -> None:
    """Print one row per job; the job that has been unowned for the longest time comes first."""
    print_table(_COLUMNS, [_row(one) for one in jobs])


def cancel_unowned(service: ElasticFlowClient, silent_s: float, reason: str, *, yes: bool) -> None:
    """Cancel all unowned jobs after a prompt. Skips a job that an owner polls while the prompt is open."""
    found = {one.job.job_id: one for one in service.unowned_jobs(silent_s) if not one.owner_gone}  # those end already
    if not found:
        say("no job is unowned")
        return
    print_unowned(list(found.values()))
    if not yes:
        what = "this job" if len(found) == 1 else f"these {len(found)} jobs"
        confirm_cancelling(what, what)
        still = {(one.job.job_id, one.job.claim, one.since_at) for one in service.unowned_jobs(silent_s)}
        for one in list(found.values()):
            if (one.job.job_id, one.job.claim, one.since_at) not in still:
                say(f"{one.job.job_id} has an owner again, or is over: left alone")
                del found[one.job.job_id]
    for one in found.values():
        try:
            job = service.cancel(one.job.job_id, one.job.claim, reason)
        except (StaleClaim, JobNotFound) as error:
            say(f"{one.job.job_id} is left alone: {error}")
        else:
            say_cancelled(job)


def confirm_cancelling(what: str, asked: str) -> None:
    """Ask whether to cancel ``asked``. Ends the command if not, or, naming ``what``, if nobody is here to answer."""
    if not sys.stdin.isatty():
        fail(f"cancel {what}? Nobody is here to answer: give --yes")
    if not typer.confirm(f"Cancel {asked}?"):
        say("nothing was cancelled")
        raise typer.Exit(1)


def say_cancelled(job: JobStatus) -> None:
    """Print what has become of a job whose cancelling the service has taken."""
    say(f"{job.job_id} is {job.state}" if job.state.terminal else f"{job.job_id} is being cancelled")


def _row(one: UnownedJob) -> tuple[str, ...]:
    identity = one.job.identity
    task = f"{name_of(identity.recurring_key)}, run {identity.run_id}"
    return one.job.job_id, task, str(one.job.state), str(one.job.workers), local_moment(one.since_at), one.why
