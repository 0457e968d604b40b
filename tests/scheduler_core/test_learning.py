"""Speeds are learnt size by size, and promises rely on a quantile of what is still uncertain."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.jobs.learned_speed import (
    Belief,
    Evidence,
    belief,
    believed,
    planned,
    promised,
    sigma_of_errors,
)
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import ScalingCurve

TOLD = ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0})
Z90 = 1.2815515655446004
APART = SchedulerConfig(speed_shared=0.0, speed_confidence=0.9)


def seen(*speeds: float) -> Evidence:
    """Windows one after another, of the length that counts as one."""
    evidence, config = Evidence(), SchedulerConfig()
    for number, speed in enumerate(speeds):
        evidence = evidence.with_report(speed, number * config.report_window_s, None, config)
    return evidence


def promise_of(measured: dict[int, float], sigma: float, config: SchedulerConfig) -> dict[int, float]:
    """What is planned with when these sizes are measured for certain."""
    held = {size: Belief(speed, 0.0) for size, speed in measured.items()}
    return planned(believed(TOLD, measured, config), TOLD, held, lambda _: sigma, config)


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
    held = belief(2.0, 0.1, seen(2.0), SchedulerConfig(report_sigma=0.1))
    assert (held.steps_per_s, held.sigma > 0.0) == (2.0, True)


def test_what_is_measured_needs_no_margin_and_the_others_have_the_quantile() -> None:
    assert promise_of({2: 2.0}, 0.0, SchedulerConfig()) == TOLD.steps_per_s
    doubt = math.exp(-0.1 * Z90)
    assert promise_of({2: 2.0}, 0.1, APART) == pytest.approx({1: doubt, 2: 2.0, 4: 4.0 * doubt})
    assert promised(TOLD, lambda _: 0.1, APART).steps_per_s == pytest.approx(
        {n: v * doubt for n, v in TOLD.steps_per_s.items()}
    )


@pytest.mark.parametrize("factor", [0.88, 0.9, 1.0, 1.2])
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_a_size_inside_the_stated_error_leaves_the_promised_speeds_of_the_others_alone(
    factor: float, shared: float
) -> None:
    """Else a promise would be lost though no speed is below what was planned with, or given on hope."""
    speeds = promise_of({1: factor, 2: 2.0 * factor}, 0.1, SchedulerConfig(speed_shared=shared))
    assert speeds == pytest.approx({1: factor, 2: 2.0 * factor, 4: 4.0 * math.exp(-0.1 * Z90)})


def test_a_size_outside_the_stated_error_speaks_against_the_others() -> None:
    assert promise_of({1: 0.7}, 0.1, SchedulerConfig(speed_shared=0.5))[4] < 4.0 * math.exp(-0.1 * Z90)


def test_one_window_is_not_solid_and_three_are() -> None:
    noisy = SchedulerConfig(report_sigma=0.05)
    assert [seen(*[1.8] * n).is_solid(noisy) for n in (1, 2, 3)] == [False, False, True]
    assert seen(1.8).is_solid(SchedulerConfig())
    long = Evidence().with_report(1.8, 60.0, 600.0, noisy)
    assert long.is_solid(noisy)
    assert long.with_report(1.8, 61.0, 600.0, noisy).count == 3.0


def test_reports_within_one_window_count_as_one() -> None:
    evidence = Evidence()
    for second in range(15):
        evidence = evidence.with_report(2.0 - 0.01 * second, float(second), None, SchedulerConfig(report_sigma=0.05))
    assert (evidence.count, evidence.median) == (1.0, pytest.approx(1.86))


def test_one_noisy_window_among_good_ones_moves_nothing_and_most_of_them_do() -> None:
    noisy = SchedulerConfig(report_sigma=0.05)
    assert belief(2.0, 0.1, seen(2.0, 2.0, 2.0, 1.6), noisy) == Belief(2.0, 0.0)
    assert belief(2.0, 0.1, seen(2.0, 2.0, 1.6, 1.6, 1.6), noisy) == Belief(1.6, 0.0)


def test_what_is_measured_once_is_planned_as_before_however_it_was() -> None:
    noisy = SchedulerConfig(speed_sigma=0.1, report_sigma=0.05, speed_confidence=0.9)
    for speeds in [(1.3,), (2.0,), (3.0,), (1.3, 3.0)]:
        held = belief(2.0, 0.1, seen(*speeds), noisy)
        assert planned(TOLD, TOLD, {2: held}, lambda _: 0.1, noisy)[2] == pytest.approx(2.0 * math.exp(-0.1 * Z90))


def test_a_size_that_nobody_told_of_is_planned_below_its_first_window() -> None:
    noisy = SchedulerConfig(report_sigma=0.05)
    held = belief(None, 0.1, seen(8.0), noisy)
    assert planned(ScalingCurve({8: 8.0}), TOLD, {8: held}, lambda _: 0.1, noisy)[8] == pytest.approx(
        8.0 * math.exp(-0.05 * Z90)
    )


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 20])
def test_errors_of_few_runs_are_judged_by_students_distribution(freedom: int) -> None:
    config = SchedulerConfig(speed_sigma=1.0)
    few = sigma_of_errors([0.02] * freedom, config) * Z90 / 0.02
    known = {1: 3.078, 2: 1.886, 3: 1.638, 5: 1.476, 20: 1.325}
    assert few == pytest.approx(known[freedom], abs=0.002)


def test_without_past_runs_the_prior_holds_and_exact_ones_leave_no_doubt() -> None:
    config = SchedulerConfig(speed_sigma=0.1)
    assert sigma_of_errors([], config) == 0.1
    assert sigma_of_errors([0.0], config) == 0.0
    assert sigma_of_errors([0.08], config) == 0.1  # one run that was off says no more than the prior
    assert sigma_of_errors([0.3], config) == 0.3


@pytest.mark.parametrize("runs", [1, 2, 4, 8])
def test_a_task_whose_errors_were_seen_keeps_the_confidence(runs: int) -> None:
    config, chaos, kept, draws = SchedulerConfig(speed_sigma=9.0), random.Random(runs), 0, 4000
    for _ in range(draws):
        sigma = sigma_of_errors([chaos.gauss(0.0, 0.05) for _ in range(runs)], config)
        kept += math.exp(chaos.gauss(0.0, 0.05)) >= math.exp(-Z90 * sigma)
    assert kept / draws >= 0.9 - 0.02


@pytest.mark.parametrize("shared", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("measured", [0, 1, 2])
def test_a_size_that_never_ran_is_as_fast_as_planned_with_the_stated_probability(shared: float, measured: int) -> None:
    config = SchedulerConfig(speed_sigma=0.2, speed_shared=shared, speed_confidence=0.9)
    chaos, kept, draws = random.Random(1), 0, 4000
    for _ in range(draws):
        common = chaos.gauss(0.0, 0.2 * math.sqrt(shared))
        own = 0.2 * math.sqrt(1.0 - shared)
        truth = {n: v * math.exp(common + chaos.gauss(0.0, own)) for n, v in TOLD.steps_per_s.items()}
        kept += truth[4] >= promise_of({n: truth[n] for n in (1, 2)[:measured]}, 0.2, config)[4]
    assert kept / draws >= 0.9 - 0.02


def test_the_first_report_lifts_the_margin_of_its_size(make_job, nodes) -> None:
    config = SchedulerConfig(speed_sigma=0.1, speed_shared=0.0)
    scheduler = Scheduler(config, nodes(1))
    (admit, *_) = scheduler.handle(ev.JobSubmitted(make_job("a", steps=100, deadline=130, curve={1: 1.0})), 0.0)
    assert isinstance(admit, de.Admit)
    assert scheduler.plan_of("a").finish_s == pytest.approx(100 * math.exp(0.1 * Z90))
    scheduler.handle(ev.JobProgressed("a", remaining_steps=80, steps_per_s=1.0), 20.0)
    assert scheduler.plan_of("a").finish_s == pytest.approx(100.0)


def test_a_size_that_turns_out_slower_than_a_smaller_one_is_planned_as_slow_as_it_is(make_job, nodes) -> None:
    """What the gang does now counts as it is, although nobody would choose that size again."""
    config = SchedulerConfig(speed_shared=0.0)
    scheduler = Scheduler(config, nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=160, deadline=150, curve={1: 1.0, 2: 1.6}, pause=60)), 0.0)
    assert scheduler.states()[0].placement.workers == 2
    decisions = scheduler.handle(ev.JobProgressed("a", remaining_steps=150, steps_per_s=0.9), 10.0)
    assert [d.job_id for d in decisions if isinstance(d, de.AtRisk)] == ["a"]
    assert scheduler.plan_of("a").finish_s == pytest.approx(10 + 150 / 0.9)


def test_what_was_learnt_outlives_a_restart(make_job, nodes) -> None:
    config = SchedulerConfig(speed_sigma=0.1)
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


def test_one_noisy_report_is_no_more_certain_after_a_restart(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig.served(), nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1000, deadline=1150, curve={1: 1.0})), 0.0)
    scheduler.handle(ev.JobProgressed("a", remaining_steps=988, steps_per_s=0.8), 15.0)
    again = Scheduler(SchedulerConfig.served(), nodes(1))
    decisions = again.restore(scheduler.states(), 16.0)
    assert not [d for d in decisions if isinstance(d, de.AtRisk)]
    assert again.plan_of("a").finish_s == pytest.approx(scheduler.plan_of("a").finish_s)
    assert again.states()[0].evidence == scheduler.states()[0].evidence


def test_each_size_has_the_error_that_was_seen_of_it(make_job, nodes) -> None:
    config = SchedulerConfig(speed_sigma=0.1)
    job = make_job("a", steps=100, deadline=1000, curve={1: 1.0, 2: 1.9}, speed_sigmas={1: 0.0}, max_workers=1)
    scheduler = Scheduler(config, nodes(2))
    scheduler.handle(ev.JobSubmitted(job), 0.0)
    assert scheduler.plan_of("a").finish_s == pytest.approx(100.0)
    other = Scheduler(config, nodes(2))
    other.handle(ev.JobSubmitted(make_job("a", steps=190, deadline=1000, curve={2: 1.9}, speed_sigmas={1: 0.0})), 0.0)
    assert other.plan_of("a").finish_s == pytest.approx(100.0 * math.exp(0.1 * Z90))


@given(
    factor=st.floats(0.05, 1.0),
    curve=st.sampled_from([{1: 10.0, 2: 18.0, 4: 32.0}, {1: 10.0, 2: 11.0, 4: 11.5}, {2: 5.0, 4: 6.0, 8: 12.0}]),
)
def test_fewer_workers_are_not_believed_to_be_as_fast_as_more_were(factor: float, curve: dict[int, float]) -> None:
    told = ScalingCurve(curve)
    largest = max(curve)
    curve_now = believed(told, {largest: curve[largest] * factor}, SchedulerConfig.served())
    assert list(curve_now.usable(1, largest)) == list(curve)
    assert curve_now.steps_per_s[largest] == curve[largest] * factor
