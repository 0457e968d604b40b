"""Jobs with ``requirements=``: they get no slots before their environment is there."""

from __future__ import annotations

import pytest

from elasticflow_airflow.api import Command

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
LINES = ("accelerate==1.1.0",)
MISSING = "mine @ file://" + "/nowhere.whl"


def command(world, *lines):
    return Command(snapshot=world.sha256, script="train.py", requirements=lines or LINES)


def test_a_job_is_decided_on_once_its_environment_is_there(world):
    world.engine.world.environment_s = 60.0
    job = world.submit(within=900, steps=200, scaling_curve=CURVE, command=command(world))
    world.run(30)
    status = world.status(job)
    assert (status.state, status.verdict.decision) == ("submitted", "undecided")
    assert status.state_reason == "waits for its environment: what it requires is being installed"
    other = world.submit(run="other", within=100, steps=100, scaling_curve=CURVE)
    assert other.job.verdict.decision == "admitted", "others do not wait"
    done = world.ended(job)
    assert (done.state, done.result.met) == ("succeeded", True)
    assert world.generations(job)[0].created_at >= job.job.submitted_at + 60.0
    again = world.submit(run="again", within=900, steps=200, scaling_curve=CURVE, command=command(world))
    assert again.job.verdict.decision == "admitted", "it is there already"


def test_an_environment_that_cannot_be_built_fails_its_job_and_no_other(world):
    job = world.submit(within=900, steps=200, scaling_curve=CURVE, command=command(world, MISSING))
    done = world.ended(job)
    assert done.state == "failed"
    assert done.failure == (
        "the environment for requirements= could not be built: " + MISSING + ": there is no such file"
    )
    assert not world.generations(job), "it never had a slot"
    assert world.ended(world.submit(run="other", within=100, steps=100, scaling_curve=CURVE)).state == "succeeded"


def test_a_job_is_cancelled_while_its_environment_is_built(world):
    world.engine.world.environment_s = 600.0
    job = world.submit(within=900, steps=200, scaling_curve=CURVE, command=command(world))
    world.run(5)
    world.job_service.cancel(job.job.job_id, job.claim, "no longer needed")
    assert world.ended(job, 30).state == "cancelled"


def test_a_service_that_is_killed_meanwhile_asks_again(world):
    world.engine.world.environment_s = 30.0
    job = world.submit(within=900, steps=200, scaling_curve=CURVE, command=command(world))
    world.run(10)
    world.restart()
    assert world.ended(job).state == "succeeded"


@pytest.mark.trouble
def test_a_defect_of_the_engine_sets_only_that_job_aside(world, monkeypatch):
    def broken(python, requirements):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(world.engine, "prepare_environment", broken)
    job = world.submit(within=900, steps=200, scaling_curve=CURVE, command=command(world))
    other = world.submit(run="other", within=100, steps=100, scaling_curve=CURVE)
    assert world.ended(other).state == "succeeded"
    assert "a defect" in world.status(job).state_reason
