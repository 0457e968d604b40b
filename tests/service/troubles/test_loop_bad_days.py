"""What the reconcile loop does when a training misbehaves: each has a message that says what was wrong."""

from __future__ import annotations

import re

import pytest

from elasticflow_airflow.api import Length
from elasticflow_airflow.engines.port import EngineError

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=3.0, hang_min_s=20.0, grace_s=5.0)


def run(world, **fake):
    job = world.submit(within=900, steps=400, scaling_curve=CURVE, max_workers=1, fake=fake)
    return job, world.ended(job)


def restarts(world, job):
    return [e.reason for e in world.events(job, "restarting")]


def test_a_hang_is_restarted_once_and_then_fails(world):
    job, done = run(world, hang_at_step=160)
    assert done.state == "failed"
    assert "hangs: made no progress for" in done.failure
    assert "again after a restart" in done.failure
    (hang,) = world.events(job, "hang")
    assert "at step 160" in hang.reason
    assert len(world.generations(job)) == 2
    assert restarts(world, job) == ["restarts after a hang at step 160; goes on from step 150"]


@pytest.mark.parametrize(("hangs", "state"), [(2, "succeeded"), (3, "failed")])
def test_a_hang_after_progress_is_restarted_as_often_as_other_failures(world, hangs, state):
    """A machine that stands still now and then makes no training fail that comes on in between."""
    job = world.submit(within=900, steps=1200, scaling_curve=CURVE, max_workers=1, fake={"in_place": True})
    for hang in range(hangs):
        world.until(lambda at=300 * (hang + 1): world.status(job).step > at, "it makes steps")
        world.engine.hang_worker(job.job.job_id, 0)
        world.until(lambda n=hang: len(world.events(job, "hang")) > n or world.is_over(job), "it is seen")
    done = world.ended(job)
    assert done.state == state
    assert len(world.events(job, "hang")) == min(hangs, 2)
    assert hangs <= 2 or "hangs: made no progress for" in done.failure


def test_a_hang_while_workers_are_changed_counts_once(world):
    """It stops two generations: the one that trains, and the one that it is changed to."""
    curve, fake = {1: 10.0, 2: 18.0, 4: 32.0}, {"in_place": True, "never_switches": True}
    job = world.submit(steps=2000, best_effort=True, scaling_curve=curve, fake=fake)
    world.until(lambda: world.status(job).step > 20, "it trains")
    world.submit(task="good", within=900, steps=5000, scaling_curve={1: 10.0}, max_workers=1)
    assert world.generations(job)[-1].mode == "in_place", "it makes room"
    for hang in range(2):
        before = world.status(job).step
        world.until(lambda at=before: world.status(job).step > at + 100, "it makes steps")
        world.engine.hang_worker(job.job.job_id, 0)
        world.until(lambda n=hang: len(world.events(job, "hang")) > n or world.is_over(job), "it is seen")
    assert sum(g.stop_cause == "hang" for g in world.generations(job)) > 2
    assert world.ended(job).state == "succeeded"


def test_a_loss_that_is_no_number_fails_at_once(world):
    job, done = run(world, nan_loss_at_step=150)
    assert done.state == "failed"
    assert "the loss is not a number at step 150" in done.failure
    assert len(world.generations(job)) == 1


def test_leaving_with_status_0_before_the_end_fails_and_says_how_far_it_came(world):
    _job, done = run(world, exit_at_step=150)
    assert done.state == "failed"
    assert "ended with status 0 after 1" in done.failure
    assert "of 400 steps" in done.failure


def test_an_end_before_all_steps_fails_unless_it_is_meant(world):
    _job, done = run(world, early_at_step=150, early=None)
    assert done.state == "failed"
    assert "finished after 150 of 400 steps: if that is meant, let it say why" in done.failure


def test_an_early_end_that_is_meant_is_a_success(world):
    job, done = run(world, early_at_step=150)
    assert done.state == "succeeded"
    assert done.result.steps == 150
    assert done.result.checkpoint_path is not None
    (event,) = world.events(job, "succeeded")
    assert event.reason.startswith("done early, after 150 of 400 steps: no better for 3 epochs, loss ")


