"""Resumes an incarnation from the last valid checkpoint of the previous one, which did not succeed.

The candidate service copies the checkpoint in its own thread, so that only the job itself waits for it. Rows in, rows
out.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticflow_airflow.api.event_data import ResumedData, WarningData
from elasticflow_airflow.runtime.protocol import Promotion, candidate_name
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.job_files.candidates import Adopted, CandidateService, Looked
from elasticflow_airflow.service.store.stored_bounds import promotion_of
from elasticflow_airflow.service.store.tables import CandidateRow, IncarnationRow


def is_ready(context: PassContext, row: IncarnationRow, candidate_service: CandidateService) -> bool:
    """Return whether the checkpoint copy is there or none is needed; otherwise request it from ``candidate_service``.

    A job waits for a copy that cannot be made now: starting from the beginning would throw away what was trained.
    """
    before = _origin(context, row)
    if before is None or before.promoted is None:
        return True
    if row.promoted is None:
        if any(copy.generation == 0 for copy in context.tx.candidates(row.job_id, row.incarnation)):
            return True  # The copy could not be used: start from the beginning.
        promotion = promotion_of(before)
        if promotion is None:
            _begin_anew(context, row, f"which checkpoint incarnation {before.incarnation} has left cannot be read")
            return True
        candidate_service.ask_adopt(row.job_id, row.incarnation, before.incarnation, promotion.path)
        return False
    if row.logical_workers is not None and before.logical_workers is not None:
        row.logical_workers = before.logical_workers  # The number the checkpoint was trained with.
    row.seed = before.seed  # It must stay the same: with another seed it would be a different training.
    return True


def record(context: PassContext, looked: Sequence[Looked], candidate_service: CandidateService) -> None:
    """Record the results of copying; copies that are not needed any more are deleted."""
    for one in looked:
        if one.adopted is None:
            continue
        if one.job_id not in context.faults:
            with context.on_behalf_of(one.job_id, "taking in the checkpoint that it goes on from"):
                _take_in(context, one, one.adopted, candidate_service)


def _take_in(context: PassContext, one: Looked, adopted: Adopted, candidate_service: CandidateService) -> None:
    row, info = context.row(one.job_id, one.incarnation), adopted.info
    if row is None or row.introduced or row.terminal or row.ending or row.cancel_reason is not None:
        if info is not None and (row is None or row.promoted is None):
            candidate_service.ask_delete(one.job_id, one.incarnation, info.name)
    elif info is not None:
        _go_on(context, row, info)
    elif adopted.again:
        reason = Reason("waits for its checkpoint, and tries again: {problem:text}", problem=adopted.problem)
        if row.state_reason != reason:
            context.event(WarningData(), reason, row)
            row.state_reason = reason
    else:
        _begin_anew(context, row, adopted.problem)


def _begin_anew(context: PassContext, row: IncarnationRow, problem: str) -> None:
    context.event(WarningData(), Reason("starts from the beginning: {problem:text}", problem=problem), row)
    _add_copy(context, row, candidate_name(0, 0), step=0, digest="", status="invalid")


def _origin(context: PassContext, row: IncarnationRow) -> IncarnationRow | None:
    """Return the incarnation whose checkpoint this one resumes from; None if it starts from the beginning."""
    before = None if row.resume_from is None else context.tx.incarnation(row.job_id, row.resume_from)
    while before is not None and before.promoted is None and before.resume_from is not None:
        before = context.tx.incarnation(row.job_id, before.resume_from)  # It ended before its first checkpoint.
    return before


def _go_on(context: PassContext, row: IncarnationRow, info: CandidateInfo) -> None:
    before = _origin(context, row)
    if before is None:
        raise LookupError(f"{row.job_id} has a copy of a checkpoint, and no incarnation {row.resume_from} it is of")
    row.promoted = Promotion(path=info.name, generation=info.generation, step=info.step, digest=info.digest)
    row.step = row.restart_step = info.step
    _add_copy(context, row, info.name, step=info.step, digest=info.digest, status="valid")
    reason = Reason(
        "goes on from step {step}, the last valid checkpoint of incarnation {incarnation}",
        step=info.step,
        incarnation=before.incarnation,
    )
    context.event(ResumedData(step=info.step), reason, row)


def _add_copy(context: PassContext, row: IncarnationRow, path: str, *, step: int, digest: str, status: str) -> None:
    context.tx.add(
        CandidateRow(
            job_id=row.job_id,
            incarnation=row.incarnation,
            path=path,
            generation=0,
            step=step,
            digest=digest,
            status=status,
        )
    )
