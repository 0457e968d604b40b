"""OASiS: the cheapest schedule over time, admitted if it is worth its price, and never changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.common.priced import utility
from elasticflow_airflow.scheduler_core.simulator.baselines.common.prices import PriceRange, Stretch
from elasticflow_airflow.scheduler_core.simulator.baselines.oasis import Oasis, schedules, seat_over_time
from elasticflow_airflow.scheduler_core.simulator.run import Disturbance

MakeJob = Callable[..., Job]


def test_a_deadline_is_all_or_nothing_and_best_effort_fades(make: MakeJob) -> None:
    job = make("a", 1.0, deadline=100.0, value=3.0)
    assert (utility(job, 100.0), utility(job, 100.1)) == (3.0, 0.0)
    assert utility(make("b", 1.0, value=3.0), 86_400.0) == pytest.approx(1.5)


def test_the_dynamic_program_waits_for_cheap_slots_and_grows_on_them(make: MakeJob, nodes: Any) -> None:
    policy = Oasis(nodes=nodes(1, 4))
    everything = 0b1111
    over = [Stretch(0.0, 100.0, everything, 10.0), Stretch(100.0, 200.0, everything, 1.0)]

    def first(steps: float) -> list[int]:
        live = policy.live_job(make("a", steps, deadline=200.0), 0.0)
        return next(iter(schedules(policy._work(live, 0.0, promised=True), over, policy.layout)))

    assert first(90.0)[0] == 0  # enough time in the cheap half
    assert first(390.0) == [0, 4]  # on four slots still
    assert first(450.0)[0] > 0  # not any more: the dear half is needed, too


def test_a_size_that_does_not_fit_a_stretch_is_not_chosen_there(make: MakeJob, nodes: Any) -> None:
    policy = Oasis(nodes=nodes(1, 4))
    over = [Stretch(0.0, 100.0, 0b0011, 1.0), Stretch(100.0, 200.0, 0b1111, 1.0)]
    live = policy.live_job(make("a", 590.0, deadline=200.0), 0.0)
    found = next(iter(schedules(policy._work(live, 0.0, promised=True), over, policy.layout)))
    assert found == [2, 4]
    held = seat_over_time(found, over, policy.layout, 0)
    assert [(h.start_s, h.end_s, h.mask) for h in held] == [(0.0, 100.0, 0b0011), (100.0, 200.0, 0b1111)]


def test_whoever_is_worth_less_than_its_price_is_told_so(make: MakeJob, nodes: Any) -> None:
    policy = Oasis(nodes=nodes(1, 4), prices=PriceRange(highest=1.0, lowest=1e-6))
    first = policy.handle(ev.JobSubmitted(make("half", 190.0, deadline=100.0, max_workers=2)), 0.0)[0]
    assert isinstance(first, de.Admit)
    assert (first.terms, first.deadline_s) == (de.Terms.DEADLINE, 100.0)
    # Half of the slots are booked: a slot-second costs sqrt(1e-6), and the job needs 50 of them.
    poor = policy.handle(ev.JobSubmitted(make("poor", 50.0, deadline=90.0, value=0.01)), 0.0)[0]
    assert isinstance(poor, de.Reject)
    assert "price of 0.05 is above its value of 0.01" in str(poor.reason)
    assert isinstance(policy.handle(ev.JobSubmitted(make("rich", 50.0, deadline=90.0)), 0.0)[0], de.Admit)
    large = policy.handle(ev.JobSubmitted(make("large", 300.0, deadline=90.0, value=1e6)), 1.0)[0]
    assert isinstance(large, de.Reject)
    assert "no room" in str(large.reason)


def test_what_is_admitted_is_never_moved_for_a_newcomer(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 4)
    alone = play(Oasis(nodes=cluster), [make("a", 200.0, deadline=120.0)], cluster).sizes("a")
    more = [make("a", 200.0, deadline=120.0), *(make(f"b{i}", 60.0, at=5.0 + i, deadline=200.0) for i in range(6))]
    played = play(Oasis(nodes=cluster), more, cluster)
    assert played.sizes("a") == alone
    assert all(not record.late_though_admitted for record in played.result.records)


def test_a_lost_node_is_booked_around_and_who_cannot_make_it_is_at_risk(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(2, 2)
    jobs = [make(f"j{i}", 180.0, deadline=200.0) for i in range(2)]
    lost = Disturbance(50.0, ev.NodeLost(cluster[0].node_id))
    played = play(Oasis(nodes=cluster), jobs, cluster, disturbances=[lost])
    records = played.result.records
    assert all(record.finished_s is not None for record in records)
    assert all(r.at_risk_s is not None for r in records if r.late_though_admitted)
