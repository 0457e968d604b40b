"""Newcomers that are decided on at the same moment: one plan proves several of them, and each verdict is its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Decision, Reject
from elasticflow_airflow.scheduler_core.model.recurring_work import ExpectedRun, Spread
from elasticflow_airflow.scheduler_core.model.values import Job, ScalingCurve
from elasticflow_airflow.scheduler_core.planning import planner, proof

ONE = {1: 1.0}


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs each joint proof was tried for."""
    tried: list[int] = []
    prove = proof.prove

    def counted(layout: Any, free: Any, ordered: Any, *rest: Any) -> Any:
        tried.append(len(ordered))
        return prove(layout, free, ordered, *rest)

    monkeypatch.setattr(planner, "prove", counted)
    return tried


def verdicts(decided: list[Decision]) -> dict[str, str]:
    return {d.job_id: type(d).__name__ for d in decided if isinstance(d, Admit | Reject)}


def full(nodes: Callable[..., Any], make_job: Callable[..., Job], slots: int) -> Scheduler:
    """A scheduler whose slots are all busy for 100 seconds."""
    scheduler = Scheduler(SchedulerConfig(), nodes(slots))
    scheduler.submitted([make_job(f"busy{i}", deadline=101.0, curve=ONE) for i in range(slots)], 0.0)
    return scheduler


def test_a_crowd_that_fits_takes_a_few_proofs(make_job: Any, nodes: Any, proofs: list[int]) -> None:
    scheduler = full(nodes, make_job, 8)
    proofs.clear()
    crowd = [make_job(f"j{i:02}", deadline=1000.0 + i, curve=ONE) for i in range(64)]
    assert verdicts(scheduler.submitted(crowd, 0.0)) == {job.job_id: "Admit" for job in crowd}
    assert len(proofs) <= 8


def test_who_does_not_fit_is_refused_alone(make_job: Any, nodes: Any) -> None:
    scheduler = full(nodes, make_job, 4)
    crowd = [make_job(f"j{i}", deadline=180.0 if i == 3 else 2000.0, steps=140.0, curve=ONE) for i in range(9)]
    got = verdicts(scheduler.submitted(crowd, 0.0))
    assert [name for name, verdict in got.items() if verdict == "Reject"] == ["j3"]


def test_the_first_of_two_rivals_wins(make_job: Any, nodes: Any) -> None:
    """Both cannot be proven together; alone, each could."""
    scheduler = full(nodes, make_job, 1)
    got = verdicts(scheduler.submitted([make_job(name, deadline=260.0, curve=ONE) for name in ("z", "a")], 0.0))
    assert got == {"z": "Admit", "a": "Reject"}


def test_an_expected_run_does_not_stand_beside_the_job_that_it_has_become(
    make_job: Any, nodes: Any, proofs: list[int]
) -> None:
    scheduler = full(nodes, make_job, 2)
    curve = ScalingCurve(ONE)
    for i in range(8):
        run = ExpectedRun(
            run_id=f"run{i}", task=f"task{i}", due_s=10.0, deadline_after_s=500.0, steps=Spread((95.0,)), curve=curve
        )
        scheduler.handle(ev.RunExpected(run), 0.0)
    crowd = [make_job(f"j{i}", deadline=510.0, steps=95.0, curve=ONE, task=f"task{i}") for i in range(8)]
    proofs.clear()
    assert set(verdicts(scheduler.submitted(crowd, 10.0)).values()) == {"Admit"}
    assert len(proofs) <= 4


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_all_promises_of_a_crowd_are_kept_by_one_plan(
    make_job: Any, nodes: Any, plan_checker: ModuleType, seed: int
) -> None:
    """By an arithmetic that is not the planner's; and a crowd gets about what its jobs get one by one."""
    chance, curve = random.Random(seed), {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0}
    crowd = []
    for i in range(60):
        deadline = chance.uniform(60.0, 1500.0)
        steps = chance.uniform(0.3, 0.9) * deadline * curve[chance.choice([1, 1, 2, 4])]
        crowd.append(make_job(f"j{i:02}", deadline=deadline, steps=steps, curve=curve, startup=10.0, pause=8.0))
    together = Scheduler(SchedulerConfig(), nodes(8, 8, 4))
    admitted = [name for name, verdict in verdicts(together.submitted(crowd, 0.0)).items() if verdict == "Admit"]
    jobs = {job.job_id: job for job in crowd}
    plans = {name: (jobs[name], together.plan_of(name)) for name in admitted}
    assert plan_checker.check_joint(plans, [8, 8, 4], 0.0) == []
    alone = Scheduler(SchedulerConfig(), nodes(8, 8, 4))
    singly = [verdicts(alone.handle(ev.JobSubmitted(job), 0.0)) for job in crowd]
    assert len(admitted) >= 0.9 * sum("Admit" in one.values() for one in singly)
