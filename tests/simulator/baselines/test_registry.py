"""Every policy by its name: it plays any list of jobs to the end, on any cluster, without giving a slot twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES, make_policy

MakeJob = Callable[..., Job]
OURS = (
    "edf",
    "edf-plain",
    "edf+elastic",
    "edf+admission",
    "gang-fifo",
    "gang-fifo+knee",
    "gandiva",
    "tiresias",
    "themis",
    "antman",
    "aonline",
    "chronus",
    "chronus+size",
    "gavel",
    "oasis",
    "optimus",
    "pollux",
)


def policy_of(name: str, nodes: Any) -> Any:
    try:
        return make_policy(name, nodes, SchedulerConfig())
    except ModuleNotFoundError as missing:
        pytest.skip(f"{name} needs {missing.name}")


def synthetic(make: MakeJob, seed: int, count: int, pause: float) -> list[Job]:
    """Jobs of all kinds: short and long, urgent and not, with curves that rise, flatten and fall."""
    chaos = random.Random(seed)
    jobs, at = [], 0.0
    for i in range(count):
        at += chaos.expovariate(1 / 60.0)
        first = chaos.uniform(0.5, 3.0)
        gains = [1.0, chaos.uniform(1.1, 2.0), chaos.uniform(0.9, 2.0), chaos.uniform(0.7, 1.9)]
        curve, speed = {}, first
        for level, gain in enumerate(gains):
            speed *= gain
            curve[1 << level] = speed
        asks = chaos.choice([1, 1, 1, 2, 4, 8])
        steps = chaos.uniform(30.0, 900.0) * curve[asks]
        deadline = None if i % 7 == 3 else at + chaos.uniform(0.5, 3.0) * steps / curve[asks] + pause
        jobs.append(make(f"j{i:02}", steps, at=at, deadline=deadline, asks=asks, curve=curve, pause=pause))
    return jobs


def test_names_begin_with_the_default_and_make_what_they_say(nodes: Any) -> None:
    assert POLICY_NAMES[0] == "elasticflow"
    assert isinstance(make_policy("elasticflow", nodes(1, 1)), Scheduler)
    assert set(OURS) < set(POLICY_NAMES)


def test_an_unknown_name_is_told_what_there_is(nodes: Any) -> None:
    with pytest.raises(ValueError, match=r"no policy 'edff'; choose one of elasticflow, .*gang-fifo"):
        make_policy("edff", nodes(1, 1))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_all_work_is_done_and_no_slot_given_twice(name: str, make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(2, 8)
    played = play(policy_of(name, cluster), synthetic(make, 1, 30, pause=12.0), cluster)
    summary = played.result.summary()
    assert summary["unfinished"] == 0
    assert summary["late_though_admitted"] == 0


@pytest.mark.parametrize("name", OURS)
def test_uneven_nodes_are_used_block_by_block(name: str, make: MakeJob, play: Any) -> None:
    cluster = [Node(node_id=f"n{i}", slots=size) for i, size in enumerate((8, 6, 4, 4, 1))]
    played = play(policy_of(name, cluster), synthetic(make, 2, 20, pause=7.0), cluster)
    assert played.result.summary()["unfinished"] == 0


@pytest.mark.parametrize("name", OURS)
def test_jobs_of_unknown_speed_and_length_are_served_and_learnt(name: str, make: MakeJob, nodes: Any) -> None:
    policy = policy_of(name, nodes(1, 4))
    known = make("known", 400.0, deadline=3000.0)
    unknown = replace(make("unknown", 1.0, asks=2, deadline=3000.0), curve=None, total_steps=None)
    held: dict[str, int] = {}
    steps = [
        ev.JobSubmitted(known),
        ev.JobSubmitted(unknown),
        ev.JobProgressed("known", 300.0),
        ev.WakeUp(),
        ev.JobFinished("known"),
        ev.WakeUp(),
        ev.JobProgressed("unknown", 5000.0, steps_per_s=2.0, total_steps=6000.0),
        ev.WakeUp(),
    ]
    for turn, event in enumerate(steps):
        for decision in policy.handle(event, 700.0 * turn):
            if isinstance(decision, de.Resize):
                held[decision.job_id] = decision.placement.workers
            elif isinstance(decision, de.Suspend):
                held[decision.job_id] = 0
            elif isinstance(decision, de.Reject):
                assert decision.job_id == "unknown"
                return  # a policy of prices cannot price what nobody knows, and says so
    assert held["unknown"] > 0
    assert policy.projected_finish_s("unknown") == pytest.approx(3500.0 + 700.0 + 5000.0 / 2.0, rel=0.3)


@pytest.mark.parametrize("name", OURS)
def test_the_same_events_give_the_same_decisions(name: str, make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(2, 4)
    jobs = synthetic(make, 3, 15, pause=5.0)
    schedules = [play(policy_of(name, cluster), jobs, cluster).changes for _ in range(2)]
    assert schedules[0] == schedules[1]
