"""Gangs on a machine that the service knows nothing of: of a database that was lost, or of somebody else."""

from __future__ import annotations

import pytest

from elasticflow_airflow.engines.port import SlotsHeldError
from elasticflow_airflow.scheduler_core.model.values import Slot

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def lose_the_database(world):
    """The service is killed and its database is gone; its machine, and what runs there, is not."""
    world.stop()
    for file in world.base.glob("test.db*"):
        file.unlink()
    world.engine = world.engine.restarted()
    world.start()


def said(world, *words):
    """Whether health says something with all of these words."""
    return any(all(word in problem for word in words) for problem in world.reconciler.problems)


def leave_one(world, **given):
    """A job of another life of the service, whose gang is still there."""
    left = world.submit(task="left", **{"steps": 10**6, "scaling_curve": CURVE, "max_workers": 2, **given})
    world.until(lambda: world.status(left).step > 5, "it trains")
    slots = world.status(left).slots
    lose_the_database(world)
    return left.job.job_id, [tuple(slot) for slot in slots]


@pytest.mark.trouble
def test_a_job_starts_beside_a_gang_of_a_lost_database(world):
    left, slots = leave_one(world, fake={"save_s": 30})
    world.step(1)
    assert said(world, f"node0:{slots[0][1]}", left, "no job of this service"), world.reconciler.problems
    job = world.submit(task="new", within=200, steps=600, scaling_curve=CURVE)
    assert job.job.verdict.decision == "admitted"
    world.until(lambda: world.status(job).step > 5, "it trains")
    taken = {tuple(slot) for slot in world.status(job).slots}
    assert taken.isdisjoint(slots)
    assert world.ended(job).state == "succeeded"
    assert world.events(job, "not_started") == []


@pytest.mark.trouble
def test_a_gang_without_an_owner_is_told_to_leave_and_its_slots_are_used_again(world):
    left, slots = leave_one(world, max_workers=4, fake={"save_s": 20})
    assert len(slots) == 4
    job = world.submit(task="new", within=600, steps=600, scaling_curve=CURVE)
    world.until(lambda: world.status(job).workers == 4, "it has all slots", 60)
    assert not world.reconciler.problems
    assert world.ended(job).result.met
    assert [event.kind for event in world.events() if event.kind.startswith("leftover")] == [
        "leftover",
        "leftover_gone",
    ]
    assert left in world.events(kind="leftover")[0].reason


@pytest.mark.trouble
@pytest.mark.parametrize("ended", [False, True], ids=["its gang lives", "its gang has ended"])
def test_a_job_of_a_lost_database_that_is_submitted_again_trains(world, ended):
    """Ids are the same in every life: what the machine knows by them is not what the service means by them."""
    left, _ = leave_one(world)
    if ended:
        world.run(60)
    again = world.submit(task="left", within=300, steps=600, scaling_curve=CURVE)
    assert (again.job.job_id, again.job.incarnation) == (left, 2)
    done = world.ended(again)
    assert (done.state, done.result.steps, done.result.met) == ("succeeded", 600, True)
    assert not world.reconciler.problems


@pytest.mark.trouble
def test_a_database_put_back_from_a_copy_goes_on_above_what_ran_since(world):
    """Its gangs are of generations that the copy has never heard of."""
    job = world.submit(within=900, steps=3000, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 5, "it trains")
    copy = {file.name: file.read_bytes() for file in world.base.glob("test.db*")}
    for _ in range(2):
        world.engine.fail_worker(job.job.job_id)
        before = world.status(job).generation
        world.until(lambda n=before: world.status(job).generation > n, "it starts again")
        world.run(10)
    lose_the_database(world)
    world.stop()
    for name, data in copy.items():
        (world.base / name).write_bytes(data)
    world.start()
    done = world.ended(job, 900)
    assert (done.state, done.result.steps) == ("succeeded", 3000)


def test_a_slot_that_somebody_takes_unseen_costs_a_job_nothing(make_world):
    """Between two looks at the nodes the launch is refused; then the slots are known, and the job waits for them."""
    world = make_world(slots=1)
    world.step()
    world.engine.set_busy("node0", 0, "job other of the service in /elsewhere")
    job = world.submit(steps=100, scaling_curve=CURVE)
    world.run(120)
    assert world.status(job).state != "failed", "\n".join(world.story())
    world.engine.set_busy("node0", 0, None)
    assert world.ended(job).state == "succeeded"


def test_an_admitted_job_waits_for_a_slot_as_long_as_its_deadline_bears_it(make_world):
    world = make_world(slots=1)
    world.step()
    world.engine.set_busy("node0", 0, "job other of the service in /elsewhere")
    job = world.submit(steps=100, within=300, scaling_curve=CURVE)
    assert job.job.verdict.decision == "admitted"
    world.run(120)
    assert not world.status(job).state.terminal, "\n".join(world.story())
    world.engine.set_busy("node0", 0, None)
    assert world.ended(job).result.met


@pytest.mark.trouble
def test_a_slot_that_is_held_and_does_not_show_is_not_used_until_it_is_free(make_world):
    """Whoever holds it: the refusal says so, and another one is taken."""
    world = make_world(slots=2)
    real, held = world.engine._check_slots, [True]

    def check(spec, *but):
        if held[0] and Slot("node0", 0) in spec.placement:
            raise SlotsHeldError({Slot("node0", 0): "another process (its lock file does not say which)"})
        real(spec, *but)

    world.engine._check_slots = check
    one = world.submit(task="one", steps=300, within=300, scaling_curve=CURVE, max_workers=1)
    world.until(lambda: world.status(one).step > 5, "it trains elsewhere", 60)
    assert world.status(one).slots == [("node0", 1)]
    assert said(world, "node0:0", "another process"), world.reconciler.problems
    held[0] = False
    two = world.submit(task="two", steps=300, within=600, scaling_curve=CURVE, max_workers=1)
    assert world.ended(two).result.met
    assert world.ended(one).result.met
