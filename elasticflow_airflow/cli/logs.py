"""``elasticflow logs``: the output of rank 0, across rotations, restarts, rescales and incarnations."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.cli.connection import JobId, StateDir, Url, check_name, client, whole_id
from elasticflow_airflow.client import ElasticFlowClient, JobNotFound

_POLL_S = 1.0
_AWAY_S = 600.0
_END = (1 << 62) - 1
"""An offset beyond the end of any log: reading from it returns the end of the log."""


def logs(
    job_id: str = JobId,
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    worker: str | None = typer.Option(None, help="Name of the log, as `show` lists them; default: the newest rank 0."),
    follow: bool = typer.Option(
        False, "--follow", "-f", help="Follow through every generation, until the job has ended."
    ),
) -> None:
    """Print the output of a worker."""
    check_name(job_id)
    with client(url, state_dir, retry_for_s=_AWAY_S if follow else 0.0) as service:
        job_id = whole_id(service, job_id)
        written = False
        for piece in read(service, job_id, worker, follow=follow):
            if piece.note:
                Console(stderr=True).print(f"--- {piece.note}", style="dim", highlight=False, soft_wrap=True)
            if piece.text:
                typer.echo(piece.text, nl=False)
                written = True
    if not written:
        Console().print("no worker has written anything yet", highlight=False)


@dataclass(frozen=True, slots=True)
class LogPart:
    """The next piece of output: text, or a note about the log itself."""

    text: str = ""
    note: str = ""


@dataclass(slots=True)
class _Log:
    """The read position in one log."""

    name: str
    incarnation: int
    offset: int = 0


def read(
    service: ElasticFlowClient,
    job_id: str,
    worker: str | None,
    *,
    follow: bool,
    pause: Callable[[], None] = lambda: time.sleep(_POLL_S),
) -> Iterator[LogPart]:
    """Yield the log of ``worker``, or of the current rank 0, in pieces. Raises JobNotFound for a missing log."""
    log: _Log | None = None
    while True:
        job = service.status(job_id)  # First, so that what an ended job wrote until its end is still read below.
        if log is None:
            name = worker or newest_main_log(job.log_names)
            log = None if name is None else _Log(name, job.incarnation)
        if log is not None:
            ended = yield from _drain(service, job, log)
            if follow and (ended or log.incarnation != job.incarnation) and worker is None:
                successor = _successor(service, job, log)
                if successor is not None:
                    yield LogPart(note=f"goes on in {successor.name}")
                    log = successor
                    continue
        if job.state.terminal or not follow:
            return
        pause()


def newest_main_log(names: list[str]) -> str | None:
    """Return the log of the rank 0 that was started last."""
    main_logs = sorted(name for name in names if name.endswith("-r000"))
    return main_logs[-1] if main_logs else None


def _drain(service: ElasticFlowClient, job: JobStatus, log: _Log) -> Generator[LogPart, None, bool]:
    """Yield everything available; return whether the log is complete."""
    while True:
        try:
            piece = service.read_log(job.job_id, log.name, log.offset, incarnation=log.incarnation)
        except JobNotFound:
            if log.name not in job.log_names and log.incarnation == job.incarnation:
                raise  # The log never existed.
            yield LogPart(note=f"{log.name} is not there any more")
            return True
        if piece.start_offset > log.offset:
            yield LogPart(note=f"{piece.start_offset - log.offset} bytes of {log.name} were rotated away")
        if piece.text:
            yield LogPart(piece.text)
        if piece.next_offset <= log.offset:
            return piece.end_of_file
        log.offset = piece.next_offset


def _successor(service: ElasticFlowClient, job: JobStatus, log: _Log) -> _Log | None:
    """Return where rank 0 writes after the worker of ``log`` has ended: a newer rank 0, or a survivor in its place."""
    newer = newest_main_log([name for name in job.log_names if name > log.name or log.incarnation != job.incarnation])
    if newer is not None:
        return _Log(newer, job.incarnation)
    if job.state.terminal or log.incarnation != job.incarnation:
        return None
    for name in sorted(job.log_names):
        if name == log.name:
            continue
        try:
            last = service.read_log(job.job_id, name, _END, 1, incarnation=job.incarnation)
        except JobNotFound:
            continue  # This worker has written nothing yet.
        if not last.end_of_file:
            return _Log(name, job.incarnation, last.next_offset)
    return None
