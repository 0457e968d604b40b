"""Jobs that come after their deadline, and jobs that come again when it cannot be kept any more."""

from __future__ import annotations

import pytest

from elasticflow_airflow.service.requests.forecasting import ForecastService

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
FAILS = {"fake": {"fail_at_step": 800}}


def test_a_first_submission_after_its_deadline_is_told_the_earliest_one(world):
    verdict = world.submit(within=-60, steps=1000, scaling_curve=CURVE).job.verdict
    assert verdict.decision == "rejected"
    assert "is past" in verdict.reason
    assert verdict.earliest_deadline_at > world.now_s
    again = world.submit(deadline_at=verdict.earliest_deadline_at, steps=1000, scaling_curve=CURVE)
    assert again.job.verdict.decision == "admitted"


@pytest.mark.parametrize("on_reject", ["best_effort", "wait"])
def test_what_may_be_done_instead_of_a_promise_is_not_done_for_a_deadline_that_has_passed(world, on_reject):
    verdict = world.submit(within=-60, steps=1000, scaling_curve=CURVE, on_reject=on_reject).job.verdict
    assert verdict.decision == "rejected"


@pytest.mark.parametrize("curve", [CURVE, None])
@pytest.mark.parametrize("policy", ["on_miss", "fail"])
def test_without_a_word_for_it_a_late_job_is_rejected(world, policy, curve):
    verdict = world.submit(within=-60, steps=1000, scaling_curve=curve, on_past_deadline=policy).job.verdict
    assert verdict.decision == "rejected"
    assert (verdict.earliest_deadline_at is None) == (curve is None)


def test_a_late_job_may_train_as_best_effort(world):
    job = world.submit(within=-60, steps=100, on_past_deadline="best_effort")
    assert (job.job.verdict.decision, job.job.best_effort, job.job.deadline_at) == ("best_effort", True, None)
    (given_in,) = world.events(job, "best_effort")
    assert "has passed already: trains as best effort" in given_in.reason
    assert world.ended(job).state == "succeeded"


@pytest.mark.parametrize("on_reject", ["late", "renegotiate"])
@pytest.mark.parametrize("curve", [CURVE, None])
def test_a_soft_deadline_counts_until_its_latest(world, on_reject, curve):
    soft = {"on_reject": on_reject, "latest_deadline_at": world.now_s + 3600}
    job = world.submit(within=-60, steps=500, scaling_curve=curve, **soft)
    world.until(lambda: world.status(job).verdict.decision != "undecided", "it is decided")
    status = world.status(job)
    assert status.verdict.decision == "renegotiated", status.verdict.reason
    assert world.now_s < status.deadline_at <= soft["latest_deadline_at"]
    assert world.ended(job).result.met


@pytest.mark.parametrize("on_reject", ["late", "renegotiate"])
def test_a_soft_deadline_is_over_after_its_latest(world, on_reject):
    soft = {"on_reject": on_reject, "latest_deadline_at": world.now_s - 1}
    assert world.submit(within=-60, steps=500, scaling_curve=CURVE, **soft).job.verdict.decision == "rejected"


def promised_and_failed(world, on_miss):
    asked = {"deadline_at": world.now_s + 120, "steps": 1000, "scaling_curve": CURVE, "on_miss": on_miss}
    first = world.submit(**asked, **FAILS)
    assert first.job.verdict.decision == "admitted"
    assert world.ended(first).state == "failed"
    return first, asked


