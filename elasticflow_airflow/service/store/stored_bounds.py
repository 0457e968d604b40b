"""Checks stored rows for values out of bounds, which a less strict version or another program may have written.

Such rows can be read like all others, but no decision can be based on them. Pure functions over rows: each returns a
sentence that names the field, the limit and the remedy, or None.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from elasticflow_airflow import bounds
from elasticflow_airflow.api import JobSubmission
from elasticflow_airflow.api.fields import OUT_OF_BOUNDS
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.scheduler_core.model.values import JobState
from elasticflow_airflow.service.store.documents.columns import Unreadable, readable
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.tables import AmendmentRow, GenerationRow, IncarnationRow

_KINDS = {OUT_OF_BOUNDS, "float_type", "int_type", "too_long"}
"""The only errors that count: an accepted submission is not given up because another version has other rules."""


def submission_out_of_bounds(submission: StoredSubmission) -> str | None:
    """Return what is out of bounds in a stored submission, or why it cannot be read; None if nothing is wrong."""
    if isinstance(submission, Unreadable):
        return submission.problem
    said = submission.model_dump(exclude={"secret_env", "secret_names"}, warnings=False)
    try:
        JobSubmission.model_validate(said)
    except ValidationError as error:
        wrong = [
            ": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"])))
            for one in error.errors(include_url=False, include_input=False)
            if one["type"] in _KINDS
        ]
        return "; ".join(wrong) or None
    return None


def course_out_of_bounds(row: IncarnationRow) -> str | None:
    """Return what is out of bounds in the columns that change after submission; cheap enough for every pass."""
    times = {"deadline_at": row.deadline_at, "submitted_at": row.submitted_at, "last_step_at": row.last_step_at}
    counts = {
        "step": row.step,
        "total_steps": row.total_steps,
        "logical_workers": row.logical_workers,
        "seed": row.seed,
    }
    lengths = {"lease_s": row.lease_s, "orphan_s": row.orphan_s}
    lengths |= {f"costs.{name}": value for name, value in row.costs.known().items()}
    return _first(
        *(_named(name, bounds.time_problem(at)) for name, at in times.items() if at is not None),
        *(_named(name, bounds.count_problem(count)) for name, count in counts.items() if count is not None),
        *(_named(name, bounds.number_problem(value, 0.0, bounds.LONGEST_S)) for name, value in lengths.items()),
        *(_named("speeds", _speed_problem(size, speed)) for size, speed in row.speeds.items()),
        _named("value", bounds.number_problem(row.value, bounds.LEAST_VALUE, bounds.MOST_VALUE)),
        _named("init_from", None if row.init_from_path is None else bounds.path_problem(row.init_from_path)),
        _named("promoted", "names no checkpoint" if row.promoted and promotion_of(row) is None else None),
        *(_named(name, _unreadable(getattr(row, name))) for name in ("ending", "in_place", "target")),
    )


def promotion_of(row: IncarnationRow) -> Promotion | None:
    """Return the promoted checkpoint; None if there is none, or if it cannot be read."""
    found = readable(row.promoted)
    if found is None:
        return None
    try:
        counts = [bounds.count_problem(found.generation), bounds.count_problem(found.step)]
        path = PurePosixPath(found.path)
        is_inside = bounds.path_problem(found.path) is None and not path.is_absolute() and ".." not in path.parts
    except (TypeError, ValueError, AttributeError):
        return None
    return found if is_inside and counts == [None, None] else None


def state_out_of_bounds(state: JobState) -> str | None:
    """Return what is out of bounds in the scheduler's stored state of a job."""
    job, costs = state.job, state.job.costs
    times = {"submitted_s": job.submitted_s, "deadline_s": job.deadline_s, "latest_deadline_s": job.latest_deadline_s}
    times |= {"as_of_s": state.as_of_s, "waiting_since_s": state.waiting_since_s}
    steps = {"total_steps": job.total_steps, "remaining_steps": state.remaining_steps, "expected": state.expected_steps}
    lengths = {name: getattr(costs, name) for name in ("startup_s", "pause_s", "tail_s", "join_s")}
    workers = {"min_workers": job.min_workers, "max_workers": job.max_workers}
    curves = [curve for curve in (job.curve, state.told) if curve is not None]
    windows = ((size, seen.steps_per_s) for size, many in state.evidence.items() for seen in many)
    speeds = [*state.measured.items(), *windows, *(pair for curve in curves for pair in curve.steps_per_s.items())]
    return _first(
        *(_named(name, bounds.time_problem(at)) for name, at in times.items() if at is not None),
        *(_named(name, bounds.number_problem(n, 0, bounds.MOST_COUNT)) for name, n in steps.items() if n is not None),
        *(_named(name, bounds.number_problem(value, 0.0, bounds.LONGEST_S)) for name, value in lengths.items()),
        *(_named(name, _size_problem(size)) for name, size in workers.items() if size is not None),
        *(_named("curve", _speed_problem(size, speed)) for size, speed in speeds),
        _named("value", bounds.number_problem(job.value, bounds.LEAST_VALUE, bounds.MOST_VALUE)),
    )


def generation_out_of_bounds(row: GenerationRow) -> str | None:
    """Return what of a generation's documents cannot be read or is out of bounds; cheap enough for every pass."""
    unreadable = _first(_named("notes", _unreadable(row.notes)), _named("window", _unreadable(row.window)))
    if unreadable is not None or row.notes.leaving_at is None:
        return unreadable
    return _named("notes.leaving_at", bounds.time_problem(row.notes.leaving_at))


def amendment_out_of_bounds(row: AmendmentRow) -> str | None:
    """Return what is out of bounds in an amendment."""
    value, at = row.value, row.deadline_at
    return _first(
        _named("deadline_at", None if at is None else bounds.time_problem(at)),
        _named("value", None if value is None else bounds.number_problem(value, bounds.LEAST_VALUE, bounds.MOST_VALUE)),
    )


def until_out_of_bounds(at_s: Any) -> str | None:
    """Return what is out of bounds in the ``until_at`` of a drain or an avoided slot; if anything is, it is ignored."""
    number = isinstance(at_s, int | float) and not isinstance(at_s, bool)
    return _named("until_at", bounds.time_problem(at_s) if number else "is no number: give UTC seconds")


def _unreadable(document: Any) -> str | None:
    return document.problem if isinstance(document, Unreadable) else None


def _size_problem(workers: int) -> str | None:
    return bounds.count_problem(workers, 1, bounds.MOST_WORKERS)


def _speed_problem(workers: int, steps_per_s: float) -> str | None:
    fastest = bounds.FASTEST_STEPS_PER_S
    return _size_problem(workers) or bounds.number_problem(steps_per_s, bounds.SLOWEST_STEPS_PER_S, fastest)


def _named(name: str, problem: str | None) -> str | None:
    return None if problem is None else f"{name}: {problem}"


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
