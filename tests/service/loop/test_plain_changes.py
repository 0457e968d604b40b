"""A plain script is changed by stop, save and start: it is not stopped for a size that it then does not get."""

from __future__ import annotations

import pytest

from elasticflow_airflow.service.decisions.pass_context import costs_from
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord, MeasuredCosts

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
SLOW = {"in_place": False, "save_s": 10.0}


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=5.0, grace_s=30.0)


def test_a_change_that_is_taken_back_before_it_has_begun_stops_nobody(world):
    """Its new slots are of a job whose owner is away: that saves still, when the owner is back."""
    job = world.submit(task="plain", steps=3000, best_effort=True, scaling_curve=CURVE, max_workers=4, fake=SLOW)
    given = {"within": 2000, "scaling_curve": {2: 18.0}, "max_workers": 2, "lease_s": 40, "orphan_s": 500}
    other = world.submit(task="other", steps=3000, fake=SLOW, **given)
    world.until(lambda: world.status(job).step > 100 and world.status(job).workers == 2, "it trains beside the other")
    (first,) = [g for g in world.generations(job) if g.state == "running"]
    world.until(lambda: world.generations(job)[-1].workers == 4, "it is to grow into the slots of who is away")
    world.step(1.0)
    world.job_service.renew(other.job.job_id, other.claim)
    world.step(1.0)
    assert world.events(other, "unparked")
    assert "the change that was ordered had not begun" in world.events(job, "kept")[-1].reason
    step = world.status(job).step
    world.run(10)
    assert [g.generation for g in world.generations(job) if g.state == "running"] == [first.generation]
    assert world.row(job).desired_generation == first.generation
    assert world.status(job).step > step + 50
    world.until(lambda: world.status(other).state == "running", "the other goes on")


@pytest.mark.parametrize(
    ("known", "pause_s"),
    [({}, 10.0), ({"startup_s": 40.0}, 40.0), ({"startup_s": 2.0}, 10.0), ({"startup_s": 40.0, "pause_s": 12.0}, 12.0)],
)
def test_a_restart_takes_at_least_as_long_as_the_start_that_was_measured(known, pause_s):
    """Else a size would be tried for a time that is over before its workers have started."""
    assert costs_from(ServiceSettings(), MeasuredCosts(**known), InPlaceRecord()).pause_s == pause_s