def test_progress_that_goes_backwards_fails(world):
    _job, done = run(world, backwards_at_step=150)
    assert done.state == "failed"
    assert "the progress went backwards, from step 1" in done.failure


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_global_one(world):
    job, done = run(world, out_of_memory_above=8)
    assert done.state == "succeeded"
    assert restarts(world, job) == [
        "out of memory with a micro-batch of 32: tries again with 16; the global batch stays 32; goes on from step 0",
        "out of memory with a micro-batch of 16: tries again with 8; the global batch stays 32; goes on from step 0",
    ]
    assert world.row(job).micro_batch_size == 8
    assert world.row(job).restarts == 0


def test_out_of_memory_while_measuring(world):
    job = world.submit(within=900, steps=2000, fake={"out_of_memory_above": 8})
    done = world.ended(job)
    assert (done.state, done.result.met) == ("succeeded", True)
    assert world.row(job).micro_batch_size == 8


def test_of_a_micro_batch_of_three_two_are_left(world):
    """One sample alone cannot train BatchNorm: a job that would do with two is not ended for it."""
    given = {"global_batch_size": 6, "min_workers": 2, "max_workers": 2}
    job = world.submit(steps=20, scaling_curve=CURVE, fake={"out_of_memory_above": 2}, **given)
    assert world.ended(job).state == "succeeded"
    assert world.row(job).micro_batch_size == 2


def test_memory_that_never_suffices_fails_with_advice(world):
    _job, done = run(world, out_of_memory_above=0)
    assert done.state == "failed"
    assert "does not suffice for a micro-batch of 1" in done.failure
    assert "larger device" in done.failure


def test_a_failing_script_is_restarted_while_it_progresses_and_then_fails_with_its_words(world):
    trace = "Traceback (most recent call last):\n  File train.py, line 7\nRuntimeError: no such column: label"
    job, done = run(world, fail_at_step=150, failure=trace)
    assert done.state == "failed"
    assert "no such column: label" in done.failure
    assert len(world.generations(job)) == 2, "the second try came no further than the first"
    assert "restart 1 of 2" in restarts(world, job)[0]
    spec = world.reconciler._actuator.spec_of(world.row(job), world.generations(job)[-1])
    assert spec.session.failures == 1, "who fails often saves often"
    assert spec.session.promoted == world.row(job).promoted, "the workers miss it where its disk is gone"


def test_a_script_that_fails_at_once_is_not_tried_again(world):
    job, done = run(world, fail_at_step=0, failure="ModuleNotFoundError: No module named 'torch'")
    assert done.state == "failed"
    assert "No module named 'torch'" in done.failure
    assert len(world.generations(job)) == 1


def test_a_worker_that_is_killed_costs_a_restart_from_the_last_checkpoint(world):
    job = world.submit(within=900, steps=400, scaling_curve=CURVE, max_workers=2)
    world.until(lambda: world.status(job).step > 200, "some steps")
    world.engine.fail_worker(job.job.job_id, rank=1)
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 400)
    assert "rank 1: killed" in restarts(world, job)[0]
    resumed = world.events(job, "started")[-1].data["step"]
    assert 100 < resumed <= 400


def test_a_lost_gang_is_started_again(world):
    job = world.submit(within=900, steps=400, scaling_curve=CURVE, max_workers=1)
    for step in (100, 200):
        world.until(lambda step=step: world.status(job).step > step, "some steps")
        world.engine.lose(job.job.job_id)
        world.step(0.5)
    done = world.ended(job)
    assert done.state == "succeeded"
    assert len([r for r in restarts(world, job) if "lost its workers" in r]) == 2


