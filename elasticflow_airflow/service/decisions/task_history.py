"""The history of a recurring task, used for its next run: scaling curve, costs and length. Rows in, rows out.

The history is keyed by the task (namespace, DAG, task, map index) and a *signature* of what makes runs comparable:
device type, global batch size, its number of shares, and the entry point of the code. Arguments change from day to day
and are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elasticflow_airflow import bounds
from elasticflow_airflow.api import JobSubmission, Length
from elasticflow_airflow.scheduler_core.convergence import LossCurve
from elasticflow_airflow.scheduler_core.jobs.learned_speed import believed, sigma_of_errors
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.reported_bounds import loss_curve
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import MeasuredCosts
from elasticflow_airflow.service.store.tables import HistoryRow, IncarnationRow

_KEPT_ERRORS = 20
_MOST_ERROR = 50.0
_LONGEST_ENTRY_BYTES = 500
"""A longer entry is replaced by its digest, as the signature is indexed together with the task."""


def signature_of(submission: JobSubmission, device_type: str, logical_workers: int | None) -> str:
    """Return the signature that comparable runs of a task share."""
    entry = submission.command.script or submission.command.module or ""
    if len(json.dumps(entry)) > _LONGEST_ENTRY_BYTES:
        entry = hashlib.sha256(entry.encode(errors="surrogatepass")).hexdigest()
    return json.dumps([device_type, submission.global_batch_size, entry, logical_workers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The trusted facts from past runs; by default none."""

    speeds: Mapping[int, float] | None = None
    """Steps/s by workers, good enough to plan a whole run: the curve is complete, or a run has succeeded."""
    measured: Mapping[int, float] | None = None
    """All speeds measured by any run, also by refused ones; sizes may be missing."""
    errors: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """By workers: the stored errors of the speeds that the last runs were decided on with."""
    costs: MeasuredCosts = field(default_factory=MeasuredCosts)
    total_steps: int | None = None
    epochs: int | None = None
    loss_curve: LossCurve | None = None


def past_of(row: HistoryRow | None) -> Past:
    """Read the stored history of past runs. What cannot be read, or is out of bounds (an older version), is ignored."""
    if row is None:
        return Past()
    stored = readable(row.speeds) or {}
    speeds = _speeds(stored)
    enough = bool(speeds) and (row.complete or bool(row.runs)) and len(speeds) == len(stored)
    steps, epochs = (n if _is_number(n, 1, bounds.MOST_COUNT) else None for n in (row.total_steps, row.epochs))
    return Past(
        speeds=speeds if enough else None,
        measured=speeds or None,
        errors=_errors(readable(row.errors) or {}),
        costs=_costs(readable(row.costs) or MeasuredCosts()),
        total_steps=steps,
        epochs=epochs,
        loss_curve=_loss_curve(readable(row.loss_curve)),
    )


def _speeds(stored: Mapping[int, float]) -> dict[int, float]:
    least, most = bounds.SLOWEST_STEPS_PER_S, bounds.FASTEST_STEPS_PER_S
    return {size: speed for size, speed in stored.items() if _is_size(size) and _is_number(speed, least, most)}


def _costs(stored: MeasuredCosts) -> MeasuredCosts:
    return MeasuredCosts(**{n: cost for n, cost in stored.known().items() if _is_number(cost, 0.0, bounds.LONGEST_S)})


def _errors(stored: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, ...]]:
    found = {
        size: tuple(error for error in errors if _is_number(error, 0.0, _MOST_ERROR))
        for size, errors in stored.items()
        if _is_size(size)
    }
    return {size: errors for size, errors in found.items() if errors}


def _loss_curve(stored: LossCurve | None) -> LossCurve | None:
    if stored is None or not stored.losses:
        return None
    accepted, _ = loss_curve({"width": stored.width, "losses": list(stored.losses)})
    return None if accepted is None else stored


