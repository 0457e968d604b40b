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


def test_automatically_the_price_begins_with_the_first_that_is_refused_for_lack_of_slots(make_world):
    world = make_world(objective="auto", nodes=1, slots=4)
    speeds = {1: 8.0, 2: 16.0, 4: 32.0}

    def small(number, **given):
        return world.submit(task=f"small{number}", within=250, steps=1000, scaling_curve={1: 8.0}, **given)

    def monster(task):
        found = world.submit(task=task, within=1000, steps=26_000, scaling_curve=speeds)
        return found, found.job.verdict

    for number in range(20):
        assert small(number).job.verdict.decision == "admitted"
        world.run(60, every=5)
    hopeless = world.submit(task="hopeless", within=100, steps=26_000, scaling_curve=speeds)
    assert hopeless.job.verdict.decision == "rejected"
    world.run(300, every=20)
    first, verdict = monster("monster")
    assert verdict.decision == "admitted", "nobody was refused for lack of slots"
    assert small(20).job.verdict.decision == "rejected"
    world.job_service.cancel(first.job.job_id, first.claim, "makes room")
    world.run(60, every=5)
    for task in ("another", "third"):
        _, verdict = monster(task)
        assert verdict.decision == "rejected"
        assert "objective: auto" in verdict.reason
        world.restart()  # that somebody was refused is remembered


def test_an_objective_that_is_none_is_told_what_there_is(tmp_path):
    with pytest.raises(ValidationError, match="first-come"):
        ServiceSettings(state_dir=tmp_path, objective="cheapest")
