"""Reads and writes the jobs of a trace file. Knows no scaling curves and no cluster.

Supports the public traces of the ElasticFlow paper (``submission_time, num_iteration, model_name, deadline, …``), their
T4 variant (``submit_time, iteration, model_name, ddl, …``) and our own format::

    job_id,submitted_s,steps,model,batch_size,deadline_s,workers,duration_s,best_effort,value,task,expected,due_s

``deadline_s`` is absolute (empty: none), ``workers`` is the size of a fixed-size request, ``duration_s`` the time at
that size. ``task`` names the recurring task that the job is a run of, ``expected`` says whether the calendar has the
run, ``due_s`` is its due time according to the timetable (empty: unknown).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.scheduler_core.simulator.inputs.csv_rows import require_width, rows_of
from elasticflow_airflow.scheduler_core.simulator.inputs.files import whole_file
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "job_id": ("job_id",),
    "submitted_s": ("submitted_s", "submission_time", "submit_time"),
    "steps": ("steps", "num_iteration", "iteration"),
    "model": ("model", "model_name"),
    "batch_size": ("batch_size",),
    "deadline_s": ("deadline_s", "deadline", "ddl"),
    "workers": ("workers", "num_gpu"),
    "duration_s": ("duration_s", "duration"),
    "best_effort": ("best_effort",),
    "value": ("value",),
    "task": ("task",),
    "expected": ("expected",),
    "due_s": ("due_s",),
}
_REQUIRED = ("job_id", "submitted_s", "steps", "model", "batch_size", "deadline_s")
COLUMNS = tuple(_ALIASES)
"""Columns of our own format, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One row. Times are in seconds since the origin of the trace; ``deadline_s`` is None for best effort."""

    job_id: str
    submitted_s: float
    steps: float
    model: str
    batch_size: int
    deadline_s: float | None
    workers: int = 1
    duration_s: float | None = None
    value: float = 1.0
    task: str = ""
    expected: bool = False
    due_s: float | None = None
    line: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """All jobs in order of submission; ``ignored`` are the unknown columns."""

    path: Path | None
    jobs: tuple[TraceJob, ...]
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """File name without its extension."""
        return self.path.stem if self.path is not None else "trace"


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        InputError: the file, a column or a row is invalid.
    """
    rows = rows_of(path)
    first = next(rows, None)
    if first is None:
        raise InputError("the file is empty; a trace begins with a header line", path)
    header = [name.strip() for name in first[1]]
    columns, ignored = _columns(header, path)
    jobs = [_job(row, len(header), columns, path, line) for line, row in rows if any(cell.strip() for cell in row)]
    seen: dict[str, int] = {}
    for job in jobs:
        if job.job_id in seen:
            problem_text = f"job_id {job.job_id!r} is already that of line {seen[job.job_id]}; ids must be unique"
            raise InputError(problem_text, path, job.line)
        seen[job.job_id] = job.line
    if not jobs:
        raise InputError("the trace has no jobs, only a header", path)
    if all(job.deadline_s is None for job in jobs):
        raise InputError("no job of the trace has a deadline, so there is nothing to keep; give at least one", path)
    jobs.sort(key=lambda job: job.submitted_s)
    return Trace(path, tuple(jobs), ignored)


def write_trace(path: Path, jobs: Iterable[TraceJob]) -> None:
    """Write jobs in our own format, atomically."""
    with whole_file(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for job in jobs:
            writer.writerow(
                [
                    job.job_id,
                    job.submitted_s,
                    job.steps,
                    job.model,
                    job.batch_size,
                    "" if job.deadline_s is None else job.deadline_s,
                    job.workers,
                    "" if job.duration_s is None else job.duration_s,
                    int(job.deadline_s is None),
                    job.value,
                    job.task,
                    int(job.expected),
                    "" if job.due_s is None else job.due_s,
                ]
            )


def _columns(header: list[str], path: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    found: dict[str, int] = {}
    used: set[int] = set()
    for name, aliases in _ALIASES.items():
        for alias in aliases:
            if alias in header:
                found[name] = header.index(alias)
                used.add(found[name])
                break
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        names = "; ".join(f"{name} (or {', '.join(_ALIASES[name][1:])})" for name in missing)
        raise InputError(f"the header lacks {names.replace(' (or )', '')}; it has {', '.join(header)}", path, 1)
    return found, tuple(name for i, name in enumerate(header) if i not in used)


def _job(row: list[str], width: int, columns: Mapping[str, int], path: Path, line: int) -> TraceJob:
    require_width(row, width, path, line)

    def text(name: str) -> str:
        return row[columns[name]].strip() if name in columns else ""

    def number(name: str, default: float | None = None) -> float:
        raw = text(name)
        if not raw and default is not None:
            return default
        try:
            value = float(raw)
        except ValueError:
            raise InputError(f"{name} is {raw!r}; it must be a number", path, line) from None
        if not math.isfinite(value):
            raise InputError(f"{name} is {raw!r}; it must be finite", path, line)
        return value

    def whole(name: str, default: float | None, least: int) -> int:
        value = number(name, default)
        if value != int(value) or value < least:
            raise InputError(f"{name} is {text(name)!r}; it must be a whole number of at least {least}", path, line)
        return int(value)

    if not text("job_id"):
        raise InputError("job_id is empty", path, line)
    if not text("model"):
        raise InputError("the name of the model is empty", path, line)
    submitted, steps, value = number("submitted_s"), number("steps"), number("value", 1.0)
    best_effort = bool(whole("best_effort", 0.0, 0))
    deadline = None if best_effort or not text("deadline_s") else number("deadline_s")
    if steps <= 0:
        raise InputError(f"steps is {text('steps')!r}; a job has at least one", path, line)
    if value < 0:
        raise InputError(f"value is {text('value')!r}; it cannot be negative", path, line)
    if deadline is not None and deadline <= submitted:
        raise InputError(
            f"the deadline {deadline:g} is not after the submission at {submitted:g}; deadlines are absolute times in"
            " seconds, of the same clock (best effort: leave it empty, or best_effort=1)",
            path,
            line,
        )
    task, expected = text("task"), bool(whole("expected", 0.0, 0))
    due = number("due_s") if text("due_s") else None
    if expected and not task:
        raise InputError(
            "expected is 1, but there is no task that it is a run of; name it in the column task", path, line
        )
    if expected and due is not None and due > submitted:
        raise InputError(
            f"due_s is {due:g}, after the submission at {submitted:g}; a run that is expected is submitted when it is"
            " due, or later",
            path,
            line,
        )
    return TraceJob(
        job_id=text("job_id"),
        submitted_s=submitted,
        steps=steps,
        model=text("model"),
        batch_size=whole("batch_size", None, 1),
        deadline_s=deadline,
        workers=whole("workers", 1.0, 1),
        duration_s=number("duration_s") if text("duration_s") else None,
        value=value,
        task=task,
        expected=expected,
        due_s=due,
        line=line,
    )
