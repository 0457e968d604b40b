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


def test_an_objective_that_is_none_is_told_what_there_is(tmp_path):
    with pytest.raises(ValidationError, match="first-come"):
        ServiceSettings(state_dir=tmp_path, objective="cheapest")
