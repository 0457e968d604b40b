"""Changes of workers in place when workers die, hang or never join: who goes on, what is told, and when it restarts."""

from __future__ import annotations

import itertools
import time

import pytest

from elasticflow_airflow.runtime.protocol import ReportKind, heartbeat_path, write_json_atomic
from elasticflow_airflow.service.loop.rescaling import break_circles
from elasticflow_airflow.times import duration

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
FAKE = {"in_place": True, "startup_s": 2.0, "join_s": 5.0}


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=10.0, grace_s=5.0)


def submit(world, **given):
    fake = {**FAKE, **given.pop("fake", {})}
    return world.submit(**{"steps": 900, "scaling_curve": CURVE, "fake": fake, **given})


def reasons(world, job, kind):
    return [event.reason for event in world.events(job, kind)]


def kinds(world, job):
    return [event.kind for event in world.events(job)]


def runs_with(world, workers, **given):
    job = submit(world, **given)
    world.until(lambda: world.status(job).workers == workers and world.status(job).step > 50, f"it has {workers}")
    return job


def grow(world, **given):
    """A job that has half of the slots, and is about to get all."""
    other = submit(world, task="other", min_workers=2, max_workers=2)
    job = submit(world, **given)
    world.until(lambda: world.status(job).step > 20 and world.status(job).workers == 2, "it trains with 2")
    world.job_service.cancel(other.job.job_id, other.claim, "makes room")
    joining(world, job)
    return job


def joining(world, job):
    world.until(lambda: world.generations(job)[-1].state == "starting", "new workers start")


def never_went_back(world, job):
    """No step was trained twice: each generation goes on where the one before stopped."""
    trained = [g for g in world.generations(job) if g.first_step is not None]
    assert all(a.last_step is None or a.last_step <= b.first_step for a, b in itertools.pairwise(trained))
    return not world.events(job, "restarting")


# -- a worker of the gang that trains dies -----------------------------------------------------------------------


def test_a_worker_dies_and_the_others_go_on_from_memory_and_grow_again(world):
    job = runs_with(world, 4)
    before = world.status(job).step
    world.engine.fail_worker(job.job.job_id, rank=1)
    world.until(lambda: world.events(job, "rescaled"), "they go on")
    assert world.elapsed_s < 20, "at once"
    (lost,) = reasons(world, job, "worker_lost")
    assert lost == "worker g000001-r001 on node0:1 died (signal 9): 2 workers go on from memory"
    assert "rescaled in place from 4 to 2 workers at step" in reasons(world, job, "rescaled")[0]
    assert world.events(job, "rescaled")[0].data["step"] >= before
    recovery = world.generations(job)[1]
    assert (recovery.mode, recovery.lost, recovery.placement) == (
        "in_place",
        ["g000001-r001"],
        [["node0", 2], ["node0", 3]],
    )
    world.until(lambda: world.status(job).workers == 4, "it grows again")
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 900)
    assert never_went_back(world, job)
    assert world.row(job).restarts == 0


def test_the_scheduler_hears_of_the_survivors(world):
    job = runs_with(world, 4, within=900, fake={"join_s": 100.0})
    world.engine.fail_worker(job.job.job_id, rank=3)
    world.until(lambda: world.events(job, "rescaled"), "they go on")
    assert [e.kind for e in world.events(job)][-1] in ("rescaled", "resized")
    (state,) = world.reconciler._scheduler.states()
    assert state.remaining_steps <= 900 - world.status(job).step + 20
    assert state.placement.workers == world.generations(job)[-1].workers
    assert world.ended(job).result.met


def test_a_worker_that_leaves_without_a_word_ends_the_training_that_it_leaves_alone(world):
    job = runs_with(world, 4)
    world.engine.fail_worker(job.job.job_id, rank=1, exit_code=0)
    world.until(lambda: world.status(job).state.terminal, "it is over")
    assert world.elapsed_s < 30, "within seconds"
    status = world.status(job)
    assert status.state == "failed"
    assert status.state_reason.startswith("worker g000001-r001 on node0:1 ended with status 0 after ")
    assert status.state_reason.endswith(" of 900 steps, before it was finished, and left the others alone")


