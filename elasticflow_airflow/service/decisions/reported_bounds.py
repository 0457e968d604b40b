"""Checks workers' reports against bounds: values out of bounds are dropped, and the job goes on.

Report files are written by users' processes and may contain anything. Only fields that the service reads are passed on,
each with the expected type. Pure; the caller writes the event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elasticflow_airflow import bounds
from elasticflow_airflow.runtime.protocol import Report, ReportKind
from elasticflow_airflow.times import duration

_WORKER_ID_CHARACTERS = 120
"""The width of the database column."""
_PATH_CHARACTERS = 200
"""The width of the database column; a path written by a session has 27 characters."""
_LINE_CHARACTERS = 1 << 20
"""The longest line of a report file. Texts are cut only after secrets have been redacted from them."""
_MOST_LOSSES = 10_000
_MOST_STEPS_LEFT = 1e15
_PARTS = ("data_s", "compute_s", "reduce_s", "wait_s", "save_s", "other_s")
_LASTING = {"pause_s", "window_s", *_PARTS}
_CLOCKS_DIFFER_S = 60.0
"""Allowance for clocks of machines that differ or jump."""
_NEEDS_STEP = (ReportKind.PROGRESS, ReportKind.CHECKPOINT, ReportKind.WORKER)


@dataclass(frozen=True, slots=True)
class Bounded:
    """A report within bounds (None: it is refused as a whole), and by refused field the problem with it."""

    report: Report | None
    refused: Mapping[str, str]


def within_bounds(report: Report, step: int, now: float, lived_s: float = math.inf) -> Bounded:
    """Check a report. ``step`` is the last known step, ``now`` the time of the service (UTC seconds).

    ``lived_s`` is how long its workers have lived by the service's clock: no reported duration can be longer, so that
    costs learned for the next runs are never larger than what this run has cost.
    """
    if bounds.text_problem(report.worker_id, _WORKER_ID_CHARACTERS) or bounds.count_problem(report.rank):
        return Bounded(None, {"worker_id": "this is none of the job's workers"})
    refused: dict[str, str] = {}
    problem = bounds.count_problem(report.step)
    if problem is not None:
        refused["step"] = problem
        if report.kind in _NEEDS_STEP:
            return Bounded(None, refused)
        report = replace(report, step=step)
    problem = bounds.time_problem(report.at_s)
    if problem is not None:
        refused["at_s"] = problem
        report = replace(report, at_s=now)
    data: dict[str, Any] = {}
    for name, read in _FIELDS.items():
        value = report.data.get(name)
        if value is None:
            continue
        taken, problem = read(value)
        if taken is not None and name in _LASTING and taken > lived_s + _CLOCKS_DIFFER_S:
            taken, problem = None, f"{taken:g} s are more than the {duration(lived_s)} that the workers have lived"
        if problem is not None:
            refused[name] = problem
        if taken is not None:
            data[name] = taken
    problem = _too_fast(data.get("window_steps"), data.get("window_s"))
    if problem is not None:
        refused["window_s"] = problem
        del data["window_steps"], data["window_s"]
    return Bounded(replace(report, data=data), refused)


_Read = Callable[[Any], tuple[Any, str | None]]
"""Returns the accepted value (None: ignored), and the problem if the value is out of bounds."""


def finite_number(value: Any) -> float | None:
    """Return a finite number; None for anything else, as sessions write "nan" and "inf" for unknown values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _within(kind: type[int] | type[float], least: float, most: float) -> _Read:
    def read(value: Any) -> tuple[float | None, str | None]:
        number = finite_number(value)
        if number is None:
            return None, None
        problem = bounds.number_problem(number, least, most)
        return (kind(number), None) if problem is None else (None, problem)

    return read


_count, _measured = partial(_within, int), partial(_within, float)


