"""How the next generation of a job's workers comes about: what it continues, and the row that orders it.

Rows in, rows out. Why there is a next generation is decided elsewhere: by the scheduler (``deciding.py``), or because
workers died or a change did not come about (``rescaling.py``).
"""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.service.decisions.pass_context import PassContext, alive
from elasticflow_airflow.service.decisions.session_settings import threads_begun_with
from elasticflow_airflow.service.store.documents.generation_notes import GenerationNotes
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import ORDERED


def can_continue(context: PassContext, row: IncarnationRow) -> GenerationRow | None:
    """The generation whose workers could go on in another one without a restart; None: a restart it must be.

    It trains, its session said at its start that it can, nobody told it to stop, and changes in place have not failed
    too often.
    """
    desired, training = context.desired(row), context.training(row)
    if training is None or desired is None or desired.desired != "run" or row.ending:
        return None
    if not training.notes.in_place or training.notes.finished or gave_up(context, row):
        return None
    return training


def unbegun_restart_of(context: PassContext, row: IncarnationRow, ordered: GenerationRow) -> GenerationRow | None:
    """The gang that trains and was not told to leave yet, as the restart that was ordered waits for its slots."""
    if ordered.state != ORDERED or ordered.mode != RescaleMode.RESTART or ordered.notes.vacate:
        return None
    open_ones = [g for g in context.open_of(row) if g is not ordered and g.state != ORDERED]
    alone = open_ones[0] if len(open_ones) == 1 else None
    if alone is None or alone.state != GangState.RUNNING or alone.desired != "run" or alone.notes.finished:
        return None
    return alone


def gave_up(context: PassContext, row: IncarnationRow) -> bool:
    """Whether changes in place have failed so often in a row that this incarnation is changed by restarts only."""
    return row.in_place.failures >= context.settings.in_place_attempts


def order(
    context: PassContext,
    row: IncarnationRow,
    *,
    slots: list[Any],
    purpose: str,
    reason: str,
    continues: GenerationRow | None,
    lost: set[str] | None = None,
    own: bool = False,
) -> GenerationRow:
    """Write down a new generation and make it the one that should run.

    ``continues`` None: by a restart. ``own``: it is the service's own idea, and the scheduler hears of it once it runs.
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
        notes=GenerationNotes(ordered_at_step=row.step, own=own, threads=threads_begun_with(context.tx, row)),
        log_names=[],
    )
    context.add_generation(generation)
    row.desired_generation = job.generation
    return generation
