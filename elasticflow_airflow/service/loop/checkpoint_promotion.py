"""Decides which checkpoint of an incarnation counts, from the verified candidates.

Only checkpoints of the incarnation's own generations count, never older than the one promoted before, so that a stale
worker cannot publish any. Rows in, rows out; ``promoted.json`` is written by the loop once the rows are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from elasticflow_airflow.api.event_data import CheckpointDamagedData, CheckpointData
from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.job_files.candidates import CandidateService, Looked, Verified
from elasticflow_airflow.service.store.tables import CandidateRow, GenerationRow, IncarnationRow


def record(context: PassContext, looked: Sequence[Looked]) -> None:
    """Record the results about candidates, and promote the best one."""
    context.tx.load_candidates({(one.job_id, one.incarnation) for one in looked})
    for one in looked:
        row = context.row(one.job_id, one.incarnation)
        if row is None:
            continue
        with context.on_behalf_of(one.job_id, "taking in what was found out about its checkpoints"):
            _take_in(context, row, one)


def _take_in(context: PassContext, row: IncarnationRow, one: Looked) -> None:
    rows = {c.path: c for c in context.tx.candidates(one.job_id, one.incarnation)}
    for verified in one.verified:
        _record(context, row, rows.get(verified.path), verified)
    for path in one.deleted:
        if path in rows:
            rows[path].status = "deleted"
    if one.verified:
        _promote_best(context, row)
    generation = None if one.generation is None else context.generations.get((one.job_id, one.generation))
    if generation is not None:
        generation.judged = True


def _record(context: PassContext, row: IncarnationRow, known: CandidateRow | None, verified: Verified) -> None:
    if verified.generation != 0 and (row.job_id, verified.generation) not in context.generations:
        return  # Neither from an open generation of this incarnation, nor the copy that it began with.
    candidate = known
    if candidate is None:
        candidate = CandidateRow(
            job_id=row.job_id,
            incarnation=row.incarnation,
            path=verified.path,
            generation=verified.generation,
            step=verified.step,
            digest="",
            status="new",
        )
        context.tx.add(candidate)
    candidate.digest = verified.digest
    candidate.status = "invalid" if verified.problem else "valid"
    if verified.problem:
        reason = Reason("checkpoint {path} is not used: {problem:text}", path=verified.path, problem=verified.problem)
        context.event(CheckpointDamagedData(path=verified.path), reason, row)


def _promote_best(context: PassContext, row: IncarnationRow) -> None:
    valid = [c for c in context.tx.candidates(row.job_id, row.incarnation) if c.status == "valid"]
    if not valid:
        return
    best = max(valid, key=lambda c: (c.generation, c.step))
    current = row.promoted
    if current is not None and (current.generation, current.step) >= (best.generation, best.step):
        return
    row.promoted = Promotion(path=best.path, generation=best.generation, step=best.step, digest=best.digest)
    where = context.files.checkpoint(row.job_id, row.incarnation, best.path)
    reason = Reason("the checkpoint of step {step} is valid from now on", step=best.step)
    context.event(CheckpointData(**asdict(row.promoted), checkpoint_path=where), reason, row)


def ask(context: PassContext, candidate_service: CandidateService) -> None:
    """Request that candidates are verified, ended generations searched, and old candidates deleted."""
    doing = "asking what its checkpoints are worth"
    valid: dict[tuple[str, int], list[CandidateRow]] = {}
    for candidate in context.tx.open_candidates():
        if candidate.status == "valid":
            valid.setdefault((candidate.job_id, candidate.incarnation), []).append(candidate)
            continue
        row = context.row(candidate.job_id, candidate.incarnation)
        if row is not None:
            with context.on_behalf_of(row.job_id, doing):
                candidate_service.ask_candidate(row.job_id, row.incarnation, candidate.path)
    ended = [g for g in context.generations.values() if g.state == GangState.ENDED and not g.judged]
    context.tx.load_candidates({(generation.job_id, generation.incarnation) for generation in ended})
    for generation in ended:
        with context.on_behalf_of(generation.job_id, doing):
            _ask_of_generation(context, candidate_service, generation)
    for row in context.rows:
        with context.on_behalf_of(row.job_id, doing):
            _ask_to_delete(context, candidate_service, row, valid.get((row.job_id, row.incarnation), []))


def _ask_of_generation(context: PassContext, candidate_service: CandidateService, generation: GenerationRow) -> None:
    rows = context.tx.candidates(generation.job_id, generation.incarnation)
    known = frozenset(c.path for c in rows if c.status != "new")
    candidate_service.ask_generation(generation.job_id, generation.incarnation, generation.generation, known)


def _ask_to_delete(
    context: PassContext, candidate_service: CandidateService, row: IncarnationRow, valid: Sequence[CandidateRow]
) -> None:
    if row.promoted is None:
        return
    for candidate in valid[: -context.settings.keep_checkpoints]:
        if candidate.path != row.promoted.path:
            candidate_service.ask_delete(row.job_id, row.incarnation, candidate.path)
