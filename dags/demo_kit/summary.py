"""What the demo has shown: asked, decided and why, workers over time, deadlines; and whether it kept its word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from demo_kit.watching import Watcher, clock
from elasticflow_airflow.wire import Event, JobStatus, State

_COLUMNS = 60
_ENDS = ("succeeded", "failed", "cancelled", "suspended")
_DECISIVE = (
    "submitted",
    "measured",
    "admitted",
    "rejected",
    "resized",
    "rescaled",
    "worker_lost",
    "restart_instead",
    "kept",
    "initialised",
    "at_risk",
    "succeeded",
    "failed",
)


def days_of(watcher: Watcher) -> list[list[JobStatus]]:
    """Jobs of each day, in order."""
    runs: dict[str, list[JobStatus]] = {}
    for job in sorted(watcher.jobs.values(), key=lambda job: job.submitted_at):
        runs.setdefault(job.identity.run_id, []).append(job)
    return [sorted(jobs, key=lambda job: job.identity.task_id) for jobs in runs.values()]


def summary_lines(watcher: Watcher) -> Iterator[str]:
    """The summary, a line at a time."""
    for number, jobs in enumerate(days_of(watcher), start=1):
        day = watcher.days[number - 1]["day"] if number <= len(watcher.days) else "?"
        yield f"Day {number} ({day})"
        for job in jobs:
            yield from _job_lines(job, watcher)
        yield f"  workers over time (one character is {_span(jobs, watcher)[2]:.1f} s; . = none, or starting):"
        yield from _chart(jobs, watcher)
        yield from _evaluation_lines(watcher, day)
        yield ""


def _job_lines(job: JobStatus, watcher: Watcher) -> Iterator[str]:
    task = job.identity.task_id
    deadline = "none" if job.deadline_at is None else clock(job.deadline_at)
    yield f"  {task}: asked for {job.total_steps} steps by {deadline}"
    for event in watcher.events[job.job_id]:
        if event.kind in _DECISIVE:
            yield f"    #{event.event_id:<4} {clock(event.at)}  {event.kind:<12} {watcher.readable(event.reason)}"
    result = job.result
    if result is not None and result.met is not None and result.slack_s is not None:
        kept = "met" if result.met else "MISSED"
        yield (
            f"    deadline {kept}, {result.slack_s:.0f} s to spare; {result.rescales} "
            f"{'change' if result.rescales == 1 else 'changes'} of size, {result.gpu_seconds:.0f} slot-seconds"
        )


def _span(jobs: Sequence[JobStatus], watcher: Watcher) -> tuple[float, float, float]:
    began = min(job.submitted_at for job in jobs)
    ended = max(watcher.events[job.job_id][-1].at for job in jobs)
    return began, ended, max(1.0, ended - began) / _COLUMNS


def _chart(jobs: Sequence[JobStatus], watcher: Watcher) -> Iterator[str]:
    began, _, step_s = _span(jobs, watcher)
    for job in jobs:
        events = watcher.events[job.job_id]
        row = ""
        for column in range(_COLUMNS):
            at = began + (column + 0.5) * step_s
            workers = workers_at(events, at)
            row += str(workers) if workers else "."
        yield f"    {job.identity.task_id:<18} |{row}|"


def workers_at(events: Sequence[Event], at: float) -> int:
    """How many workers trained at a moment, by the events."""
    workers = 0
    for event in events:
        if event.at > at:
            break
        if event.kind in ("started", "rescaled"):
            workers = int(event.data.get("workers", 0))
        elif event.kind in _ENDS:
            workers = 0
    return workers


def _evaluation_lines(watcher: Watcher, day: str) -> Iterator[str]:
    path = watcher.layout.models / "data" / day / "evaluation.json"
    if not path.exists():
        return
    result = json.loads(path.read_text())
    models = ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in result["models"].items())
    yield (
        f"  accuracy: {models}; a probe on the frozen encoder {result['probe']:.1%}, "
        f"always guessing the most frequent class {result['majority']:.1%}"
    )


def broken_promises(watcher: Watcher) -> list[str]:
    """What the demo is meant to show, and did not; empty when all is well."""
    days = days_of(watcher)
    broken = []
    if len(days) != len(watcher.days) or not days:
        broken.append(f"{len(watcher.days)} days were run, and the service knows jobs of {len(days)}")
    for state_day, state in watcher.states.items():
        if state != "success":
            broken.append(f"the DAG run of {state_day} ended as {state}")
    for job in watcher.jobs.values():
        task = job.identity.task_id
        if job.state is not State.SUCCEEDED:
            broken.append(f"{task} of run {job.identity.run_id} is {job.state}: {job.state_reason}")
        elif job.result is None or not job.result.met:
            broken.append(f"{task} of run {job.identity.run_id} missed its deadline")
    if not any(job.result is not None and job.result.rescales for job in watcher.jobs.values()):
        broken.append("no job changed its number of workers while it ran")
    for job in days[1] if len(days) > 1 else ():
        kinds = {event.kind for event in watcher.events[job.job_id]}
        if "measured" in kinds or job.verdict.decision != "admitted":
            broken.append(f"{job.identity.task_id} was not admitted at once on the second day")
        if not any(e.kind == "initialised" and "weights of" in e.reason for e in watcher.events[job.job_id]):
            broken.append(f"{job.identity.task_id} did not start from the first day's weights")
    return broken