def test_a_gang_that_is_lost_again_and_again_without_progress_fails(make_world):
    world = make_world(max_losses=2)
    job = world.submit(within=900, steps=400, scaling_curve=CURVE, max_workers=1)

    def lose() -> bool:
        running = [g for g in world.engine.world.gangs.values() if g.phase == "running"]
        if running:
            world.engine.lose(job.job.job_id)
        return world.status(job).state.terminal

    world.until(lose, "it gives up")
    assert world.status(job).state == "failed"
    assert "lost its workers 3 times in a row without progress" in world.status(job).state_reason


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(world):
    job = world.submit(within=900, steps=400, scaling_curve=CURVE, max_workers=1)
    world.until(lambda: world.row(job).promoted and world.row(job).promoted.step >= 60, "two checkpoints")
    good = world.row(job).promoted.step
    gang = world.engine.world.gangs[job.job.job_id, 1]
    gang.behaviour = type(gang.behaviour)(damaged_checkpoints=True)
    world.until(lambda: world.events(job, "checkpoint_damaged"), "a damaged one is found")
    assert world.row(job).promoted.step == good
    world.engine.fail_worker(job.job.job_id)
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 400)
    assert world.events(job, "started")[1].data["step"] == good
    assert "is not used: it is damaged: " in world.events(job, "checkpoint_damaged")[0].reason


def test_a_damaged_final_checkpoint_is_trained_again_and_never_returned(world):
    job = world.submit(within=900, steps=400, scaling_curve=CURVE, max_workers=1)
    world.until(lambda: world.status(job).step >= 370, "nearly done")
    gang = world.engine.world.gangs[job.job.job_id, 1]
    gang.behaviour = type(gang.behaviour)(damaged_checkpoints=True)
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 400)
    assert "the final checkpoint" in restarts(world, job)[0]
    assert "/g000002/" in done.result.checkpoint_path


def test_a_job_whose_final_checkpoint_stays_damaged_says_so_as_it_fails(make_world):
    world = make_world(checkpoint_interval_s=3.0, max_restarts=0)
    _job, done = run(world, damaged_checkpoints=True)
    assert done.state == "failed"
    assert re.fullmatch(r"the final checkpoint \S+ is missing or damaged", done.failure)


def test_workers_that_ignore_that_they_should_leave_are_gone_in_the_end(world):
    job = world.submit(within=900, steps=4000, scaling_curve=CURVE, fake={"ignores_leave": True})
    world.run(5)
    world.job_service.cancel(job.job.job_id, job.claim, "no longer wanted")
    done = world.ended(job)
    assert (done.state, done.state_reason) == ("cancelled", "no longer wanted")
    assert all(g.phase == "ended" for g in world.engine.world.gangs.values())


def test_a_cancel_saves_first(world):
    job = world.submit(within=900, steps=4000, scaling_curve=CURVE, max_workers=1)
    world.until(lambda: world.status(job).step > 10, "some steps")
    world.job_service.cancel(job.job.job_id, job.claim, "no longer wanted")
    assert world.ended(job).state == "cancelled"
    assert world.row(job).promoted.step > 10


def test_a_cancel_of_a_job_that_is_done_leaves_the_success(world):
    job = world.submit(within=900, steps=100, scaling_curve=CURVE, fake={"tail_s": 5})
    world.until(lambda: world.status(job).step == 100, "its last step")
    world.job_service.cancel(job.job.job_id, job.claim, "too late")
    done = world.ended(job)
    assert done.state in ("succeeded", "cancelled")
    assert done.result.steps == 100


def test_a_sleeping_machine_costs_a_restart_and_nothing_else(world):
    job = world.submit(steps=400, scaling_curve=CURVE, max_workers=1, lease_s=30, orphan_s=3600)
    world.until(lambda: world.status(job).step > 50, "some steps")
    world.job_service.renew(job.job.job_id, job.claim)
    world.elapsed_s += 200  # Nobody ran: neither the service nor its owner.
    world.now_s += 200
    world.step(0.5)
    world.job_service.renew(job.job.job_id, job.claim)

    def over() -> bool:
        world.job_service.renew(job.job.job_id, job.claim)
        return world.status(job).state.terminal

    world.until(over, "it ends")
    assert world.status(job).state == "succeeded"
    assert world.status(job).result.steps == 400


