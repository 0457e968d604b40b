"""A node that goes away at a known time is left before, and a node that stays after all is used again."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from elasticflow_airflow.service.store.tables import AvoidedSlotRow, DrainRow
from elasticflow_airflow.service.store.views import slot_statuses

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
    world.job_service.drain(home, world.now_s + 40)
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


def test_a_node_that_announces_its_end_is_left_before_and_one_that_takes_it_back_is_used_again(world):
    job = world.submit(steps=3000, scaling_curve={1: 10.0, 2: 18.0}, max_workers=2)
    world.until(lambda: world.status(job).step > 50, "some steps")
    (home,) = nodes_of(world, job)
    world.engine.announce_leave(home, world.now_s + 15)  # As a cloud does, with little time.
    world.run(9)
    assert nodes_of(world, job) == {"node0", "node1"} - {home}
    step = world.status(job).step
    world.engine.remove_node(home)
    world.run(6)
    assert world.status(job).step > step, "no step is lost"
    (other,) = nodes_of(world, job)

    def told() -> set[float | None]:
        world.run(6)
        with world.store.read() as reader:
            return {slot.draining_until for slot in slot_statuses(world.reconciler.nodes, reader)}

    begun = world.now_s
    world.engine.announce_leave(other, begun + 1000)
    assert told() == {begun + 1000}
    world.job_service.drain(other, begun + 500)
    assert told() == {begun + 500}, "the earlier one counts"
    world.job_service.drain(other, None)
    world.engine.announce_leave(other, None)
    world.run(6)
    assert world.events(kind="node_draining")[-1].reason == f"node {other} stays after all"
    assert world.ended(job).state == "succeeded"


def test_a_drain_outlives_the_service_and_ends_with_the_node(world):
    world.step()
    (first, second) = world.engine.inventory()
    world.job_service.drain(first.node_id, world.now_s + 5)
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
    world.job_service.drain("node0", world.now_s + 5)
    job = world.submit(steps=2000, scaling_curve=CURVE)
    world.run(5)
    assert nodes_of(world, job) == {"node1"}
    world.job_service.drain("node0", None)
    world.until(lambda: nodes_of(world, job) == {"node0", "node1"}, "it grows onto the node")
    assert world.events(kind="node_draining")[-1].reason == "node node0 stays after all"


@pytest.mark.trouble
@pytest.mark.parametrize(
    ("until_at", "words"), [(1.8e12, "these look like milliseconds"), ("soon", "is no number: give UTC seconds")]
)
def test_a_drain_that_is_stored_out_of_bounds_is_told(world, until_at, words, capsys):
    world.step()
    with world.store.engine.begin() as connection:
        connection.execute(sa.insert(DrainRow).values(node_id="node1", until_at=0.0))
        connection.execute(sa.text("UPDATE drain SET until_at = :at"), {"at": until_at})
        connection.execute(
            sa.insert(AvoidedSlotRow).values(node_id="node0", slot_index=1, until_at=1e30, reason="it was slow")
        )
    world.run(5)
    drain, slot = world.reconciler.problems
    assert drain.startswith("the drain of node 'node1' is stored with a time that cannot be, and is not heeded: until")
    assert words in drain
    assert slot.startswith("slot node0:1 to avoid is stored with a time that cannot be")
    assert capsys.readouterr().out.count("the drain of node 'node1'") == 1
    with world.store.read() as reader:
        assert {s.draining_until for s in slot_statuses(world.reconciler.nodes, reader)} == {None}
    job = world.submit(steps=200, scaling_curve=CURVE)
    world.until(lambda: nodes_of(world, job) == {"node0", "node1"}, "all slots are used")
    world.job_service.drain("node1", None)
    world.step()
    assert world.reconciler.problems == [slot]
