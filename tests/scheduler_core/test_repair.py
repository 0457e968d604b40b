"""One promise breaks: it is helped with what is free, and nobody else pays for it."""

from __future__ import annotations

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
