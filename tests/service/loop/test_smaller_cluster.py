"""Clusters that are, or become, too small for a gang: it moves, shrinks or waits, and says so."""

from __future__ import annotations

import pytest

from elasticflow_airflow.engines.port import EngineNode


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=3.0, grace_s=5.0)


@pytest.mark.parametrize("fast", [True, False])
def test_a_node_that_comes_back_smaller_shrinks_the_gang(world, fast):
    """Whether it can go on in place or not, nobody trains on slots that are not there."""
    job = world.submit(steps=4000, within=2000, scaling_curve={1: 10.0, 2: 18.0, 4: 32.0}, fake={"in_place": fast})
    world.until(lambda: world.status(job).step > 100 and world.status(job).workers == 4, "it trains with four")
    world.engine.add_node(EngineNode(node_id="node0", slots=2, device="cpu", device_type="fake"))
    world.until(lambda: world.status(job).workers == 2, "it goes on with two")
    step = world.status(job).step
    world.until(lambda: world.status(job).step > step + 100, "it trains")
    running = [gang for gang in world.engine.world.gangs.values() if gang.phase == "running"]
    assert [sorted(slot.index for slot in gang.spec.placement) for gang in running] == [[0, 1]]
    assert "the node is smaller now" in "".join(world.story()) or world.events(job, "resized")
    world.engine.add_node(EngineNode(node_id="node0", slots=4, device="cpu", device_type="fake"))
    done = world.ended(job)
    assert (done.state, done.result.steps) == ("succeeded", 4000)


def test_a_node_that_is_smaller_after_a_restart_of_the_service_shrinks_the_gang(world):
    job = world.submit(steps=4000, within=2000, scaling_curve={1: 10.0, 2: 18.0, 4: 32.0})
    world.until(lambda: world.status(job).step > 100 and world.status(job).workers == 4, "it trains with four")
    world.engine.add_node(EngineNode(node_id="node0", slots=2, device="cpu", device_type="fake"))
    world.restart()
    world.until(lambda: world.status(job).workers == 2, "it goes on with two")
    assert world.ended(job).result.steps == 4000


def test_a_node_that_comes_back_too_small_suspends_the_gang_and_says_why(world):
    job = world.submit(steps=4000, scaling_curve={4: 32.0}, best_effort=True)
    world.until(lambda: world.status(job).step > 100, "it trains with four")
    world.engine.add_node(EngineNode(node_id="node0", slots=2, device="cpu", device_type="fake"))
    status = world.reach(job, "waiting")
    assert "waits for a larger cluster" in status.state_reason
    assert "node0:2, node0:3 are gone: the node is smaller now" in world.events(job, "suspended")[0].reason
    world.until(
        lambda: not [g for g in world.engine.world.gangs.values() if g.phase != "ended"], "it has saved and left"
    )
    world.engine.add_node(EngineNode(node_id="node0", slots=4, device="cpu", device_type="fake"))
    assert world.ended(job).result.steps == 4000


def test_best_effort_that_fits_no_block_says_so_once_and_trains_when_the_cluster_grows(world):
    job = world.submit(steps=200, min_workers=8, best_effort=True)
    world.run(60)
    (told,) = world.events(job, "waiting")
    assert "it needs at least 8, and the largest block of the cluster is 4 slots" in told.reason.replace(
        " and at most 8", ""
    )
    status = world.status(job)
    assert (status.state, status.state_reason) == ("waiting", told.reason)
    world.engine.add_node(EngineNode(node_id="big", slots=8, device="cpu", device_type="fake"))
    assert world.ended(job).result.steps == 200
