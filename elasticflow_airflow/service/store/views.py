"""Converts rows to the messages of the API, such as JobStatus and Event. Pure functions over rows.

The stored values of a job may be unreadable (rows of another version, or written by hand). This affects the view of
that job alone: lists, sums and the pages of all other jobs are made without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from elasticflow_airflow.api import Event, JobResult, JobStatus, SlotStatus, State, Verdict
from elasticflow_airflow.api.status import AmendAnswer, Mention
from elasticflow_airflow.api.submission import name_of, owner_of
from elasticflow_airflow.engines.port import STANDING, EngineNode, GangState
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.scheduler_core.model.reason import Part, Reason
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.stored_bounds import until_out_of_bounds
from elasticflow_airflow.service.store.tables import EventRow, GenerationRow, IncarnationRow, JobRow

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError)
"""The exceptions that reading an unreadable row may raise."""
_CANNOT_BE_SHOWN = "what is stored of it cannot be shown: cancel it to end it, and submit it again"


def told(**reasons: Reason) -> dict[str, Any]:
    """Return the sentences of reasons, by field of a message, and what they mention."""
    sentences = {name: sentence_of(reason) for name, reason in reasons.items()}
    mentions = {name: found for name, (_, found) in sentences.items()}
    return {"mentions": mentions, **{name: text for name, (text, _) in sentences.items()}}


def sentence_of(reason: Reason) -> tuple[str, list[Mention]]:
    """Return the sentence of a reason, and what it mentions."""
    text, found = reason.rendered(name_of)
    return text, [_mention(one) for one in found]


def _mention(part: Part) -> Mention:
    if part.what == "task":
        namespace, dag_id = owner_of(part.of)
        return Mention(at=part.at, length=part.length, namespace=namespace, dag_id=dag_id)
    return Mention(at=part.at, length=part.length, job_id=part.of if part.what == "job" else None)


def status_of(job: JobRow, row: IncarnationRow, generations: Sequence[GenerationRow]) -> JobStatus:
    """Return the status of a job's current incarnation. ``generations`` are all of that incarnation, oldest first.

    If the row is unreadable, the status has only the readable fields, and ``set_aside`` says so.
    """
    try:
        return _status_of(job, row, generations)
    except UNREADABLE:
        return _unreadable(job, row)


def _unreadable(job: JobRow, row: IncarnationRow) -> JobStatus:
    """Return a status made only of fields that cannot be invalid."""
    at, state = row.submitted_at, State.FAILED if row.terminal else State.SUSPENDED
    with suppress(ValueError):
        state = State(row.state) if State(row.state).terminal == row.terminal else state
    return JobStatus(
        job_id=row.job_id,
        identity=job.identity,
        incarnation=row.incarnation,
        generation=int(job.generation),
        state=state,
        state_reason=_CANNOT_BE_SHOWN,
        set_aside=None if row.terminal else _CANNOT_BE_SHOWN,
        verdict=Verdict(decision="undecided"),
        claim=int(job.claim),
        submitted_at=float(at) if isinstance(at, int | float) and math.isfinite(at) else 0.0,
        deadline_at=None,
        best_effort=bool(row.best_effort),
        value=1.0,
        last_event_id=int(row.last_event_id),
    )


def _status_of(job: JobRow, row: IncarnationRow, generations: Sequence[GenerationRow]) -> JobStatus:
    holding = [g for g in generations if g.state in STANDING and not g.handled]
    trains = [g for g in holding if g.state == GangState.RUNNING]
    if trains and holding[-1].mode == RescaleMode.IN_PLACE:
        holding = trains  # Until an in-place change has switched, the previous workers train on.
    slots = holding[-1].placement if holding else []
    stored = row.verdict
    verdict = Verdict(
        decision=stored.decision,
        **told(reason=stored.reason),
        deadline_at=stored.deadline_at,
        earliest_deadline_at=stored.earliest_deadline_at,
        event_id=stored.event_id,
        plan=stored.plan,
    )
    target = row.target
    result, asked = row.result, readable(row.submission)
    return JobStatus(
        job_id=row.job_id,
        identity=job.identity,
        incarnation=row.incarnation,
        generation=generations[-1].generation if generations else job.generation,
        state=State(row.state),
        **told(state_reason=row.state_reason),
        set_aside=row.set_aside,
        verdict=verdict,
        claim=job.claim,
        submitted_at=row.submitted_at,
        deadline_at=row.deadline_at,
        best_effort=row.best_effort,
        value=row.value,
        workers=len(slots),
        slots=[(str(node), int(index)) for node, index in slots],
        consistency="consistent" if asked is None else asked.consistency,
        logical_workers=row.logical_workers,
        seed=row.seed,
        step=row.step,
        total_steps=row.total_steps,
        loss=row.loss,
        target_loss=None if asked is None else asked.target_loss,
        smoothed_loss=target and target.smoothed,
        expected_steps=target and target.step,
        expected_steps_at_most=target and target.at_most,
        target_reached=target and target.reached,
        steps_per_s=row.steps_per_s if slots else None,
        projected_finish_at=row.projected_finish_at,
        slack_s=_slack_s(row, result),
        at_risk=row.at_risk,
        lease_expires_at=row.lease_expires_at,
        acknowledged=row.acknowledged,
        orphaned=row.state == State.CANCELLED and row.parked and row.cancel_reason is None,
        result=result,
        failure=row.failure,
        log_names=list(dict.fromkeys(name for g in generations for name in g.log_names)),
        last_event_id=row.last_event_id,
    )


def _slack_s(row: IncarnationRow, result: JobResult | None) -> float | None:
    if result is not None:
        return result.slack_s
    if row.deadline_at is None or row.projected_finish_at is None:
        return None
    return row.deadline_at - row.projected_finish_at


def amend_answer_of(answer: AmendmentAnswer, job: JobStatus) -> AmendAnswer:
    """Return the answer to an amendment, with the job as it is now."""
    return AmendAnswer(
        accepted=answer.accepted,
        **told(reason=answer.reason),
        earliest_deadline_at=answer.earliest_deadline_at,
        job=job,
    )


def slot_statuses(nodes: Sequence[EngineNode], reader: Reader) -> list[SlotStatus]:
    """Return every slot of the cluster, with the job that holds it."""
    held: dict[tuple[str, int], str] = {}
    for job_id, slots in reader.slots_held():
        with suppress(*UNREADABLE):
            held |= {(str(node), int(index)): job_id for node, index in slots}
    drains = {node_id: at for node_id, at in reader.drains().items() if until_out_of_bounds(at) is None}
    avoided: dict[tuple[str, int], dict[str, Any]] = {
        (row.node_id, row.slot_index): {
            "avoided_until": row.until_at,
            "avoided_for": "device" if row.is_for_device else "slow",
        }
        for row in reader.avoided()
        if until_out_of_bounds(row.until_at) is None
    }
    return [
        SlotStatus(
            node_id=node.node_id,
            index=index,
            job_id=held.get((node.node_id, index)),
            busy=node.busy.get(index),
            draining_until=node.leaves_at(drains.get(node.node_id)),
            **avoided.get((node.node_id, index), {}),
        )
        for node in nodes
        for index in range(node.slots)
    ]


def event_of(row: EventRow) -> Event:
    """Return one event, with empty data if its data is unreadable."""
    return Event(
        event_id=row.event_id,
        job_id=row.job_id,
        incarnation=row.incarnation,
        at=row.at,
        kind=row.kind,
        **told(reason=row.reason),
        data=row.data if isinstance(row.data, dict) else {},
    )
