"""Speeds are learnt size by size, and promises rely on a quantile of what is still uncertain."""

from __future__ import annotations

import math
import random

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core import decisions as de
from elasticflow_airflow.scheduler_core import events as ev
from elasticflow_airflow.scheduler_core.learning import believed, planned, smoothed
from elasticflow_airflow.scheduler_core.values import ScalingCurve

TOLD = ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0})
Z90 = 1.2815515655446004


@pytest.mark.parametrize(("shared", "factor"), [(0.0, 1.0), (0.5, 1.5**0.5), (1.0, 1.5)])
def test_other_sizes_follow_as_far_as_the_error_is_shared(shared: float, factor: float) -> None:
    curve = believed(TOLD, {2: 3.0}, SchedulerConfig(speed_shared=shared))
    assert dict(curve.steps_per_s) == pytest.approx({1: factor, 2: 3.0, 4: 4.0 * factor})


def test_two_sizes_say_more_than_one_and_contradict_each_other() -> None:
    curve = believed(TOLD, {1: 1.5, 2: 3.0}, SchedulerConfig(speed_shared=0.5))
    assert curve.steps_per_s[4] == pytest.approx(4.0 * 1.5 ** (2 / 3))
    curve = believed(TOLD, {1: 1.5, 2: 2.0 / 1.5}, SchedulerConfig(speed_shared=1.0))
    assert dict(curve.steps_per_s) == pytest.approx({1: 1.5, 2: 2.0 / 1.5, 4: 4.0})


def test_a_size_that_the_curve_does_not_name_is_added_and_says_nothing_about_the_others() -> None:
    assert dict(believed(TOLD, {8: 5.0}, SchedulerConfig()).steps_per_s) == {1: 1.0, 2: 2.0, 4: 4.0, 8: 5.0}


def test_an_exact_report_changes_nothing() -> None:
    assert believed(TOLD, {2: 2.0}, SchedulerConfig()) == TOLD
    assert smoothed(2.0, 2.0, first=True, config=SchedulerConfig(speed_sigma=0.1)) == 2.0


def test_a_flat_margin_is_on_all_sizes_and_a_stated_error_on_those_not_measured() -> None:
    assert planned(TOLD, {2: 2.0}, SchedulerConfig()) == {1: 1.0, 2: 2.0, 4: 4.0}
    assert planned(TOLD, {2: 2.0}, SchedulerConfig(speed_error=0.1)) == pytest.approx({1: 0.9, 2: 1.8, 4: 3.6})
    config = SchedulerConfig(speed_sigma=0.1, speed_shared=0.0, speed_confidence=0.9)
    doubt = math.exp(-0.1 * Z90)
    assert planned(TOLD, {2: 2.0}, config) == pytest.approx({1: doubt, 2: 2.0, 4: 4.0 * doubt})


def test_a_measured_size_takes_the_doubt_from_the_others_as_far_as_the_error_is_shared() -> None:
    shared = SchedulerConfig(speed_sigma=0.1, speed_shared=1.0)
    assert planned(TOLD, {2: 2.0}, shared) == pytest.approx({1: 1.0, 2: 2.0, 4: 4.0})
    half = SchedulerConfig(speed_sigma=0.1, speed_shared=0.5)
    one, two = planned(TOLD, {2: 2.0}, half)[4], planned(TOLD, {1: 1.0, 2: 2.0}, half)[4]
    assert 4.0 * math.exp(-0.1 * Z90) < one < two < 4.0


def test_an_inexact_report_leaves_a_margin_of_its_own() -> None:
    config = SchedulerConfig(speed_sigma=0.1, report_sigma=0.1, speed_shared=0.0)
    assert smoothed(2.0, 3.0, first=True, config=config) == pytest.approx(2.5)
    assert planned(TOLD, {2: 2.0}, config)[2] == pytest.approx(2.0 * math.exp(-Z90 * 0.1 / 2**0.5))


