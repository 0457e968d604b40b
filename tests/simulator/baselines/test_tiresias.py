"""Tiresias: service in slot-seconds, queues, promotion of who waits too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.tiresias import Tiresias

MakeJob = Callable[..., Job]


def test_who_passes_a_threshold_makes_way_for_who_has_had_less(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("long", 300.0, curve={1: 1.0}), make("short", 50.0, at=50.0, curve={1: 1.0})]
    policy = Tiresias(nodes=nodes(1, 1), thresholds_slot_s=(100.0,))
    played = play(policy, jobs, nodes(1, 1))
    assert [(round(at, 2), size) for at, size in played.sizes("long")][:3] == [(0.0, 1), (100.0, 0), (150.0, 1)]
    assert round(played.ends()["short"], 2) == 150.0


def test_service_counts_slots_and_time(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("wide", 400.0, asks=4, curve={4: 1.0}), make("small", 10.0, at=1.0, curve={1: 1.0})]
    played = play(Tiresias(nodes=nodes(1, 4), thresholds_slot_s=(100.0,)), jobs, nodes(1, 4))
    assert round(played.jobs["small"].started_s, 2) == 25.0  # four slots for 25 s


def test_inside_a_queue_nobody_is_preempted(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make(f"j{i}", 90.0, at=1.0 * i, curve={1: 1.0}) for i in range(3)]
    played = play(Tiresias(nodes=nodes(1, 1), thresholds_slot_s=(100.0,)), jobs, nodes(1, 1))
    assert played.ends() == {"j0": 90.0, "j1": 180.0, "j2": 270.0}
    assert all(record.changes == 1 for record in played.jobs.values())


def test_a_small_job_goes_past_a_gang_that_does_not_fit(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("runs", 100.0, asks=2, curve={2: 1.0}),
        make("gang", 100.0, at=1.0, asks=4, curve={4: 1.0}),
        make("small", 20.0, at=2.0, curve={1: 1.0}),
    ]
    played = play(Tiresias(nodes=nodes(1, 4), thresholds_slot_s=(1e6,)), jobs, nodes(1, 4))
    assert played.ends() == {"runs": 100.0, "gang": 200.0, "small": 22.0}


def test_who_waits_too_long_is_promoted(make: MakeJob, nodes: Any, play: Any) -> None:
    """``a`` sinks at 100 s and waits; at 300 s, twice the time that it ran, it rises, and ``late`` comes after it."""
    jobs = [make("a", 250.0, curve={1: 1.0})]
    jobs += [make(f"b{i}", 90.0, curve={1: 1.0}) for i in range(5)]
    jobs += [make("late", 90.0, at=310.0, curve={1: 1.0})]

    def turns(knob: float) -> list[float]:
        policy = Tiresias(nodes=nodes(1, 1), thresholds_slot_s=(100.0,), promote_knob=knob)
        return [round(at) for at, size in play(policy, jobs, nodes(1, 1)).sizes("a") if size]

    assert turns(2.0) == [0, 550, 740]
    assert turns(1e9) == [0, 640]


def test_the_service_of_a_start_counts_too(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 300.0, curve={1: 1.0}, pause=30.0), make("b", 50.0, at=1.0, curve={1: 1.0}, pause=30.0)]
    played = play(Tiresias(nodes=nodes(1, 1), thresholds_slot_s=(100.0,)), jobs, nodes(1, 1))
    assert round(played.jobs["b"].started_s) == 100
    assert round(played.ends()["a"]) == 180 + 30 + 230
