"""A running job tries a size that was never measured, when slots lie idle and even a useless try breaks no promise."""

from __future__ import annotations

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Resize
from elasticflow_airflow.scheduler_core.model.values import Job, Node, RescaleCosts, ScalingCurve

CONFIG = SchedulerConfig(explore_gain=0.35, explore_window_s=30.0)
COSTS = RescaleCosts(startup_s=10.0, pause_s=5.0, tail_s=5.0)


def running(deadline_s: float = 400.0, config: SchedulerConfig = CONFIG, **changes: object) -> Scheduler:
    """Two slots, and one job of 100 steps that was measured with one worker only, at 1 step/s."""
    scheduler = Scheduler(config, [Node(node_id="a", slots=2)])
    job = Job(
        job_id="j",
        submitted_s=0.0,
        deadline_s=deadline_s,
        total_steps=100.0,
        curve=ScalingCurve({1: 1.0}),
        costs=COSTS,
        **changes,  # type: ignore[arg-type]  # fields of Job
    )
    (resize,) = [d for d in scheduler.handle(ev.JobSubmitted(job), 0.0) if isinstance(d, Resize)]
    assert resize.placement.workers == 1
    return scheduler


def starts(scheduler: Scheduler, at_s: float = 10.0) -> list[Resize]:
    (state,) = scheduler.states()
    decisions = scheduler.handle(ev.GangStarted("j", state.placement), at_s)
    decisions += scheduler.handle(ev.WakeUp(), at_s + 1.0)
    return [d for d in decisions if isinstance(d, Resize)]


def test_idle_slots_are_tried_once_the_gang_trains() -> None:
    (resize,) = starts(running())
    assert resize.placement.workers == 2
    assert "its speed there is not known" in str(resize.reason)


def test_a_size_that_is_faster_is_kept() -> None:
    scheduler = running()
    (resize,) = starts(scheduler)
    scheduler.handle(ev.GangStarted("j", resize.placement), 16.0)
    scheduler.handle(ev.JobProgressed("j", remaining_steps=90.0, steps_per_s=1.8), 22.0)
    assert not [d for d in scheduler.handle(ev.WakeUp(), 60.0) if isinstance(d, Resize)]
    assert scheduler.states()[0].placement.workers == 2


def test_a_size_that_is_not_faster_is_given_back_and_not_tried_again() -> None:
    scheduler = running()
    (resize,) = starts(scheduler)
    scheduler.handle(ev.GangStarted("j", resize.placement), 16.0)
    decisions = scheduler.handle(ev.JobProgressed("j", remaining_steps=90.0, steps_per_s=0.8), 22.0)
    for at_s in (30.0, 46.5, 60.0, 80.0):
        decisions += scheduler.handle(ev.WakeUp(), at_s)
    sizes = [d.placement.workers for d in decisions if isinstance(d, Resize)]
    assert sizes == [1]


def test_a_try_that_could_cost_the_deadline_is_not_made() -> None:
    assert starts(running(deadline_s=140.0)) == []


def test_nothing_is_tried_beyond_a_curve_that_the_user_gave() -> None:
    assert starts(running(explore=False)) == []


def test_nothing_is_tried_where_it_is_turned_off() -> None:
    assert starts(running(config=SchedulerConfig())) == []


def test_nothing_is_tried_beyond_max_workers() -> None:
    assert starts(running(max_workers=1)) == []
