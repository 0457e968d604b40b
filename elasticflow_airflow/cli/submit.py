"""``elasticflow submit``: submits a training without Airflow, with the same promise of its deadline."""

from __future__ import annotations

import getpass
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from pydantic import SecretStr, ValidationError

from elasticflow_airflow.api import JobStatus, JobSubmission, State, Verdict
from elasticflow_airflow.api.training_options import on_wire
from elasticflow_airflow.cli.connection import BAD_INPUT, StateDir, Url, client, fail, program, what_is_wrong
from elasticflow_airflow.cli.logs import read
from elasticflow_airflow.cli.terminal.lines import note, say
from elasticflow_airflow.cli.terminal.moments import moment_of
from elasticflow_airflow.cli.training_flags import with_training_flags
from elasticflow_airflow.client import ElasticFlowClient, Snapshot, SnapshotError, snapshot_script
from elasticflow_airflow.requirement_lines import read_requirements
from elasticflow_airflow.times import local_moment

NAMESPACE = "command-line"
"""Separates these jobs from those of any Airflow."""
_REJECTED = 3
_LEASE_S = 30 * 24 * 3600.0
"""Long, because no client renews it: the terminal of the submission may be closed."""
_AWAY_S = 600.0
_POLL_S = 0.5
_TAKE_LATER = ("renegotiate", "late")


