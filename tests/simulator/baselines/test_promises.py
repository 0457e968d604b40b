"""Whoever promises keeps it, by exact curves: on full clusters, with waiting, best effort, and every kind of cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model.events import JobSubmitted, NodeJoined, NodeLost, WakeUp
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, RescaleCosts
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES, make_policy

MakeJob = Callable[..., Job]
PROMISING = ("edf+admission", "chronus", "chronus+size")
SHAPES = ((1, 4), (2, 4), (1, 8), (3, 2))
CHOICES = (OnReject.WAIT, OnReject.WAIT, OnReject.FAIL, OnReject.BEST_EFFORT)
TERM_S = 600.0
"""Of chronus: what comes or ends just as leases are given out is a case of its own."""


def crowd(make: MakeJob, seed: int) -> list[Job]:
    """More jobs than fit, of the same costs: some together, some as a term begins, some without a deadline."""
    chaos = random.Random(seed)
    startup_s, pause_s, tail_s = (chaos.choice(of) for of in ((0.0, 5.0, 60.0), (0.0, 5.0, 30.0), (0.0, 0.0, 40.0)))
    jobs, at = [], 0.0
    for i in range(chaos.randint(8, 24)):
        at += chaos.choice((0.0, chaos.expovariate(1 / 200.0)))
        if chaos.random() < 0.2:
            at = TERM_S * (at // TERM_S + 1.0)
        first = chaos.uniform(0.5, 3.0)
        curve, speed = {}, first
        for level in range(4):
            curve[1 << level] = speed
            speed *= chaos.uniform(0.8, 2.0)
        asks = chaos.choice((1, 1, 2, 4))
        alone_s = chaos.choice((30.0, 300.0, TERM_S, 2000.0, 6000.0)) * chaos.uniform(0.5, 1.0)
        slack = chaos.uniform(1.0, 4.0)
        job = make(f"j{i:02}", alone_s * curve[asks], at=at, asks=asks, curve=curve, on_reject=chaos.choice(CHOICES))
        if chaos.random() < 0.85:
            job = replace(job, deadline_s=at + startup_s + tail_s + slack * alone_s)
        jobs.append(replace(job, costs=RescaleCosts(startup_s=startup_s, pause_s=pause_s, tail_s=tail_s)))
    return jobs


@pytest.mark.parametrize("name", PROMISING)
def test_no_promise_is_broken_where_not_everybody_fits(name: str, make: MakeJob, nodes: Any, play: Any) -> None:
    if name.startswith("chronus"):
        pytest.importorskip("scipy")
    promised = 0
    for seed in range(40):
        cluster = nodes(*SHAPES[seed % len(SHAPES)])
        played = play(make_policy(name, cluster), crowd(make, seed), cluster)
        late = [record.job_id for record in played.result.records if record.late_though_admitted]
        assert not late, f"seed {seed}: {late}"
        assert played.result.summary()["unfinished"] == 0
        promised += sum(record.promised_deadline_s is not None for record in played.result.records)
    assert promised > 150


@pytest.mark.parametrize("seed", range(12))
def test_who_has_no_promise_moves_nobody_whom_edf_has_promised(seed: int, make: MakeJob, nodes: Any, play: Any) -> None:
    """Promises rest on what EDF would do without further arrivals: others come and wait, and it does just that."""
    cluster = nodes(*SHAPES[seed % len(SHAPES)])
    jobs = [replace(job, on_reject=OnReject.FAIL) for job in crowd(make, seed) if job.deadline_s is not None]
    chaos = random.Random(seed)
    guests = []
    for i in range(12):
        curve = {1: 1.0, 2: 1.5, 4: 2.5}
        guest = make(f"guest{i:02}", chaos.uniform(10.0, 900.0), at=chaos.uniform(0.0, 3000.0), curve=curve)
        guests.append(replace(guest, costs=jobs[0].costs))
    alone = play(make_policy("edf+admission", cluster), jobs, cluster).changes
    beside = play(make_policy("edf+admission", cluster), sorted([*jobs, *guests], key=_arrival), cluster).changes
    assert [change for change in beside if not change.job_id.startswith("guest")] == alone


def with_tail(jobs: list[Job], tail_s: float) -> list[Job]:
    """The same with another tail, and as much later deadlines."""
    return [
        replace(
            job,
            costs=replace(job.costs, tail_s=tail_s),
            deadline_s=None if job.deadline_s is None else job.deadline_s + tail_s - job.costs.tail_s,
        )
        for job in jobs
    ]


@pytest.mark.parametrize(("seed", "shape"), [(2146, (2, 4)), (2227, (1, 6)), *((seed, (1, 4)) for seed in range(8))])
def test_a_job_that_is_in_its_tail_leaves_when_it_does(seed: int, shape: tuple[int, int], make, nodes, play) -> None:
    """A trial that lets it leave later lets others grow later, and promises what does not happen."""
    cluster = nodes(*shape)
    played = play(make_policy("edf+admission", cluster), with_tail(crowd(make, seed), 40.0), cluster)
    assert [record.job_id for record in played.result.records if record.late_though_admitted] == []


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("choice", [OnReject.FAIL, OnReject.WAIT, OnReject.BEST_EFFORT])
def test_jobs_may_come_while_there_is_no_node(name: str, choice: OnReject, make: MakeJob) -> None:
    """The last one is lost, or none has joined yet."""
    policy = make_policy(name, [])

    def asked(job_id: str, deadline: float | None) -> JobSubmitted:
        return JobSubmitted(make(job_id, 100.0, deadline=deadline, asks=2, curve={2: 2.0, 4: 3.0}, on_reject=choice))

    policy.handle(asked("a", 9000.0), 0.0)
    policy.handle(NodeJoined(Node(node_id="n", slots=4)), 1.0)
    policy.handle(NodeLost("n"), 2.0)
    policy.handle(asked("b", 9000.0), 3.0)
    policy.handle(asked("c", None), 3.0)
    policy.handle(NodeJoined(Node(node_id="n", slots=4)), 4.0)
    policy.handle(WakeUp(), 5.0)
    assert {state.job.job_id for state in policy.states()} <= {"a", "b", "c"}


def _arrival(job: Job) -> float:
    return job.submitted_s
