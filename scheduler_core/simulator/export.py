"""A schedule as a file that others can check: one JSON object a line, in order of time.

``{"t": s, "job": id, "workers": n, "slots": [[node, index], …]}``: from t on the job holds exactly these slots (0 =
none); ``{"t": …, "job": …, "event": "rejected" | "finished"}``. Nodes are numbered from 0 in the order of the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from elasticflow_airflow.scheduler_core.simulator.files import whole_file
from elasticflow_airflow.scheduler_core.simulator.run import Change
from elasticflow_airflow.scheduler_core.values import Node


def write_schedule(path: Path, nodes: Sequence[Node], changes: Iterable[Change]) -> None:
    """Write a schedule, whole or not at all: an interrupted run leaves nothing."""
    number = {node.node_id: i for i, node in enumerate(nodes)}
    with whole_file(path) as file:
        for change in changes:
            line: dict[str, object] = {"t": change.at_s, "job": change.job_id}
            if change.event:
                line["event"] = change.event
            else:
                line["workers"] = len(change.slots)
                line["slots"] = [[number[slot.node_id], slot.index] for slot in change.slots]
            file.write(json.dumps(line) + "\n")