@with_training_flags
def submit(
    *,
    script: Path = typer.Argument(..., help="The script to train; its folder is taken along."),  # noqa: B008
    args: list[str] | None = typer.Argument(  # noqa: B008
        None, help="Its arguments, last of all; put -- before the first that begins with -."
    ),
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    training: dict[str, Any],
    name: str | None = typer.Option(
        None, "--name", help="Runs of one name share what is learned about their speed; default: the script's name."
    ),
    run: str | None = typer.Option(
        None, "--run", help="Name of the run; if it exists, it is attached to. Default: a new one."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Ask what would be promised; submit nothing."),
    wait: bool | None = typer.Option(
        None,
        "--wait/--no-wait",
        "-w",
        help="Print its log and wait for its end; or do not even wait for the verdict. Default: wait for the verdict.",
    ),
) -> None:
    """Submit a training script with a deadline, without a DAG. Ends with status 3 if it cannot be promised.

    Returns when it is promised or rejected: a training whose speed is not known yet is measured first, while it trains.
    With --no-wait, or interrupted, it may still be rejected later. It trains on when the terminal is closed.
    """
    now = time.time()
    steps, epochs, samples = training["steps"], training["epochs"], training["samples"]
    deadline, latest_deadline = training["deadline"], training["latest_deadline"]
    if training["best_effort"] == (deadline is not None):
        raise typer.BadParameter("give --deadline or --best-effort, one of the two")
    if steps is not None and (epochs is not None or samples is not None):
        other = f"--samples={samples}" if epochs is None else f"--epochs={epochs}"
        raise typer.BadParameter(f"--steps={steps} beside {other}: give steps, or epochs and their samples")
    if latest_deadline is not None and training["on_reject"] not in _TAKE_LATER:
        wanted = f"--on-reject {' or '.join(_TAKE_LATER)}"
        raise typer.BadParameter(
            f"--latest-deadline={latest_deadline!r} beside --on-reject={training['on_reject']}: it is for {wanted}"
        )
    snapshot = _snapshot(script)
    message = on_wire(
        training
        | {
            "script": snapshot.entry,
            "script_args": tuple(args or ()),
            "env": _pairs(training["env"]),
            "requirements": _requirements(training["requirements"]),
            "secret_env": {},  # set after all checks, since a validation error quotes its input
            "epochs": 1 if epochs is None and samples is not None else epochs,
            "deadline": None if deadline is None else moment_of(deadline, now),
            "latest_deadline": None
            if latest_deadline is None
            else moment_of(latest_deadline, now, option="--latest-deadline"),
        }
    )
    message["command"]["snapshot"] = snapshot.sha256
    message |= {
        "identity": {
            "namespace": NAMESPACE,
            "dag_id": name or script.stem,
            "run_id": run or _new_run(now),
            "task_id": "train",
        },
        "lease_s": _LEASE_S,
        "orphan_s": _LEASE_S,
        "labels": {"submitted_by": getpass.getuser()},
    }
    try:
        submission = JobSubmission.model_validate(message)
    except ValidationError as error:
        fail(f"cannot be submitted: {what_is_wrong(error)}", BAD_INPUT)
    submission = submission.model_copy(update={"secret_env": _secrets(training["secret_env"])})
    with client(url, state_dir, start=True) as service:
        if dry_run:
            answer = service.dry_run(submission)
            _say_verdict(answer.job_id, answer.verdict, answer.projected_finish_at)
            raise typer.Exit(_REJECTED if answer.verdict.decision == "rejected" else 0)
        _submit(service, snapshot, submission, wait=wait)


def _snapshot(script: Path) -> Snapshot:
    """Snapshot the script's folder. Ends the command with a message if that fails."""
    if not script.is_file():
        what = "is a folder: name the script in it" if script.is_dir() else "is not there: give the path of a script"
        fail(f"{script} {what}", BAD_INPUT)
    try:
        return snapshot_script(script)
    except SnapshotError as error:
        fail(str(error), BAD_INPUT)


def _submit(service: ElasticFlowClient, snapshot: Snapshot, submission: JobSubmission, *, wait: bool | None) -> None:
    service.upload_snapshot(snapshot)
    attachment = service.submit(submission)
    job = attachment.job
    service.retry_for_s = _AWAY_S  # From now on tolerate a restart of the service: the job survives it, too.
    for warning in attachment.warnings:
        note(f"warning: {warning}")
    try:
        if wait is None:
            job = _await_verdict(service, job, submission)
        _say_verdict(job.job_id, job.verdict, job.projected_finish_at, job.state_reason)
        if job.verdict.decision == "rejected":
            raise typer.Exit(_REJECTED)
        if wait:
            for piece in read(service, job.job_id, None, follow=True):
                if piece.text:
                    typer.echo(piece.text, nl=False)
            job = service.status(job.job_id)
    except KeyboardInterrupt:
        undecided = "" if wait else ", and may still be rejected"
        say(f"\n{job.job_id} goes on{undecided}; end it with: {program()} cancel {job.job_id}")
        raise typer.Exit(130) from None
    if wait or job.state.terminal:
        _conclude(service, job, attachment.claim)
        return
    if _is_open(job, submission):
        say(f"it may still be rejected; the verdict will be told by: {program()} show {job.job_id}")
    say(f"follow it with: {program()} logs -f {job.job_id}")


def _await_verdict(service: ElasticFlowClient, job: JobStatus, submission: JobSubmission) -> JobStatus:
    """Wait until the job is promised or rejected, printing the reason for the wait.

    Returns early for a job that was submitted with ``on_reject="wait"`` and waits for capacity.
    """
    said, pause_s = "", _POLL_S / 16
    while _is_open(job, submission) and not job.state.terminal:
        if submission.on_reject == "wait" and job.state is State.WAITING:
            break
        if job.state_reason not in ("", said):
            said = job.state_reason
            note(f"{job.job_id}: not decided yet, {said}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)  # Most verdicts come at once; some take until a speed is measured.
        job = service.status(job.job_id)
    return job


def _is_open(job: JobStatus, submission: JobSubmission) -> bool:
    """Whether the job may still be rejected."""
    return job.verdict.decision == "undecided" and not submission.best_effort


def _conclude(service: ElasticFlowClient, job: JobStatus, claim: int) -> None:
    if job.verdict.decision == "rejected":
        _say_verdict(job.job_id, job.verdict, None)
        raise typer.Exit(_REJECTED)
    if job.state is not State.SUCCEEDED:
        fail(f"{job.job_id} {job.state}: {job.failure or job.state_reason}")
    if not job.acknowledged and job.claim == claim:
        service.acknowledge(job.job_id, claim)
    result = job.result
    met = "" if result is None or result.met is None else ", in time" if result.met else ", but late"
    # If no step was reported, nothing is known about the training, and the service's reason says so.
    done = f" after {job.step} steps{met}" if job.step else f"{met}: {job.state_reason}"
    say(f"{job.job_id} succeeded{done}")
    if result is not None and result.checkpoint_path:
        say(f"checkpoint: {result.checkpoint_path}")


def _say_verdict(job_id: str, verdict: Verdict, projected_at: float | None, meanwhile: str = "") -> None:
    reason = verdict.reason or meanwhile
    say(f"{job_id}: {verdict.decision.replace('_', ' ')}{f', {reason}' if reason else ''}")
    if projected_at is not None:
        say(f"projected finish {local_moment(projected_at)}")
    if verdict.earliest_deadline_at is not None:
        say(f"the earliest deadline that can be promised is {local_moment(verdict.earliest_deadline_at)}")


def _new_run(now: float) -> str:
    return f"{getpass.getuser()}-{datetime.fromtimestamp(now).astimezone().strftime('%Y%m%dT%H%M%S.%f')}"


def _pairs(given: list[str]) -> dict[str, str]:
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise typer.BadParameter(f"--env {pair!r}: write NAME=VALUE")
    return {pair.partition("=")[0]: pair.partition("=")[2] for pair in given}


def _requirements(path: str | None) -> tuple[str, ...]:
    try:
        return () if path is None else read_requirements(Path(path))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--requirements {path!r}: {error}") from error


def _secrets(names: list[str]) -> dict[str, SecretStr]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise typer.BadParameter(f"--secret-env {missing[0]}: this shell has no such variable; export it first")
    return {name: SecretStr(os.environ[name]) for name in names}
