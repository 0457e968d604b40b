"""Write a schedule to a file that others can check: one JSON object per line, in order of time.

``{"t": s, "job": id, "workers": n, "slots": [[node, index], …]}``: from t on the job holds exactly these slots (0
workers: none); ``{"t": …, "job": …, "event": "rejected" | "finished"}``. Nodes are numbered from 0 in cluster order.
All lines of one time are one change; jobs that release slots come before jobs that take them, where such an order
exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from elasticflow_airflow.scheduler_core.model.values import Node, Slot
from elasticflow_airflow.scheduler_core.simulator.inputs.files import whole_file
from elasticflow_airflow.scheduler_core.simulator.run import Change


def one_by_one(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield the same changes, ordered within each time so that no slot is taken before it is released.

    The changes of each job keep their order. If jobs exchange slots in a cycle there is no such order, and one of them
    takes its slots first. Releasing its slots for a moment instead would falsely mean that it was suspended.
    """
    held: dict[str, frozenset[Slot]] = {}
    holders: dict[Slot, set[str]] = {}

    def gives_up(change: Change) -> bool:
        return held.get(change.job_id, frozenset()).issuperset(change.slots)

    def fits(change: Change) -> bool:
        return all(holders.get(slot, set()) <= {change.job_id} for slot in change.slots)

    def apply(change: Change) -> Change:
        for slot in held.get(change.job_id, ()):
            holders[slot].discard(change.job_id)
        held[change.job_id] = frozenset(change.slots)
        for slot in change.slots:
            holders.setdefault(slot, set()).add(change.job_id)
        return change

    for _, same_time in groupby(changes, key=lambda change: change.at_s):
        waiting = list(same_time)
        while waiting:
            for may_come in (gives_up, fits):
                ready, rest = [], []
                behind: set[str] = set()
                for change in waiting:
                    if change.job_id not in behind and may_come(change):
                        ready.append(apply(change))
                    else:
                        behind.add(change.job_id)
                        rest.append(change)
                if ready:
                    break
            else:
                ready, rest = [apply(waiting[0])], waiting[1:]
            yield from ready
            waiting = rest


def write_schedule(path: Path, nodes: Sequence[Node], changes: Iterable[Change]) -> None:
    """Write a schedule atomically: an interrupted run leaves no file."""
    number = {node.node_id: i for i, node in enumerate(nodes)}
    with whole_file(path) as file:
        for change in one_by_one(changes):
            line: dict[str, object] = {"t": change.at_s, "job": change.job_id}
            if change.event:
                line["event"] = change.event
            else:
                line["workers"] = len(change.slots)
                line["slots"] = [[number[slot.node_id], slot.index] for slot in change.slots]
            file.write(json.dumps(line) + "\n")
