"""A newcomer that finds no free slots gets those of a job that uses more than its promise needs, and loses least."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.planning import allocation
from elasticflow_airflow.scheduler_core.planning.lookahead import Lookahead
from elasticflow_airflow.scheduler_core.planning.planner import Planner

STEEP, FLAT = {1: 1.0, 2: 1.9, 4: 3.6}, {1: 1.0, 2: 1.5, 4: 1.6}


def busy(make_job: Callable[..., Job], slots: int = 8, **curves: dict[int, float]) -> Scheduler:
    """A cluster on which jobs with late deadlines use everything."""
    scheduler = Scheduler(SchedulerConfig(afresh_up_to=0), [Node(node_id="n", slots=slots)])
    for name, curve in curves.items():
        scheduler.handle(ev.JobSubmitted(make_job(name, steps=1000.0, deadline=9000.0, curve=curve)), 0.0)
    return scheduler


def sizes(scheduler: Scheduler) -> dict[str, int]:
    return {state.job.job_id: state.placement.workers for state in scheduler.states()}


def submit(scheduler: Scheduler, job: Job, now: float = 10.0) -> list[de.Decision]:
    return scheduler.handle(ev.JobSubmitted(job), now)


def without_fresh_plans(monkeypatch) -> None:
    monkeypatch.setattr(Planner, "_proven", lambda *_, **__: (None, None))


def test_the_job_that_loses_least_makes_room(make_job, monkeypatch):
    scheduler = busy(make_job, steep=STEEP, flat=FLAT)
    assert sizes(scheduler) == {"steep": 4, "flat": 4}
    without_fresh_plans(monkeypatch)
    decisions = submit(scheduler, make_job("new", steps=100.0, deadline=500.0, curve={1: 1.0}))
    assert isinstance(decisions[0], de.Admit)
    assert sizes(scheduler) == {"steep": 4, "flat": 2, "new": 1}
    assert [decision.job_id for decision in decisions if isinstance(decision, de.Resize)] == ["flat", "new"]


def test_the_newcomer_gets_what_saves_it_more_than_the_other(make_job, monkeypatch):
    scheduler = busy(make_job, steep=STEEP, flat=FLAT)
    without_fresh_plans(monkeypatch)
    submit(scheduler, make_job("new", steps=1000.0, deadline=9000.0, curve=STEEP))
    assert sizes(scheduler) == {"steep": 4, "flat": 2, "new": 2}


def test_nobody_makes_room_who_would_be_late(make_job, monkeypatch):
    scheduler = Scheduler(SchedulerConfig(afresh_up_to=0), [Node(node_id="n", slots=4)])
    submit(scheduler, make_job("tight", steps=1000.0, deadline=300.0, curve=STEEP), 0.0)
    without_fresh_plans(monkeypatch)
    decisions = submit(scheduler, make_job("new", steps=100.0, deadline=200.0, curve={1: 1.0}))
    assert isinstance(decisions[0], de.Reject)
    assert sizes(scheduler) == {"tight": 4}


def test_a_pause_is_paid_before_a_limit_is_kept(make_job, monkeypatch):
    """With two slots it would be done 536 s after its start, and one pause later it is late."""
    without_fresh_plans(monkeypatch)
    for pause, makes_room in ((0.0, True), (30.0, False)):
        scheduler = Scheduler(SchedulerConfig(afresh_up_to=0), [Node(node_id="n", slots=4)])
        submit(scheduler, make_job("a", steps=1036.0, deadline=550.0, curve=STEEP, pause=pause), 0.0)
        assert sizes(scheduler) == {"a": 4}
        decisions = submit(scheduler, make_job("new", steps=100.0, deadline=200.0, curve={1: 1.0}))
        assert isinstance(decisions[0], de.Admit) == makes_room


def test_beside_few_jobs_everything_is_planned_anew(make_job, monkeypatch):
    scheduler = Scheduler(SchedulerConfig(afresh_up_to=1), [Node(node_id="n", slots=8)])
    submit(scheduler, make_job("flat", steps=1000.0, deadline=9000.0, curve={1: 1.0, 2: 1.5, 4: 1.6, 8: 1.7}), 0.0)
    without_fresh_plans(monkeypatch)
    assert isinstance(submit(scheduler, make_job("new", steps=100.0, deadline=150.0, curve={1: 1.0}))[0], de.Reject)


def test_who_holds_slots_and_would_have_to_move_is_not_promised_for_nothing():
    """Its own slots go away: the pause of moving has to be paid, and then its deadline cannot be kept."""
    nodes = [Node(node_id="n1", slots=4), Node(node_id="n2", slots=2, draining_until_s=200.0)]
    scheduler = Scheduler(SchedulerConfig(afresh_up_to=0), nodes)
    flat, steps = {1: 1.0, 2: 1.5, 4: 1.6}, {"submitted_s": 0.0, "total_steps": 1000.0}
    submit(scheduler, Job(job_id="a", deadline_s=9000.0, curve=ScalingCurve(flat), min_workers=2, **steps), 0.0)
    costs = RescaleCosts(pause_s=30.0)
    submit(scheduler, Job(job_id="e", deadline_s=None, curve=ScalingCurve({2: 1.9}), costs=costs, **steps), 0.0)
    assert sizes(scheduler) == {"a": 4, "e": 2}
    decisions = scheduler.handle(ev.JobAmended("e", deadline_s=540.0), 10.0)
    assert not [decision for decision in decisions if isinstance(decision, de.Amended | de.AtRisk)]


def test_a_plan_in_another_order_is_not_one_that_no_other_could_better(make_job, monkeypatch):
    """Late jobs are then planned anew when they were before, not a minute later."""
    found: list[bool] = []
    monkeypatch.setattr(Planner, "_proven", lambda *_, **__: (None, None))
    monkeypatch.setattr(Planner, "_rescued", lambda self, *_: (self.stored(), None))
    ask = Planner.fresh
    monkeypatch.setattr(Planner, "fresh", lambda *a, **k: note(ask(*a, **k)))

    def note(draft):
        found.append(draft.planned_anew if draft is not None else False)
        return draft

    planner = busy(make_job, flat=FLAT)._state.planner(10.0)
    assert planner.fresh(rescue=1) is not None
    assert found == [False]


def beside_thousands(make_job: Callable[..., Job]) -> Scheduler:
    """A full cluster whose scheduler takes its four jobs for thousands."""
    scheduler = Scheduler(SchedulerConfig(afresh_up_to=0, afresh_first_up_to=0), [Node(node_id="n", slots=4)])
    for name in "abcd":
        scheduler.handle(ev.JobSubmitted(make_job(name, steps=1000.0, deadline=3000.0, curve={1: 1.0})), 0.0)
    return scheduler


def test_beside_thousands_a_newcomer_is_promised_what_others_leave(make_job, monkeypatch):
    scheduler = beside_thousands(make_job)
    monkeypatch.setattr(Lookahead, "plan", lambda *_, **__: pytest.fail("everything was planned anew"))
    plans = {state.job.job_id: scheduler.plan_of(state.job.job_id) for state in scheduler.states()}
    admit = submit(scheduler, make_job("new", steps=100.0, deadline=2000.0, curve={1: 1.0}))[0]
    assert isinstance(admit, de.Admit)
    assert admit.plan is not None
    assert admit.plan.segments[0].start_s >= min(plan.finish_s for plan in plans.values() if plan is not None)
    assert {job_id: scheduler.plan_of(job_id) for job_id in plans} == plans


def test_beside_thousands_an_offer_is_admitted_too(make_job, monkeypatch):
    scheduler = beside_thousands(make_job)
    job = make_job("new", steps=100.0, deadline=50.0, curve={1: 1.0})
    refused = submit(scheduler, job)[0]
    assert isinstance(refused, de.Reject)
    assert refused.earliest_deadline_s is not None
    monkeypatch.setattr(Lookahead, "plan", lambda *_, **__: pytest.fail("everything was planned anew"))
    assert isinstance(submit(scheduler, replace(job, deadline_s=refused.earliest_deadline_s))[0], de.Admit)


def test_beside_thousands_who_got_nothing_is_helped_within_a_minute(make_job):
    scheduler = Scheduler(SchedulerConfig(afresh_up_to=0, afresh_first_up_to=0), [Node(node_id="n", slots=4)])
    for name in ("promised", "other"):
        submit(scheduler, make_job(name, steps=1000.0, deadline=9000.0, curve=STEEP), 0.0)
    scheduler._state.hopeful_s = 61.0  # Everything was planned anew a second ago.
    decisions = submit(scheduler, make_job("late", steps=900.0, deadline=None, curve=STEEP), 2.0)
    assert sizes(scheduler) == {"promised": 2, "other": 2, "late": 0}
    (wake,) = (decision for decision in decisions if isinstance(decision, de.WakeMeAt))
    assert wake.at_s == 61.0
    scheduler.handle(ev.WakeUp(), 61.0)
    assert min(sizes(scheduler).values()) > 0


def test_who_is_not_looked_at_when_all_grow_could_not_have_grown(make_job, monkeypatch):
    """The filter leaves out nobody: by chance, with gangs of many sizes on nodes of several."""
    left_out = 0

    class Checked(allocation._RoomToGrow):
        def __init__(self, draft):
            super().__init__(draft)
            self.draft = draft

        def has(self, work, course):
            nonlocal left_out
            found = super().has(work, course)
            if not found:
                left_out += 1
                room = self.draft.book.free_now.bit_count()
                assert allocation._option(self.draft, work, SchedulerConfig(), room) is None
            return found

    monkeypatch.setattr(allocation, "_RoomToGrow", Checked)
    chaos = random.Random(11)
    scheduler = Scheduler(nodes=[Node(node_id=f"n{i}", slots=slots) for i, slots in enumerate((4, 6, 8, 3, 8))])
    for number in range(150):
        now = 20.0 * number
        live = [state.job.job_id for state in scheduler.states()]
        if len(live) > 12:
            scheduler.handle(ev.JobFinished(chaos.choice(live)), now)
        curve = {size: size ** chaos.uniform(0.4, 1.0) for size in (1, 2, 4, 8)}
        deadline = now + chaos.uniform(300.0, 3000.0) if chaos.random() < 0.6 else None
        submit(scheduler, make_job(f"j{number}", steps=chaos.uniform(50.0, 900.0), deadline=deadline, curve=curve), now)
    assert left_out > 100
