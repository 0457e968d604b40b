"""Orders the next generation of a job's workers: which generation it continues, and its row.

Rows in, rows out. Whether a next generation is needed is decided elsewhere: by the scheduler (``deciding.py``), or
because workers died or a change failed (``rescaling.py``).
"""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.runtime.reporting import STEADY_INTERVAL_S
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.pass_context import PassContext, alive
from elasticflow_airflow.service.decisions.session_settings import threads_begun_with
from elasticflow_airflow.service.store.documents.generation_notes import GenerationNotes
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import ORDERED

_ON_THE_WAY_S = 2.0
"""A report takes about so long, from a node in calm times, until it is read."""


def can_continue(context: PassContext, row: IncarnationRow) -> GenerationRow | None:
    """Return the generation whose workers can go on in a new one without a restart; None if a restart is needed.

    The generation trains, its session reported at its start that it can change in place, it was not told to stop, and
    changes in place have not failed too often.
    """
    desired, training = context.desired(row), context.training(row)
    if training is None or desired is None or desired.desired != "run" or row.ending:
        return None
    if not training.notes.in_place or training.notes.finished or gave_up(context, row):
        return None
    return training


def unbegun_restart_of(context: PassContext, row: IncarnationRow, ordered: GenerationRow) -> GenerationRow | None:
    """Return the training gang if it was not told to leave yet, as the ordered restart waits for slots; else None."""
    if ordered.state != ORDERED or ordered.mode != RescaleMode.RESTART or ordered.notes.vacate:
        return None
    open_ones = [g for g in context.open_of(row) if g is not ordered and g.state != ORDERED]
    alone = open_ones[0] if len(open_ones) == 1 else None
    if alone is None or alone.state != GangState.RUNNING or alone.desired != "run" or alone.notes.finished:
        return None
    return alone


def gave_up(context: PassContext, row: IncarnationRow) -> bool:
    """Return whether so many changes in place failed in a row that this incarnation is changed by restarts only."""
    return row.in_place.failures >= context.settings.in_place_attempts


def order(
    context: PassContext,
    row: IncarnationRow,
    *,
    slots: list[Any],
    purpose: str,
    reason: Reason,
    continues: GenerationRow | None,
    lost: set[str] | None = None,
    own: bool = False,
) -> GenerationRow:
    """Add a new generation and make it the desired one.

    ``continues`` None: start it by a restart. ``own``: the service orders it by itself, and the scheduler is told once
    it runs.
    """
    job = context.jobs[row.job_id]
    job.generation += 1
    mode = RescaleMode.RESTART if continues is None else RescaleMode.IN_PLACE
    generation = GenerationRow(
        job_id=row.job_id,
        generation=job.generation,
        incarnation=row.incarnation,
        placement=slots,
        workers=len(slots),
        purpose=purpose,
        reason=reason,
        created_at=context.now,
        fresh_start=not any(alive(g) for g in context.open_of(row)),
        mode=mode.value,
        continues=None if continues is None else continues.generation,
        lost=[] if continues is None else sorted(context.lost_since(row, continues) | (lost or set())),
        desired="run",
        stop_cause="",
        state=ORDERED,
        judged=False,
        handled=False,
        window={},
        folded={},
        notes=GenerationNotes(
            ordered_at_step=_step_now(row, context.now), own=own, threads=threads_begun_with(context.tx, row)
        ),
        log_names=[],
    )
    context.add_generation(generation)
    row.desired_generation = job.generation
    return generation


def _step_now(row: IncarnationRow, now: float) -> int:
    """Return the step that a training has probably reached since its last report."""
    if row.last_step_at is None or row.steps_per_s is None:
        return row.step
    since_s = min(max(0.0, now - row.last_step_at), STEADY_INTERVAL_S + _ON_THE_WAY_S)
    return row.step + round(row.steps_per_s * since_s)
