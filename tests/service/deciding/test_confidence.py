"""How surely promises are kept is a setting, and what was promised with a flat margin before keeps it."""

from __future__ import annotations

import math

import pytest
import sqlalchemy as sa

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.scheduler_values import StoredState
from elasticflow_airflow.service.store.tables import IncarnationRow

FLAT = 0.1
"""What was taken off all speeds before: of 10 steps/s, 9 were promised with."""


def test_what_is_simulated_by_default_is_what_is_served_by_default():
    """But for what only a service hears: that a gang has started."""
    assert ServiceSettings(engine="fake").scheduler_config() == SchedulerConfig.served(starts_reported=True)


@pytest.mark.parametrize(("confidence", "decision"), [(0.5, "admitted"), (0.9, "undecided"), (0.99, "undecided")])
def test_the_confidence_says_how_much_of_a_speed_is_promised_with(make_world, confidence, decision):
    """232 s as told, start-up and tail included; who is refused for the margin alone is measured first."""
    world = make_world(confidence=confidence)
    job = world.submit(steps=2000, within=240, scaling_curve={1: 10.0}, max_workers=1)
    assert world.status(job).verdict.decision == decision
    assert world.ended(job).result.met


def test_a_job_that_is_measured_before_it_is_promised_says_so(world):
    job = world.submit(steps=2000, within=240, scaling_curve={1: 10.0}, max_workers=1)
    assert world.status(job).verdict.decision == "undecided"
    assert "not sure enough for a promise" in " ".join(event.reason for event in world.events(job))
    done = world.ended(job)
    assert (done.verdict.decision, done.result.met, done.result.steps) == ("admitted", True, 2000)
    assert done.result.rescales == 0


def test_a_promise_of_the_release_before_keeps_the_margin_that_it_was_made_with(make_world):
    """It has no error of its own stored: planned with more than a tenth less, it would be at risk after the upgrade."""
    world = make_world(nodes=1, slots=1)
    job = world.submit(steps=2000, within=300, scaling_curve={1: 10.0}, max_workers=1)
    assert world.status(job).verdict.decision == "admitted"
    stored = dict(world.row(job).scheduler_state.raw)
    stored["job"] = {name: value for name, value in stored["job"].items() if name != "speed_sigma"}
    with world.store.engine.begin() as connection:
        connection.execute(
            sa.update(IncarnationRow)
            .where(IncarnationRow.job_id == job.job.job_id)
            .values(scheduler_state=StoredState(stored))
        )
    world.restart()
    world.step()
    kept = world.reconciler._scheduler.state(job.job.job_id)
    factor = math.exp(-1.2815515655446004 * kept.job.speed_sigma)
    assert factor == pytest.approx(1.0 - FLAT)
    assert not kept.at_risk
