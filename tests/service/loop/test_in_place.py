"""Changes of workers in place, as the service orders and tells them: grow, shrink, move, what it costs, early ends."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elasticflow_airflow.api import AmendRequest
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
FAKE = {"in_place": True, "startup_s": 2.0, "join_s": 5.0}


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=10.0)


def submit(world, **given):
    fake = {**FAKE, **given.pop("fake", {})}
    return world.submit(**{"steps": 1000, "scaling_curve": CURVE, "fake": fake, **given})


def reasons(world, job, kind):
    return [event.reason for event in world.events(job, kind)]


def grow(world, **given):
    """A job that has half of the slots, and is about to get all: (the job, its change)."""
    other = submit(world, task="other", min_workers=2, max_workers=2)
    job = submit(world, **given)
    world.until(lambda: world.status(job).step > 20 and world.status(job).workers == 2, "it trains with 2")
    world.job_service.cancel(other.job.job_id, other.claim, "makes room")
    world.until(lambda: world.generations(job)[-1].state == "starting", "the change is under way")
    return job, world.generations(job)[-1]


def test_a_job_grows_while_it_trains(world):
    job, change = grow(world)
    assert (change.mode, change.workers) == ("in_place", 4)
    (first, second) = world.generations(job)
    assert second.continues == first.generation
    began = world.status(job).step
    world.run(3)
    status = world.status(job)
    assert (status.workers, status.state) == (2, "running"), "until the new ones are ready the old ones train on"
    assert status.step == pytest.approx(began + 3 * 18, abs=12)
    world.until(lambda: world.status(job).workers == 4, "the change is done")
    (said,) = reasons(world, job, "rescaled")
    assert re.fullmatch(
        r"rescaled in place from 2 to 4 workers at step \d+: training paused \d+ ms \([\d.]+ MB of state\)", said
    )
    done = world.ended(job)
    assert (done.state, done.result.steps, done.result.rescales) == ("succeeded", 1000, 1)
    assert not world.events(job, "restarting")
    generations = world.generations(job)
    assert [g.mode for g in generations] == ["restart", "in_place"]
    assert generations[0].outcome == "stopped"
    assert generations[0].last_step <= generations[1].first_step


def test_a_job_shrinks_in_place_and_the_next_one_waits_for_its_slots(world):
    job = submit(world)
    world.until(lambda: world.status(job).workers == 4 and world.status(job).step > 50, "it has all slots")
    urgent = submit(world, task="urgent", within=200, steps=600, scaling_curve=CURVE)
    assert urgent.job.verdict.decision == "admitted"
    world.until(lambda: world.events(job, "rescaled"), "it shrinks")
    assert "rescaled in place from 4 to " in reasons(world, job, "rescaled")[0]
    assert world.ended(urgent).result.met
    assert world.ended(job).state == "succeeded"
    assert not world.events(job, "restarting")


def test_slots_are_held_by_one_job_only_while_workers_change(world):
    jobs = [submit(world, task=f"t{n}", within=900, steps=200 * 2**n) for n in range(3)]

    def over() -> bool:
        holders: dict[object, str] = {}
        for gang in world.engine.world.gangs.values():
            if gang.started and gang.phase != "ended":
                for slot in gang.spec.placement:
                    assert holders.setdefault(slot, gang.spec.job_id) == gang.spec.job_id
        return all(world.status(job).state.terminal for job in jobs)

    world.until(over, "all end")
    assert all(world.status(job).result.met for job in jobs)
    assert any(world.events(job, "rescaled") for job in jobs)


def test_slot_seconds_are_counted_once_while_two_generations_hold_the_same_slots(world):
    job, _ = grow(world)
    done = world.ended(job)
    generations = world.generations(job)
    whole = sum(g.workers * (g.ended_at - g.holding_at) for g in generations)
    assert done.result.gpu_seconds < whole, "the overlap is not counted twice"
    longest = 4 * (generations[-1].ended_at - generations[0].holding_at)
    assert done.result.gpu_seconds <= longest


def test_a_job_is_measured_in_place(world):
    job = submit(world, scaling_curve=None, within=900, steps=1200)
    done = world.ended(job)
    assert done.result.met
    measured = {e.data["workers"]: e.data["steps_per_s"] for e in world.events(job, "measured")}
    assert measured == pytest.approx(CURVE, rel=0.15)
    assert {g.mode for g in world.generations(job)[1:]} == {"in_place"}


def test_what_it_costs_is_measured_told_and_remembered(world):
    job, change = grow(world)
    assumed = world.reconciler._scheduler.states()[0].job.costs
    world.until(lambda: world.events(job, "rescaled"), "the change is done")
    costs = world.row(job).costs
    assert costs.in_place_pause_s == world.events(job, "rescaled")[0].data["pause_s"] < 1.0
    assert costs.join_s == pytest.approx(5.0, abs=1.5)
    assert costs.pause_s is None, "that of a restart is another one, and was not seen"
    told = world.reconciler._scheduler.states()[0].job.costs
    assert (told.pause_s, told.join_s) == (costs.in_place_pause_s, costs.join_s)
    assert (told.pause_s, told.join_s) < (assumed.pause_s, assumed.join_s)
    world.ended(job)
    again = submit(world, run="monday")
    known = world.reconciler._scheduler.states()[0].job.costs
    assert (known.pause_s, known.join_s) == pytest.approx((told.pause_s, told.join_s), rel=0.3)
    assert world.ended(again).state == "succeeded"
    assert change.workers == 4


def test_what_the_old_gang_does_meanwhile_is_not_counted_twice_in_the_plan(world):
    job, _ = grow(world, within=600)
    for _ in range(40):
        world.step(0.5)
        row = world.row(job)
        if row.terminal:
            break
        (state,) = world.reconciler._scheduler.states()
        truth = row.total_steps - row.step
        believed = state.remaining_steps
        curve = state.job.curve.steps_per_s[state.placement.workers] * 0.9
        believed -= max(0.0, world.now_s - max(state.as_of_s, state.no_progress_until_s)) * curve
        assert believed >= truth - 25, "the plan is never ahead of the training by more than a report"


def test_a_session_that_cannot_is_changed_by_a_restart(world):
    other = submit(world, task="other", min_workers=2, max_workers=2, fake={"in_place": False})
    job = submit(world, fake={"in_place": False})
    world.until(lambda: world.status(job).step > 20, "it trains")
    world.job_service.cancel(other.job.job_id, other.claim, "makes room")
    assert world.ended(job).state == "succeeded"
    assert {g.mode for g in world.generations(job)} == {"restart"}
    assert world.row(job).in_place == InPlaceRecord(able=False)


def test_a_restarted_service_goes_on_with_a_change_that_is_under_way(world):
    job, change = grow(world)
    for _ in range(12):
        world.restart()
        world.step(0.5)
    world.until(lambda: world.status(job).workers == 4, "the change is done")
    assert len(world.events(job, "rescaled")) == 1
    assert world.row(job).desired_generation == change.generation
    assert world.ended(job).state == "succeeded"


# -- the end comes in the middle of a change ---------------------------------------------------------------------


def test_a_cancel_in_the_middle_of_a_change(world):
    job, _ = grow(world)
    world.job_service.cancel(job.job.job_id, job.claim, "no longer wanted")
    done = world.ended(job)
    assert done.state == "cancelled"
    assert world.row(job).promoted.step > 20
    world.until(lambda: not world.engine.world.gangs, "nobody is left")


def test_the_training_ends_in_the_middle_of_a_change(world):
    job, _ = grow(world, steps=900, fake={"join_s": 60.0})
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 900)
    assert not world.events(job, "rescaled")
    assert not {"restarting", "join_failed", "restart_instead", "warning"} & {e.kind for e in world.events(job)}
    world.until(lambda: not world.engine.world.gangs, "nobody is left")


def test_the_script_fails_in_the_middle_of_a_change(world):
    job, _ = grow(world, fake={"fail_at_step": 120, "join_s": 60.0, "failure": "RuntimeError: no such column"})
    done = world.ended(job)
    assert done.state == "failed"
    assert "no such column" in done.failure
    world.until(lambda: not world.engine.world.gangs, "nobody is left")


def test_an_owner_goes_away_in_the_middle_of_a_change_and_comes_back(world):
    job, _ = grow(world, lease_s=20, orphan_s=500, fake={"join_s": 60.0})
    world.reach(job, "suspended")
    world.until(lambda: world.status(job).workers == 0, "its workers have left")
    world.run(2)
    saved = world.row(job).promoted.step
    world.job_service.renew(job.job.job_id, job.claim)
    world.reach(job, "running")
    assert world.events(job, "started")[-1].data["step"] == saved


def test_the_plan_changes_again_in_the_middle_of_a_change(world):
    job, first = grow(world, fake={"join_s": 30.0})
    world.run(3)
    urgent = submit(world, task="urgent", within=100, steps=600, max_workers=2)
    assert urgent.job.verdict.decision == "admitted"
    world.run(3)
    assert world.row(job).desired_generation > first.generation
    assert world.ended(urgent).result.met
    assert world.ended(job).state == "succeeded"
    assert not world.events(job, "restarting")


def shrunk_and_to_grow(world, monkeypatch):
    """A job that shrank (generation 2) when its deadline made it grow again (generation 3), which continues 1."""
    job = submit(world)
    world.until(lambda: world.status(job).workers == 4 and world.status(job).step > 50, "it has all slots")
    urgent = submit(world, task="urgent", within=200, steps=600, scaling_curve=CURVE)
    shrunk = world.generations(job)[-1]
    assert (shrunk.mode, shrunk.continues, shrunk.running_at) == ("in_place", 1, None)
    seen_before = world.engine.observe()
    with monkeypatch.context() as patch:
        patch.setattr(world.engine, "observe", lambda: [replace(gang, reports=()) for gang in seen_before])
        world.now_s += 2.0  # The workers change, which the service sees a pass later.
        world.elapsed_s += 2.0
        world.job_service.cancel(urgent.job.job_id, urgent.claim, "makes room")
        soon = AmendRequest(claim=job.claim, deadline_at=world.now_s + 60)
        assert world.amend(job.job.job_id, soon).accepted
    grown = world.generations(job)[-1]
    assert (grown.mode, grown.continues, grown.workers) == ("in_place", 1, 4)
    world.step(0.5)
    assert [g.state for g in world.generations(job)][1:] == ["running", "starting"]
    return job


def test_a_plan_that_was_made_while_the_workers_changed_costs_no_restart(world, monkeypatch):
    """Who trained before that change has been replaced, though the newer plan was to continue it: nobody is lost."""
    job = shrunk_and_to_grow(world, monkeypatch)
    assert world.ended(job).state == "succeeded"
    assert len(world.events(job, "rescaled")) == 2
    assert not world.events(job, "restarting"), "\n".join(world.story())


def test_those_who_train_when_a_plan_is_made_for_those_before_them_are_missed_at_once(world, monkeypatch):
    job = shrunk_and_to_grow(world, monkeypatch)
    for rank in range(2):
        world.engine.fail_worker(job.job.job_id, rank)
    world.run(2)
    assert world.events(job, "restarting") or world.events(job, "worker_lost"), "\n".join(world.story())
    assert world.ended(job).state == "succeeded"