def test_rank_0_dies_too(world):
    job = runs_with(world, 2, max_workers=2)
    world.engine.fail_worker(job.job.job_id, rank=0)
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_two_of_four_die_one_after_the_other(world):
    job = runs_with(world, 4)
    world.engine.fail_worker(job.job.job_id, rank=0)
    world.step(0.05)
    world.engine.fail_worker(job.job.job_id, rank=3)
    world.until(lambda: world.events(job, "rescaled"), "they go on")
    assert sorted(world.generations(job)[2].lost) == ["g000001-r000", "g000001-r003"]
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_too_many_deaths_within_a_while_are_a_restart(make_world):
    world = make_world(checkpoint_interval_s=3.0, grace_s=5.0, max_recoveries=2)
    job = runs_with(world, 2, max_workers=2, steps=1200)
    for _ in range(3):
        world.run(15)
        assert world.status(job).workers == 2, "it has grown again"
        world.engine.fail_worker(job.job.job_id, rank=1)
        world.step(0.5)
    assert "it is the third time within 10 min: restarts from" in reasons(world, job, "worker_lost")[-1]
    world.until(lambda: world.events(job, "restarting"), "it restarts")
    assert reasons(world, job, "restarting")[0].startswith("restart 1 of 2 after a failure: worker g")
    assert world.ended(job).state == "succeeded", "\n".join(world.story())


def test_deaths_that_are_long_ago_do_not_count(make_world):
    world = make_world(checkpoint_interval_s=10.0, max_recoveries=1, recovery_window_s=20.0)
    job = runs_with(world, 2, max_workers=2, steps=1600)
    for _ in range(3):
        world.run(25)
        world.engine.fail_worker(job.job.job_id, rank=1)
        world.step(0.5)
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_all_die_and_the_last_checkpoint_counts(world):
    job = runs_with(world, 2, max_workers=2)
    world.until(lambda: world.row(job).promoted, "a checkpoint")
    for rank in (0, 1):
        world.engine.fail_worker(job.job.job_id, rank=rank)
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 900)
    assert len(world.events(job, "restarting")) == 1


def test_survivors_that_no_plan_reached_fail_and_are_restarted(world):
    job = runs_with(world, 2, max_workers=2)
    world.until(lambda: world.row(job).promoted, "a checkpoint")
    world.engine.fail_worker(job.job.job_id, rank=1)
    world.now_s += 90  # The service was away for longer than they wait.
    world.elapsed_s += 90
    done = world.ended(job)
    assert done.state == "succeeded"
    assert "no plan without g000001-r001 came within 60 s" in reasons(world, job, "restarting")[0]


def test_a_script_that_fails_is_no_death(world):
    job = runs_with(world, 2, max_workers=2)
    world.engine.fail_worker(job.job.job_id, rank=1, exit_code=1, message="ValueError: bad row")
    world.until(lambda: world.events(job, "restarting"), "it restarts")
    assert not world.events(job, "worker_lost")
    assert world.ended(job).state == "succeeded", "\n".join(world.story())


def test_a_worker_dies_while_others_are_about_to_join(world):
    job = grow(world)
    world.run(2)
    world.engine.fail_worker(job.job.job_id, rank=0)
    world.until(lambda: world.events(job, "rescaled"), "the other goes on")
    assert reasons(world, job, "worker_lost")[0].endswith("1 worker goes on from memory")
    assert world.events(job, "rescaled")[0].data["workers"] == 1
    world.until(lambda: world.status(job).workers == 4, "it grows")
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)
    assert not world.events(job, "warning")


def test_a_worker_dies_while_the_size_is_measured(world):
    job = submit(world, scaling_curve=None, within=900, steps=1200)
    world.until(lambda: world.generations(job)[-1].workers == 2 and world.status(job).workers == 2, "2 are measured")
    world.engine.fail_worker(job.job.job_id, rank=1)
    done = world.ended(job)
    assert done.result.met
    assert {e.data["workers"] for e in world.events(job, "measured")} >= {1, 2}
    assert never_went_back(world, job)


# -- a worker hangs ----------------------------------------------------------------------------------------------


def say(world, job, worker_id, phase, silent_s=0.0):
    value = {"step": 1, "phase": phase, "at_s": time.time() - silent_s}
    write_json_atomic(heartbeat_path(world.incarnation_dir(job), worker_id), value)


