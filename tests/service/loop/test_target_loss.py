"""A loss to train to: it ends the training, and its prediction sizes the job; no promise stands on a prediction."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from elasticflow_airflow.api import JobSubmission

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
# The modelled loss falls from 4.0 towards 0.5; it is at 0.8 after 214 steps, and at 0.6 after 680.


def reasons(world, job, kind):
    return [event.reason for event in world.events(job, kind)]


def test_the_target_ends_the_training_as_a_success(world):
    job = world.submit(steps=2000, target_loss=0.8, scaling_curve=CURVE, within=900)
    world.until(lambda: world.status(job).expected_steps, "it can be foretold")
    status = world.status(job)
    assert (status.target_loss, status.expected_steps, status.total_steps) == (0.8, 214, 2000)
    assert 214 < status.expected_steps_at_most <= 2000
    done = world.ended(job)
    assert (done.state, done.step, done.result.steps, done.result.met) == ("succeeded", 214, 214, True)
    assert done.target_reached
    assert reasons(world, job, "target_reached") == [
        "target loss 0.8 reached at step 214 of at most 2000 (smoothed loss 0.7991)"
    ]
    assert done.state_reason.startswith("done: 214 steps, target loss 0.8 reached, loss 0.7991")
    assert not world.events(job, "hang")


def test_a_target_that_is_not_reached_ends_with_the_upper_bound(world):
    job = world.submit(steps=200, target_loss=0.6, scaling_curve=CURVE)
    done = world.ended(job)
    assert (done.state, done.step, done.target_reached) == ("succeeded", 200, False)
    assert re.fullmatch(
        r"target loss 0\.6 was not reached in 200 steps \(smoothed loss 0\.818\d\)",
        reasons(world, job, "target_missed")[0],
    )


def test_the_event_log_says_once_how_long_it_will_take_and_again_when_that_changes(world):
    job = world.submit(steps=2000, target_loss=0.6, scaling_curve=CURVE, max_workers=1)
    world.run(30)
    (said,) = reasons(world, job, "target_length")
    assert said == (
        "target loss 0.6 is expected at step 680, at 748 with the error of the prediction; at most 2000 steps"
    )
    for gang in world.engine.world.gangs.values():
        gang.behaviour = gang.behaviour.changed({"target_length": 2.0})
    world.run(2)
    assert [reason.split(",")[0] for reason in reasons(world, job, "target_length")] == [
        "target loss 0.6 is expected at step 680",
        "target loss 0.6 is expected at step 1360",
    ]
    for gang in world.engine.world.gangs.values():
        gang.behaviour = gang.behaviour.changed({"target_error": None})
    world.run(2)
    assert reasons(world, job, "target_length")[-1] == (
        "when target loss 0.6 is reached can no longer be predicted: at most 2000 steps"
    )
    assert world.status(job).expected_steps is None
    assert world.status(job).projected_finish_at == pytest.approx(
        world.now_s + (2000 - world.status(job).step) / 9, 0.1
    )


def test_the_projected_end_follows_the_prediction_and_the_promise_does_not(world):
    job = world.submit(steps=2000, target_loss=0.6, scaling_curve={1: 10.0}, within=265, max_workers=1)
    assert job.job.verdict.decision == "admitted"
    world.run(20)
    status = world.status(job)
    assert status.projected_finish_at - world.now_s < 100
    assert world.row(job).scheduler_state.state.reserved[-1].end_s - world.now_s >= (2000 - status.step) / 10
    # It would need all four slots, and in time, if the prediction was right.
    other = world.submit(task="other", steps=3000, scaling_curve={4: 32.0}, min_workers=4, within=235)
    assert other.job.verdict.decision == "rejected"


def test_admission_counts_the_upper_bound(world):
    world.submit(steps=300, target_loss=0.8, scaling_curve=CURVE, max_workers=1)
    late = world.submit(task="late", steps=2000, target_loss=0.8, scaling_curve={1: 10.0}, max_workers=1, within=150)
    assert late.job.verdict.decision == "rejected", "214 steps would fit, 2000 do not"


def test_the_next_run_expects_what_the_last_one_took(world):
    first = world.submit(run="run1", steps=2000, target_loss=0.6, scaling_curve=CURVE)
    assert world.ended(first).target_reached
    second = world.submit(run="run2", steps=2000, target_loss=0.6, scaling_curve=CURVE, fake={"target_error": None})
    world.run(1)
    assert world.status(second).expected_steps == pytest.approx(680, rel=0.1)
    assert "as in the last run of this task" in reasons(world, second, "target_length")[0]
    assert world.ended(second).step == 680


def test_a_service_that_was_killed_knows_the_prediction_again(world):
    job = world.submit(steps=2000, target_loss=0.6, scaling_curve={1: 10.0}, max_workers=1, within=400)
    world.run(20)
    before = world.status(job)
    assert before.expected_steps == 680
    world.restart()
    world.run(1)
    after = world.status(job)
    assert after.expected_steps == 680
    assert after.projected_finish_at == pytest.approx(before.projected_finish_at, abs=5)
    assert world.ended(job).target_reached


def test_a_loss_of_all_workers_keeps_the_target(world):
    job = world.submit(steps=2000, target_loss=0.6, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 200, "some steps")
    world.engine.lose(job.job.job_id)
    done = world.ended(job)
    assert (done.state, done.step, done.target_reached) == ("succeeded", 680, True)


def test_a_script_may_evaluate_after_its_target_for_longer_than_a_step_may_take(make_world):
    world = make_world(hang_min_s=20.0)
    job = world.submit(steps=2000, target_loss=0.8, scaling_curve=CURVE, fake={"tail_s": 90.0})
    assert world.ended(job).state == "succeeded"
    assert not world.events(job, "hang")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_loss": float("nan")}, "must be a finite number: give at least -1e"),
        ({"target_loss": 0.5, "length": {"steps": None}}, "needs steps= or epochs= as well"),
        ({"target_loss": 0.5, "progress_regex": "step (\\d+)"}, "only a script that uses the session"),
    ],
)
def test_what_cannot_be_a_target_is_refused(world, changes, words):
    message = world.submission().model_dump(mode="json")
    with pytest.raises(ValidationError, match=words):
        JobSubmission.model_validate(message | changes)


def test_a_length_that_is_the_scripts_is_the_same_training_as_the_one_epoch_that_was_sent_before(world):
    own = world.submission(steps=None)
    submission = own.model_dump(mode="json")
    before = JobSubmission.model_validate(submission | {"length": {"steps": None, "epochs": 1, "samples": None}})
    two = JobSubmission.model_validate(submission | {"length": {"steps": None, "epochs": 2, "samples": None}})
    assert own.equality_key() == before.equality_key() != two.equality_key()


def test_another_target_is_another_training_and_none_is_what_it_was(world):
    plain, low, lower = (world.submission(target_loss=target).equality_key() for target in (None, 0.6, 0.5))
    assert len({plain, low, lower}) == 3
