"""What a promise goes through when speeds are lower than planned: when it is lost, and what the job keeps then."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Node

SERVED = SchedulerConfig.served(explore_gain=0.0)
ONE = {1: 1.0}
UP_TO_EIGHT = {1: 1.0, 2: 1.9, 4: 3.6, 8: 6.5}


def of(decisions: list[de.Decision], kind: type) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def held(scheduler: Scheduler, job_id: str) -> int:
    state = scheduler.state(job_id)
    assert state is not None
    return state.placement.workers


def report(scheduler: Scheduler, job_id: str, left: float, speed: float, now: float) -> list[de.Decision]:
    return scheduler.handle(ev.JobProgressed(job_id, left, steps_per_s=speed), now)


def test_a_speed_inside_the_stated_error_is_no_risk(make_job: Any, nodes: Any) -> None:
    """It was taken off a second time: at 0.9 of its curve a job was at risk at its first report."""
    scheduler = Scheduler(SERVED, nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1150, curve=ONE)), 0.0)
    for now in range(15, 1000, 15):
        assert of(report(scheduler, "a", 1000 - 0.9 * now, 0.9, float(now)), de.AtRisk) == []
    state = scheduler.state("a")
    assert state is not None
    assert not state.at_risk
    assert scheduler.plan_of("a").finish_s == pytest.approx(1000 / 0.9, rel=1e-3)


def test_what_is_measured_is_planned_with_as_it_is(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1500, curve=ONE)), 0.0)
    assert scheduler.plan_of("a").finish_s > 1100
    for now in (15.0, 30.0, 45.0):
        report(scheduler, "a", 1000 - now, 1.0, now)
    assert scheduler.plan_of("a").finish_s == pytest.approx(1000.0)


@pytest.mark.parametrize("before", [0, 1, 3, 10])
def test_one_noisy_report_costs_a_job_on_schedule_nothing(make_job: Any, nodes: Any, before: int) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1150, curve=ONE)), 0.0)
    for number in range(before):
        report(scheduler, "a", 1000 - 15.0 * (number + 1), 1.0, 15.0 * (number + 1))
    now = 15.0 * (before + 1)
    decided = report(scheduler, "a", 1000 - 15.0 * before - 12.0, 0.8, now)
    assert of(decided, de.AtRisk) == []
    newcomer = scheduler.handle(ev.JobSubmitted(make_job("b", steps=300, deadline=700, curve=ONE)), now + 1.0)
    assert of(newcomer, de.Reject)
    assert of(newcomer, de.Suspend) == []
    assert held(scheduler, "a") == 1


def test_a_speed_that_stays_low_is_a_risk_that_is_told_within_three_windows(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1150, curve=ONE)), 0.0)
    told = [of(report(scheduler, "a", 1000 - 0.7 * now, 0.7, now), de.AtRisk) for now in (15.0, 30.0, 45.0)]
    assert sum(map(len, told)) == 1


def test_a_job_at_risk_keeps_its_slots_while_it_may_yet_make_it(make_job: Any, nodes: Any) -> None:
    """With more workers later it would: newcomers do not get the slots that it stands on."""
    scheduler = Scheduler(SERVED, nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1150, curve={1: 1.0, 2: 1.9})), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("b", steps=800, deadline=1000, curve=ONE)), 0.0)
    assert (held(scheduler, "a"), held(scheduler, "b")) == (1, 1)
    for now in range(15, 75, 15):
        report(scheduler, "a", 1000 - 0.7 * now, 0.7, float(now))
    state = scheduler.state("a")
    assert state is not None
    assert state.at_risk
    newcomer = scheduler.handle(ev.JobSubmitted(make_job("c", steps=200, deadline=500, curve=ONE)), 61.0)
    assert of(newcomer, de.Reject)
    assert held(scheduler, "a") == 1


def test_a_job_that_is_lost_for_good_holds_up_no_promise(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1150, curve=ONE)), 0.0)
    for now in range(15, 75, 15):
        report(scheduler, "a", 1000 - 0.5 * now, 0.5, float(now))
    newcomer = scheduler.handle(ev.JobSubmitted(make_job("c", steps=200, deadline=500, curve=ONE)), 61.0)
    assert of(newcomer, de.Admit)


def test_a_late_job_takes_what_best_effort_and_growth_hold(make_job: Any, nodes: Any) -> None:
    """It held 2 of 4 workers beside idle ones, and stood behind best effort that had come before it fell behind."""
    scheduler = Scheduler(SERVED, nodes(4))
    late = make_job("late", steps=2000, deadline=1300, curve={1: 1.0, 2: 1.9, 4: 3.6})
    scheduler.handle(ev.JobSubmitted(make_job("other", steps=9000, curve={1: 1.0, 2: 1.9})), 0.0)
    scheduler.handle(ev.JobSubmitted(late), 1.0)
    for now in range(20, 140, 15):
        report(scheduler, "late", 2000 - now, 0.3 * held(scheduler, "late"), float(now))
    state = scheduler.state("late")
    assert state is not None
    assert state.at_risk
    assert held(scheduler, "late") == 4


def test_a_promised_job_goes_on_as_it_is_when_its_only_node_will_go_away(make_job: Any, nodes: Any) -> None:
    """With two hours' notice of a drain it shrank from 8 workers to 1 beside idle slots."""
    scheduler = Scheduler(SERVED, [Node(node_id="n0", slots=8)])
    job = make_job("a", steps=100_000, deadline=40_000, curve=UP_TO_EIGHT, pause=10)
    scheduler.handle(ev.JobSubmitted(job), 0.0)
    before = held(scheduler, "a")
    assert before == 8
    decided = scheduler.handle(ev.NodeDraining("n0", 7200.0 + 60.0), 60.0)
    assert of(decided, de.AtRisk)
    assert of(decided, de.Resize) == []
    assert held(scheduler, "a") == 8


