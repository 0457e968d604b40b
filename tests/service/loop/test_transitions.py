"""The table of states: what may follow what, and whose trouble it is when something else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticflow_airflow.api import State
from elasticflow_airflow.engines.fake.engine import FakeEngine
from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.service.loop import restart_or_end
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.transitions import (
    GENERATION_TRANSITIONS,
    JOB_TRANSITIONS,
    ORDERED,
    TransitionError,
    advance,
    move,
)

CURVE = {1: 10.0, 2: 18.0}


def test_the_tables_know_every_state():
    assert JOB_TRANSITIONS.keys() == set(State)
    assert GENERATION_TRANSITIONS.keys() == {ORDERED, *GangState}
    assert set(State) == {State.SUBMITTED}.union(*JOB_TRANSITIONS.values()), "each can be reached"


@pytest.mark.parametrize("state", list(State))
def test_what_is_over_stays_so_and_all_else_can_end(state):
    assert bool(JOB_TRANSITIONS[state]) is not state.terminal
    row = IncarnationRow(state=state.value)
    if state.terminal:
        with pytest.raises(TransitionError, match=f"is {state.value}, and cannot become running"):
            move(row, State.RUNNING, "again")
        assert row.state == state.value
    else:
        move(row, State.CANCELLED, "enough")
        assert (row.state, row.state_reason) == ("cancelled", "enough")


def test_to_stay_gives_another_reason():
    row = IncarnationRow(state="succeeded", state_reason="done")
    move(row, State.SUCCEEDED, "done, and kept")
    assert row.state_reason == "done, and kept"


def test_a_generation_that_has_ended_does_not_come_back():
    generation = GenerationRow(generation=3, state="ended")
    with pytest.raises(TransitionError, match="generation 3 is ended, and cannot become running"):
        advance(generation, GangState.RUNNING)
    assert generation.state == "ended"


@pytest.mark.trouble
def test_a_state_that_cannot_follow_sets_aside_the_one_job(make_world, monkeypatch):
    world = make_world(nodes=2)
    bad = world.submit(task="bad", within=900, steps=60, scaling_curve=CURVE)
    good = world.submit(task="good", within=900, steps=300, scaling_curve=CURVE)
    world.reach(bad, "running")

    def wrong(row, state, reason):
        move(row, State.SUBMITTED if row.job_id == bad.job.job_id else state, reason)

    monkeypatch.setattr(restart_or_end, "move", wrong)
    assert world.ended(good).state == "succeeded"
    assert "cannot become submitted" in world.status(bad).set_aside
    assert not world.reconciler.problem


def test_what_the_engine_has_seen_of_living_workers_may_be_less_after_a_restart(make_world, monkeypatch):
    """As of a script without a session: that all of it is there for a while is looked at anew by a new engine."""
    world = make_world()
    job = world.submit(task="quiet", within=900, steps=300, scaling_curve=CURVE)
    world.reach(job, "running")
    real = FakeEngine.observe

    def starting(self):
        return [
            replace(gang, state=GangState.STARTING) if gang.state is GangState.RUNNING else gang for gang in real(self)
        ]

    with monkeypatch.context() as anew:
        anew.setattr(FakeEngine, "observe", starting)
        world.restart()
        world.run(3)
    assert world.status(job).set_aside is None
    assert world.ended(job).state == "succeeded"
    assert len(world.events(job, "started")) == 1
