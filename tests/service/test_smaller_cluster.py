"""Clusters that are, or become, too small for a gang: it moves, shrinks or waits, and says so."""

from __future__ import annotations

import pytest

from elasticflow_airflow.engines.port import EngineNode


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=3.0, grace_s=5.0)


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