@pytest.mark.parametrize("shared", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("measured", [0, 1, 2])
def test_a_size_that_never_ran_is_as_fast_as_planned_with_the_stated_probability(shared: float, measured: int) -> None:
    config = SchedulerConfig(speed_sigma=0.2, speed_shared=shared, speed_confidence=0.9)
    chaos, kept, draws = random.Random(1), 0, 4000
    for _ in range(draws):
        common = chaos.gauss(0.0, 0.2 * math.sqrt(shared))
        own = 0.2 * math.sqrt(1.0 - shared)
        truth = {n: v * math.exp(common + chaos.gauss(0.0, own)) for n, v in TOLD.steps_per_s.items()}
        seen = {n: truth[n] for n in (1, 2)[:measured]}
        kept += truth[4] >= planned(believed(TOLD, seen, config), seen, config)[4]
    assert kept / draws == pytest.approx(0.9, abs=0.02)


def test_the_first_report_lifts_the_margin_of_its_size(make_job, nodes) -> None:
    config = SchedulerConfig(speed_sigma=0.1, speed_shared=0.0, speed_smoothing=1.0)
    scheduler = Scheduler(config, nodes(1))
    (admit, *_) = scheduler.handle(ev.JobSubmitted(make_job("a", steps=100, deadline=130, curve={1: 1.0})), 0.0)
    assert isinstance(admit, de.Admit)
    assert scheduler.plan_of("a").finish_s == pytest.approx(100 * math.exp(0.1 * Z90))
    scheduler.handle(ev.JobProgressed("a", remaining_steps=80, steps_per_s=1.0), 20.0)
    assert scheduler.plan_of("a").finish_s == pytest.approx(100.0)


def test_a_deadline_that_only_the_told_speed_keeps_is_not_promised(make_job, nodes) -> None:
    job = make_job("a", steps=100, deadline=105, curve={1: 1.0})
    assert isinstance(Scheduler(nodes=nodes(1)).handle(ev.JobSubmitted(job), 0.0)[0], de.Admit)
    config = SchedulerConfig(speed_sigma=0.1)
    assert isinstance(Scheduler(config, nodes(1)).handle(ev.JobSubmitted(job), 0.0)[0], de.Reject)


def test_a_size_that_turns_out_slower_than_a_smaller_one_is_planned_as_slow_as_it_is(make_job, nodes) -> None:
    """What the gang does now counts as it is, although nobody would choose that size again."""
    config = SchedulerConfig(speed_shared=0.0, speed_smoothing=1.0)
    scheduler = Scheduler(config, nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=160, deadline=150, curve={1: 1.0, 2: 1.6}, pause=60)), 0.0)
    assert scheduler.states()[0].placement.workers == 2
    decisions = scheduler.handle(ev.JobProgressed("a", remaining_steps=150, steps_per_s=0.9), 10.0)
    assert [d.job_id for d in decisions if isinstance(d, de.AtRisk)] == ["a"]
    assert scheduler.plan_of("a").finish_s == pytest.approx(10 + 150 / 0.9)


def test_what_was_learnt_outlives_a_restart(make_job, nodes) -> None:
    config = SchedulerConfig(speed_sigma=0.1, speed_smoothing=1.0)
    scheduler = Scheduler(config, nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=300, deadline=400, curve={1: 1.0, 2: 1.6})), 0.0)
    scheduler.handle(ev.JobProgressed("a", remaining_steps=290, steps_per_s=1.2), 10.0)
    again = Scheduler(config, nodes(2))
    again.restore(scheduler.states(), 10.0)
    assert again.states()[0].told == ScalingCurve({1: 1.0, 2: 1.6})
    assert dict(again.states()[0].measured) == {2: pytest.approx(1.2)}
    assert again.plan_of("a") == scheduler.plan_of("a")
    for one in (scheduler, again):
        one.handle(ev.JobProgressed("a", remaining_steps=270, steps_per_s=2.0), 20.0)
    assert again.states()[0].job.curve == scheduler.states()[0].job.curve


def test_a_report_of_what_is_known_moves_nothing(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=300, deadline=400, curve={1: 1.0, 2: 1.6})), 0.0)
    (state,) = scheduler.states()
    scheduler.handle(ev.GangStarted("a", state.placement), 0.0)
    scheduler.handle(ev.JobProgressed("a", remaining_steps=300 - 16, steps_per_s=1.6), 10.0)
    before = scheduler.states()
    scheduler.handle(ev.JobProgressed("a", remaining_steps=300 - 32, steps_per_s=1.6), 20.0)
    assert scheduler.states() == before
    scheduler.handle(ev.JobProgressed("a", remaining_steps=300 - 40, steps_per_s=1.6), 30.0)
    assert scheduler.states()[0].remaining_steps == 260