def test_a_retry_after_the_deadline_goes_on_as_its_on_miss_says(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    first, asked = promised_and_failed(world, "finish")
    saved = world.row(first).promoted.step
    world.run(150)
    second = world.submit(**asked)
    world.step()
    status = world.status(second)
    assert (status.incarnation, status.best_effort, status.step) == (2, True, saved)
    assert "while it did not train" in world.events(second, "deadline_missed")[0].reason
    assert world.ended(second).result.steps == 1000


def test_a_retry_of_a_late_retry_goes_on_as_well(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    _, asked = promised_and_failed(world, "finish")
    world.run(150)
    second = world.submit(**asked, fake={"fail_at_step": 900})
    assert world.ended(second).state == "failed"
    third = world.submit(**asked)
    done = world.ended(third)
    assert (done.incarnation, done.state) == (3, "succeeded")


def test_a_miss_is_told_once_however_often_it_comes_again(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    asked = {"deadline_at": world.now_s + 55, "steps": 2500, "scaling_curve": {1: 40.0, 2: 72.0, 4: 128.0}}
    first = world.submit(**asked, fake={"fail_at_step": 2200})
    assert world.ended(first).state == "failed"
    assert world.now_s > asked["deadline_at"]
    second = world.submit(**asked, fake={"fail_at_step": 2300})
    assert world.ended(second).state == "failed"
    third = world.submit(**asked)
    assert world.ended(third).state == "succeeded"
    (missed,) = world.events(third, "deadline_missed")
    assert missed.incarnation == 1
    assert [event.incarnation for event in world.events(third, "best_effort")] == [2, 3]


@pytest.mark.parametrize(
    "given",
    [
        {"on_past_deadline": "best_effort"},
        {"on_reject": "late", "latest_deadline_at": 1.0},
        {},
        {"scaling_curve": None},
        {"on_reject": "best_effort"},
    ],
)
def test_a_dry_run_says_what_a_submit_would(world, given):
    asked = {"within": -60, "steps": 1000, "scaling_curve": CURVE, **given}
    if "latest_deadline_at" in asked:
        asked["latest_deadline_at"] = world.now_s + 3600
    submission = world.submission(**asked)
    world.step()
    reconciler = world.reconciler
    forecasts = ForecastService(
        world.store, world.settings, reconciler.copy_scheduler, lambda: reconciler.device_type, clock=world.clock
    )
    dry = forecasts.dry_run(submission.identity.job_id, submission).verdict
    real = world.submit(**asked).job.verdict
    assert (dry.decision, dry.earliest_deadline_at) == (real.decision, real.earliest_deadline_at)


def test_a_late_retry_that_must_not_be_late_fails(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    _, asked = promised_and_failed(world, "fail")
    world.run(150)
    second = world.submit(**asked)
    done = world.ended(second)
    assert done.state == "failed"
    assert "missed its deadline" in done.failure


def test_a_late_retry_may_use_the_last_checkpoint(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    first, asked = promised_and_failed(world, "use_last_checkpoint")
    saved = world.row(first).promoted.step
    world.run(150)
    second = world.submit(**asked)
    done = world.ended(second)
    assert (done.state, done.result.met, done.result.steps) == ("succeeded", False, saved)
    assert done.result.checkpoint_path == str(
        world.incarnation_dir(second, 2) / "checkpoints" / world.row(second).promoted.path
    )


def test_a_late_retry_is_refused_where_a_late_job_must_not_train(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    _, asked = promised_and_failed(world, "finish")
    world.run(150)
    second = world.submit(**asked, on_past_deadline="fail")
    assert world.ended(second).verdict.decision == "rejected"


def test_a_retry_that_cannot_end_in_time_any_more_ends_late(make_world):
    """Its promise was broken by its own failure; to refuse it would throw away what was trained."""
    world = make_world(checkpoint_interval_s=3.0)
    first, asked = promised_and_failed(world, "finish")
    world.until(lambda: world.now_s > asked["deadline_at"] - 4, "the deadline is near")
    second = world.submit(**asked)
    world.step()
    status = world.status(second)
    assert (status.verdict.decision, status.best_effort) == ("best_effort", True)
    assert "cannot be promised" in status.verdict.reason
    assert world.ended(second).state == "succeeded"
    assert first.job.verdict.decision == "admitted"


def test_a_retry_that_cannot_end_in_time_is_refused_where_nothing_may_be_late(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    _, asked = promised_and_failed(world, "fail")
    world.until(lambda: world.now_s > asked["deadline_at"] - 4, "the deadline is near")
    second = world.submit(**asked)
    world.step()
    assert world.status(second).verdict.decision == "rejected"


def test_who_was_rejected_is_no_less_late_when_it_comes_again(world):
    asked = {"within": 5, "steps": 1000, "scaling_curve": CURVE}
    deadline_at = world.now_s + 5
    assert world.submit(**asked).job.verdict.decision == "rejected"
    world.run(20)
    again = world.submit(deadline_at=deadline_at, steps=1000, scaling_curve=CURVE)
    assert (again.job.incarnation, again.job.verdict.decision) == (2, "rejected")


def test_who_comes_late_to_a_live_job_changes_no_promise(world):
    """A retry, a clear: the deadline that has passed is not asked for again."""
    asked = {"deadline_at": world.now_s - 60, "steps": 1000, "on_past_deadline": "best_effort"}
    first = world.submit(**asked)
    world.until(lambda: world.status(first).step >= 100, "it trains")
    again = world.submit(**asked)
    assert (again.created, again.warnings) == (False, [])
    assert world.events(again, "amend_rejected") == []
    assert world.status(again).best_effort
    assert world.row(again).submission.deadline_at is None


def test_a_job_that_trains_past_its_deadline_keeps_it_when_its_task_comes_again(make_world):
    world = make_world(checkpoint_interval_s=3.0)
    asked = {"deadline_at": world.now_s + 55, "steps": 2500, "scaling_curve": {1: 40.0, 2: 72.0, 4: 128.0}}
    first = world.submit(**asked)
    world.run(60)
    assert world.status(first).state == "running"
    again = world.submit(**asked, value=2.0)
    assert (again.created, again.warnings) == (False, [])
    status = world.status(first)
    assert (status.deadline_at, status.value, status.best_effort) == (asked["deadline_at"], 2.0, False)


def test_a_deadline_that_was_moved_into_the_past_is_not_taken_and_that_is_said(world):
    asked = {"steps": 1000, "scaling_curve": CURVE}
    first = world.submit(within=600, **asked)
    world.run(10)
    again = world.submit(deadline_at=world.now_s - 5, **asked)
    assert world.status(first).deadline_at == first.job.deadline_at
    (warning,) = again.warnings
    assert "has passed already" in warning


def test_a_cleared_late_task_trains_though_its_job_is_still_being_cancelled(world):
    asked = {"deadline_at": world.now_s + 60, "steps": 2000, "scaling_curve": {1: 100.0}}
    first = world.submit(**asked, fake={"save_s": 8.0})
    world.run(70)
    world.job_service.cancel(first.job.job_id, first.claim, "the task was cleared")
    assert not world.status(first).state.terminal
    second = world.submit(**asked, on_past_deadline="best_effort")
    assert second.created
    done = world.ended(second)
    assert (done.incarnation, done.state, done.best_effort) == (2, "succeeded", True)