def test_a_worker_that_is_silent_while_others_wait_is_given_up(make_world):
    world = make_world(checkpoint_interval_s=10.0, heartbeat_limit_s=20.0)
    job = submit(world, max_workers=2, fake={"hang_at_step": 150})
    world.until(lambda: any(g.phase == "hanging" for g in world.engine.world.gangs.values()), "it hangs")
    world.run(15)
    say(world, job, "g000001-r000", "wait")
    say(world, job, "g000001-r001", "compute", silent_s=30)
    assert not world.events(job, "worker_lost")
    world.until(lambda: world.events(job, "rescaled"), "the other goes on", limit_s=15)
    (lost,) = reasons(world, job, "worker_lost")
    assert "worker g000001-r001 held the others up for 2" in lost
    assert world.generations(job)[1].lost == ["g000001-r001"]
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)
    assert not world.events(job, "hang")


def test_a_gang_of_which_nobody_can_be_singled_out_is_restarted(make_world):
    world = make_world(checkpoint_interval_s=3.0, heartbeat_limit_s=10.0, hang_min_s=40.0, grace_s=5.0)
    job = submit(world, max_workers=2, fake={"hang_at_step": 150})
    world.until(lambda: any(g.phase == "hanging" for g in world.engine.world.gangs.values()), "it hangs")
    for worker_id in ("g000001-r000", "g000001-r001"):
        say(world, job, worker_id, "wait")
    world.until(lambda: world.events(job, "hang"), "it is stopped")
    assert not world.events(job, "worker_lost")
    world.until(lambda: world.events(job, "restarting"), "it restarts")


def test_a_gang_that_hangs_while_others_join_is_restarted(make_world):
    world = make_world(checkpoint_interval_s=3.0, hang_min_s=20.0, grace_s=5.0)
    job = grow(world, fake={"hang_at_step": 150, "join_s": 100.0})
    world.until(lambda: world.events(job, "hang"), "it is stopped")
    world.until(lambda: world.events(job, "restarting"), "it restarts")
    assert "restarts after a hang at step 1" in reasons(world, job, "restarting")[0]


# -- a worker that should join does not --------------------------------------------------------------------------


@pytest.mark.parametrize("exit_code", [-9, 1])
def test_a_joiner_that_dies_delays_nobody_and_the_next_try_succeeds(world, exit_code):
    job = grow(world)
    step = world.status(job).step
    world.engine.fail_joiner(job.job.job_id, exit_code)
    world.run(4)
    assert world.status(job).step > step + 40, "the others train on"
    (failed,) = reasons(world, job, "join_failed")
    said = "signal 9" if exit_code < 0 else "status 1"
    assert f"ended ({said}) before it could join: stays with 2 workers where it was" in failed
    world.until(lambda: world.status(job).workers == 4, "the next try succeeds")
    assert world.row(job).in_place.failures == 0
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_a_joiner_that_does_not_answer_is_given_up_and_the_next_try_succeeds(world):
    """Those that train were ready to switch, and went on without it: they say so."""
    job = grow(world)
    change = world.generations(job)[-1]
    (training,) = [g for g in world.engine.world.of(job.job.job_id) if g.phase == "running"]
    absent = f"g{change.generation:06d}-r002"
    training._say(ReportKind.WARNING, 0, message="the change did not come about", absent=[absent])
    world.run(2)
    (failed,) = reasons(world, job, "join_failed")
    assert f"worker {absent}" in failed
    assert "did not answer when it was to join: stays with 2 workers where it was" in failed
    assert world.generations(job)[change.generation].lost == [absent], "it is killed"
    world.until(lambda: world.status(job).workers == 4, "the next try succeeds")
    assert world.ended(job).state == "succeeded", "\n".join(world.story())


def test_joiners_that_die_twice_in_a_row_lead_to_a_restart(world):
    job = grow(world)
    world.engine.fail_joiner(job.job.job_id)
    world.until(lambda: world.events(job, "join_failed"), "the first try fails")
    world.until(lambda: len(world.events(job, "resized")) == 3, "it is tried again")
    joining(world, job)
    world.engine.fail_joiner(job.job.job_id)
    world.until(lambda: world.events(job, "restart_instead"), "a restart is chosen")
    (said,) = reasons(world, job, "restart_instead")
    assert said.endswith("changed by stop, save and restart instead and so are all further changes")
    world.until(lambda: world.generations(job)[-1].first_step is not None, "it has 4")
    last = world.generations(job)[-1]
    assert (last.mode, last.workers, last.first_step) == ("restart", 4, world.events(job, "started")[-1].data["step"])
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_a_change_that_takes_too_long_is_made_by_a_restart(make_world):
    world = make_world(checkpoint_interval_s=10.0, in_place_limit_s=20.0)
    job = grow(world, fake={"join_s": 500.0})
    world.until(lambda: world.events(job, "restart_instead"), "it takes too long", limit_s=30)
    (said,) = reasons(world, job, "restart_instead")
    assert said.startswith("the workers were not changed in place within 20 s: changed by stop, save and restart")
    world.until(lambda: world.status(job).workers == 4, "it has 4")
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_a_change_that_the_engine_refuses_is_made_by_a_restart(world):
    other = submit(world, task="other", min_workers=2, max_workers=2)
    job = submit(world)
    world.until(lambda: world.status(job).step > 20 and world.status(job).workers == 2, "it trains with 2")
    for _ in range(12):
        world.engine.fail_next("apply", "no more processes can be started")
    world.job_service.cancel(other.job.job_id, other.claim, "makes room")
    world.until(lambda: world.events(job, "restart_instead"), "it is refused for long")
    assert "no more processes can be started" in reasons(world, job, "restart_instead")[0]
    assert world.ended(job).state == "succeeded", "\n".join(world.story())
    assert never_went_back(world, job)


