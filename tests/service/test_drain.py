"""A node that goes away at a known time is left before, and a node that stays after all is used again."""

from __future__ import annotations

import pytest

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


@pytest.fixture
def world(make_world):
    return make_world(nodes=2, slots=2, drain_lead_s=10.0)


def nodes_of(world, job):
    return {node for node, _ in world.status(job).slots}


def test_workers_are_elsewhere_before_their_node_goes(world):
    job = world.submit(steps=2000, scaling_curve={1: 10.0, 2: 18.0}, max_workers=2)
    world.until(lambda: world.status(job).step > 50, "some steps")
    (home,) = nodes_of(world, job)
    world.desk.drain(home, world.now_s + 40)
    world.run(20)
    assert nodes_of(world, job) == {home}, "there is time"
    world.run(18)
    assert nodes_of(world, job) == {"node0", "node1"} - {home}
    world.engine.remove_node(home)
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 2000)
    assert not world.events(job, "restarting")
    (said,) = world.events(kind="node_draining")
    assert said.reason.startswith(f"node {home} goes away: nothing is planned on it after ")


def test_a_drain_outlives_the_service_and_ends_with_the_node(world):
    world.step()
    (first, second) = world.engine.inventory()
    world.desk.drain(first.node_id, world.now_s + 5)
    world.restart()
    job = world.submit(steps=900, scaling_curve=CURVE)
    world.run(5)
    assert nodes_of(world, job) == {second.node_id}
    world.engine.remove_node(first.node_id)
    world.run(6)
    world.engine.add_node(first)
    world.until(lambda: nodes_of(world, job) == {first.node_id, second.node_id}, "a node that comes back is used")


def test_a_node_that_stays_after_all_is_used_again(world):
    world.step()
    world.desk.drain("node0", world.now_s + 5)
    job = world.submit(steps=2000, scaling_curve=CURVE)
    world.run(5)
    assert nodes_of(world, job) == {"node1"}
    world.desk.drain("node0", None)
    world.until(lambda: nodes_of(world, job) == {"node0", "node1"}, "it grows onto the node")
    assert world.events(kind="node_draining")[-1].reason == "node node0 stays after all"
