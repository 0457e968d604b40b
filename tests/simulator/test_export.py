"""The exported form is fixed: others read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest

from elasticflow_airflow.scheduler_core.model.values import Node, ScalingCurve, Slot
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting, play
from elasticflow_airflow.scheduler_core.simulator.inputs import synthetic
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace
from elasticflow_airflow.scheduler_core.simulator.outputs.export import one_by_one, write_schedule
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster
from elasticflow_airflow.scheduler_core.simulator.run import Change

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


# -- the order within one time ---------------------------------------------------------------------------------------

A, B, C, D = (Slot("west", 0), Slot("west", 1), Slot("east", 0), Slot("east", 1))


def given_twice(changes: Sequence[Change]) -> dict[float, set[str]]:
    """What a reader sees who takes line by line: by time, who was given a slot that another still held."""
    held: dict[str, set[Slot]] = {}
    found: dict[float, set[str]] = {}
    for change in changes:
        held[change.job_id] = set()
        if any(slots & set(change.slots) for slots in held.values()):
            found.setdefault(change.at_s, set()).add(change.job_id)
        held[change.job_id] = set(change.slots)
    return found


def in_rings(changes: Sequence[Change]) -> set[float]:
    """Times at which jobs exchange slots so that each needs another to let go first, all the way round."""
    held: dict[str, set[Slot]] = {}
    found = set()
    for at_s, lines in groupby(changes, key=lambda change: change.at_s):
        before = dict(held)
        held |= {change.job_id: set(change.slots) for change in lines}
        waits = {a: {b for b in before if b != a and held[a] & before[b]} for a in held}
        while ready := [a for a, others in waits.items() if not others & waits.keys()]:
            for a in ready:
                del waits[a]
        if waits:
            found.add(at_s)
    return found


def test_who_gives_up_stands_before_who_takes() -> None:
    first = [Change(0.0, "a", (A, B)), Change(0.0, "b", (C,))]
    moved = [
        Change(5.0, "late", (C,)),  # after b, which needs what a gives up
        Change(5.0, "b", (B,)),
        Change(5.0, "no", (), "rejected"),
        Change(5.0, "a", (A,)),
        Change(5.0, "new", (D,)),
    ]
    last = [Change(9.0, "new", (A,)), Change(9.0, "a", ()), Change(9.0, "a", (), "finished")]
    ordered = list(one_by_one([*first, *moved, *last]))
    assert [(change.job_id, change.event) for change in ordered] == [
        ("a", ""),
        ("b", ""),
        ("no", "rejected"),
        ("a", ""),
        ("b", ""),
        ("new", ""),
        ("late", ""),
        ("a", ""),
        ("a", "finished"),
        ("new", ""),
    ]
    assert given_twice(ordered) == {}


def test_in_a_ring_one_takes_first_and_nobody_is_said_to_be_suspended() -> None:
    changes = [Change(0.0, "a", (A,)), Change(0.0, "b", (B,)), Change(5.0, "a", (B,)), Change(5.0, "b", (A,))]
    assert list(one_by_one(changes)) == changes
    assert given_twice(changes) == {5.0: {"a"}}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_reader_line_by_line_sees_no_slot_twice_but_in_a_ring(policy: str) -> None:
    if policy.split("+")[0] in ("chronus", "gavel"):
        pytest.importorskip("scipy", reason="needs the extra [simulate]")
    curves = {
        ("net", 64): ScalingCurve({1: 2.0, 2: 3.6, 4: 6.0, 8: 9.0}),
        ("wide", 64): ScalingCurve({2: 3.0, 4: 5.6, 8: 10.0}),
    }
    setting = Setting(
        trace=Trace(None, tuple(synthetic.poisson(curves, jobs=25, every_s=200.0, seed=5))),
        curves=curves,
        nodes=cluster(2, 8),
        conditions=Conditions(pause_s=10.0),
    )
    made = play(setting, Contender(policy=policy)).changes
    ordered = list(one_by_one(made))
    assert sorted(map(repr, ordered)) == sorted(map(repr, made))
    assert set(given_twice(ordered)) <= in_rings(made)
    for job in setting.trace.jobs:
        own = [change for change in ordered if change.job_id == job.job_id]
        assert own == [change for change in made if change.job_id == job.job_id]