def test_a_size_that_nobody_can_join_for_is_not_measured(world):
    job = submit(world, scaling_curve=None, within=900, steps=500)
    world.until(lambda: world.generations(job)[-1].workers == 2, "2 are to be measured")
    joining(world, job)
    world.engine.fail_joiner(job.job.job_id, 1)
    done = world.ended(job)
    assert done.result.met
    assert "2 workers could not be measured" in reasons(world, job, "not_measured")[0]
    assert never_went_back(world, job)


# -- jobs that wait for each other's slots -----------------------------------------------------------------------


def test_of_jobs_that_wait_for_each_other_in_a_circle_one_makes_room(make_world):
    from elasticflow_airflow.service.decisions import next_generation
    from elasticflow_airflow.service.decisions.pass_context import PassContext
    from elasticflow_airflow.service.store.unit_of_work import unit_of_work

    world = make_world(slots=2, checkpoint_interval_s=10.0)
    jobs = [submit(world, task=name, max_workers=1, steps=300) for name in ("a", "b")]
    world.until(lambda: all(world.status(job).step > 20 for job in jobs), "both train")
    homes = [world.status(job).slots for job in jobs]
    with unit_of_work(world.store) as tx:  # What no plan has made so far: they change places.
        context = PassContext.open(
            tx, world.now_s, world.settings, world.reconciler._scheduler, world.engine.files, None
        )
        for job, slots in zip(jobs, reversed(homes), strict=True):
            row = context.live(job.job.job_id)
            next_generation.order(
                context,
                row,
                slots=[list(slot) for slot in slots],
                purpose="train",
                reason="changes places",
                continues=next_generation.can_continue(context, row),
                own=False,
            )
        assert {context.due(context.live(job.job.job_id)).mode for job in jobs} == {"in_place"}
        break_circles(context)
        tx.commit()
        modes = [context.due(context.live(job.job.job_id)).mode for job in jobs]
    assert sorted(modes) == ["in_place", "restart"]
    for job in jobs:
        assert world.ended(job).state == "succeeded"
    assert sum(len(world.events(job, "restart_instead")) for job in jobs) == 1, "\n".join(world.story())
    assert all(never_went_back(world, job) for job in jobs)


# -- the training is done before the change has come about ---------------------------------------------------------


def test_who_comes_to_join_a_training_that_is_done_is_not_waited_for(world, monkeypatch):
    job = grow(world, within=600, fake={"join_s": 500.0})
    stop, graces_s = world.engine.stop, []
    monkeypatch.setattr(
        world.engine, "stop", lambda job_id, grace_s, *told: graces_s.append(grace_s) or stop(job_id, grace_s, *told)
    )
    assert world.ended(job).result.met, "\n".join(world.story())
    assert set(graces_s) == {0.0}


def test_how_long_before_its_deadline_a_job_was_done_is_said_of_when_it_was_over(world):
    job = grow(world, within=120, fake={"join_s": 500.0})
    for _ in range(20):
        world.engine.fail_next("stop", "no answer")
    world.until(lambda: world.row(job).ending, "it is done")
    done_s = world.elapsed_s
    done = world.ended(job)
    assert world.elapsed_s > done_s + 5, "its joiners were there"
    (event,) = world.events(job, "succeeded")
    assert (
        f"{duration(abs(done.result.slack_s))} {'before' if done.result.met else 'after'} the deadline" in event.reason
    )
    assert event.reason == done.state_reason
