"""gang-fifo: in order of arrival, at the size asked for, and the head of the line blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.fifo import GangFifo

MakeJob = Callable[..., Job]


def test_the_head_of_the_line_blocks_who_would_fit(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("runs", 300.0, asks=2),
        make("head", 100.0, at=10.0, asks=4),
        make("small", 10.0, at=20.0, asks=1),
    ]
    played = play(GangFifo(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert played.ends() == {"runs": 150.0, "head": 175.0, "small": 185.0}
    assert all(record.changes == 1 for record in played.jobs.values())


def test_a_size_that_was_not_measured_is_the_nearest_smaller_one(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 100.0, asks=8, curve={1: 1.0, 2: 2.0}), make("b", 100.0, asks=1, curve={2: 2.0, 4: 4.0})]
    played = play(GangFifo(nodes=nodes(1, 8)), jobs, nodes(1, 8))
    assert played.sizes("a")[0] == (0.0, 2)
    assert played.sizes("b")[0] == (0.0, 2)  # the least that runs


def test_at_the_knee_nobody_holds_slots_that_make_it_slower(make: MakeJob, nodes: Any, play: Any) -> None:
    job = make("a", 100.0, asks=4, curve={1: 1.0, 2: 2.0, 4: 1.0})
    assert play(GangFifo(nodes=nodes(1, 4)), [job], nodes(1, 4)).ends() == {"a": 100.0}
    assert play(GangFifo(nodes=nodes(1, 4), at_knee=True), [job], nodes(1, 4)).ends() == {"a": 50.0}


def test_running_gangs_move_only_when_the_head_of_the_line_needs_a_block(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("a", 1000.0, asks=1, pause=5.0),
        make("b", 20.0, asks=2, pause=5.0),
        make("c", 1000.0, asks=1, pause=5.0),
        make("d", 400.0, asks=2, at=1.0, pause=5.0),
    ]
    played = play(GangFifo(nodes=nodes(2, 2)), jobs, nodes(2, 2))
    assert played.jobs["d"].started_s == 15.0
    assert sum(record.migrations for record in played.jobs.values()) == 0


def test_nothing_that_runs_is_ever_stopped(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make(f"j{i}", 100.0 / (i + 1.7), at=i / 3, asks=1 << i % 3, curve={1: 0.7, 2: 1.1, 4: 1.3}) for i in range(20)
    ]
    played = play(GangFifo(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert [(record.changes, record.suspensions) for record in played.result.records] == [(1, 0)] * 20
