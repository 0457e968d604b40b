"""Tells the scheduler which nodes exist, when they drain, and which of their slots it may not use.

A slot whose device fails is avoided for a day. If that happens to another task on the same node, too, the whole node
is set aside, and left as one that is drained, until somebody has looked at it and says that it stays (``elasticflow
drain --undo``); of the last node that is left, only the slots.

A job that gives up its slots saves and leaves after the step that it is in; one that does not is killed after twice the
grace period. Until then its slots cannot be used, whatever was planned: a job that waits for them, perhaps with a
promise to keep, is planned on other slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.api.event_data import DeviceFaultData
from elasticflow_airflow.engines.port import EngineNode, GangState
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Parameter, Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Slot
from elasticflow_airflow.service.decisions import setting_aside
from elasticflow_airflow.service.decisions.deciding import feed, feed_nodes
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.loop import slow_workers
from elasticflow_airflow.service.store.tables import (
    DEVICE_FAILED,
    SET_ASIDE,
    AvoidedSlotRow,
    GenerationRow,
    IncarnationRow,
)

_SLOW = 0.25
"""Part of the grace period after which a gang counts as slow to leave."""
_LONGER_S = 60.0
"""How much later than it should have been killed it is expected to be gone, again and again."""
_AFTER_FAULT_S = 24 * 3600.0
"""How long a slot is avoided whose device has failed."""
_SET_ASIDE_S = 30 * 24 * 3600.0
"""How long a node is set aside when nobody says anything."""


def nodes_now(context: PassContext, seen: Sequence[EngineNode]) -> list[Node]:
    """Return the nodes as the scheduler should see them; a draining node is to be left ``drain_lead_s`` early."""
    drains, lead_s, avoided = context.tx.drains(), context.settings.drain_lead_s, context.tx.avoided()
    leaves_at = {node.node_id: node.leaves_at(drains.get(node.node_id)) for node in seen}
    held, slow = setting_aside.held_slots(context), _held_by_slow_leavers(context)
    return [
        Node(
            node_id=node.node_id,
            slots=node.slots,
            busy=frozenset((*node.busy, *held.get(node.node_id, ()))),
            draining_until_s=None if (at := leaves_at[node.node_id]) is None else at - lead_s,
            avoided={
                **{row.slot_index: row.until_at for row in avoided if row.node_id == node.node_id},
                **{slot.index: one.until_s for slot, one in context.held.items() if slot.node_id == node.node_id},
                **{slot.index: until_s for slot, until_s in slow.items() if slot.node_id == node.node_id},
            },
        )
        for node in seen
    ]


def tell_nodes(context: PassContext, seen: tuple[EngineNode, ...]) -> None:
    """Tell the scheduler which nodes have changed since the last call."""
    slow_workers.take_back(context)
    known = {node.node_id: node for node in context.scheduler.nodes()}
    there = {node.node_id: node for node in nodes_now(context, seen)}
    changes: list[ev.NodeChange] = []
    for node_id in known.keys() - there.keys():
        context.tx.add_event(EventKind.NODE_LOST, Reason("node {node_id} is gone", node_id=node_id))
        changes.append(ev.NodeLost(node_id))
        context.tx.forget_drain(node_id)
    for node_id, node in there.items():
        before = known.get(node_id)
        drained = None if before is None else before.draining_until_s
        if node.draining_until_s != drained:
            until_s = node.draining_until_s
            reason = Reason("node {node_id} stays after all", node_id=node_id)
            if until_s is not None:
                reason = Reason(
                    "node {node_id} goes away: nothing is planned on it after {until_s:moment}",
                    node_id=node_id,
                    until_s=until_s,
                )
            context.tx.add_event(EventKind.NODE_DRAINING, reason)
        dated = before and replace(before, draining_until_s=node.draining_until_s, avoided=node.avoided)
        if dated == node:
            if before != node:
                changes.append(ev.NodeJoined(node))
        elif before != node:
            holders = {
                **next(n.busy for n in seen if n.node_id == node_id),
                **setting_aside.held_slots(context).get(node_id, {}),
            }
            busy = "".join(f"; slot {index} is held by {holder}" for index, holder in sorted(holders.items()))
            context.tx.add_event(
                EventKind.NODE_CHANGED,
                Reason("node {node_id} has {slots} slots{busy:text}", node_id=node_id, slots=node.slots, busy=busy),
            )
            changes.append(ev.NodeJoined(node))
    feed_nodes(context, changes)


def device_failed(
    context: PassContext, row: IncarnationRow, generation: GenerationRow, worker_id: str, message: str
) -> bool:
    """Avoid the slot of a worker whose device is broken, or set its node aside.

    Return whether that was believed: whoever finds broken devices wherever it comes is broken itself, and what it has
    said before is taken back.
    """
    workers = context.workers.get((generation.job_id, generation.generation), ())
    slot = next((worker.slot for worker in workers if worker.worker_id == worker_id), None)
    if slot is None:
        return True
    task, gang = row.submission.identity.recurring_key, f"{row.job_id} {row.incarnation} {generation.generation}"
    if _has_said_so_elsewhere(context, task, gang):
        _take_back(context, task)
        return False
    fault: dict[str, Parameter] = {"slot": slot.name, "task": task, "said": message.partition("\n")[0], "gang": gang}
    until_s, avoided = context.now + _AFTER_FAULT_S, {slot.index}
    reason, done = Reason(DEVICE_FAILED, **fault), "it is avoided until {until:moment}"
    tasks = _tasks_that_met_faults(context, slot.node_id) | {task}
    if len(tasks) > 1:
        until_s = context.now + _SET_ASIDE_S
        reason = Reason(SET_ASIDE, node=slot.node_id, tasks=sorted(tasks), gang=gang)
        done = "as it happened to another task, too, the node is set aside until somebody says that it stays"
        avoided |= _slots_to_set_aside(context, slot.node_id)
    for index in avoided:
        context.tx.avoid(slot.node_id, index, until_s, reason)
    data = DeviceFaultData(node_id=slot.node_id, slot=slot.index, until_at=until_s, set_aside=len(tasks) > 1)
    context.event(data, Reason(f"{DEVICE_FAILED}; {done}", **fault, until=until_s), row)
    _tell_avoided(context, {slot.node_id})  # Before anything is planned anew.
    return True


def _has_said_so_elsewhere(context: PassContext, task: str, gang: str) -> bool:
    """Return whether another gang of a task has said lately that a device is broken."""
    return any(
        row.is_for_device and task in _tasks_of(row) and row.reason.parameters.get("gang") != gang
        for row in context.tx.avoided()
    )


def _take_back(context: PassContext, task: str) -> None:
    """Use the slots again that are avoided because of what a task has said."""
    found = [row for row in context.tx.avoided() if row.is_for_device and task in _tasks_of(row)]
    for row in found:
        row.until_at = context.now
    _tell_avoided(context, {row.node_id for row in found})


def _tasks_that_met_faults(context: PassContext, node_id: str) -> set[str]:
    """Return the recurring keys of the tasks for which devices of a node failed lately."""
    return {task for row in context.tx.avoided() if row.node_id == node_id for task in _tasks_of(row)}


def _tasks_of(row: AvoidedSlotRow) -> list[str]:
    parameters = row.reason.parameters
    tasks = parameters.get("tasks", [parameters.get("task", "")]) if row.is_for_device else []
    return [str(task) for task in tasks] if isinstance(tasks, Sequence) else []


def _slots_to_set_aside(context: PassContext, node_id: str) -> set[int]:
    """Return all slots of a node; none if no other node could be used."""
    nodes = {node.node_id: node for node in context.scheduler.nodes()}
    usable = [
        other
        for other in nodes.values()
        if other.draining_until_s is None
        and any(other.avoided.get(index, 0.0) <= context.now for index in range(other.slots))
    ]
    is_last = all(other.node_id == node_id for other in usable)
    return set() if is_last or node_id not in nodes else set(range(nodes[node_id].slots))


def _tell_avoided(context: PassContext, node_ids: set[str]) -> None:
    """Tell the scheduler at once which slots of some nodes are avoided now."""
    for node in context.scheduler.nodes():
        if node.node_id in node_ids:
            now = {row.slot_index: row.until_at for row in context.tx.avoided() if row.node_id == node.node_id}
            feed(context, ev.NodeJoined(replace(node, avoided={**node.avoided, **now})))


def set_aside_nodes(avoided: Sequence[AvoidedSlotRow]) -> list[str]:
    """Describe the nodes that wait for somebody to look at them, without the names of tasks."""
    slots: dict[str, list[int]] = {}
    for row in avoided:
        if row.reason.kind == SET_ASIDE:
            slots.setdefault(row.node_id, []).append(row.slot_index)
    return [
        f"node {node_id} is set aside (slots {', '.join(map(str, sorted(found)))}): devices there failed for several "
        f"tasks; look at it (nvidia-smi, dmesg), then say that it stays: elasticflow drain {node_id} --undo"
        for node_id, found in sorted(slots.items())
    ]


def _held_by_slow_leavers(context: PassContext) -> dict[Slot, float]:
    """Return the slots that gangs should have left long ago, and when each should be free (UTC seconds)."""
    grace_s = context.settings.grace_s
    found: dict[Slot, float] = {}
    for row in context.rows:
        if row.terminal or row.ending:
            continue  # The scheduler knows that the job has its slots until it is over.
        with context.on_behalf_of(row.job_id, "looking whether its workers leave"):
            for generation, since, limit_s in _leaving(context, row):
                until_s = _slow_until(context.now, since, grace_s, limit_s)
                if until_s is not None:
                    desired = context.desired(row)
                    own = set() if desired is None else set(setting_aside.slots_of(desired))  # Its next gang waits.
                    found |= dict.fromkeys(set(setting_aside.slots_of(generation)) - own, until_s)
    return found


def _leaving(context: PassContext, row: IncarnationRow) -> Iterator[tuple[GenerationRow, float, float]]:
    """Yield the generations that leave slots, since when they should have, and how long they may take (seconds)."""
    for generation in context.open_of(row):
        if generation.state == GangState.LEAVING and generation.notes.leaving_at is not None:
            yield generation, generation.notes.leaving_at, 2 * context.settings.grace_s
    desired, training = context.desired(row), context.training(row)
    if desired is not None and training is not None and training is not desired:
        # Who leaves by a change in place trains on until all others are ready for it.
        costs = context.costs_of(row)
        yield training, desired.created_at + costs.join_s + costs.pause_s, context.settings.in_place_limit_s


def _slow_until(now: float, since: float, grace_s: float, limit_s: float) -> float | None:
    """Return when slots should be free that were to be left at ``since``; None: they are not late yet."""
    if now - since < _SLOW * grace_s:
        return None
    return since + limit_s + _LONGER_S * math.ceil(max(0.0, now - since - limit_s) / _LONGER_S)
