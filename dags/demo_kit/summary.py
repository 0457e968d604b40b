"""What the demo has shown: asked, decided and why, workers over time, deadlines; and whether it kept its word."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from demo_kit.layout import DemoPaths
from demo_kit.watching import clock
from elasticflow_airflow.testing import JobOutcome

_COLUMNS = 60
_ENDS = ("succeeded", "failed", "cancelled", "suspended")


@dataclass(frozen=True, slots=True)
class Day:
    """One run of the DAG: its date, the state in which it ended, and its trainings."""

    date: str
    state: str
    jobs: Sequence[JobOutcome]


def summary_lines(days: Sequence[Day], layout: DemoPaths, readable: Callable[[str], str]) -> Iterator[str]:
    """The summary, a line at a time."""
    for number, day in enumerate(days, start=1):
        yield f"Day {number} ({day.date})"
        for job in day.jobs:
            asked = f"{job.status.total_steps} steps by {clock(job.deadline) if job.deadline else 'any time'}"
            yield f"  {job.status.identity.task_id}: asked for {asked}"
            yield f"    {job.verdict}: {readable(job.reason)}"
            yield f"    deadline {'met' if job.met else 'MISSED'}: {job.summary()}"
        if day.jobs:
            yield from _chart(day.jobs)
        evaluation = layout.models / "data" / day.date / "evaluation.json"
        if evaluation.exists():
            result = json.loads(evaluation.read_text())
            models = ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in result["models"].items())
            guess = f"always guessing the most frequent class {result['majority']:.1%}"
            yield f"  accuracy: {models}; a probe on the frozen encoder {result['probe']:.1%}, {guess}"
        yield ""
    if layout.accidents.exists():
        yield "What happened meanwhile"
        yield from (f"  {line}" for line in layout.accidents.read_text().splitlines())
        jobs = [job for day in days for job in day.jobs]
        yield f"  {sum(bool(job.met) for job in jobs)} of {len(jobs)} deadlines met"
        yield ""


def _chart(jobs: Sequence[JobOutcome]) -> Iterator[str]:
    began = min(job.events[0].at for job in jobs)
    column_s = max(1.0, max(job.events[-1].at for job in jobs) - began) / _COLUMNS
    yield f"  workers over time (one character is {column_s:.1f} s; . = none, or starting):"
    for job in jobs:
        moments = [began + (column + 0.5) * column_s for column in range(_COLUMNS)]
        row = "".join(str(_workers_at(job, at) or ".") for at in moments)
        yield f"    {job.status.identity.task_id:<18} |{row}|"


def _workers_at(job: JobOutcome, at: float) -> int:
    workers = 0
    for event in job.events:
        if event.at <= at and event.kind in ("started", "rescaled", *_ENDS):
            workers = 0 if event.kind in _ENDS else int(event.data["workers"])
    return workers


def broken_promises(days: Sequence[Day]) -> Iterator[str]:
    """What the demo is meant to show on two days, and did not; nothing when all is well."""
    jobs = [job for day in days for job in day.jobs]
    if [day.state for day in days] != ["success", "success"]:
        yield f"two DAG runs were to succeed, and they ended as {', '.join(day.state for day in days)}"
    for job in jobs:
        if not job.met:
            yield f"{job.status.identity.task_id} missed its deadline: {job.state} {job.status.state_reason}"
    if all(len(job.sizes) < 2 for job in jobs):
        yield "no job changed its number of workers while it ran"
    for job in jobs[2:]:
        if "measured" in job.kinds() or job.verdict != "admitted":
            yield f"{job.status.identity.task_id} was not admitted at once on the second day"
        if "starts from the weights of" not in job.story():
            yield f"{job.status.identity.task_id} did not start from the first day's weights"
