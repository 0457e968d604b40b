"""A worker that is slow for good: its gang leaves the slot if that does good and no harm, and the slot comes back."""

from __future__ import annotations

import pytest

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
FAKE = {"in_place": True, "startup_s": 2.0, "join_s": 5.0}


@pytest.fixture
def world(make_world):
    return make_world(nodes=1, slots=4)


def submit(world, slow, **given):
    fake = {**FAKE, "slow_slots": slow, **given.pop("fake", {})}
    return world.submit(**{"steps": 3000, "scaling_curve": CURVE, "fake": fake, **given})


def slots_of(world, job):
    return {f"{node}:{index}" for node, index in world.status(job).slots}


def said(world, job):
    return [(event.data["action"], event.reason) for event in world.events(job, "slow_worker")]


def test_the_gang_moves_off_a_slow_slot_and_the_slot_comes_back(world):
    job = submit(world, {"node0:1": 2.0}, max_workers=2)
    world.until(lambda: said(world, job), "it is seen")
    ((action, reason),) = said(world, job)
    assert action == "moved"
    assert reason.startswith(
        "worker g000001-r001 on node0:1 computes 0.1 s a step, and the median of the others is 0.05 s: its gang"
        " moves to other slots, and the slot is avoided until 2027-01-15 08:"
    )
    world.until(lambda: slots_of(world, job) == {"node0:2", "node0:3"}, "it has moved")
    (moved,) = world.events(job, "rescaled")
    assert moved.reason.startswith("moved in place with 2 workers to other slots")
    assert not world.events(job, "restarting")
    speed = world.status(job).step
    world.run(10)
    assert world.status(job).step - speed == pytest.approx(180, abs=20)
    assert world.ended(job).result.steps == 3000
    world.run(600, every=20)
    (back,) = world.events(kind="slot_back")
    assert back.reason.startswith("slot node0:1 is used again: worker g000001-r001 of daily-train-")
    again = world.submit(task="again", steps=200, scaling_curve=CURVE)
    world.until(lambda: world.status(again).workers == 4, "all slots are used")


def test_nobody_is_put_on_an_avoided_slot(world):
    job = submit(world, {"node0:1": 2.0}, max_workers=2)
    world.until(lambda: slots_of(world, job) == {"node0:2", "node0:3"}, "it has moved")
    other = world.submit(task="other", steps=2000, scaling_curve=CURVE)
    world.run(20)
    assert slots_of(world, other) == {"node0:0"}
    with world.store.read() as reader:
        (row,) = reader.avoided()
    assert (row.node_id, row.slot_index) == ("node0", 1)
    assert row.until_at == pytest.approx(world.now_s + 600, abs=60)


def test_an_avoided_slot_outlives_the_service(world):
    job = submit(world, {"node0:1": 2.0}, max_workers=2)
    world.until(lambda: slots_of(world, job) == {"node0:2", "node0:3"}, "it has moved")
    world.restart()
    world.run(10)
    assert slots_of(world, job) == {"node0:2", "node0:3"}
    assert world.ended(job).state == "succeeded"


def test_without_other_slots_it_goes_on_with_fewer_workers_if_that_is_faster(world):
    job = submit(world, {"node0:3": 4.0})
    world.until(lambda: said(world, job), "it is seen")
    ((action, reason),) = said(world, job)
    assert action == "shrunk"
    assert "its gang goes on with 2 of its workers, and the slot is avoided until" in reason
    world.until(lambda: slots_of(world, job) == {"node0:0", "node0:1"}, "it has shrunk")
    step = world.status(job).step
    world.run(10)
    assert world.status(job).step - step == pytest.approx(180, abs=20), "8 steps/s before"
    assert not world.events(job, "restarting")
    assert world.ended(job).state == "succeeded"


def test_it_stays_where_fewer_workers_would_be_slower(world):
    job = submit(world, {"node0:3": 1.4})
    world.run(60)
    ((action, reason),) = said(world, job)
    assert action == "left"
    assert reason.endswith("as no other slots are free, and with 2 of its workers it would be slower still")
    assert len(slots_of(world, job)) == 4
    assert len(world.generations(job)) == 1


def test_it_stays_where_it_may_not_have_fewer_workers(world):
    job = submit(world, {"node0:3": 4.0}, min_workers=4, within=600)
    world.run(60)
    ((action, reason),) = said(world, job)
    assert action == "left"
    assert reason.endswith("it is left there, as no other slots are free")
    assert len(slots_of(world, job)) == 4


def test_it_stays_where_the_other_slots_are_promised_and_moves_when_they_are_free(world):
    other = world.submit(task="other", steps=700, scaling_curve={2: 18.0}, min_workers=2, max_workers=2)
    world.until(lambda: slots_of(world, other) == {"node0:0", "node0:1"}, "the other one runs")
    job = submit(world, {"node0:3": 2.0}, min_workers=2, max_workers=2)
    world.until(lambda: said(world, job), "it is seen")
    assert said(world, job)[0][0] == "left"
    world.ended(other)
    world.until(lambda: slots_of(world, job) == {"node0:0", "node0:1"}, "it moves as soon as it can")
    assert [action for action, _ in said(world, job)] == ["left", "moved"]


def test_no_other_promise_is_broken_to_move_it(world):
    # The other one is promised the slots to which this one would move, and cannot do without.
    other = world.submit(
        task="other", steps=1500, scaling_curve={2: 18.0}, min_workers=2, max_workers=2, within=135, fake=FAKE
    )
    job = submit(world, {"node0:3": 2.0}, min_workers=2, max_workers=2)
    world.until(lambda: said(world, job), "it is seen")
    assert said(world, job)[0][0] == "left"
    assert world.ended(other).result.met
    assert not world.events(other, "at_risk")


@pytest.mark.parametrize(
    ("options", "fake", "why"),
    [
        ({"straggler_removal": False}, {}, "as ELASTICFLOW_STRAGGLER_REMOVAL is off"),
        ({}, {"in_place": False}, "as its session cannot change its workers while it trains"),
    ],
)
def test_it_is_left_there_and_that_is_said_once(make_world, options, fake, why):
    world = make_world(nodes=1, slots=4, **options)
    job = submit(world, {"node0:1": 2.0}, max_workers=2, fake=fake)
    world.run(90)
    ((action, reason),) = said(world, job)
    assert (action, reason.endswith(why)) == ("left", True), reason
    assert len(world.generations(job)) == 1


@pytest.mark.parametrize(("slowness", "part"), [(1.2, 1.0), (1.5, 0.1)])
def test_a_worker_that_costs_the_gang_little_is_left_in_peace(world, slowness, part):
    job = submit(world, {"node0:1": slowness}, max_workers=2, fake={"compute_part": part})
    world.run(60)
    assert not said(world, job)


def test_a_joiner_that_dies_on_the_way_is_tried_again(world):
    job = submit(world, {"node0:1": 2.0}, max_workers=2, fake={"joiner_dies": 1})
    world.until(lambda: world.events(job, "join_failed"), "the joiner dies")
    problems = set()
    there = {"node0:2", "node0:3"}
    world.until(lambda: problems.add(world.reconciler.problem) or slots_of(world, job) == there, "it moves after all")
    assert problems == {""}  # also where the slot is avoided already
    assert world.ended(job).state == "succeeded"
    assert not world.events(job, "restarting")
