"""Gandiva: turns by time slices, and growth into slots that would idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticflow_airflow.scheduler_core.policies.gandiva import Gandiva
from elasticflow_airflow.scheduler_core.values import Job

MakeJob = Callable[..., Job]


def test_two_jobs_on_one_slot_take_turns_of_a_slice(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 120.0, curve={1: 1.0}), make("b", 120.0, curve={1: 1.0})]
    played = play(Gandiva(nodes=nodes(1, 1), slice_s=60.0), jobs, nodes(1, 1))
    assert played.sizes("a") == [(0.0, 1), (60.0, 0), (120.0, 1), (180.0, 0)]
    assert played.sizes("b") == [(60.0, 1), (120.0, 0), (180.0, 1), (240.0, 0)]


def test_turns_go_round_and_gangs_have_theirs(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("gang", 240.0, asks=2, curve={2: 2.0}),
        make("one", 120.0, curve={1: 1.0}),
        make("two", 120.0, curve={1: 1.0}),
    ]
    played = play(Gandiva(nodes=nodes(1, 2), slice_s=60.0), jobs, nodes(1, 2))
    assert played.sizes("gang") == [(0.0, 2), (60.0, 0), (120.0, 2), (180.0, 0)]
    assert played.ends() == {"gang": 180.0, "one": 240.0, "two": 240.0}


def test_a_start_does_not_eat_its_slice(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 1000.0, curve={1: 1.0}, pause=10.0), make("b", 1000.0, curve={1: 1.0}, pause=10.0)]
    played = play(Gandiva(nodes=nodes(1, 1), slice_s=60.0, slice_starts=20.0), jobs, nodes(1, 1))
    assert played.sizes("a")[:3] == [(0.0, 1), (200.0, 0), (400.0, 1)]


def test_idle_slots_of_the_node_are_grown_into_and_given_back(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("grows", 1000.0), make("comes", 200.0, at=50.0)]
    played = play(Gandiva(nodes=nodes(2, 4)), jobs, nodes(2, 4))
    assert played.sizes("grows")[0] == (0.0, 4)  # 8 would be faster, but lies on two nodes
    assert played.sizes("comes")[0] == (50.0, 4)
    alone = play(Gandiva(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert alone.sizes("grows")[:3] == [(0.0, 4), (50.0, 2), (150.0, 4)]
    assert alone.sizes("comes") == [(50.0, 2), (150.0, 0)]


def test_grown_jobs_shrink_to_what_they_asked_for_before_anybody_waits(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 1000.0), *(make(f"b{i}", 100.0, at=10.0, curve={1: 1.0}) for i in range(3))]
    played = play(Gandiva(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert [size for at, size in played.sizes("a") if at == 10.0][-1] == 1
    assert all(record.started_s == record.submitted_s for record in played.jobs.values())


def test_nobody_grows_past_the_knee_or_for_less_than_the_pause(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("knee", 100.0, curve={1: 1.0, 2: 1.5, 4: 1.4}, pause=30.0),
        make("last", 110.0, curve={1: 1.0, 2: 1.2}, pause=30.0),
    ]
    played = play(Gandiva(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert max(size for _, size in played.sizes("knee")) == 2
    late = [make("first", 60.0, asks=2, curve={2: 2.0}, pause=30.0), make("b", 80.0, asks=2, pause=30.0)]
    played = play(Gandiva(nodes=nodes(1, 4)), late, nodes(1, 4))
    assert played.jobs["b"].changes == 1  # 10 s are left when slots fall idle; a pause takes 30
