"""The nodes after an event, and which nodes stay neighbours. Knows no plans and no policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Placement


def nodes_after(nodes: Mapping[str, Node], event: ev.NodeChange) -> tuple[dict[str, Node], Reason]:
    """Return the nodes by id after an event, and a phrase that describes the event."""
    after = dict(nodes)
    match event:
        case ev.NodeJoined(node):
            after[node.node_id] = node
            free = node.slots - len(node.busy)
            return after, Reason("node {node} is there with {free} free slots", node=node.node_id, free=free)
        case ev.NodeLost(node_id):
            after.pop(node_id, None)
            return after, Reason("node {node} is lost", node=node_id)
        case ev.NodeDraining(node_id, until_s):
            if node_id in after:
                after[node_id] = replace(after[node_id], draining_until_s=until_s)
            return after, Reason("node {node} goes away at {until:moment}", node=node_id, until=until_s)


def slots_cut_off(placement: Placement, nodes: Mapping[str, Node]) -> Reason | None:
    """Return which slots of a gang are gone because their nodes have fewer slots now; None: none are.

    Their workers may still run, so they must be stopped. On a node that is gone there are no workers to stop.
    """
    cut = [slot for slot in placement.slots if slot.node_id in nodes and slot.index >= nodes[slot.node_id].slots]
    if not cut:
        return None
    kind = "{slots} is gone: the node is smaller now" if len(cut) == 1 else "{slots} are gone: the node is smaller now"
    return Reason(kind, slots=", ".join(slot.name for slot in cut))


def nodes_avoiding(nodes: Mapping[str, Node], event: ev.SlotSlow) -> dict[str, Node]:
    """Return the nodes by id, with the slow slot avoided until the event's time; the node must exist."""
    node_id, index = event.slot
    node = nodes[node_id]
    return {**nodes, node_id: replace(node, avoided={**node.avoided, index: event.until_s})}


def neighbours(placements: Iterable[Placement]) -> list[list[str]]:
    """Return the node ids of each gang that spans several, in order: they stay neighbours when the cluster changes."""
    groups = [list(dict.fromkeys(slot.node_id for slot in sorted(held.slots))) for held in placements]
    return [ids for ids in groups if len(ids) > 1]
