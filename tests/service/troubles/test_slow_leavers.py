"""Gangs that do not leave when they are told to: who was promised their slots trains elsewhere, and in time."""

from __future__ import annotations

import pytest

CURVE = {1: 10.0}
STUBBORN = {"ignores_leave": True}
ONE = {"scaling_curve": CURVE, "max_workers": 1}


def avoided(world):
    """The slots that nothing is planned on now."""
    return [index for node in world.reconciler._scheduler.nodes() for index in node.avoided]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("order", [(STUBBORN, {}), ({}, STUBBORN)])
def test_a_promise_is_kept_whoever_does_not_leave_its_slots(make_world, order, restarts):
    world = make_world(nodes=1, slots=2)
    for number, fake in enumerate(order):
        job = world.submit(task=f"whenever{number}", steps=10**6, best_effort=True, fake=fake, **ONE)
        world.until(lambda job=job: world.status(job).step > 5, "it trains")
    job = world.submit(task="good", within=90, steps=200, **ONE)
    assert world.status(job).verdict.decision == "admitted"
    if restarts:
        for _ in range(4):
            world.run(8)
            world.restart()
    assert world.ended(job).result.met, "\n".join(world.story())


def test_the_slots_are_used_again_once_they_are_free(make_world):
    world = make_world(nodes=1, slots=2)
    stubborn = world.submit(task="stubborn", steps=10**6, best_effort=True, fake=STUBBORN, **ONE)
    world.until(lambda: world.status(stubborn).step > 5, "it trains")
    first, second = (world.submit(task=f"good{within}", within=within, steps=2000, **ONE) for within in (230, 400))
    ((_, index),) = world.status(stubborn).slots
    world.run(30)
    assert avoided(world) == [index]
    third = world.submit(task="soon", within=60, steps=100, **ONE)
    assert world.status(third).verdict.decision == "rejected"
    assert all(world.ended(job).result.met for job in (first, second))
    assert avoided(world) == []
    world.until(lambda: world.status(stubborn).workers == 1, "it goes on")


def test_a_gang_that_is_to_start_again_on_its_own_slots_waits_there(make_world):
    """Its slots are nobody else's: to plan it elsewhere would help nobody."""
    world = make_world(nodes=1, slots=2)
    other = world.submit(task="other", within=60, steps=200, **ONE)
    fake = {"save_s": 40.0, "steps_per_s": {1: 10.0, 2: 18.0}}
    job = world.submit(task="grows", within=900, steps=4000, scaling_curve={1: 10.0, 2: 18.0}, max_workers=2, fake=fake)
    assert world.ended(other).state == "succeeded"
    seen = set()
    world.until(lambda: seen.update(avoided(world)) or world.status(job).state.terminal, "it ends")
    assert world.status(job).result.rescales == 1
    assert seen == set()


@pytest.mark.trouble
def test_a_promise_is_kept_though_the_change_in_place_hangs_that_gives_its_slots_up(make_world):
    """Whoever leaves by it trains on until it is done: nobody has told it to leave."""
    world = make_world(nodes=1, slots=3)
    curve, fake = {1: 10.0, 2: 18.0}, {"in_place": True, "never_switches": True, "steps_per_s": {1: 10.0, 2: 18.0}}
    hangs = world.submit(
        task="hangs", steps=10**6, best_effort=True, fake=fake, scaling_curve=curve, min_workers=1, max_workers=2
    )
    world.until(lambda: world.status(hangs).workers == 2 and world.status(hangs).step > 5, "it trains with two")
    other = world.submit(task="other", within=80, steps=400, **ONE)
    world.until(lambda: world.status(other).step > 5, "it trains")
    good = world.submit(task="good", within=150, steps=200, **ONE)
    assert good.job.verdict.decision == "admitted"
    assert world.ended(good).result.met, "\n".join(world.story())
    assert world.status(hangs).state == "running"