def _loss(value: Any) -> tuple[float | str | None, str | None]:
    """Check a loss. A loss that is not finite is passed on, as it shows that the training diverged."""
    if isinstance(value, str):
        return (value, None) if value in ("nan", "inf", "-inf") else (None, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None, None
    problem = bounds.loss_problem(value)
    return (float(value), None) if problem is None else (None, problem)


def loss_curve(value: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return an accepted loss curve (None: not accepted), and the problem if something is out of bounds."""
    width = finite_number(value.get("width")) if isinstance(value, Mapping) else None
    losses = value.get("losses") if isinstance(value, Mapping) else None
    if width is None or not isinstance(losses, list):
        return None, None
    if len(losses) > _MOST_LOSSES:
        return None, f"has {len(losses)} losses, and may have {_MOST_LOSSES}"
    problem = bounds.number_problem(width, 0.0, bounds.MOST_COUNT, above=True)
    numbers = [finite_number(loss) for loss in losses]
    if None in numbers:
        return None, None
    problem = problem or next(filter(None, (bounds.loss_problem(loss) for loss in numbers if loss is not None)), None)
    return ({"width": width, "losses": numbers}, None) if problem is None else (None, problem)


def _text(most: int, *, tail: bool = False) -> _Read:
    def read(value: Any) -> tuple[str | None, str | None]:
        return (bounds.clean_text(value, most, tail=tail), None) if isinstance(value, str) else (None, None)

    return read


def _names(value: Any) -> tuple[list[str] | None, str | None]:
    if not isinstance(value, list):
        return None, None
    if len(value) > bounds.MOST_WORKERS:
        return None, f"has {len(value)} names, and may have {bounds.MOST_WORKERS}"
    return [bounds.clean_text(name, _WORKER_ID_CHARACTERS) for name in value if isinstance(name, str)], None


def _metrics(value: Any) -> tuple[dict[str, Any] | None, str | None]:
    if not isinstance(value, Mapping):
        return None, None
    taken: dict[str, Any] = {}
    refused = ""
    for name, metric in value.items():
        problem = bounds.json_problem({name: metric})
        if problem is None:
            taken[name] = metric
        else:
            refused = f"{bounds.clean_text(name, bounds.NAME_CHARACTERS)} {problem}"
    problem = bounds.json_problem(taken)
    if problem is not None:
        return None, problem
    return taken, refused or None


def _switch(value: Any) -> tuple[bool, str | None]:
    return bool(value), None


def _too_fast(steps: int | None, seconds: float | None) -> str | None:
    if not steps or not seconds or seconds <= 0 or steps <= seconds * bounds.FASTEST_STEPS_PER_S:
        return None
    return f"{steps} steps in {seconds:g} s are more than {bounds.FASTEST_STEPS_PER_S:g} a second"


def _seconds(value: Any) -> tuple[float | None, str | None]:
    """Check a duration. A clock that was set back yields negative times, which are ignored."""
    taken, problem = _measured(-bounds.LONGEST_S, bounds.LONGEST_S)(value)
    return (taken, problem) if taken is None or taken >= 0.0 else (None, None)


_BYTES = _count(0, bounds.MOST_BYTES)

_FIELDS: dict[str, _Read] = {
    "steps": _count(1, bounds.MOST_COUNT),
    "samples": _count(0, bounds.MOST_SAMPLES),
    "micro_batch_size": _count(0, bounds.MOST_COUNT),
    "logical_workers": _count(1, bounds.MOST_COUNT),
    "seed": _count(0, bounds.MOST_COUNT),
    "threads": _count(1, bounds.MOST_COUNT),
    "in_place": _switch,
    "init_from": _text(bounds.PATH_BYTES),
    "pause_s": _seconds,
    "state_bytes": _BYTES,
    "loss": _loss,
    "window_steps": _count(0, bounds.MOST_COUNT),
    "window_s": _seconds,
    "samples_per_s": _measured(0.0, 1e18),
    "noise_scale": _measured(-1e38, 1e38),
    **dict.fromkeys(_PARTS, _seconds),
    "memory_bytes": _BYTES,
    "device_memory_bytes": _BYTES,
    "size_bytes": _BYTES,
    "target_loss": _loss,
    "smoothed_loss": _loss,
    "loss_curve": loss_curve,
    "steps_left": _measured(0.0, _MOST_STEPS_LEFT),
    "steps_left_error": _measured(0.0, _MOST_STEPS_LEFT),
    "target_reached": _switch,
    "path": _text(_PATH_CHARACTERS - 10),
    "metrics": _metrics,
    "early": _text(_LINE_CHARACTERS),
    "message": _text(_LINE_CHARACTERS),
    "kind": _text(bounds.NAME_CHARACTERS),
    "field": _text(bounds.NAME_CHARACTERS),
    "absent": _names,
}
