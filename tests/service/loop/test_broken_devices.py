"""A broken device: its slot is left alone; after a second task its node is, until somebody has looked at it."""

from __future__ import annotations

import pytest

from elasticflow_airflow.service.store.views import slot_statuses

ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
ONE = {"scaling_curve": {1: 10.0}, "max_workers": 1}


@pytest.fixture
def world(make_world):
    return make_world(nodes=2, slots=2)


def meet(world, task, *broken, **given):
    """Run a job of a task where some devices are broken."""
    fake = {"broken_devices": dict.fromkeys(broken, ECC)}
    return world.submit(task=task, fake=fake, steps=50, **{**ONE, **given})


def avoided(world):
    with world.store.read() as reader:
        slots = slot_statuses(world.engine.inventory(), reader)
    return {f"{slot.node_id}:{slot.index}" for slot in slots if slot.avoided_for == "device"}


def test_a_job_goes_on_elsewhere_and_the_slot_is_avoided_for_a_day(world):
    job = meet(world, "one", "node0:0")
    assert world.ended(job).state == "succeeded"
    (event,) = world.events(job, "device_fault")
    assert event.data == {"node_id": "node0", "slot": 0, "until_at": event.data["until_at"], "set_aside": False}
    assert event.reason.startswith(f"the device of slot node0:0 failed for daily.one: {ECC}; it is avoided until 2027-")
    assert not world.events(job, "warning")
    assert avoided(world) == {"node0:0"}
    assert not world.reconciler.problems
    wide = world.submit(task="wide", steps=20000, scaling_curve={1: 10.0, 2: 18.0, 4: 32.0})
    world.run(30)
    assert ["node0", 0] not in [list(slot) for slot in world.status(wide).slots]
    world.job_service.cancel(wide.job.job_id, wide.claim, "enough")
    world.run(24 * 3600, every=600)
    assert avoided(world) == set()


def test_who_finds_broken_devices_wherever_it_comes_is_broken_itself(world):
    """One job's trouble is never another's: a script that spoils its environment sets nothing aside."""
    everywhere = [f"node{node}:{index}" for node in range(2) for index in range(2)]
    job = meet(world, "one", *everywhere)
    ended = world.ended(job)
    assert ended.state == "failed"
    assert ended.failure.startswith(ECC)
    assert len(world.events(job, "device_fault")) == 1
    world.run(2)
    assert avoided(world) == set()
    other = meet(world, "other", *everywhere)
    assert world.ended(other).state == "failed"
    world.run(2)
    assert avoided(world) == set()
    assert not world.reconciler.problems


@pytest.mark.trouble
def test_a_second_task_sets_the_node_aside_until_somebody_says_that_it_stays(world):
    assert world.ended(meet(world, "one", "node0:0")).state == "succeeded"
    other = meet(world, "other", "node0:1")
    assert world.ended(other).state == "succeeded"
    (event,) = world.events(other, "device_fault")
    assert event.data["set_aside"]
    assert "as it happened to another task, too, the node is set aside" in event.reason
    assert avoided(world) == {"node0:0", "node0:1"}
    world.restart()
    world.run(1)
    (problem,) = world.reconciler.problems
    assert problem.startswith("node node0 is set aside (slots 0, 1): devices there failed for several tasks")
    assert problem.endswith("then say that it stays: elasticflow drain node0 --undo")
    world.job_service.drain("node0", None)
    world.run(2)
    assert avoided(world) == set()
    assert not world.reconciler.problems
    wide = world.submit(task="wide", steps=2000, scaling_curve={1: 10.0, 2: 18.0, 4: 32.0})
    world.until(lambda: world.status(wide).workers == 4, "all slots are used")


def trains_beside(world):
    """A job that trains on one of four slots, its node, and two slots beside it."""
    good = world.submit(task="good", steps=3000, fake={"in_place": True}, **ONE)
    world.until(lambda: world.status(good).step > 20, "it trains")
    ((home, mine),) = world.status(good).slots
    first, second, _ = (f"{home}:{index}" for index in range(4) if index != mine)
    return good, home, first, second


@pytest.mark.trouble
def test_what_trains_on_a_node_that_is_set_aside_waits_where_there_is_no_other_room(make_world):
    world = make_world(nodes=2, slots=4)
    good, home, first, second = trains_beside(world)
    four = {"scaling_curve": {4: 32.0}, "min_workers": 4, "max_workers": 4}
    elsewhere = world.submit(task="elsewhere", steps=10**6, **four)
    world.until(lambda: world.status(elsewhere).step > 20, "the other node is full")
    one = meet(world, "one", first)
    assert world.ended(one).state == "succeeded"
    other = meet(world, "other", second)
    world.until(lambda: len(avoided(world)) == 4, "the node is set aside")
    world.run(20)
    assert {world.status(job).state for job in (good, other)} == {"suspended"}
    step = world.status(good).step
    assert step > 20
    world.job_service.cancel(elsewhere.job.job_id, elsewhere.claim, "enough")
    world.until(lambda: world.status(other).step > 0, "there is room for it")
    assert {node for node, _ in world.status(other).slots} == {f"node{1 - int(home[-1])}"}
    world.until(lambda: world.status(good).step > step, "it goes on from where it was")
    assert {node for node, _ in world.status(good).slots} == {f"node{1 - int(home[-1])}"}
    assert world.ended(good).state == "succeeded"
    assert not world.events(good, "restarting")


@pytest.mark.trouble
def test_what_trains_on_a_node_that_is_set_aside_moves_where_there_is_room(make_world):
    world = make_world(nodes=2, slots=4)
    good, home, first, second = trains_beside(world)
    for task, broken in (("one", first), ("other", second)):
        assert world.ended(meet(world, task, broken)).state == "succeeded"
    world.run(20)
    assert len(avoided(world)) == 4
    assert {node for node, _ in world.status(good).slots} == {f"node{1 - int(home[-1])}"}
    assert len(world.events(good, "rescaled")) == 1
    assert not world.events(good, "restarting")


def test_who_lost_the_peer_may_be_first_to_say_so(world):
    job = meet(world, "two", "node0:1", scaling_curve={2: 18.0}, min_workers=2, max_workers=2)
    assert world.ended(job).state == "succeeded"
    (event,) = world.events(job, "device_fault")
    assert event.data["slot"] == 1
    assert avoided(world) == {"node0:1"}


@pytest.mark.trouble
def test_of_the_last_node_only_the_slots_are_set_aside(make_world):
    world = make_world(nodes=1, slots=4)
    for number in range(3):
        assert world.ended(meet(world, f"task{number}", f"node0:{number}")).state == "succeeded"
    assert avoided(world) == {"node0:0", "node0:1", "node0:2"}
    (problem,) = world.reconciler.problems
    assert problem.startswith("node node0 is set aside (slots 1, 2)")
