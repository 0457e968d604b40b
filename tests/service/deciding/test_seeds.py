"""The seed of a training: its task's or its script's, never the cluster's; kept by all that goes on from it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def spec(world):
    *_, gang = world.engine.world.gangs.values()
    return gang.spec.session


@pytest.mark.parametrize("seed", [None, 0, 7, 2**31 - 1])
def test_workers_get_the_seed_that_was_submitted_or_are_left_to_their_script(world, seed):
    job = world.submit(steps=900, scaling_curve=CURVE, seed=seed)
    world.run(5)
    assert spec(world).seed == seed
    assert world.status(job).seed == (seed or 0)


def test_what_the_session_says_is_told_and_kept(world):
    job = world.submit(steps=900, scaling_curve=CURVE, fake={"seed": 23})
    world.run(5)
    assert world.status(job).seed == 23
    (event,) = world.events(job, "seed")
    assert event.reason == "trains with seed 23 in 8 logical workers"
    world.engine.lose(job.job.job_id)
    world.run(10)
    assert spec(world).seed == 23
    assert len(world.events(job, "seed")) == 1


def test_another_seed_is_another_training_and_none_goes_on_with_what_is_there(world):
    first = world.submit(steps=900, scaling_curve=CURVE, seed=1)
    world.run(3)
    assert not world.submit(steps=900, scaling_curve=CURVE, seed=1).created
    other = world.submit(steps=900, scaling_curve=CURVE, seed=2)
    assert other.created
    assert first.job.job_id == other.job.job_id


def test_a_retry_that_resumes_keeps_the_seed_of_its_checkpoint(make_world):
    world = make_world(checkpoint_interval_s=1.0)
    job = world.submit(steps=400, scaling_curve=CURVE, fake={"fail_at_step": 150, "report_interval_s": 0.1, "seed": 23})
    assert world.ended(job).state == "failed"
    again = world.submit(steps=400, scaling_curve=CURVE)
    assert again.created
    world.run(3)
    assert world.row(again).step > 0, "it goes on"
    assert spec(world).seed == world.status(again).seed == 23


@pytest.mark.parametrize("seed", [-1, 2**31, 1.5, "7"])
def test_a_seed_that_is_none_is_refused(world, seed):
    with pytest.raises(ValidationError, match="seed"):
        world.submit(steps=900, scaling_curve=CURVE, seed=seed)


def test_a_training_keeps_the_number_of_threads_that_it_has_begun_with(make_world):
    """Also one of a version in which the slot decided on it, and across a retry that resumes."""
    world = make_world(checkpoint_interval_s=1.0)
    fake = {"fail_at_step": 150, "report_interval_s": 0.1, "threads": 2}
    job = world.submit(steps=400, scaling_curve=CURVE, fake=fake)
    world.run(1)
    assert spec(world).threads is None, "the session decides"
    world.until(lambda: world.row(job).promoted, "a checkpoint")
    world.engine.lose(job.job.job_id)
    world.until(lambda: len(world.generations(job)) == 2, "the next generation")
    world.step()
    assert spec(world).threads == 2
    assert world.ended(job).state == "failed"
    again = world.submit(steps=400, scaling_curve=CURVE)
    world.run(3)
    assert world.row(again).step > 0, "it goes on"
    assert spec(world).threads == 2


def test_the_number_of_threads_in_the_submitted_environment_counts(world):
    world.submit(steps=900, command={"snapshot": world.sha256, "script": "train.py", "env": {"OMP_NUM_THREADS": "4"}})
    world.run(5)
    assert spec(world).threads == 4
