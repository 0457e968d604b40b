"""One promise breaks: it is helped with what is free, and nobody else pays for it."""

from __future__ import annotations

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev

CONFIG = SchedulerConfig(speed_shared=0.0)


def of(decisions: list[de.Decision], *kinds: type) -> list[tuple[type, str]]:
    return [(type(d), d.job_id) for d in decisions if isinstance(d, kinds)]


def admitted(scheduler: Scheduler, *jobs) -> None:
    for job in jobs:
        assert isinstance(scheduler.handle(ev.JobSubmitted(job), 0.0)[0], de.Admit)


def test_a_slower_job_takes_idle_slots(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(speed_shared=0.0, min_saving_s=1e6), nodes(4))
    admitted(scheduler, make_job("a", steps=100, deadline=110, curve={1: 1.0, 2: 1.9}, pause=5))
    decisions = scheduler.handle(ev.JobProgressed("a", remaining_steps=90, steps_per_s=0.5), 20.0)
    assert of(decisions, de.AtRisk, de.Resize) == [(de.Resize, "a")]
    assert scheduler.states()[0].placement.workers == 2


def test_who_cannot_be_helped_goes_on_where_it_is_and_the_others_are_left_alone(make_job, nodes) -> None:
    """Three jobs on three slots; the oldest turns out to be half as fast."""
    scheduler = Scheduler(CONFIG, nodes(3))
    admitted(scheduler, *[make_job(name, steps=100, deadline=110, curve={1: 1.0}, pause=5) for name in "abc"])
    plans = {name: scheduler.plan_of(name) for name in "bc"}
    decisions = scheduler.handle(ev.JobProgressed("a", remaining_steps=90, steps_per_s=0.5), 20.0)
    assert of(decisions, de.AtRisk, de.Resize, de.Suspend) == [(de.AtRisk, "a")]
    assert {name: scheduler.plan_of(name) for name in "bc"} == plans
    assert scheduler.plan_of("a").finish_s == 20 + 90 / 0.5


def test_a_slower_job_pushes_best_effort_aside(make_job, nodes) -> None:
    scheduler = Scheduler(CONFIG, nodes(2))
    admitted(scheduler, make_job("a", steps=100, deadline=120, curve={1: 1.0, 2: 1.9}, pause=5, max_workers=2))
    scheduler.handle(ev.JobSubmitted(make_job("be", steps=1000, deadline=None, curve={1: 1.0})), 0.0)
    assert {s.job.job_id: s.placement.workers for s in scheduler.states()} == {"a": 1, "be": 1}
    decisions = scheduler.handle(ev.JobProgressed("a", remaining_steps=90, steps_per_s=0.5), 20.0)
    assert of(decisions, de.AtRisk) == []
    assert {s.job.job_id: s.placement.workers for s in scheduler.states()} == {"a": 2, "be": 0}


def test_a_promise_at_risk_is_kept_again_once_there_is_room(make_job, nodes) -> None:
    """A node is lost and comes back: the newer of two promises is at risk meanwhile, and both are kept in the end."""
    first, second = nodes(1, 1)
    scheduler = Scheduler(CONFIG, [first, second])
    admitted(scheduler, *[make_job(name, steps=100, deadline=130, curve={1: 1.0}) for name in "ab"])
    decisions = scheduler.handle(ev.NodeLost(second.node_id), 20.0)
    assert of(decisions, de.AtRisk) == [(de.AtRisk, "b")]
    decisions = scheduler.handle(ev.NodeJoined(second), 40.0)
    assert of(decisions, de.OnTrack) == [(de.OnTrack, "b")]
    assert scheduler.plan_of("b").finish_s == 120.0


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("news", ["starts late", "is slower"])
def test_who_runs_stays_and_those_that_wait_begin_later(make_job, nodes, slots: int, news: str) -> None:
    """To give its slots up would cost it another start-up, and once more if it was late only because of that."""
    scheduler = Scheduler(SchedulerConfig.served(), nodes(slots))
    names = [f"j{number}" for number in range(4 * slots)]
    admitted(scheduler, *[make_job(name, steps=20, deadline=600, curve={1: 1.0}, startup=3) for name in names])
    begun = [state for state in scheduler.states() if state.placement.workers]
    before = {name: scheduler.plan_of(name) for name in names}
    assert len(begun) == slots
    for state in begun:
        name = state.job.job_id
        if news == "starts late":
            decisions = scheduler.handle(ev.GangStarted(name, state.placement), 15.0)
        else:
            decisions = scheduler.handle(ev.JobProgressed(name, remaining_steps=18, steps_per_s=0.5), 15.0)
        assert of(decisions, de.Suspend, de.Resize, de.AtRisk) == []
        assert len(scheduler.plan_of(name).segments) == 1
    order = [
        [name for name, plan in sorted(plans.items(), key=lambda one: (one[1].finish_s, one[0]))]
        for plans in (before, {name: scheduler.plan_of(name) for name in names})
    ]
    assert order[0] == order[1]
    assert all(scheduler.plan_of(name).finish_s <= before[name].finish_s + 40 for name in names)


