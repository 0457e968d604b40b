"""Target losses: predicts when a job reaches its target, and tells the scheduler how much is left.

Promises are based on the upper bound (``steps=``, ``epochs=``); the scheduler gets the prediction besides it. Rows in,
rows and events out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticflow_airflow.api.event_data import TargetLengthData, TargetMissedData, TargetReachedData
from elasticflow_airflow.runtime.protocol import Report
from elasticflow_airflow.scheduler_core.convergence import LossCurve, Prediction, predict
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.reported_bounds import finite_number
from elasticflow_airflow.service.store.documents.job_documents import LossTarget
from elasticflow_airflow.service.store.tables import IncarnationRow

_MATERIAL = 0.25
"""Fraction of what is left: a prediction that moves by more is written to the event log ..."""
_MATERIAL_OF_ALL = 0.05
"""... if it also moves by more than this fraction of the upper bound: near the end, any move is large relative to what
is left."""


def begin(context: PassContext, row: IncarnationRow, earlier: LossCurve | None) -> None:
    """Set up the target of a new job; ``earlier`` is the loss curve of this task's last run, if there is one.

    Until it has a curve of its own, it is expected to take as long as that run (Optimus, EuroSys 2018, section 3.1).
    """
    loss = row.submission.target_loss
    if loss is None:
        return
    target = LossTarget(loss=loss, earlier=earlier)
    _take(context, row, target, predict(LossCurve(1.0, ()), target.loss, earlier=target.earlier))


def fold(context: PassContext, row: IncarnationRow, report: Report) -> None:
    """Update the target from a progress report."""
    data, target = report.data, row.target
    if target is None or "target_loss" not in data:
        return
    smoothed = finite_number(data.get("smoothed_loss"))
    if smoothed is not None:
        row.target = target = replace(target, smoothed=smoothed)
    curve = _curve(data.get("loss_curve"))
    if curve is None:
        return  # No new prediction: the last one holds.
    target = replace(target, curve=curve)
    made = predict(curve, target.loss, earlier=target.earlier) if target.earlier else _reported(report)
    _take(context, row, target, made)


def finished(context: PassContext, row: IncarnationRow, report: Report) -> None:
    """Record at the end of a session whether the target was reached, and drop the prediction."""
    data, target = report.data, row.target
    if target is None or "target_reached" not in data:
        return
    smoothed = finite_number(data.get("smoothed_loss"))
    reached, loss = bool(data["target_reached"]), target.loss
    curve = _curve(data.get("loss_curve")) or target.curve
    row.target = replace(target.unpredicted(), reached=reached, smoothed=smoothed, curve=curve)
    seen = "" if smoothed is None else Reason("smoothed loss {loss:.4g}", loss=smoothed)
    if reached:
        most = "" if row.total_steps is None else Reason(" of at most {steps}", steps=row.total_steps)
        reason = Reason(
            "target loss {loss:g} reached at step {step}{most} ({seen})",
            loss=loss,
            step=report.step,
            most=most,
            seen=seen,
        )
        context.event(TargetReachedData(step=report.step, target_loss=loss, smoothed_loss=smoothed), reason, row)
    else:
        reason = Reason(
            "target loss {loss:g} was not reached in {step} steps ({seen})", loss=loss, step=report.step, seen=seen
        )
        context.event(TargetMissedData(step=report.step, target_loss=loss, smoothed_loss=smoothed), reason, row)


def reached(row: IncarnationRow) -> bool:
    """Return whether the job ended, or is ending, because it reached its target loss."""
    return row.target is not None and bool(row.target.reached)


def tell(context: PassContext, row: IncarnationRow, *, step: int | None = None, total: bool = False) -> None:
    """Tell the scheduler how much is left, if the length is known. Arguments as for :func:`progress`."""
    report = progress(row, step=step, total=total)
    if report is not None:
        feed(context, report)


def progress(
    row: IncarnationRow, *, step: int | None = None, speed: float | None = None, total: bool = False
) -> ev.JobProgressed | None:
    """Return the event that tells how much is left; None while the length is unknown.

    ``step`` replaces the row's step, ``total`` adds the total number of steps.
    """
    if row.total_steps is None:
        return None
    done = row.step if step is None else step
    left = 0.0 if reached(row) else float(max(0, row.total_steps - done))
    at_most = None if row.target is None else row.target.at_most
    return ev.JobProgressed(
        row.job_id,
        remaining_steps=left,
        steps_per_s=speed,
        total_steps=float(row.total_steps) if total else None,
        expected_steps=None if at_most is None else min(left, max(0.0, float(at_most) - done)),
        at_s=row.last_step_at if step is None else None,
    )


def _reported(report: Report) -> Prediction | None:
    """Return the session's prediction; None if it has no error estimate, as it cannot be planned with then."""
    left, error = (report.data.get(name) for name in ("steps_left", "steps_left_error"))
    if left is None or error is None or left + error <= 0.0:
        return None
    steps = report.step + left
    if steps <= 0.0:
        return None
    return Prediction(steps=steps, error=math.log1p(max(0.0, error) / steps), source="fit")


def _take(context: PassContext, row: IncarnationRow, target: LossTarget, made: Prediction | None) -> None:
    """Store a target with its prediction, or without one; write an event if the change is material."""
    if made is None or not math.isfinite(made.at_most()):
        row.target = replace(target.unpredicted(), told=None)
        if target.told is not None:
            kind = "when target loss {loss:g} is reached can no longer be predicted: at {bound}"
            reason = Reason(kind, loss=target.loss, bound=_bound(row))
            context.event(TargetLengthData(step=row.step), reason, row)
        return
    bound = math.inf if row.total_steps is None else float(row.total_steps)
    step, at_most = min(made.steps, bound), min(made.at_most(), bound)
    expected, latest = round(step), math.ceil(at_most - 1e-6)
    row.target = replace(target, step=expected, at_most=latest)
    if _is_news(at_most, bound if target.told is None else float(target.told), bound, row.step):
        row.target = replace(row.target, told=latest)
        since = "" if made.source == "fit" else ", as in the last run of this task"
        reason = Reason(
            "target loss {loss:g} is expected at step {expected}, at {latest} with the error of the prediction{since}; "
            "at {bound}",
            loss=target.loss,
            expected=expected,
            latest=latest,
            since=since,
            bound=_bound(row),
        )
        context.event(TargetLengthData(step=row.step, expected_step=expected, at_most_step=latest), reason, row)


def _is_news(at_most: float, before: float, bound: float, step: int) -> bool:
    if math.isinf(before):
        return True
    floor = 0.0 if math.isinf(bound) else _MATERIAL_OF_ALL * bound
    return abs(at_most - before) > max(_MATERIAL * (max(at_most, before) - step), floor)


def _bound(row: IncarnationRow) -> Reason:
    if row.total_steps is None:
        return Reason("most as long as the script says")
    return Reason("most {steps} steps", steps=row.total_steps)


def _curve(raw: Mapping[str, Any] | None) -> LossCurve | None:
    if not raw or not raw.get("losses"):
        return None
    return LossCurve(float(raw["width"]), tuple(float(loss) for loss in raw["losses"]))
