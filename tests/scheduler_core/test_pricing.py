"""Admission by value: what is kept free for cheaper arrivals, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, Spread
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, ScalingCurve
from elasticflow_airflow.scheduler_core.model.work import Work
from elasticflow_airflow.scheduler_core.planning.protection_price import Arrival, Protection, footprint_of

HOUR = 3600.0


def protection(half_lives_h: tuple[float, ...] = (10.0,), reach: float = 100.0, weight: float = 1.0) -> Protection:
    return Protection(tuple(h * HOUR for h in half_lives_h), reach, weight)


def test_the_footprint_is_the_least_that_keeps_the_deadline_alone() -> None:
    work = Work("a", 100.0, 0.0, 0, 0, 0.0, False, (1, 2, 4), {1: 1.0, 2: 1.6, 4: 2.5}, 10.0, 5.0, 0.0, 0.0)
    assert footprint_of(work, 0.0, 200.0) == 110.0
    assert footprint_of(work, 0.0, 100.0) == 2 * (10.0 + 62.5)
    assert footprint_of(work, 0.0, 60.0) == 4 * (10.0 + 40.0)
    assert footprint_of(work, 0.0, 40.0) is None


def test_who_trains_pays_no_start_for_the_size_that_it_has() -> None:
    speeds = {1: 1.0, 2: 1.6, 4: 2.5}
    work = Work("a", 100.0, 0.0, 0b1111, 4, 2.5, False, (1, 2, 4), speeds, 10.0, 5.0, 0.0, 0.0)
    assert footprint_of(work, 10.0, 40.0) == 4 * 30.0
    assert footprint_of(work, 10.0, 39.0) is None


def test_a_steady_stream_is_expected_to_go_on() -> None:
    """One job an hour, each one slot for its window of 2 h: two slots once the stream has filled its windows."""
    learned = protection()
    for hour in range(200):
        learned.note(Arrival(hour * HOUR, 2 * HOUR, 2 * HOUR, 1.0))
    now = 199.5 * HOUR
    times = now + np.array([0.5, 1.0, 2.0, 10.0]) * HOUR
    assert learned.expected_use(now, 3 * HOUR, times) == pytest.approx([0.5, 1.0, 2.0, 2.0], rel=0.05)


def test_only_who_is_cheaper_counts_and_value_makes_cheap() -> None:
    learned = protection()
    learned.note(Arrival(0.0, 100.0, HOUR, 1.0))
    learned.note(Arrival(0.0, 1000.0, HOUR, 20.0))
    times = np.array([2 * HOUR])
    assert learned.expected_use(1.0, 40.0, times) == 0.0
    only_valuable = learned.expected_use(1.0, 60.0, times)[0]
    both = learned.expected_use(1.0, 200.0, times)[0]
    assert both == pytest.approx(only_valuable * 1.1)


@pytest.mark.filterwarnings("error")
def test_what_is_worth_nothing_is_cheaper_than_nobody() -> None:
    """A newcomer that is worth nothing has an infinite price: all that is worth something is cheaper."""
    learned = protection()
    learned.note(Arrival(0.0, 100.0, HOUR, 0.0))
    times = np.array([2 * HOUR])
    assert learned.expected_use(1.0, math.inf, times) == 0.0
    learned.note(Arrival(0.0, 100.0, HOUR, 1.0))
    assert learned.expected_use(1.0, math.inf, times)[0] == learned.expected_use(1.0, 1e9, times)[0] > 0.0


def test_a_burst_is_not_the_rate_of_a_week() -> None:
    burst = protection((1.0,), reach=2.0)
    for _ in range(20):
        burst.note(Arrival(0.0, HOUR, HOUR, 1.0))
    soon, later = burst.expected_use(60.0, 2 * HOUR, np.array([1.0, 50.0]) * HOUR)
    assert soon > 1.0
    assert later == 0.0


def test_after_few_arrivals_nothing_is_sure() -> None:
    soon = np.array([HOUR])
    for moments, least in ((1, 0.0), (4, 0.4), (100, 0.85)):
        learned = protection((1.0, 36.0), reach=3.0)
        for number in range(moments):
            for _ in range(5):  # at once
                learned.note(Arrival(number * HOUR / moments, 600.0, HOUR, 1.0))
        now = HOUR
        agreed = learned.expected_use(now, math.inf, now + soon, agreed=True, sure=True)[0]
        estimates = [protection((hours,), reach=3.0) for hours in (1.0, 36.0)]
        for one in estimates:
            one.arrivals = learned.arrivals
        smallest = min(one.expected_use(now, math.inf, now + soon)[0] for one in estimates)
        assert least * smallest <= agreed < (least + 0.15) * smallest
    long_ago = 1e9
    assert learned.expected_use(long_ago, math.inf, long_ago + soon, sure=True)[0] == 0.0


def test_the_more_others_are_worth_the_more_than_expected_is_kept_for_them() -> None:
    learned = Protection((10 * HOUR,), reach=3.0, weight=1.0)
    for number in range(1000):
        learned.note(Arrival(600.0 * number, 600.0, 1000.0, 1.0))
    now = 600.0 * 1000

    def kept(slot_s: float, **how: bool) -> float:
        """What is kept by chance from a job that needs so many slot-seconds in a day."""
        limit = now + 24 * HOUR
        work = Work("large", slot_s, now, 0, 0, 0.0, False, (1,), {1: 1.0}, 0.0, 0.0, 0.0, limit)
        expected = learned.expectation(work, 1.0, now, limit, **how)
        assert expected is not None
        assert expected.needed == expected.slot_seconds + expected.by_chance + expected.footprint
        return expected.by_chance

    assert kept(900.0) == 0.0, "it is worth nearly as much as they are"
    less, more, most = kept(1500.0), kept(6000.0), kept(60_000.0)
    assert 0.0 < less < more < most
    deviation = 600.0 * math.sqrt(24 * 6)  # a day's arrivals are Poisson: 144, give or take 12
    assert most == pytest.approx(NormalDist().inv_cdf(0.99) * deviation, rel=0.02)
    assert kept(60_000.0, agreed=True, sure=True) == 0.0


def test_what_was_worked_out_before_changes_nothing() -> None:
    """Asked again and again, at other moments and after other arrivals, it expects what it would if asked once."""
    asked, so_far = protection((1.0, 36.0), reach=3.0), list[Arrival]()
    for number in range(40):
        came = Arrival(600.0 * (number // 2), 500.0 + 100.0 * (number % 7), HOUR, 1.0, float(number))
        asked.note(came)
        so_far.append(came)
        for now in (came.at_s, came.at_s + 1800.0):
            for agreed, sure in ((True, True), (False, True), (False, False)):
                once = protection((1.0, 36.0), reach=3.0)
                for one in so_far:
                    once.note(one)
                times, how = now + np.array([0.5, 2.0]) * HOUR, {"agreed": agreed, "sure": sure, "but": came.key}
                expected = once.expected_use(now, 950.0, times, **how)
                assert asked.expected_use(now, 950.0, times, **how).tolist() == expected.tolist()


def value_scheduler(nodes: Callable[..., list[Node]], **config: float) -> Scheduler:
    return Scheduler(SchedulerConfig(objective=Objective.VALUE, protection_weight=1.0, **config), nodes(4))


def small(make_job: Callable[..., Job], number: int, now: float) -> Job:
    return make_job(f"small{number}", steps=600.0, deadline=now + 1000.0, curve={1: 1.0})


def verdict(decisions: list[de.Decision]) -> de.Admit | de.Reject | de.Wait:
    return next(d for d in decisions if isinstance(d, de.Admit | de.Reject | de.Wait))


def learn(scheduler: Scheduler, make_job: Callable[..., Job], until_s: float, since_s: float = 0.0) -> None:
    """Small jobs: one every 250 s, each with one slot for 600 s; all go as they come."""
    now = since_s
    while now < until_s:
        job = small(make_job, int(now), now)
        assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(job), now)), de.Admit)
        scheduler.handle(ev.JobFinished(job.job_id), now + 100.0)
        now += 250.0


def monster(make_job: Callable[..., Job], now: float, **more: object) -> Job:
    """All four slots for 9,000 of the next 10,000 s."""
    return make_job("monster", steps=36_000.0, deadline=now + 10_000.0, curve={1: 1.0, 2: 2.0, 4: 4.0}, **more)


def test_a_monster_is_refused_where_many_small_ones_are_expected(make_job, nodes) -> None:
    first_come = Scheduler(SchedulerConfig(objective=Objective.FIRST_COME), nodes(4))
    by_value = value_scheduler(nodes)
    for scheduler in (first_come, by_value):
        learn(scheduler, make_job, 20_000.0)
    assert isinstance(verdict(first_come.handle(ev.JobSubmitted(monster(make_job, 20_000.0)), 20_000.0)), de.Admit)
    refused = verdict(by_value.handle(ev.JobSubmitted(monster(make_job, 20_000.0)), 20_000.0))
    assert isinstance(refused, de.Reject)
    assert "objective: value" in str(refused.reason)
    assert "fewer for the same value" in str(refused.reason)


@pytest.mark.parametrize("before", [False, True])
def test_what_a_later_promise_needs_is_not_free_for_those_that_are_expected(make_job, nodes, before: bool) -> None:
    scheduler, now = value_scheduler(nodes), 20_000.0
    learn(scheduler, make_job, now)
    if before:  # It leaves 50,000 slot-seconds until its deadline, and does not need those of the small ones.
        later = make_job("later", steps=30_000.0, deadline=now + 20_000.0, curve={1: 1.0, 2: 2.0, 4: 4.0})
        assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(later), now)), de.Admit)
    # Beside the small ones there is no moment for it; until its own deadline there are 72,000 slot-seconds.
    newcomer = make_job("newcomer", steps=6000.0, deadline=now + 18_000.0, curve={4: 4.0}, min_workers=4)
    found = verdict(scheduler.handle(ev.JobSubmitted(newcomer), now))
    assert isinstance(found, de.Reject if before else de.Admit)
    assert not before or "fewer for the same value" in str(found.reason)


MEMORIES_S = (HOUR, 36 * HOUR)


def test_automatically_slots_are_kept_free_as_far_as_all_memories_agree(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(objective=Objective.AUTO, protection_half_lives_s=MEMORIES_S), nodes(4))
    learn(scheduler, make_job, 20_000.0)
    refused = verdict(scheduler.handle(ev.JobSubmitted(monster(make_job, 20_000.0)), 20_000.0))
    assert isinstance(refused, de.Reject)
    assert "(objective: auto); a value well above 1, or the objective first-come, would" in str(refused.reason)
    lull_s = 20_000.0 + 8 * HOUR
    admitted = verdict(scheduler.handle(ev.JobSubmitted(monster(make_job, lull_s)), lull_s))
    assert isinstance(admitted, de.Admit), "a refusal by price is none for lack of slots"


def test_automatically_a_burst_at_the_beginning_is_no_rate_for_the_next_hours(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(), nodes(64))
    for number in range(60):
        job = small(make_job, number, 0.2 * number)
        assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(job), 0.2 * number)), de.Admit)
    large = make_job("large", steps=18_000.0, deadline=20_000.0, curve={64: 1.0}, min_workers=64)
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(large), 13.0)), de.Admit)


def test_automatically_the_largest_memory_counts_for_as_long_as_slots_are_short(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(objective=Objective.AUTO, protection_half_lives_s=MEMORIES_S), nodes(4))
    learn(scheduler, make_job, 20_000.0)

    def ask(name: str, now: float) -> de.Admit | de.Reject | de.Wait:
        return verdict(scheduler.handle(ev.JobSubmitted(replace(monster(make_job, now), job_id=name)), now))

    lull_s = 20_000.0 + 8 * HOUR
    hopeless = make_job("hopeless", steps=36_000.0, deadline=lull_s + 100.0, curve={1: 1.0})
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(hopeless), lull_s)), de.Reject)
    assert isinstance(ask("first", lull_s), de.Admit), "nobody was refused for lack of slots"
    short_at_s = lull_s + 10.0
    refused = ask("second", short_at_s)
    assert isinstance(refused, de.Reject)
    assert "objective" not in str(refused.reason)
    scheduler.handle(ev.JobFinished("first"), short_at_s + 10.0)
    for hours in (1, 4):
        refused = ask(f"after {hours}", short_at_s + hours * HOUR)
        assert isinstance(refused, de.Reject)
        assert "(objective: auto, as slots were short at " in str(refused.reason)
    forgotten_s = short_at_s + 8.1 * MEMORIES_S[-1]
    assert isinstance(ask("in the end", forgotten_s), de.Admit)


def test_a_monster_of_enough_value_is_admitted(make_job, nodes) -> None:
    scheduler = value_scheduler(nodes)
    learn(scheduler, make_job, 20_000.0)
    dear = monster(make_job, 20_000.0, value=100.0)
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(dear), 20_000.0)), de.Admit)


def test_what_comes_late_is_weighed_by_what_it_is_worth_then(make_job, nodes) -> None:
    """At its deadline it would be worth its slots; promised as late as it must be, it would not."""
    decided = {}
    for choice in (OnReject.RENEGOTIATE, OnReject.LATE):
        scheduler = value_scheduler(nodes)
        learn(scheduler, make_job, 20_000.0)
        full = make_job("full", steps=38_000.0, deadline=30_000.0, curve={1: 1.0, 2: 2.0, 4: 4.0}, value=100.0)
        assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(full), 20_000.0)), de.Admit)
        dear = monster(make_job, 20_000.0, value=110.0, on_reject=choice, latest_deadline_s=38_700.0)
        decided[choice] = verdict(scheduler.handle(ev.JobSubmitted(dear), 20_000.0))
    renegotiated = decided[OnReject.RENEGOTIATE]
    assert isinstance(renegotiated, de.Admit)
    assert 38_500.0 <= (renegotiated.deadline_s or 0.0) <= 38_700.0
    assert isinstance(decided[OnReject.LATE], de.Reject)


def test_a_run_that_was_expected_is_not_refused_by_price(make_job, nodes) -> None:
    """Room was kept free for it before it came; those who are expected beside it did not get that room."""
    linear = ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0})
    scheduler = Scheduler(SchedulerConfig(objective=Objective.VALUE), nodes(4), CalendarPolicy(unseen=0.0))
    learn(scheduler, make_job, 20_000.0)
    run = ExpectedRun(
        run_id="tonight",
        task="nightly",
        due_s=20_010.0,
        deadline_after_s=10_000.0,
        steps=Spread((36_000.0,)),
        curve=linear,
    )
    scheduler.handle(ev.RunExpected(run), 20_000.0)
    beside = make_job("beside", steps=5.0, deadline=20_100.0, curve={1: 1.0})  # whoever is admitted leaves the room
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(beside), 20_000.0)), de.Admit)
    scheduler.handle(ev.JobFinished("beside"), 20_005.0)
    nightly = monster(make_job, 20_010.0, task="nightly")
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(nightly), 20_010.0)), de.Admit)


def test_nothing_is_kept_free_before_anything_was_seen(make_job, nodes) -> None:
    scheduler = value_scheduler(nodes)
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(monster(make_job, 0.0)), 0.0)), de.Admit)


def test_the_deadline_that_a_refusal_by_price_offers_is_admitted_at_once(make_job, nodes) -> None:
    scheduler = value_scheduler(nodes)
    learn(scheduler, make_job, 20_000.0)
    refused = verdict(scheduler.handle(ev.JobSubmitted(monster(make_job, 20_000.0)), 20_000.0))
    assert isinstance(refused, de.Reject)
    assert refused.earliest_deadline_s is not None
    again = make_job("again", steps=36_000.0, deadline=refused.earliest_deadline_s, curve={1: 1.0, 2: 2.0, 4: 4.0})
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(again), 20_000.0)), de.Admit)


def test_who_waits_is_asked_for_again_the_cheapest_first(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(objective=Objective.VALUE), nodes(1))
    blocker = make_job("blocker", steps=500.0, deadline=500.0, curve={1: 1.0})
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(blocker), 0.0)), de.Admit)
    for name, steps in (("long", 820.0), ("short", 600.0)):  # both would fit after 350, but not one after the other
        waits = make_job(name, steps=steps, deadline=1200.0, curve={1: 1.0}, on_reject=OnReject.WAIT)
        decided = scheduler.handle(ev.JobSubmitted(waits), 10.0)
        if name == "long":
            assert isinstance(verdict(decided), de.Wait)
    decided = scheduler.handle(ev.JobFinished("blocker"), 350.0)
    states = {state.job.job_id: state for state in scheduler.states()}
    assert states["short"].placement.workers == 1
    assert "long" not in [d.job_id for d in decided if isinstance(d, de.Admit)]


@pytest.mark.parametrize("caution", [1.0, 2.0])
def test_who_is_asked_again_and_again_must_leave_more_for_others(make_job, nodes, caution: float) -> None:
    scheduler = Scheduler(SchedulerConfig(objective=Objective.VALUE, waiting_caution=caution), nodes(8))
    learn(scheduler, make_job, 20_000.0)
    blocker = make_job("blocker", steps=2000.0, deadline=22_000.0, curve={8: 1.0}, value=1e9, min_workers=8)
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(blocker), 20_000.0)), de.Admit)

    def long(name: str) -> Job:
        return make_job(name, steps=9000.0, deadline=30_500.0, curve={1: 1.0}, on_reject=OnReject.WAIT)

    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(long("waits")), 20_000.0)), de.Wait)
    decided = scheduler.handle(ev.JobFinished("blocker"), 20_500.0)
    admitted = [decision.job_id for decision in decided if isinstance(decision, de.Admit)]
    assert admitted == ([] if caution > 1.0 else ["waits"])
    if caution > 1.0:
        assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(long("fresh")), 20_500.0)), de.Admit)


def test_no_job_is_expected_to_come_again_before_it_is_decided_on(make_job, nodes) -> None:
    """With a margin before the deadline it may need more slots than are counted for it when it comes."""
    config = SchedulerConfig(objective=Objective.VALUE, deadline_margin_s=210.0)
    scheduler = Scheduler(config, nodes(2))
    first = make_job("first", steps=3000.0, deadline=3060.0, curve={1: 1.0, 2: 1.06})
    assert isinstance(verdict(scheduler.handle(ev.JobSubmitted(first), 0.0)), de.Admit)