def test_a_change_that_is_due_is_made_though_a_report_says_just_then_what_was_expected(
    make_job: Any, nodes: Any
) -> None:
    scheduler = Scheduler(SchedulerConfig(), nodes(1, 1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=None, curve=ONE)), 0.0)
    state = scheduler.state("a")
    assert state is not None
    scheduler.handle(ev.GangStarted("a", state.placement), 0.0)
    report(scheduler, "a", 995, 1.0, 5.0)
    scheduler.handle(ev.NodeDraining(state.placement.slots[0].node_id, 60.0), 10.0)
    assert of(report(scheduler, "a", 940, 1.0, 60.0), de.Resize)


def test_a_job_without_an_end_in_sight_takes_slots_that_become_free(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, [Node(node_id="n0", slots=8)])
    curve = {2: 1.9, 4: 3.6, 8: 6.5}
    scheduler.handle(ev.JobSubmitted(make_job("b", steps=2000, deadline=4000, curve={4: 1.0})), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=100_000, deadline=60_000, curve=curve, pause=10)), 0.0)
    scheduler.handle(ev.NodeDraining("n0", 7200.0), 1.0)
    assert held(scheduler, "a") == 4
    scheduler.handle(ev.JobFinished("b"), 2000.0)
    assert held(scheduler, "a") == 8


def test_who_becomes_at_risk_is_helped_at_once_though_another_cannot_be(make_job: Any, nodes: Any) -> None:
    """The other needs more slots than are left: it has no end in any plan, and was counted as if nothing helped."""
    scheduler = Scheduler(SERVED, nodes(4, 8))
    scheduler.handle(ev.JobSubmitted(make_job("wide", steps=4000, deadline=3000, curve={8: 2.0})), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("other", steps=9000, curve={1: 1.0, 2: 1.9})), 0.0)
    late = make_job("late", steps=2000, deadline=1300, curve={1: 1.0, 2: 1.9, 4: 3.6})
    scheduler.handle(ev.JobSubmitted(late), 1.0)
    scheduler.handle(ev.NodeLost("n001"), 2.0)
    for now in range(20, 140, 15):
        workers = held(scheduler, "late")
        report(scheduler, "late", 2000 - now, 0.3 * workers, float(now))
    assert held(scheduler, "late") == 4


@pytest.mark.parametrize("factor", [0.7, 0.5, 0.25])
def test_a_late_job_keeps_its_workers_though_best_effort_waits_for_slots(
    make_job: Any, nodes: Any, factor: float
) -> None:
    """One that waited for its turn was booked on slots of the late job, which shrank for it, and ended later still."""
    scheduler = Scheduler(SERVED, nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job("late", steps=1000, deadline=340, curve={1: 1.0, 2: 1.9, 4: 3.6})), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("waits", steps=10_000, deadline=None, curve=ONE)), 1.0)
    assert held(scheduler, "late") == 4
    left, risks = 1000.0, 0
    for now in range(15, 200, 15):
        left -= 15.0 * 3.6 * factor
        risks += len(of(report(scheduler, "late", left, 3.6 * factor, float(now)), de.AtRisk))
        assert (held(scheduler, "late"), held(scheduler, "waits")) == (4, 0)
    assert risks == 1


@pytest.mark.parametrize("slots", [1, 4])
def test_a_late_job_comes_to_its_end_though_newcomers_never_cease(
    make_job: Any, nodes: Any, world: ModuleType, slots: int
) -> None:
    """Each newcomer could be promised if it was put off once more, and it waited until nobody came any more."""
    play = world.World(Scheduler(SERVED, nodes(slots)), reports=True)
    for number in range(slots):
        late = make_job(f"late{number}", steps=1000, deadline=1150, curve=ONE)
        play.submit(0.0, late, {1: 0.5})
    for number in range(100 * slots):
        came_s = 100.0 + 100.0 * number / slots
        play.submit(came_s, make_job(f"new{number}", steps=180, deadline=came_s + 400, curve=ONE))
    play.run(until=20_000)
    runs = play.runs.values()
    ends = {run.job.job_id: run.ended_s for run in runs if run.job.job_id.startswith("late")}
    assert all(end_s is not None and end_s <= 1150 + 1000 / 0.5 for end_s in ends.values())
    admitted = [run for run in runs if run.deadline_s is not None]
    assert len(admitted) > 40 * slots
