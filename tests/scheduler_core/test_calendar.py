"""Expected runs: what is learned of them, what is kept free for them, and what a forecast says."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.decider import Decider
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Reject, Wait
from elasticflow_airflow.scheduler_core.model.recurring_work import (
    Calendar,
    CalendarPolicy,
    ExpectedRun,
    PastRun,
    Spread,
    expect,
    how_surely,
)
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, ScalingCurve
from elasticflow_airflow.scheduler_core.outlook import forecast as calendar_forecast
from elasticflow_airflow.scheduler_core.outlook.forecast import Outcome, fewest, forecast
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob, Simulation

LINEAR = ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0})


def make_scheduler(unseen: float = 0.0) -> Scheduler:
    return Scheduler(SchedulerConfig(), [Node(node_id="a", slots=4)], CalendarPolicy(unseen=unseen))


def expected(name: str = "run", due: float = 1000.0, **given: object) -> ExpectedRun:
    """A run that keeps four slots busy for 75 of the 100 seconds from its due time to its deadline."""
    values = {"task": "nightly", "deadline_after_s": 100.0, "steps": Spread((300.0,)), "curve": LINEAR, **given}
    return ExpectedRun(run_id=name, due_s=due, **values)


def job(name: str, now: float, deadline: float | None, steps: float, **given: object) -> Job:
    return Job(job_id=name, submitted_s=now, deadline_s=deadline, total_steps=steps, curve=LINEAR, **given)


def verdict(scheduler: Scheduler, submitted: Job, now: float) -> Admit | Reject | Wait:
    decided = scheduler.handle(ev.JobSubmitted(submitted), now)
    return next(d for d in decided if isinstance(d, Admit | Reject | Wait) and d.job_id == submitted.job_id)


def greedy(name: str = "greedy") -> Job:
    """Needs the whole cluster for 1,050 of the 1,090 seconds until its deadline."""
    return job(name, 0.0, 1090.0, 4200.0)


# -- distributions and histories ---------------------------------------------------------------------------------


def test_a_quantile_is_a_value_that_was_seen():
    spread = Spread((5.0, 1.0, 3.0, 2.0, 4.0))
    assert [spread.quantile(part) for part in (0.01, 0.2, 0.21, 0.5, 0.9, 1.0)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]


@pytest.mark.parametrize("values", [(), (float("nan"),), (float("inf"), 1.0)])
def test_a_distribution_needs_finite_values(values):
    with pytest.raises(ValueError, match="distribution needs"):
        Spread(values)


def test_what_is_expected_comes_from_the_history():
    history = [
        PastRun(due_s=100.0 * i, late_s=10.0 * i, steps=100.0 + i, deadline_after_s=50.0 + i, came=i != 2)
        for i in range(4)
    ]
    run = expect(history, run_id="next", task="t", due_s=400.0, curve=LINEAR)
    assert run is not None
    assert run.steps.values == (100.0, 101.0, 103.0)
    assert run.lateness.values == (0.0, 10.0, 30.0)
    assert run.deadline_s == 453.0
    assert run.probability == how_surely(history) == 0.8


def test_nothing_is_expected_of_a_task_without_a_run_that_had_a_deadline():
    assert expect([], run_id="r", task="t", due_s=1.0, curve=LINEAR) is None
    assert expect([PastRun(due_s=0.0, came=False)], run_id="r", task="t", due_s=1.0, curve=LINEAR) is None
    assert how_surely([]) == 1.0


def test_a_submission_takes_the_run_that_has_been_due_longest():
    calendar = Calendar()
    for name, due in (("late", 3000.0), ("first", 1000.0), ("second", 2000.0)):
        calendar.expect(expected(name, due))
    assert calendar.take("nightly", 900.0) is None
    assert calendar.take("another", 2500.0) is None
    assert [run.run_id for run in (calendar.take("nightly", 2500.0), calendar.take("nightly", 2500.0)) if run] == [
        "first",
        "second",
    ]
    assert set(calendar.runs) == {"late"}


def test_a_run_is_given_up_when_it_is_later_than_any_before_and_at_its_deadline_at_the_latest():
    policy = CalendarPolicy(late_min_s=100.0)
    patient = {"deadline_after_s": 1e6}
    assert expected(**patient).forgotten_s(policy) == 1100.0
    assert expected(lateness=Spread((0.0, 400.0)), **patient).forgotten_s(policy) == 1800.0
    assert expected(deadline_after_s=50.0).forgotten_s(policy) == 1050.0


# -- admission ---------------------------------------------------------------------------------------------------


def test_without_a_calendar_nothing_is_kept_free():
    assert isinstance(verdict(make_scheduler(), greedy(), 0.0), Admit)


def test_a_newcomer_must_fit_beside_what_is_expected():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected()), 0.0)
    refused = verdict(scheduler, greedy(), 0.0)
    assert isinstance(refused, Reject)
    assert "1 expected run" in str(refused.reason)
    offer = refused.earliest_deadline_s
    assert offer is not None
    assert isinstance(verdict(scheduler, job("patient", 0.0, offer, 4200.0), 0.0), Admit)
    # The run comes, takes its place, and whoever was promised keeps the promise.
    run = verdict(scheduler, job("run", 1000.0, 1100.0, 300.0, task="nightly"), 1000.0)
    assert isinstance(run, Admit)
    assert scheduler.plan_of("patient").promised_s <= offer
    assert scheduler.expected_runs() == ()


def test_what_is_expected_need_not_fit_beside_what_else_is():
    scheduler = make_scheduler()
    for name in ("one", "two"):
        scheduler.handle(ev.RunExpected(expected(name, task=name)), 0.0)
    assert isinstance(verdict(scheduler, job("a", 1000.0, 1100.0, 390.0, task="one"), 1000.0), Admit)
    (state,) = scheduler.states()
    assert state.foreseen


def test_a_forgotten_run_gives_its_place_back_to_who_waits():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected()), 0.0)
    waits = job("waits", 0.0, 1090.0, 4200.0, on_reject=OnReject.WAIT)
    assert isinstance(verdict(scheduler, waits, 0.0), Wait)
    decided = scheduler.handle(ev.RunForgotten("run"), 10.0)
    assert any(isinstance(d, Admit) and d.job_id == "waits" for d in decided)


def test_a_run_that_does_not_come_is_given_up_in_time():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected(deadline_after_s=5000.0)), 0.0)
    scheduler.handle(ev.WakeUp(), 1599.0)
    assert len(scheduler.expected_runs()) == 1
    scheduler.handle(ev.WakeUp(), 1600.0)
    assert scheduler.expected_runs() == ()


@pytest.mark.parametrize(("probability", "count", "kept"), [(0.3, 1, False), (0.6, 1, True), (0.3, 4, True)])
def test_uncertain_runs_are_reserved_for_by_what_they_use_together(probability, count, kept):
    scheduler = make_scheduler()
    for number in range(count):
        run = expected(str(number), task=str(number), probability=probability)
        scheduler.handle(ev.RunExpected(run), 0.0)
    assert isinstance(verdict(scheduler, greedy(), 0.0), Reject if kept else Admit)


def test_reservations_hold_for_a_long_and_late_run_not_for_the_mean_one():
    lengths = Spread((100.0,) * 8 + (300.0, 300.0))
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected(steps=lengths)), 0.0)
    # At the mean of 140 steps it would fit: 4,200 steps here and 140 there are 1,085 s of the whole cluster.
    assert isinstance(verdict(scheduler, greedy(), 0.0), Reject)


def test_of_a_task_that_was_seen_once_a_longer_run_is_expected():
    modest = job("modest", 0.0, 1090.0, 4060.0)  # together with a run of 300 steps exactly what there is until 1,090
    for unseen, kind in ((0.0, Admit), (0.25, Reject)):
        scheduler = make_scheduler(unseen)
        scheduler.handle(ev.RunExpected(expected()), 0.0)
        assert isinstance(verdict(scheduler, modest, 0.0), kind)


def test_a_reservation_stays_when_there_is_no_room_for_a_longer_one():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected()), 0.0)
    assert isinstance(verdict(scheduler, job("modest", 0.0, 1090.0, 4060.0), 0.0), Admit)
    scheduler.handle(ev.RunExpected(expected(steps=Spread((300.0, 390.0)))), 10.0)
    assert isinstance(verdict(scheduler, job("another", 20.0, 1095.0, 200.0), 20.0), Reject)
    assert isinstance(verdict(scheduler, job("run", 1000.0, 1100.0, 300.0, task="nightly"), 1000.0), Admit)


def test_what_cannot_be_kept_does_not_keep_others_out():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected("too long", steps=Spread((1e6,)))), 0.0)
    scheduler.handle(ev.RunExpected(expected("no size", min_workers=64)), 0.0)
    assert isinstance(verdict(scheduler, greedy(), 0.0), Admit)
    crowd = make_scheduler()
    for number in range(5):
        crowd.handle(ev.RunExpected(expected(str(number), task=str(number))), 0.0)
    # Only one of the five fits beside the others; a job that leaves room for it is admitted.
    assert isinstance(verdict(crowd, job("modest", 0.0, 990.0, 3900.0), 0.0), Admit)
    assert isinstance(verdict(crowd, job("another", 0.0, 1500.0, 1500.0), 0.0), Admit)


def test_what_was_foreseen_survives_a_restore():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected()), 0.0)
    verdict(scheduler, job("run", 1000.0, 1100.0, 300.0, task="nightly"), 1000.0)
    again = make_scheduler()
    again.restore(scheduler.states(), 1001.0)
    assert [state.foreseen for state in again.states()] == [True]


arrivals = st.lists(
    st.tuples(st.floats(0.0, 900.0), st.integers(50, 3000), st.floats(1.05, 8.0)), min_size=1, max_size=8
)


@settings(max_examples=40, deadline=None)
@example(arrivals=[(0.0, 50, 2.0), (0.0, 1058, 4.0), (1.0, 936, 4.0), (3.0, 2045, 2.0)], late=0.0)
@given(arrivals=arrivals, late=st.floats(0.0, 20.0))
def test_the_run_that_comes_as_expected_is_promised_whatever_came_before(arrivals, late):
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected(lateness=Spread((0.0, 20.0)))), 0.0)
    jobs = [job("run", 1000.0 + late, 1100.0, 300.0, task="nightly")]
    for number, (at, steps, slack) in enumerate(arrivals):
        jobs.append(job(f"j{number}", at, at + slack * steps / 4.0, float(steps)))
    simulated = [SimulatedJob(job=one, truth=dict(LINEAR.steps_per_s), arrives_s=one.submitted_s) for one in jobs]
    result = Simulation(name="calendar", policy=scheduler, nodes=scheduler.nodes(), jobs=simulated).run()
    (run,) = [record for record in result.records if record.job_id == "run"]
    assert run.met
    assert not any(record.late_though_admitted for record in result.records)


# -- forecast ----------------------------------------------------------------------------------------------------


def test_a_forecast_of_nothing_is_empty():
    assert forecast(make_scheduler(), 0.0, 1e6).outlooks == ()


def test_a_forecast_says_what_is_kept_and_when_it_is_done():
    scheduler = make_scheduler()
    verdict(scheduler, job("live", 0.0, 500.0, 400.0), 0.0)
    verdict(scheduler, job("beyond", 0.0, 50_000.0, 400.0), 0.0)
    verdict(scheduler, job("best effort", 0.0, None, 400.0), 0.0)
    scheduler.handle(ev.RunExpected(expected()), 0.0)
    found = forecast(copy.deepcopy(scheduler), 0.0, 5000.0)
    assert [(one.job_id or one.run_id, one.outcome) for one in found.outlooks] == [
        ("live", Outcome.KEPT),
        ("run", Outcome.KEPT),
    ]
    assert found.outlooks[1].projected_s == pytest.approx(1075.0)
    assert found.extra_nodes == 0


def test_a_forecast_says_how_much_is_missing():
    scheduler = make_scheduler()
    for number in range(3):
        scheduler.handle(ev.RunExpected(expected(str(number), task=str(number))), 0.0)
    found = forecast(copy.deepcopy(scheduler), 0.0, 5000.0)
    assert sorted(one.outcome for one in found.outlooks) == ["kept", "missed", "missed"]
    assert (found.extra_nodes, found.extra_slots) == (2, 4)
    missed = [one for one in found.outlooks if one.outcome is Outcome.MISSED]
    assert all(1140.0 <= (one.earliest_deadline_s or 0.0) <= 1215.0 for one in missed)
    assert "does not fit beside 0 promised jobs and 1 expected run " in str(missed[0].reason)
    assert len(scheduler.expected_runs()) == 3


def test_a_forecast_knows_what_no_capacity_helps():
    scheduler = make_scheduler()
    scheduler.handle(ev.RunExpected(expected(steps=Spread((4000.0,)))), 0.0)
    found = forecast(copy.deepcopy(scheduler), 0.0, 5000.0)
    (one,) = found.outlooks
    assert one.outcome is Outcome.MISSED
    assert "too long even with the cluster to itself" in str(one.reason)
    assert one.earliest_deadline_s == pytest.approx(2000.0, abs=61.0)
    assert found.extra_nodes is None


def test_a_forecast_sees_what_is_at_risk():
    scheduler = Scheduler(SchedulerConfig(), [Node(node_id="a", slots=4), Node(node_id="b", slots=4)])
    for name in ("one", "two"):
        assert isinstance(verdict(scheduler, job(name, 0.0, 1050.0, 4000.0), 0.0), Admit)
    scheduler.handle(ev.NodeLost("b"), 10.0)
    found = forecast(copy.deepcopy(scheduler), 10.0, 5000.0)
    assert sorted(one.outcome for one in found.outlooks) == ["at_risk", "kept"]
    assert found.extra_nodes == 1


def test_a_forecast_says_nothing_of_a_job_that_fell_back_to_best_effort():
    scheduler = make_scheduler()
    fallen = job("fallen", 0.0, 10.0, 4000.0, on_reject=OnReject.BEST_EFFORT)
    assert verdict(scheduler, fallen, 0.0).deadline_s is None
    assert forecast(copy.deepcopy(scheduler), 0.0, 5000.0).outlooks == ()


def waiting(scheduler: Scheduler) -> None:
    """A promise for the whole cluster, and two that wait for what it leaves."""
    verdict(scheduler, job("holds", 0.0, 1010.0, 4000.0), 0.0)
    for name in ("first", "second"):
        asked = job(name, 0.0, 1000.0, 2000.0, on_reject=OnReject.WAIT)
        assert isinstance(verdict(scheduler, asked, 0.0), Wait)


def test_a_forecast_says_what_is_missing_for_jobs_that_wait():
    scheduler = make_scheduler()
    waiting(scheduler)
    found = forecast(copy.deepcopy(scheduler), 0.0, 5000.0)
    outlooks = {one.job_id: one for one in found.outlooks}
    assert {name: one.outcome for name, one in outlooks.items()} == {
        "holds": Outcome.KEPT,
        "first": Outcome.MISSED,
        "second": Outcome.MISSED,
    }
    assert str(outlooks["first"].reason) == "waits for capacity: it does not fit beside 1 promised job"
    assert outlooks["first"].earliest_deadline_s == pytest.approx(1500.0, abs=60.0)
    assert (found.extra_nodes, found.extra_slots) == (1, 4)


def test_a_forecast_beside_many_that_wait_asks_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch):
    """Offers for some, none while it looks for more nodes; and nobody who waits is asked as each of them joins."""
    scheduler = make_scheduler()
    verdict(scheduler, greedy("promised"), 0.0)
    for number in range(100):
        verdict(scheduler, job(f"waits{number:02}", 0.0, 1100.0 + number, 4200.0, on_reject=OnReject.WAIT), 0.0)
    plans = Counter[str]()

    def counted(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            plans[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    counted(calendar_forecast._Expecting, "_fits")
    counted(Decider, "ask")
    found = forecast(scheduler, 0.0, 5000.0)
    outlooks = [one for one in found.outlooks if one.outcome is Outcome.MISSED]
    assert len(outlooks) == 100
    assert sum(one.earliest_deadline_s is not None for one in outlooks) == calendar_forecast.MOST_OFFERS
    assert plans["_fits"] < 100 + 12 * calendar_forecast.MOST_OFFERS + 8 * 100
    assert plans["ask"] < 3 * 100


def test_with_an_objective_a_job_may_wait_though_it_would_fit(monkeypatch: pytest.MonkeyPatch):
    scheduler = Scheduler(SchedulerConfig(objective="value"), [Node(node_id="a", slots=4)])
    waiting(scheduler)
    monkeypatch.setattr(Decider, "_retry", lambda *_: None)  # its slots are worth more to others that are expected
    scheduler.handle(ev.JobCancelled("holds"), 0.0)
    found = forecast(scheduler, 0.0, 5000.0)
    assert [one.outcome for one in found.outlooks] == [Outcome.UNDECIDED] * 2
    assert "would fit" in str(found.outlooks[0].reason)
    assert found.extra_nodes == 0


def test_a_forecast_says_that_a_job_is_still_measured():
    scheduler = make_scheduler()
    asked = Job(job_id="new", submitted_s=0.0, deadline_s=1000.0, total_steps=100.0, curve=None)
    scheduler.handle(ev.JobSubmitted(asked), 0.0)
    found = forecast(copy.deepcopy(scheduler), 0.0, 5000.0)
    assert [(one.outcome, str(one.reason)) for one in found.outlooks] == [
        (Outcome.UNDECIDED, "not promised yet: its speed is still being measured")
    ]


def test_a_forecast_asks_for_nodes_of_the_type_that_there_is():
    scheduler = Scheduler(SchedulerConfig(), [Node(node_id="a", slots=4, gpu_type="h200")])
    for number in range(3):
        scheduler.handle(ev.RunExpected(expected(str(number), task=str(number))), 0.0)
    found = forecast(copy.deepcopy(scheduler), 0.0, 5000.0)
    assert (found.extra_nodes, found.extra_slots) == (2, 4)


@pytest.mark.parametrize(("least", "most", "found"), [(1, 64, 1), (5, 64, 5), (7, 7, 7), (6, 5, None), (1, 0, None)])
def test_the_fewest_that_are_enough(least, most, found):
    asked: list[int] = []
    assert fewest(lambda count: bool(asked.append(count)) or count >= least, most) == found
    assert all(1 <= count <= most for count in asked)
    assert len(asked) <= 2 * most.bit_length()
