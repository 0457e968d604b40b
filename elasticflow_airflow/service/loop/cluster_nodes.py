"""Tells the scheduler which nodes exist, when they drain, and which of their slots it may not use.

A job that gives up its slots saves and leaves after the step that it is in; one that does not is killed after twice the
grace period. Until then its slots cannot be used, whatever was planned: a job that waits for them, perhaps with a
promise to keep, is planned on other slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.engines.port import EngineNode, GangState
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Slot
from elasticflow_airflow.service.decisions import setting_aside
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.loop import slow_workers

_SLOW = 0.25
"""Part of the grace period after which a gang counts as slow to leave."""
_LONGER_S = 60.0
"""How much later than it should have been killed it is expected to be gone, again and again."""


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
    for node_id in known.keys() - there.keys():
        context.tx.add_event(EventKind.NODE_LOST, Reason("node {node_id} is gone", node_id=node_id))
        feed(context, ev.NodeLost(node_id))
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
                feed(context, ev.NodeJoined(node))
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
            feed(context, ev.NodeJoined(node))


def _held_by_slow_leavers(context: PassContext) -> dict[Slot, float]:
    """Return the slots of gangs that were told to leave long ago, and when each should be free (UTC seconds)."""
    grace_s = context.settings.grace_s
    found: dict[Slot, float] = {}
    for row in context.rows:
        if row.terminal or row.ending:
            continue  # The scheduler knows that the job has its slots until it is over.
        with context.on_behalf_of(row.job_id, "looking whether its workers leave"):
            for generation in context.open_of(row):
                since = generation.notes.leaving_at
                if generation.state != GangState.LEAVING or since is None or context.now - since < _SLOW * grace_s:
                    continue
                desired = context.desired(row)
                own = set() if desired is None else set(setting_aside.slots_of(desired))  # Its next gang waits there.
                late_s = max(0.0, context.now - (since + 2 * grace_s))
                until_s = since + 2 * grace_s + _LONGER_S * math.ceil(late_s / _LONGER_S)
                found |= dict.fromkeys(set(setting_aside.slots_of(generation)) - own, until_s)
    return found
