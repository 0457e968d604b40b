"""What nodes there are after an event, and which stay neighbours. Knows no plans and no policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Node, Placement
from elasticflow_airflow.times import moment


def nodes_after(
    nodes: Mapping[str, Node], event: ev.NodeJoined | ev.NodeLost | ev.NodeDraining
) -> tuple[dict[str, Node], str]:
    """The nodes by id, and what has happened as a part of a sentence."""
    after = dict(nodes)
    match event:
        case ev.NodeJoined(node):
            after[node.node_id] = node
            return after, f"node {node.node_id} is there with {node.slots - len(node.busy)} free slots"
        case ev.NodeLost(node_id):
            after.pop(node_id, None)
            return after, f"node {node_id} is lost"
        case ev.NodeDraining(node_id, until_s):
            if node_id in after:
                after[node_id] = replace(after[node_id], draining_until_s=until_s)
            return after, f"node {node_id} goes away at {moment(until_s)}"


def slots_cut_off(placement: Placement, nodes: Mapping[str, Node]) -> str:
    """What has become of a gang's slots on nodes that are there, with fewer slots than before; empty: nothing has.

    Its workers need not have died: they have to be told to leave. On a node that is gone there is nobody to tell.
    """
    cut = [slot for slot in placement.slots if slot.node_id in nodes and slot.index >= nodes[slot.node_id].slots]
    if not cut:
        return ""
    return f"{', '.join(slot.name for slot in cut)} {'is' if len(cut) == 1 else 'are'} gone: the node is smaller now"


def nodes_avoiding(nodes: Mapping[str, Node], event: ev.SlotSlow) -> dict[str, Node]:
    """The nodes by id, with the slow slot avoided for the time that the event says; the node must be there."""
    node_id, index = event.slot
    node = nodes[node_id]
    return {**nodes, node_id: replace(node, avoided={**node.avoided, index: event.until_s})}


def neighbours(placements: Iterable[Placement]) -> list[list[str]]:
    """Ids of the nodes of each gang that spans several, in order: they stay neighbours when the cluster changes."""
    groups = [list(dict.fromkeys(slot.node_id for slot in sorted(held.slots))) for held in placements]
    return [ids for ids in groups if len(ids) > 1]
