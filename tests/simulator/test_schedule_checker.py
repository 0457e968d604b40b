"""The checker finds each class of fault, and none in what our scheduler exports for the shared traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.schedule_checker import CheckedJob, Report, check, read_jobs

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.outputs.export import write_schedule
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Change, Simulation

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PAUSE_S = 10.0
NODES = [4, 4, 4, 4]
JOBS = {
    # Ten steps a second on one slot, 18 on two, 30 on four, 40 on eight.
    "a": CheckedJob(0.0, 200.0, 1000.0, {1: 10.0, 2: 18.0, 4: 30.0, 8: 40.0}),
    "b": CheckedJob(5.0, 100.0, 600.0, {2: 20.0, 4: 30.0, 8: 40.0}),
    "c": CheckedJob(5.0, None, 10.0, {1: 10.0}),
}

Line = dict[str, Any]


def hold(t: float, job: str, slots: list[list[int]]) -> Line:
    return {"t": t, "job": job, "workers": len(slots), "slots": slots}


def over(t: float, job: str, how: str = "finished") -> Line:
    return {"t": t, "job": job, "event": how}


def block(node: int, first: int, size: int) -> list[list[int]]:
    return [[node, first + i] for i in range(size)]


def good() -> list[Line]:
    """``a`` runs 50 s on 2 (40 s of steps: 720), moves to 1 that is part of them (10 s lost, 28 s: 280)."""
    return [
        hold(0.0, "a", block(0, 0, 2)),
        over(5.0, "c", "rejected"),
        hold(5.0, "b", block(1, 0, 4)),
        hold(35.0, "b", []),
        over(35.0, "b"),
        hold(50.0, "a", block(0, 0, 1)),
        hold(88.0, "a", []),
        over(88.0, "a"),
    ]


def checked(lines: list[Line], **options: Any) -> Report:
    return check([json.dumps(line) for line in lines], JOBS, NODES, PAUSE_S, **options)


def test_a_schedule_that_could_have_happened_is_counted_and_not_blamed() -> None:
    report = checked(good())
    assert report.violations == []
    assert (report.met, report.late, report.rejected, report.finished) == (2, 0, 1, 2)
    assert (report.changes, report.migrations) == (3, 0)
    assert report.slot_s == 50 * 2 + 38 * 1 + 30 * 4


def test_ends_after_the_deadline_are_counted() -> None:
    lines = [line for line in good() if line["job"] != "b"] + [
        hold(90.0, "b", block(1, 0, 4)),
        hold(120.0, "b", []),
        over(120.0, "b"),
    ]
    report = checked(lines)
    assert report.violations == []
    assert (report.met, report.late) == (1, 1)


def test_what_changes_at_one_time_is_one_change() -> None:
    lines = [
        hold(0.0, "a", block(0, 0, 2)),
        over(5.0, "c", "rejected"),
        hold(20.0, "b", block(0, 0, 2)),  # listed before "a" lets go, at the same time
        hold(20.0, "a", block(1, 0, 2)),
        hold(60.0, "b", []),
        over(60.0, "b"),
        hold(76.0, "a", []),
        over(76.0, "a"),
    ]
    report = checked(lines)
    assert report.violations == []
    assert (report.changes, report.migrations) == (3, 1)


def test_a_start_may_cost_something_else_than_a_change() -> None:
    assert checked(good(), startup_s=5.0).violations == []
    assert {"work"} == set(checked(good(), startup_s=15.0).kinds())


def faulty(change: Callable[[list[Line]], Any]) -> list[Line]:
    lines = good()
    change(lines)
    return lines


FAULTS: Mapping[str, tuple[str, list[Line]]] = {
    "no slots named": ("form", faulty(lambda lines: lines[0].pop("slots"))),
    "an event that does not exist": ("form", faulty(lambda lines: lines[1].update(event="paused"))),
    "the number of workers is another": ("form", faulty(lambda lines: lines[0].update(workers=1))),
    "backwards in time": ("order", faulty(lambda lines: lines[5].update(t=20.0))),
    "a job from nowhere": ("unknown", faulty(lambda lines: lines.insert(0, hold(0.0, "x", block(2, 0, 1))))),
    "before its submission": ("early", faulty(lambda lines: lines[1].update(t=1.0))),
    "a node that is not there": ("slots", faulty(lambda lines: lines[2].update(slots=block(4, 0, 4)))),
    "a slot that is not there": ("slots", faulty(lambda lines: lines[2].update(slots=block(1, 4, 4)))),
    "a slot twice in a gang": ("slots", faulty(lambda lines: lines[0].update(slots=[[0, 0], [0, 0]]))),
    "a slot of another job": ("double", faulty(lambda lines: lines[2].update(slots=block(0, 0, 4)))),
    "a slot given twice at one time": (
        "double",
        faulty(lambda lines: lines.insert(3, hold(5.0, "a", block(1, 2, 2)))),
    ),
    "three workers": ("size", faulty(lambda lines: lines[0].update(workers=3, slots=block(0, 0, 3)))),
    "fewer workers than it runs on": ("size", faulty(lambda lines: lines[2].update(workers=1, slots=[[1, 0]]))),
    "a gang across two halves of blocks": ("span", faulty(lambda lines: lines[0].update(slots=block(0, 1, 2)))),
    "a small gang on two nodes": ("span", faulty(lambda lines: lines[0].update(slots=[[0, 3], [1, 0]]))),
    "a large gang on broken nodes": (
        "span",
        faulty(lambda lines: lines[2].update(workers=8, slots=block(1, 0, 4) + block(2, 0, 2) + block(3, 0, 2))),
    ),
    "a large gang on nodes that are no pair": (
        "span",
        faulty(lambda lines: lines[2].update(workers=8, slots=block(1, 0, 4) + block(2, 0, 4))),
    ),
    "a pause that was not paid": ("work", faulty(lambda lines: [line.update(t=87.9) for line in lines[6:]])),
    "the last step missing": ("work", faulty(lambda lines: [line.update(t=34.99) for line in lines[3:5]])),
    "finished on slots": ("ended", faulty(lambda lines: lines.pop(6))),
    "rejected on slots": ("ended", faulty(lambda lines: lines.insert(1, hold(5.0, "c", block(2, 0, 1))))),
    "slots after its end": ("ended", faulty(lambda lines: lines.append(hold(99.0, "a", block(0, 0, 1))))),
    "rejected and finished": ("ended", faulty(lambda lines: lines.append(over(99.0, "c")))),
    "forgotten": ("forgotten", faulty(lambda lines: lines.pop())),
}


@pytest.mark.parametrize("name", FAULTS)
def test_finds(name: str) -> None:
    kind, lines = FAULTS[name]
    report = checked(lines)
    assert report.kinds()[kind] >= 1, report.violations
    assert all(violation.text for violation in report.violations)


def test_says_which_line() -> None:
    report = check(['{"t": 0', *(json.dumps(line) for line in good())], JOBS, NODES, PAUSE_S)
    assert [(violation.kind, violation.line) for violation in report.violations] == [("form", 1)]


def test_spans_are_left_alone_where_gangs_may_stand_anywhere() -> None:
    assert checked(faulty(lambda lines: lines[0].update(slots=[[0, 3], [1, 0]]))).kinds()["span"] == 1
    free = [hold(0.0, "a", [[0, 3], [2, 0]]), *good()[1:5], hold(50.0, "a", [[0, 3]]), *good()[6:]]
    assert checked(free, blocks=False).violations == []


def test_blocks_of_uneven_nodes_are_aligned_among_their_equals() -> None:
    jobs = {"a": CheckedJob(0.0, None, 400.0, {8: 40.0})}
    pair = block(1, 0, 4) + block(3, 0, 4)  # the first two nodes of size 4
    lines = [hold(0.0, "a", pair), hold(20.0, "a", []), over(20.0, "a")]
    assert check([json.dumps(line) for line in lines], jobs, [6, 4, 6, 4], PAUSE_S).violations == []
    assert check([json.dumps(line) for line in lines], jobs, [4, 4, 6, 4], PAUSE_S).kinds() == {"span": 1}


@pytest.mark.parametrize(
    ("nodes", "gang", "kinds"),
    [
        ([6, 6, 6], block(0, 0, 4) + block(1, 0, 4), {}),
        ([6, 6, 6], block(1, 0, 4) + block(2, 0, 4), {"span": 1}),  # not aligned
        ([6, 6], block(0, 0, 6) + block(1, 0, 2), {"span": 1}),
        ([6, 6], block(0, 2, 4) + block(1, 2, 4), {"span": 1}),
        ([3, 3, 3, 3], [spot for node in range(4) for spot in block(node, 0, 2)], {"span": 1}),
    ],
)
def test_gangs_on_several_uneven_nodes_have_the_largest_block_of_each(nodes, gang, kinds) -> None:
    jobs = {"a": CheckedJob(0.0, None, 400.0, {8: 40.0})}
    lines = [hold(0.0, "a", gang), hold(20.0, "a", []), over(20.0, "a")]
    assert check([json.dumps(line) for line in lines], jobs, nodes, PAUSE_S).kinds() == kinds


@pytest.mark.parametrize(
    ("slots", "finds"),
    [
        pytest.param(block(0, 0, 4) + block(2, 0, 4), {}, id="the fast ones, neighbours among their kind"),
        pytest.param(block(1, 0, 4) + block(3, 0, 4), {"work": 1}, id="the slow ones, as soon as on the fast"),
        pytest.param(block(0, 0, 4) + block(1, 0, 4), {"type": 1, "work": 1}, id="both"),
        pytest.param(block(4, 0, 4) + block(5, 0, 4), {"type": 1, "work": 1}, id="a type that it does not run on"),
    ],
)
def test_work_is_counted_at_the_speed_of_the_type_it_is_done_on(slots: list[list[int]], finds: dict[str, int]) -> None:
    jobs = {"a": CheckedJob(0.0, None, 400.0, {8: 20.0}, {"fast": {8: 40.0}, "slow": {8: 20.0}})}
    types = ["fast", "slow", "fast", "slow", "other", "other"]
    lines = [json.dumps(line) for line in (hold(0.0, "a", slots), hold(20.0, "a", []), over(20.0, "a"))]
    assert check(lines, jobs, [4] * 6, PAUSE_S, node_types=types).kinds() == finds


@pytest.mark.parametrize(
    ("trace", "kind", "nodes", "slots"),
    [
        ("195job", "a100", 16, 8),
        pytest.param("195job", "a100", 4, 8, marks=pytest.mark.slow),
        pytest.param("t4_195job", "t4", 16, 4, marks=pytest.mark.slow),
        ("cluster10", "a100", 32, 8),
        ("poisson_100job", "a100", 16, 8),
    ],
)
def test_the_exports_of_our_scheduler_are_free_of_faults(
    trace: str, kind: str, nodes: int, slots: int, tmp_path: Path
) -> None:
    path, curves = DATA / "traces" / f"{trace}.csv", DATA / "throughput" / kind
    if not path.exists():
        pytest.skip(f"{path} is not there")
    machines = cluster(nodes, slots)
    log: list[Change] = []
    result = Simulation(
        name="elasticflow",
        policy=Scheduler(SchedulerConfig(), machines),
        nodes=machines,
        jobs=prepare(read_trace(path), read_curves(curves), machines, Conditions(pause_s=30.0)),
        on_change=log.append,
    ).run()
    write_schedule(tmp_path / "schedule.jsonl", machines, log)
    with (tmp_path / "schedule.jsonl").open() as lines:
        report = check(lines, read_jobs(path, curves), [slots] * nodes, 30.0)
    assert report.violations == []
    told = result.summary()
    assert (report.met, report.rejected) == (told["met"], told["rejected"])
    assert (report.changes, report.migrations) == (told["changes"], told["migrations"])
    assert report.late == 0