def test_one_that_cannot_be_kept_costs_no_other_its_promise(make_job, nodes) -> None:
    """Two start late on full slots: those behind the second can wait a little, and nothing can help the first."""
    scheduler = Scheduler(CONFIG, nodes(2))
    one = {"steps": 20, "curve": {1: 1.0}, "startup": 3}
    admitted(scheduler, make_job("hopeless", deadline=24, **one), make_job("late", deadline=50, **one))
    admitted(scheduler, make_job("behind", deadline=60, **one), make_job("next", deadline=85, **one))
    admitted(scheduler, make_job("last", deadline=90, **one))
    running = {state.job.job_id: state.placement for state in scheduler.states() if state.placement.workers}
    assert sorted(running) == ["hopeless", "late"]
    started = [ev.GangStarted(name, placement) for name, placement in sorted(running.items())]
    decisions = scheduler.reported(started, 9.0)
    assert of(decisions, de.AtRisk) == [(de.AtRisk, "hopeless")]
    assert of(decisions, de.Suspend, de.Resize) == []
    deadlines = {"late": 50, "behind": 60, "next": 85, "last": 90}
    assert all(scheduler.plan_of(name).finish_s <= deadline for name, deadline in deadlines.items())


def test_who_runs_does_not_move_while_those_behind_it_can_wait(make_job, nodes) -> None:
    """To move costs a start-up, too, though other slots are free now."""
    scheduler = Scheduler(CONFIG, nodes(2, 2))
    one = {"curve": {1: 1.0}, "deadline": 600, "startup": 3}
    admitted(scheduler, *[make_job(name, steps=20, **one) for name in "abc"])
    admitted(scheduler, make_job("wide", steps=20, curve={2: 1.0}, min_workers=2, deadline=600, startup=3))
    running = {state.job.job_id: state.placement for state in scheduler.states() if state.placement.workers}
    assert sorted(running) == ["a", "b", "c"]
    before = scheduler.plan_of("wide").finish_s
    decisions = scheduler.handle(ev.GangStarted("a", running["a"]), 15.0)
    assert of(decisions, de.Suspend, de.Resize, de.AtRisk) == []
    assert {state.job.job_id: state.placement for state in scheduler.states() if state.placement.workers} == running
    assert scheduler.plan_of("a").finish_s == 35.0
    assert scheduler.plan_of("wide").finish_s == before, "it has found other slots"


def test_nobody_waits_longer_than_its_deadline_allows(make_job, nodes) -> None:
    """The one that waits cannot begin later: the one that runs gives its slots up, and ends in time as well."""
    scheduler = Scheduler(CONFIG, nodes(1))
    admitted(scheduler, make_job("runs", steps=20, deadline=50, curve={1: 1.0}, startup=3))
    scheduler.handle(ev.GangStarted("runs", scheduler.states()[0].placement), 3.0)
    scheduler.handle(ev.JobSubmitted(make_job("waits", steps=20, deadline=55, curve={1: 1.0}, startup=3)), 4.0)
    assert [s.job.job_id for s in scheduler.states() if s.placement.workers] == ["runs"]
    assert isinstance(scheduler.handle(ev.JobAmended("runs", deadline_s=200.0), 4.0)[0], de.Amended)
    scheduler.handle(ev.JobProgressed("runs", remaining_steps=19, steps_per_s=0.5), 5.0)
    assert not any(state.at_risk for state in scheduler.states())
    assert scheduler.plan_of("waits").finish_s <= 55
    assert scheduler.plan_of("runs").finish_s <= 200
    assert len(scheduler.plan_of("runs").segments) == 2
