"""``elasticflow submit``: a training without Airflow, with the same promise."""

from __future__ import annotations

import getpass
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console

from elasticflow_airflow.cli.connection import StateDir, Url, client, fail, program
from elasticflow_airflow.cli.display import moment
from elasticflow_airflow.cli.following import read
from elasticflow_airflow.cli.moments import FORMS, moment_of
from elasticflow_airflow.client import ElasticFlowClient, Snapshot, SnapshotError, snapshot_script
from elasticflow_airflow.wire import JobIdentity, JobStatus, JobSubmission, State, Verdict

NAMESPACE = "command-line"
"""Keeps these jobs apart from those of every Airflow."""
_REJECTED = 3
_LEASE_S = 30 * 24 * 3600.0
"""Nobody renews it: whoever submitted from a terminal may go home."""
_AWAY_S = 600.0


def submit(
    script: Path = typer.Argument(..., help="The script to train; its folder is taken along."),  # noqa: B008
    args: list[str] | None = typer.Argument(None, help="Its arguments; put -- before those that begin with -."),  # noqa: B008
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    steps: int | None = typer.Option(None, "--steps", min=1, help="How many optimizer steps to train; or --epochs."),
    epochs: int | None = typer.Option(None, "--epochs", min=1, help="How many epochs."),
    samples: int | None = typer.Option(None, "--samples", min=1, help="Samples of an epoch, if they are known."),
    batch: int = typer.Option(..., "--batch", min=1, help="Samples of a step, over all workers."),
    deadline: str | None = typer.Option(None, "--deadline", help=f"When it must have ended: {FORMS}."),
    best_effort: bool = typer.Option(False, "--best-effort", help="No deadline: trains with what others leave."),
    on_reject: str = typer.Option(
        "fail", "--on-reject", help="If the deadline cannot be promised: fail, best_effort, wait, renegotiate or late."
    ),
    latest_deadline: str | None = typer.Option(
        None,
        "--latest-deadline",
        help="With renegotiate or late, which lets its value fall until then: the latest deadline that will do.",
    ),
    value: float = typer.Option(1.0, "--value", min=1e-9, help="What meeting the deadline is worth."),
    min_workers: int = typer.Option(1, "--min-workers", min=1, help="Never fewer; a power of two."),
    max_workers: int | None = typer.Option(None, "--max-workers", min=1, help="Never more; a power of two."),
    target_loss: float | None = typer.Option(None, "--target-loss", help="End when the smoothed loss is there."),
    consistency: str = typer.Option(
        "consistent", "--consistency", help="consistent: the same weights for any number of workers; or fast."
    ),
    progress_regex: str | None = typer.Option(
        None, "--progress-regex", help="For scripts that know nothing of us: how a line of output tells the step."
    ),
    python: str | None = typer.Option(None, "--python", help="Interpreter on the service's machine; default: its own."),
    working_dir: str | None = typer.Option(None, "--working-dir", help="Working directory on the service's machine."),
    env: list[str] = typer.Option([], "--env", help="NAME=VALUE for the script; may be repeated."),  # noqa: B008
    secret_env: list[str] = typer.Option(  # noqa: B008
        [], "--secret-env", help="NAME of a variable of this shell that is passed on as a secret; may be repeated."
    ),
    name: str | None = typer.Option(
        None, "--name", help="Runs of one name share what is learned of their speed; default: the script's name."
    ),
    run: str | None = typer.Option(
        None, "--run", help="Name of the run; with one that exists it is attached to. Default: a new one."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Ask what would be promised; submit nothing."),
    wait: bool = typer.Option(False, "--wait", "-w", help="Print its log and wait for its end."),
) -> None:
    """Submit a training script with a deadline, without Airflow. Ends with status 3 if it cannot be promised.

    It is promised before the command returns, and trains on when the terminal is closed.
    """
    now = time.time()
    if best_effort == (deadline is not None):
        raise typer.BadParameter("give --deadline or --best-effort, one of the two")
    with client(url, state_dir, start=True, retry_for_s=_AWAY_S if wait else 0.0) as service:
        try:
            snapshot = snapshot_script(script)
        except SnapshotError as error:
            fail(str(error), 2)
        message: dict[str, Any] = {
            "identity": JobIdentity(
                namespace=NAMESPACE, dag_id=name or script.stem, run_id=run or _new_run(now), task_id="train"
            ),
            "command": {
                "snapshot": snapshot.sha256,
                "script": snapshot.entry,
                "args": tuple(args or ()),
                "python": python,
                "working_dir": working_dir,
                "env": _pairs(env),
            },
            "length": {"steps": steps, "epochs": None if steps is not None else epochs or 1, "samples": samples},
            "global_batch_size": batch,
            "deadline_at": None if deadline is None else moment_of(deadline, now),
            "best_effort": best_effort,
            "on_reject": on_reject,
            "latest_deadline_at": None if latest_deadline is None else moment_of(latest_deadline, now),
            "value": value,
            "min_workers": min_workers,
            "max_workers": max_workers,
            "target_loss": target_loss,
            "consistency": consistency,
            "progress_regex": progress_regex,
            "lease_s": _LEASE_S,
            "orphan_s": _LEASE_S,
            "labels": {"submitted_by": getpass.getuser()},
        }
        try:
            submission = JobSubmission.model_validate(message)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            fail(f"cannot be submitted: {wrong}", 2)
        submission = submission.model_copy(update={"secret_env": _secrets(secret_env)})
        if dry_run:
            answer = service.dry_run(submission)
            _say(answer.job_id, answer.verdict, answer.projected_finish_at)
            raise typer.Exit(_REJECTED if answer.verdict.decision == "rejected" else 0)
        _submit(service, snapshot, submission, wait=wait)


def _submit(service: ElasticFlowClient, snapshot: Snapshot, submission: JobSubmission, *, wait: bool) -> None:
    service.upload_snapshot(snapshot)
    attachment = service.submit(submission)
    job = attachment.job
    for warning in attachment.warnings:
        Console(stderr=True).print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    _say(job.job_id, job.verdict, job.projected_finish_at, job.state_reason)
    if job.state is State.REJECTED:
        raise typer.Exit(_REJECTED)
    if not wait:
        _print(f"follow it with: {program()} logs -f {job.job_id}")
        return
    try:
        for piece in read(service, job.job_id, None, follow=True):
            if piece.text:
                typer.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        _print(f"\n{job.job_id} trains on; end it with: {program()} cancel {job.job_id}")
        raise typer.Exit(130) from None
    _conclude(service, service.status(job.job_id), attachment.claim)


def _conclude(service: ElasticFlowClient, job: JobStatus, claim: int) -> None:
    if job.state is State.REJECTED:
        _say(job.job_id, job.verdict, None)
        raise typer.Exit(_REJECTED)
    if job.state is not State.SUCCEEDED:
        fail(f"{job.job_id} {job.state}: {job.failure or job.state_reason}")
    if not job.acknowledged and job.claim == claim:
        service.acknowledge(job.job_id, claim)
    result = job.result
    met = "" if result is None or result.met is None else ", in time" if result.met else ", but late"
    _print(f"{job.job_id} succeeded after {job.step} steps{met}")
    if result is not None and result.checkpoint_path:
        _print(f"checkpoint: {result.checkpoint_path}")


def _say(job_id: str, verdict: Verdict, projected_at: float | None, meanwhile: str = "") -> None:
    reason = verdict.reason or meanwhile
    _print(f"{job_id}: {verdict.decision.replace('_', ' ')}{f', {reason}' if reason else ''}")
    if projected_at is not None:
        _print(f"projected finish {moment(projected_at)}")
    if verdict.earliest_deadline_at is not None:
        _print(f"the earliest deadline that can be promised is {moment(verdict.earliest_deadline_at)}")


def _new_run(now: float) -> str:
    return f"{getpass.getuser()}-{datetime.fromtimestamp(now).astimezone().strftime('%Y%m%dT%H%M%S.%f')}"


def _pairs(given: list[str]) -> dict[str, str]:
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise typer.BadParameter(f"--env {pair!r}: write NAME=VALUE")
    return {pair.partition("=")[0]: pair.partition("=")[2] for pair in given}


def _secrets(names: list[str]) -> dict[str, SecretStr]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise typer.BadParameter(f"--secret-env {missing[0]}: this shell has no such variable; export it first")
    return {name: SecretStr(os.environ[name]) for name in names}


def _print(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(line, markup=False)
