"""AntMan: opportunistic jobs run on what is left, and guaranteed ones never notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.antman import AntMan
from elasticflow_airflow.scheduler_core.simulator.run import Change, SimulatedJob, Simulation

MakeJob = Callable[..., Job]
FAR = 1e9


def beside(jobs: list[Job], nodes: Any, leftover: Any) -> tuple[dict[str, float | None], list[Change]]:
    """Simulate with slots that may be shared: when each job ended, and who held what."""
    changes: list[Change] = []
    simulated = [
        SimulatedJob(job=job, truth=job.curve.steps_per_s if job.curve else {}, arrives_s=job.submitted_s)
        for job in jobs
    ]
    result = Simulation(
        name="antman",
        policy=AntMan(nodes=nodes, leftover=leftover),
        nodes=nodes,
        jobs=simulated,
        leftover=leftover,
        on_change=changes.append,
    ).run()
    return {record.job_id: record.finished_s for record in result.records}, changes


def test_a_guest_has_what_its_host_leaves_and_the_host_loses_nothing(make: MakeJob, nodes: Any) -> None:
    jobs = [make("host", 100.0, deadline=FAR, workload="H"), make("guest", 60.0, workload="G")]
    ends, _ = beside(jobs, nodes(1, 1), lambda host, guest: {("H", "G"): 0.3}[host, guest])
    assert ends["host"] == 100.0
    assert ends["guest"] == pytest.approx(130.0)  # 30 steps beside it, 30 alone


def test_a_host_that_leaves_too_little_has_no_guest(make: MakeJob, nodes: Any) -> None:
    jobs = [make("host", 100.0, deadline=FAR), make("guest", 60.0)]
    ends, changes = beside(jobs, nodes(1, 1), lambda host, guest: 0.05)
    assert ends == {"host": 100.0, "guest": 160.0}
    assert changes[1].job_id == "host"


def test_a_guest_goes_where_most_is_left(make: MakeJob, nodes: Any) -> None:
    left = {"greedy": 0.2, "modest": 0.8}
    jobs = [
        make("one", 500.0, deadline=FAR, workload="greedy"),
        make("two", 500.0, deadline=FAR, workload="modest"),
        make("guest", 80.0, at=10.0),
    ]
    ends, _ = beside(jobs, nodes(1, 2), lambda host, guest: left[host])
    assert ends["guest"] == pytest.approx(110.0)


@pytest.mark.parametrize("seed", range(6))
def test_guaranteed_jobs_end_as_if_nobody_else_were_there(seed: int, make: MakeJob, nodes: Any) -> None:
    chaos = random.Random(seed)
    cluster = nodes(2, 4)
    curve = {1: 1.0, 2: 1.8, 4: 3.0}
    guaranteed, others = [], []
    for i in range(30):
        at, steps = chaos.uniform(0.0, 2000.0), chaos.uniform(20.0, 900.0)
        job = make(f"j{i}", steps, at=at, asks=chaos.choice([1, 1, 2, 4]), curve=curve, pause=8.0, workload=str(i % 3))
        if i % 2:
            guaranteed.append(replace(job, deadline_s=FAR))
        else:
            others.append(job)

    def left(host: str, guest: str) -> float:
        return 0.2 * (int(host) + int(guest))

    alone, _ = beside(guaranteed, cluster, left)
    together, _ = beside([*guaranteed, *others], cluster, left)
    assert {job_id: together[job_id] for job_id in alone} == pytest.approx(alone)
    assert all(end is not None for end in together.values())


def test_without_a_table_opportunistic_jobs_use_idle_slots_and_give_them_up(
    make: MakeJob, nodes: Any, play: Any
) -> None:
    cluster = nodes(1, 2)
    jobs = [make("spare", 200.0, asks=2), make("due", 50.0, at=30.0, deadline=FAR, asks=2)]
    played = play(AntMan(nodes=cluster), jobs, cluster)
    assert played.sizes("due") == [(30.0, 2), (55.0, 0)]
    assert played.sizes("spare")[:3] == [(0.0, 2), (30.0, 0), (55.0, 2)]


def test_who_waits_for_its_turn_runs_opportunistically_on_fewer_slots(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 4)
    jobs = [
        make("first", 100.0, deadline=FAR, asks=2),
        make("wide", 400.0, at=1.0, deadline=FAR, asks=4),
        make("last", 30.0, at=2.0, deadline=FAR, asks=1),
    ]
    played = play(AntMan(nodes=cluster), jobs, cluster)
    assert played.sizes("wide")[0] == (1.0, 2)
    assert (50.0, 4) in played.sizes("wide")  # its turn, with all that it asked for
    assert played.sizes("last")[0][0] > 50.0  # nobody overtakes
