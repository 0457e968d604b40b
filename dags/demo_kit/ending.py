"""Brings down what the demo has started: jobs, then the service, then whoever is left. Nothing outlives the demo."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from demo_kit.layout import Layout
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint, StaleClaim

_JOBS_WITHIN_S = 60.0
_LEAVE_WITHIN_S = 20.0


def bring_down(layout: Layout) -> None:
    """Cancel the jobs that live, have the service leave, and wait until no process of this demo is left."""
    if not processes_of(layout):
        return
    _cancel_jobs(layout)
    # Workers leave by themselves once their job is cancelled; the service only when it is told, or idle for long.
    for process in processes_of(layout):
        if "elasticflow_airflow.service" in _command(process):
            process.terminate()
    if _wait(lambda: not processes_of(layout), _LEAVE_WITHIN_S):
        return
    for process in processes_of(layout):
        process.kill()
    _wait(lambda: not processes_of(layout), _LEAVE_WITHIN_S)


def processes_of(layout: Layout) -> list[psutil.Process]:
    """The demo's service and supervisors, known by the state folder among their arguments; workers end with those."""
    folder = str(layout.state_dir)
    return [process for process in psutil.process_iter() if _is_ours(_command(process), folder)]


def _is_ours(command: list[str], folder: str) -> bool:
    ours = any(argument.startswith("elasticflow_airflow.") for argument in command)
    return ours and any(argument == folder or argument.startswith(f"{folder}/") for argument in command)


def _command(process: psutil.Process) -> list[str]:
    """The command line; empty for one that has ended, or is nobody's business."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _cancel_jobs(layout: Layout) -> None:
    socket = layout.state_dir / "service.sock"
    if not socket.exists():
        return
    with ElasticFlowClient(Endpoint(socket_path=socket), retry_for_s=0) as service:

        def all_ended() -> bool:
            try:
                live = service.list_jobs(live=True)
                for job in live:
                    service.cancel(job.job_id, job.claim, "the demo was stopped")
            except StaleClaim:
                return False  # Taken over a moment ago: look again.
            except ElasticFlowError:
                return True  # The service has gone, and what it left is ended below.
            return not live

        _wait(all_ended, _JOBS_WITHIN_S)


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True
