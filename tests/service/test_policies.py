"""The service under a policy of the literature: the same jobs, the same engine, other decisions."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from elasticflow_airflow.scheduler_core.simulator.baselines.gandiva import Gandiva
from elasticflow_airflow.scheduler_core.simulator.registry import POLICY_NAMES, make_policy
from elasticflow_airflow.service.settings import ServiceSettings

CURVE = {1: 8.0, 2: 14.0, 4: 22.0}


OF_EACH_KIND = ("gang-fifo", "edf+admission", "tiresias")


@pytest.mark.parametrize(
    "policy", [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow) for name in POLICY_NAMES]
)
def test_jobs_train_to_their_end_under_every_policy(make_world, policy):
    try:
        make_policy(policy, [])
    except ModuleNotFoundError as missing:
        pytest.skip(f"{policy} needs {missing.name}")
    world = make_world(policy=policy, nodes=1, slots=4)
    jobs = [world.submit(task=f"t{i}", within=3000, steps=200, scaling_curve=CURVE) for i in range(3)]
    assert [world.ended(job, limit_s=3000).state for job in jobs] == ["succeeded"] * 3


def test_nothing_is_promised_and_the_answer_says_so(make_world):
    world = make_world(policy="gang-fifo")
    job = world.submit(within=1, steps=400, scaling_curve=CURVE)
    assert job.job.verdict.decision == "best_effort"
    assert "no deadline is promised" in job.job.verdict.reason


def test_a_job_of_unknown_speed_is_not_profiled_but_learnt(make_world):
    world = make_world(policy="gandiva", nodes=1, slots=4)
    job = world.submit(within=900, steps=100)
    assert world.ended(job).state == "succeeded"
    assert {generation.purpose for generation in world.generations(job)} == {"train"}


def test_after_a_kill_the_policy_goes_on_with_its_jobs(make_world):
    world = make_world(policy="gandiva", nodes=1, slots=2)
    jobs = [world.submit(task=f"t{i}", within=3000, steps=160, scaling_curve={1: 8.0}) for i in range(3)]
    world.run(10)
    world.restart()
    world.run(5)
    assert isinstance(world.reconciler.copy_scheduler(), Gandiva)
    assert [world.ended(job, limit_s=3000).state for job in jobs] == ["succeeded"] * 3


def test_an_unknown_policy_is_told_what_there_is(tmp_path):
    with pytest.raises(ValidationError, match="no policy 'fifo'; choose one of elasticflow, "):
        ServiceSettings(state_dir=tmp_path, policy="fifo")


def test_by_value_a_job_that_would_take_what_many_need_is_refused_and_says_why(make_world):
    world = make_world(objective="value", nodes=1, slots=4)
    for number in range(20):
        small = world.submit(task=f"small{number}", within=250, steps=1000, scaling_curve={1: 8.0})
        assert small.job.verdict.decision == "admitted"
        world.run(60, every=5)
    for task in ("monster", "another"):
        monster = world.submit(task=task, within=1000, steps=26_000, scaling_curve={1: 8.0, 2: 16.0, 4: 32.0})
        assert monster.job.verdict.decision == "rejected"
        assert "objective: value" in monster.job.verdict.reason
        world.run(300, every=20)
        world.restart()  # what was seen to come is remembered


def test_an_objective_that_is_none_is_told_what_there_is(tmp_path):
    with pytest.raises(ValidationError, match="first-come"):
        ServiceSettings(state_dir=tmp_path, objective="cheapest")
