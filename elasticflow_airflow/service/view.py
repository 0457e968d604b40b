"""How rows look from outside: the wire's JobStatus and Event. Pure functions over rows."""

from __future__ import annotations

from collections.abc import Sequence

from elasticflow_airflow.engines.port import EngineNode, GangState
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.service.models import EventRow, GenerationRow, IncarnationRow, JobRow
from elasticflow_airflow.service.store import Reader
from elasticflow_airflow.wire import Event, JobIdentity, JobResult, JobStatus, SlotStatus, State, Verdict


def status_of(job: JobRow, row: IncarnationRow, generations: Sequence[GenerationRow]) -> JobStatus:
    """Everything about a job's current incarnation. ``generations`` are all of that incarnation, oldest first."""
    holding = [
        g
        for g in generations
        if g.state in (GangState.STARTING, GangState.RUNNING, GangState.LEAVING) and not g.handled
    ]
    trains = [g for g in holding if g.state == GangState.RUNNING]
    if trains and holding[-1].mode == RescaleMode.IN_PLACE:
        holding = trains  # Until a change in place has switched, those before it train on.
    slots = holding[-1].placement if holding else []
    verdict = Verdict.model_validate({"decision": "undecided", **row.verdict})
    result = None if row.result is None else JobResult.model_validate(row.result)
    return JobStatus(
        job_id=row.job_id,
        identity=JobIdentity.model_validate(job.identity),
        incarnation=row.incarnation,
        generation=generations[-1].generation if generations else job.generation,
        state=State(row.state),
        state_reason=row.state_reason,
        verdict=verdict,
        claim=job.claim,
        submitted_at=row.submitted_at,
        deadline_at=row.deadline_at,
        best_effort=row.best_effort,
        value=row.value,
        workers=len(slots),
        slots=[(str(node), int(index)) for node, index in slots],
        consistency=row.submission.get("consistency", "consistent"),
        logical_workers=row.logical_workers,
        step=row.step,
        total_steps=row.total_steps,
        loss=row.loss,
        target_loss=row.submission.get("target_loss"),
        smoothed_loss=(row.target or {}).get("smoothed"),
        expected_steps=(row.target or {}).get("step"),
        expected_steps_at_most=(row.target or {}).get("at_most"),
        target_reached=(row.target or {}).get("reached"),
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


def slot_statuses(nodes: Sequence[EngineNode], reader: Reader) -> list[SlotStatus]:
    """Every slot of the cluster, and who holds it."""
    held = {
        (str(node), int(index)): generation.job_id
        for generation in reader.open_generations()
        if generation.state in (GangState.STARTING, GangState.RUNNING, GangState.LEAVING)
        for node, index in generation.placement
    }
    drains = reader.drains()
    avoided = {(row.node_id, row.slot_index): row.until_at for row in reader.avoided()}
    return [
        SlotStatus(
            node_id=node.node_id,
            index=index,
            job_id=held.get((node.node_id, index)),
            busy=node.busy.get(index),
            draining_until=drains.get(node.node_id),
            avoided_until=avoided.get((node.node_id, index)),
        )
        for node in nodes
        for index in range(node.slots)
    ]


def event_of(row: EventRow) -> Event:
    """One event."""
    return Event(
        event_id=row.event_id,
        job_id=row.job_id,
        incarnation=row.incarnation,
        at=row.at,
        kind=row.kind,
        reason=row.reason,
        data=row.data,
    )
