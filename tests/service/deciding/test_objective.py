"""Whom the service promises when not everybody can be: by value, what would take what many need is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from elasticflow_airflow.service.settings import ServiceSettings


def test_by_value_a_job_that_would_take_what_many_need_is_refused_and_says_why(make_world):
    world = make_world(objective="value", nodes=1, slots=4)
    for number in range(20):
        small = world.submit(task=f"small{number}", within=250, steps=1000, scaling_curve={1: 8.0})
        assert small.job.verdict.decision == "admitted"
        world.run(60, every=5)
    for task in ("monster", "another"):
        monster = world.submit(task=task, within=1000, steps=26_000, scaling_curve={1: 8.0, 2: 16.0, 4: 32.0})
        assert monster.job.verdict.decision == "rejected"
        assert "objective: value" in monster.job.verdict.reason
        world.run(300, every=20)
        world.restart()  # what was seen to come is remembered


def test_automatically_slots_are_kept_free_and_that_they_were_short_is_remembered(make_world):
    world = make_world(nodes=1, slots=4)

    def small(number):
        return world.submit(task=f"small{number}", within=250, steps=1000, scaling_curve={1: 8.0}).job.verdict.decision

    def monster(task, **given):
        return world.submit(task=task, within=1000, steps=26_000, scaling_curve={1: 8.0, 2: 16.0, 4: 32.0}, **given)

    for number in range(20):
        assert small(number) == "admitted"
        world.run(60, every=5)
    refused = monster("monster").job.verdict
    assert refused.decision == "rejected"
    assert "(objective: auto); a value well above 1" in refused.reason
    dear = monster("dear", value=100.0)
    assert dear.job.verdict.decision == "admitted"
    assert "rejected" in [small(number) for number in range(20, 24)]
    world.job_service.cancel(dear.job.job_id, dear.claim, "makes room")
    world.run(300, every=20)
    for task in ("another", "third"):
        refused = monster(task).job.verdict
        assert refused.decision == "rejected"
        assert "objective: auto, as slots were short at" in refused.reason
        world.restart()


def test_an_objective_that_is_none_is_told_what_there_is(tmp_path):
    with pytest.raises(ValidationError, match="first-come"):
        ServiceSettings(state_dir=tmp_path, objective="cheapest")
