"""What past runs of a recurring task tell the next one: its scaling curve, costs and length. Rows in, rows out.

Kept under the task (namespace, DAG, task, map index) and a *signature* of what makes runs comparable: device type,
global batch size, the shares that it is cut into, and the code's entry. Arguments change from day to day and are not
part of it.
"""

from __future__ import annotations

import json
import math
from typing import Any

from elasticflow_airflow.service.models import HistoryRow, IncarnationRow, JobRow
from elasticflow_airflow.service.store import Writer
from elasticflow_airflow.wire import Length


def signature_of(submission: dict[str, Any], device_type: str, logical_workers: int | None) -> str:
    """What makes two runs of a task comparable."""
    command = submission["command"]
    entry = command["script"] or command["module"]
    return json.dumps([device_type, submission["global_batch_size"], entry, logical_workers])


def length_of(length: Length, global_batch_size: int, past: HistoryRow | None) -> int | None:
    """How many steps a run makes: as it says, else as many an epoch as the run before; None if nobody knows."""
    said = length.total_steps(global_batch_size)
    if said is not None or past is None or past.total_steps is None:
        return said
    if length.epochs is None or past.epochs is None:
        return past.total_steps
    return math.ceil(past.total_steps * length.epochs / past.epochs)


def remember(
    tx: Writer, job: JobRow, row: IncarnationRow, now: float, *, complete: bool = False, success: bool = False
) -> None:
    """Keep what this run has shown so far; newer numbers replace older ones of the same size."""
    past = tx.history(job.recurring_key, row.signature)
    if past is None:
        past = HistoryRow(
            recurring_key=job.recurring_key,
            signature=row.signature,
            speeds={},
            complete=False,
            costs={},
            total_steps=None,
            epochs=None,
            loss_curve=None,
            runs=0,
            updated_at=now,
        )
        tx.add(past)
    past.speeds = {**past.speeds, **row.speeds}
    past.costs = {**past.costs, **row.costs}
    past.complete = past.complete or complete
    length = Length.model_validate(row.submission["length"])
    if row.total_steps is not None and length.epochs is not None:
        past.total_steps, past.epochs = row.total_steps, length.epochs
    if success and (row.target or {}).get("curve"):
        past.loss_curve = dict(row.target["curve"])
    past.runs = (past.runs or 0) + int(success)
    past.updated_at = now