@pytest.mark.parametrize("tail_s", [1.0, 30.0])
def test_the_time_for_which_the_service_was_away_is_no_cost_of_a_job(world, tail_s):
    job = world.submit(steps=400, scaling_curve=CURVE, max_workers=1, lease_s=5000, fake={"tail_s": tail_s})
    world.until(lambda: world.status(job).step >= 390, "it is nearly done")
    world.elapsed_s += 120
    world.now_s += 120
    world.restart()
    assert world.ended(job).state == "succeeded"
    # It may have taken longer than the service saw; that it took less is not known.
    assert world.row(job).costs.tail_s is None or world.row(job).costs.tail_s < 20
    following = world.submit(run="next", steps=400, scaling_curve=CURVE, max_workers=1, lease_s=5000)
    assert world.ended(following).state == "succeeded"
    assert world.row(following).costs.tail_s < 20


@pytest.mark.parametrize("away", [False, True])
def test_a_start_that_took_long_counts_but_not_the_time_for_which_the_service_was_away(world, away):
    fake = {"startup_s": 3.0 if away else 60.0}
    job = world.submit(steps=400, scaling_curve=CURVE, max_workers=1, lease_s=5000, fake=fake)
    world.step(0.1)
    if away:
        world.elapsed_s += 120
        world.now_s += 120
        world.restart()
    assert world.ended(job).state == "succeeded"
    startup_s = world.row(job).costs.startup_s
    assert startup_s is None or startup_s < 20 if away else startup_s > 50


@pytest.mark.trouble
@pytest.mark.parametrize("wrong", [EngineError("no"), RuntimeError("broken")])
def test_gangs_are_renewed_after_a_restart_though_no_pass_succeeds(world, monkeypatch, wrong):
    job = world.submit(steps=4000, scaling_curve={1: 10.0}, lease_s=20, orphan_s=20)
    world.until(lambda: world.status(job).step > 5, "it trains")
    world.restart()
    refused = []

    def fail(*_):
        raise wrong

    def refuse_once(job_id):
        refused.append(job_id)
        if len(refused) == 1:
            raise wrong
        type(world.engine).renew(world.engine, job_id)

    with monkeypatch.context() as broken:
        broken.setattr(world.engine, "observe", fail)
        broken.setattr(world.engine, "renew", refuse_once)
        world.run(120, every=2.0)
        assert world.reconciler.problem
    assert len(refused) > 10
    assert world.engine.stacks(job.job.job_id), "its workers train on"


def test_the_thread_that_renews_outlasts_whatever_fails(world, monkeypatch):
    turns = iter([False, False, False, True])
    monkeypatch.setattr(world.reconciler._stop, "wait", lambda _: next(turns))
    held = []

    def hold(**_):
        held.append(1)
        raise RuntimeError("broken")

    monkeypatch.setattr(type(world.reconciler._actuator), "hold", lambda _, **more: hold(**more))
    world.reconciler._renew()
    assert len(held) == 3


def test_a_loss_before_the_first_checkpoint_says_that_it_begins_again(make_world):
    world = make_world(checkpoint_interval_s=1000.0)
    job = world.submit(steps=4000, scaling_curve=CURVE, max_workers=1)
    world.until(lambda: world.row(job).step > 20, "some steps")
    done = world.row(job).step
    world.engine.lose(job.job.job_id)
    (said,) = world.until(lambda: restarts(world, job), "it hears of the loss")
    lost = re.search(r"begins again at step 0, as there was no checkpoint yet \((\d+) steps are lost\)$", said)
    assert lost is not None, said
    assert int(lost[1]) >= done
    assert "goes on from" not in said


@pytest.mark.parametrize("steps", [400, None])
def test_a_failed_job_says_at_which_step(world, steps):
    given = {"steps": steps} if steps else {"length": Length(epochs=2, samples=6400)}
    job = world.submit(
        scaling_curve=CURVE, max_workers=1, fake={"fail_at_step": 150, "failure": "KeyError: 'x'"}, **given
    )
    done = world.ended(job)
    assert done.state_reason.startswith("failed at step 150 of 400, without progress since the start: ")
    (event,) = world.events(job, "failed")
    assert "failed at step 150 of 400" in event.reason
    assert done.step == 150
