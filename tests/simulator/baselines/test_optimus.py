"""Optimus: slots go where they shorten a job most, once an interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room
from elasticflow_airflow.scheduler_core.simulator.baselines.optimus import Optimus, by_marginal_gain

MakeJob = Callable[..., Job]


def views(policy: Optimus, *jobs: Job) -> list[JobView]:
    return [policy.view(policy.live_job(job, 0.0), 0.0) for job in jobs]


def sizes(nodes: Any, slots: int, *jobs: Job) -> dict[str, int]:
    policy = Optimus(nodes=nodes(1, slots))
    return by_marginal_gain(views(policy, *jobs), Room(policy.layout, policy.usable(0.0)))


def test_the_longer_job_gains_more_from_the_next_slots(make: MakeJob, nodes: Any) -> None:
    # One slot each; b gains 400 s from a second slot and 100 a slot from two more, a gains 50 from its second.
    assert sizes(nodes, 8, make("a", 100.0), make("b", 800.0)) == {"a": 4, "b": 4}
    # No room for b's third and fourth, so a has the last one.
    assert sizes(nodes, 4, make("a", 100.0), make("b", 800.0)) == {"a": 2, "b": 2}


def test_a_step_is_weighed_with_the_pause_that_it_costs(make: MakeJob, nodes: Any, play: Any) -> None:
    # Running on one slot with 300 s to go, a second would save 150 s and cost a pause of 200.
    cluster = nodes(1, 2)
    played = play(Optimus(nodes=cluster, interval_s=100.0), [make("a", 600.0, pause=200.0)], cluster)
    assert played.sizes("a") == [(0.0, 2), (500.0, 0)]
    blocked = make("b", 100.0, pause=200.0)
    played = play(Optimus(nodes=cluster, interval_s=100.0), [blocked, make("a", 300.0, pause=200.0)], cluster)
    assert all(size < 2 for _, size in played.sizes("a"))


def test_more_jobs_than_slots_begin_with_the_one_that_ends_first(make: MakeJob, nodes: Any) -> None:
    assert sizes(nodes, 2, make("a", 300.0), make("b", 100.0), make("c", 200.0)) == {"b": 1, "c": 1}


def test_a_dent_in_the_curve_is_stepped_over_and_the_knee_is_not(make: MakeJob, nodes: Any) -> None:
    dented = {1: 1.0, 2: 0.9, 4: 3.0, 8: 2.0}
    assert sizes(nodes, 8, make("a", 100.0, curve=dented)) == {"a": 4}


def test_between_two_intervals_nothing_that_runs_is_touched(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 4)
    jobs = [make("a", 4000.0), make("b", 400.0, at=100.0), make("c", 4000.0, at=650.0)]
    played = play(Optimus(nodes=cluster), jobs, cluster)
    assert played.sizes("a")[:2] == [(0.0, 4), (600.0, 2)]  # b comes at 100 and waits for the end of the interval
    assert played.sizes("b")[0] == (600.0, 2)
    assert played.sizes("c")[0][0] == 800.0  # b's slots are idle then, and c starts with the smallest gang
    assert played.sizes("c")[0][1] == 1


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interval_s is 0\.0"):
        Optimus(interval_s=0.0)