def _is_number(value: Any, least: float, most: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and bounds.number_problem(value, least, most) is None


def _is_size(size: int) -> bool:
    return _is_number(size, 1, bounds.MOST_WORKERS)


def speeds_to_plan_with(
    given: Mapping[int, float] | None, measured: Mapping[int, float] | None
) -> dict[int, float] | None:
    """Return measured speeds, else those of the submitted curve, by workers; None if nothing is known.

    A submitted curve determines the sizes. The speed of a size that was not measured is partly adjusted by those that
    were.
    """
    if not given:
        return dict(measured) if measured else None
    told = ScalingCurve(given)
    seen = {size: speed for size, speed in (measured or {}).items() if size in told.steps_per_s}
    return dict(believed(told, seen, SchedulerConfig()).steps_per_s)


def sigmas_of(
    past: Past, given: Mapping[int, float] | None, config: SchedulerConfig
) -> tuple[float | None, dict[int, float]]:
    """Return the expected errors (sigma) of the next run's speeds from past runs: for other sizes, and by size.

    The first is None if unknown. For a submitted curve, sizes that were never measured are assumed to be as wrong as
    the measured ones, if that is more than the default for any size.
    """
    by_size = {size: sigma_of_errors(errors, config) for size, errors in past.errors.items()}
    told, seen = given or {}, past.measured or {}
    squares = [math.log(seen[size] / speed) ** 2 for size, speed in told.items() if size in seen]
    spread = math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0
    return (spread if spread > config.speed_sigma else None), by_size


def errors_of(row: IncarnationRow, known: Mapping[int, Sequence[float]], prior: float) -> dict[int, float]:
    """Return by size the errors of the speeds that a run was decided on with: abs(log(measured / planned)).

    When a size is measured for the first time, the planned speed may have been a guess. It has been replaced since, so
    its error counts against the next run only up to ``prior``, which is assumed of any size.
    """
    told, measured = _speeds(readable(row.told_speeds) or {}), _speeds(row.speeds)
    errors = {size: abs(math.log(measured[size] / told[size])) for size in told.keys() & measured.keys()}
    return {size: error if size in known else min(error, prior) for size, error in errors.items()}


def length_of(length: Length, global_batch_size: int, past: Past) -> int | None:
    """Return the steps of a run: as it states, else with the previous run's steps per epoch; None if unknown."""
    said = length.total_steps(global_batch_size)
    if said is not None or past.total_steps is None:
        return said
    if length.epochs is None and past.epochs is None:
        return past.total_steps
    if length.epochs is None or past.epochs is None:
        return None  # A length of the script and a length in epochs: neither can be derived from the other.
    return min(bounds.MOST_COUNT, math.ceil(past.total_steps * length.epochs / past.epochs))


def remember(context: PassContext, row: IncarnationRow, *, complete: bool = False, success: bool = False) -> None:
    """Store what this run has shown so far; newer numbers replace older ones of the same size.

    ``complete``: the speeds are known at every size that is worth measuring.
    The length that a script reports counts only once it has succeeded: otherwise one wrong value would make all later
    runs be refused.
    """
    recurring_key = context.jobs[row.job_id].recurring_key
    past = context.tx.history(recurring_key, row.signature)
    if past is None:
        past = HistoryRow(
            recurring_key=recurring_key,
            signature=row.signature,
            speeds={},
            complete=False,
            errors=None,
            costs=MeasuredCosts(),
            total_steps=None,
            epochs=None,
            loss_curve=None,
            runs=0,
            updated_at=context.now,
        )
        context.tx.add(past)
    before = past_of(past)
    past.speeds = {**(before.measured or {}), **row.speeds}
    past.costs = replace(before.costs, **row.costs.known())
    past.complete = past.complete or complete
    length = row.submission.length
    if success and row.total_steps is not None and length.steps is None:
        past.total_steps, past.epochs = row.total_steps, length.epochs
    if success and row.target and row.target.curve:
        past.loss_curve = row.target.curve
    if success:
        known = before.errors
        new = errors_of(row, known, context.settings.throughput_error)
        past.errors = {
            size: (*known.get(size, ()), *([new[size]] if size in new else []))[-_KEPT_ERRORS:]
            for size in known.keys() | new.keys()
        }
    past.runs = (past.runs or 0) + int(success)
    past.updated_at = context.now
