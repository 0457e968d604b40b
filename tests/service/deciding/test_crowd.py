"""Who submits while a pass looks at all the others is decided on before the next one does; as if each came alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import sqlalchemy as sa

from elasticflow_airflow.service.loop.actuating import Actuator

CURVE = {1: 10.0, 2: 18.0}


@pytest.fixture
def world(make_world):
    return make_world(nodes=2, slots=4)


def submit_meanwhile(world, monkeypatch, count):
    """Have jobs submitted while the engine is told what to do, one after the other."""
    act, made = Actuator.act, []

    def acting(self, context):
        nonlocal made
        act(self, context)
        if not made:
            with monkeypatch.context() as quiet:
                quiet.setattr(world.job_service.notifier, "wake", lambda: None)
                made += [world.submit(task=f"late{n}", within=900, scaling_curve=CURVE) for n in range(count)]

    monkeypatch.setattr(Actuator, "act", acting)
    return made


def test_who_submits_during_a_pass_has_his_verdict_before_the_next_one(world, monkeypatch):
    made = submit_meanwhile(world, monkeypatch, 5)
    looks, observe = [], world.engine.observe
    monkeypatch.setattr(world.engine, "observe", lambda: looks.append(1) or observe())
    world.step()
    assert len(looks) == 1
    assert [world.status(job).verdict.decision for job in made] == ["admitted"] * 5
    assert [world.ended(job).result.met for job in made] == [True] * 5


def test_who_cannot_be_decided_on_yet_is_not_asked_about_again_and_again(world, monkeypatch):
    first = world.submit(task="t", within=900, scaling_curve=CURVE)
    world.run(5)
    second = world.submit(task="t", within=900, steps=77, scaling_curve=CURVE)  # waits for the end of the first
    passes, make_pass = [], world.reconciler._pass
    monkeypatch.setattr(world.reconciler, "_pass", lambda seen: passes.append(seen) or make_pass(seen))
    world.step()
    assert len(passes) == 1
    assert world.ended(second).result.met
    assert world.status(first).incarnation == 2


@pytest.mark.trouble
def test_a_job_that_cannot_be_decided_on_keeps_nobody_of_a_crowd_from_it(world, monkeypatch):
    from elasticflow_airflow.service.loop import introducing

    introduce = introducing._introduce

    def broken(context, row, *given):
        if row.job_id.startswith("daily-late1"):
            raise RuntimeError("nobody can decide on this one")
        return introduce(context, row, *given)

    made = submit_meanwhile(world, monkeypatch, 3)
    monkeypatch.setattr(introducing, "_introduce", broken)
    world.step()
    world.run(5)
    assert [bool(world.status(job).set_aside) for job in made] == [False, True, False]
    assert [world.status(job).verdict.decision for job in (made[0], made[2])] == ["admitted"] * 2


def test_what_jobs_report_together_is_planned_with_once(world, monkeypatch):
    jobs = [world.submit(task=f"t{n}", within=3000, steps=4000, scaling_curve=CURVE) for n in range(4)]
    for job in jobs:
        world.reach(job, "running")
    world.run(30)
    decider = world.reconciler._scheduler._decider
    planned, replan = [], decider.replan
    monkeypatch.setattr(
        decider,
        "replan",
        lambda *given, **more: planned.append(given[1]) or replan(*given, **more),
    )
    world.run(30, every=10.0)
    progress = [why for why in planned if "reported progress" in str(why)]
    assert len(progress) <= 3
    assert all(world.status(job).step > 0 for job in jobs)


def test_of_orders_that_are_given_together_the_last_one_of_each_job_counts(monkeypatch):
    """A slot that is given and taken back in one breath belongs to the next."""
    from types import SimpleNamespace

    from elasticflow_airflow.scheduler_core.model import decisions as de
    from elasticflow_airflow.scheduler_core.model.values import Placement, Slot
    from elasticflow_airflow.service.decisions import deciding

    slot = Placement((Slot("node0", 0),))
    orders = [
        de.Resize("planned", slot, de.Purpose.TRAIN, "its time has come"),
        de.Suspend("planned", "gives up its slots"),
        de.Suspend("moved", "gives up its slots"),
        de.Wait("moved", "waits", None),
        de.Resize("moved", slot, de.Purpose.TRAIN, "other slots"),
    ]
    written = []
    monkeypatch.setattr(deciding, "record", lambda _books, decision: written.append(decision))
    monkeypatch.setattr(deciding, "_trains_there", lambda _books, _job_id: False)
    deciding.record_all(SimpleNamespace(on_behalf_of=lambda *_: nullcontext(), scheduler=None, singly=True), orders)
    assert written == [orders[1], orders[4]]


@pytest.mark.parametrize("jobs", [1, 6])
def test_a_pass_asks_the_database_as_little_however_many_train(make_world, jobs):
    """What has come to lie there of their checkpoints, too."""
    world = make_world(nodes=2, checkpoint_interval_s=2.0)
    made = [world.submit(task=f"t{n}", steps=10**6, scaling_curve={1: 10.0}, max_workers=1) for n in range(jobs)]
    world.until(lambda: all((done := world.row(job).promoted) and done.step > 60 for job in made), "some checkpoints")
    for _ in range(3):
        world.step(0.001)  # What was found out about checkpoints is taken in.
    asked = []
    sa.event.listen(world.store.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    world.step(0.01)
    assert sum("FROM candidate" in one for one in asked) == 1
    assert sum(one.startswith("SELECT") for one in asked) < 15
