"""The exported form is fixed: others read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticflow_airflow.scheduler_core.simulator.export import write_schedule
from elasticflow_airflow.scheduler_core.simulator.run import Change
from elasticflow_airflow.scheduler_core.values import Node, Slot

NODES = (Node(node_id="west", slots=2), Node(node_id="east", slots=2))


def test_each_change_is_a_line_with_nodes_by_their_number(tmp_path: Path) -> None:
    changes = [
        Change(0.5, "a", (Slot("east", 1), Slot("west", 0))),
        Change(2.0, "b", (), "rejected"),
        Change(7.25, "a", ()),
        Change(7.25, "a", (), "finished"),
    ]
    write_schedule(tmp_path / "s.jsonl", NODES, changes)
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert lines == [
        {"t": 0.5, "job": "a", "workers": 2, "slots": [[1, 1], [0, 0]]},
        {"t": 2.0, "job": "b", "event": "rejected"},
        {"t": 7.25, "job": "a", "workers": 0, "slots": []},
        {"t": 7.25, "job": "a", "event": "finished"},
    ]


def test_an_interrupted_run_leaves_no_file_and_an_older_one_as_it_was(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Change]:
        yield Change(0.0, "a", (Slot("west", 0),))
        raise KeyboardInterrupt

    path = tmp_path / "s.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write_schedule(path, NODES, interrupted())
    assert list(tmp_path.iterdir()) == []
    write_schedule(path, NODES, [])
    with pytest.raises(KeyboardInterrupt):
        write_schedule(path, NODES, interrupted())
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("s.jsonl", "")]
