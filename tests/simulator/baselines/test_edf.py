"""Earliest deadline first, alone and with each of ElasticFlow's two modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job, OnReject
from elasticflow_airflow.scheduler_core.simulator.baselines.edf import AdmittingEdf, Edf, ElasticEdf

MakeJob = Callable[..., Job]
FLAT = {1: 1.0, 2: 1.5, 4: 2.0}


def test_the_next_deadline_preempts(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("later", 100.0, deadline=900.0, curve={1: 1.0}, pause=5.0),
        make("sooner", 100.0, at=55.0, deadline=300.0, curve={1: 1.0}, pause=5.0),
        make("whenever", 10.0, at=0.0, curve={1: 1.0}, pause=5.0),
    ]
    played = play(Edf(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    # 50 steps, then 105 s for the other, a start again and the other 50; best effort comes last.
    assert played.ends() == {"later": 215.0, "sooner": 160.0, "whenever": 230.0}


def test_it_stops_at_the_knee_and_its_plain_form_does_not(make: MakeJob, nodes: Any, play: Any) -> None:
    job = make("a", 180.0, deadline=300.0, curve={1: 1.0, 2: 1.8, 4: 1.2})
    assert play(Edf(nodes=nodes(1, 4)), [job], nodes(1, 4)).sizes("a")[0] == (0.0, 2)
    assert play(Edf(nodes=nodes(1, 4), plain=True), [job], nodes(1, 4)).sizes("a")[0] == (0.0, 4)


def test_it_grows_only_when_it_then_ends_sooner(make: MakeJob, nodes: Any, play: Any) -> None:
    def jobs(steps: float) -> list[Job]:
        first = make("first", 40.0, deadline=100.0, curve={2: 2.0}, pause=10.0)
        return [first, make("second", steps, deadline=900.0, curve={2: 2.0, 4: 4.0}, pause=10.0)]

    # At 30 s the second has 100 or 20 steps left: 50 or 10 s as it is, 10 + 25 or 10 + 5 s on twice the slots.
    assert play(Edf(nodes=nodes(1, 4)), jobs(140.0), nodes(1, 4)).ends()["second"] == 65.0
    assert play(Edf(nodes=nodes(1, 4)), jobs(60.0), nodes(1, 4)).ends()["second"] == 40.0


def test_one_late_job_makes_the_others_late(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make(f"j{i}", 100.0, deadline=90.0 + 60.0 * i, curve={1: 1.0}) for i in range(3)]
    assert sum(record.met for record in play(Edf(nodes=nodes(1, 1)), jobs, nodes(1, 1)).jobs.values()) == 0
    played = play(AdmittingEdf(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert [record.met for record in played.result.records] == [False, True, True]
    assert played.jobs["j0"].reject_reason == "earliest deadline first would end it 10 s late"


def test_a_newcomer_that_would_make_another_late_is_refused(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("promised", 100.0, deadline=150.0, curve={1: 1.0}),
        make("urgent", 60.0, at=10.0, deadline=100.0, curve={1: 1.0}),
        make("short", 40.0, at=10.0, deadline=100.0, curve={1: 1.0}),
    ]
    played = play(AdmittingEdf(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert "would end promised 10 s late" in played.jobs["urgent"].reject_reason
    assert played.ends() == {"promised": 140.0, "urgent": None, "short": 50.0}


def test_who_may_wait_is_asked_again_when_somebody_leaves(make: MakeJob, nodes: Any) -> None:
    policy = AdmittingEdf(nodes=nodes(1, 1))
    policy.handle(ev.JobSubmitted(make("first", 100.0, deadline=150.0, curve={1: 1.0})), 0.0)
    waits = make("waits", 60.0, at=10.0, deadline=100.0, curve={1: 1.0}, on_reject=OnReject.WAIT)
    decided = policy.handle(ev.JobSubmitted(waits), 10.0)
    assert [type(d) for d in decided] == [de.Wait, de.WakeMeAt]
    assert decided[0] == de.Wait("waits", Reason("waits for capacity until 1970-01-01 00:00:40 UTC: " + _LATE), 40.0)
    decided = policy.handle(ev.JobCancelled("first"), 20.0)
    assert any(isinstance(d, de.Admit) and d.job_id == "waits" and d.deadline_s == 100.0 for d in decided)


_LATE = "earliest deadline first would end first 10 s late"


def test_who_may_not_wait_any_longer_is_refused(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("first", 100.0, deadline=150.0, curve={1: 1.0}),
        make("waits", 60.0, at=10.0, deadline=100.0, curve={1: 1.0}, on_reject=OnReject.WAIT),
        make("rather-late", 60.0, at=10.0, deadline=100.0, curve={1: 1.0}, on_reject=OnReject.BEST_EFFORT),
    ]
    played = play(AdmittingEdf(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert played.jobs["waits"].rejected_s == pytest.approx(40.0, abs=1e-3)
    assert played.ends() == {"first": 100.0, "waits": None, "rather-late": 160.0}


def test_jobs_that_wait_or_are_parked_do_not_stand_in_the_way(make: MakeJob, nodes: Any) -> None:
    policy = AdmittingEdf(nodes=nodes(1, 1))
    policy.handle(ev.JobSubmitted(make("away", 100.0, deadline=150.0, curve={1: 1.0})), 0.0)
    waits = make("waits", 60.0, deadline=155.0, curve={1: 1.0}, on_reject=OnReject.WAIT)
    assert isinstance(policy.handle(ev.JobSubmitted(waits), 0.0)[0], de.Wait)
    decided = policy.handle(ev.JobParked("away"), 10.0)
    assert isinstance(decided[0], de.Admit)
    assert decided[0].job_id == "waits"
    late = policy.handle(ev.JobSubmitted(make("late", 90.0, deadline=150.0, curve={1: 1.0})), 20.0)
    assert isinstance(late[0], de.Reject)


def test_a_promise_is_not_amended_into_one_that_cannot_be_kept(make: MakeJob, nodes: Any) -> None:
    policy = AdmittingEdf(nodes=nodes(1, 1))
    policy.handle(ev.JobSubmitted(make("a", 100.0, deadline=150.0, curve={1: 1.0})), 0.0)
    refused = policy.handle(ev.JobAmended("a", deadline_s=90.0), 5.0)
    assert isinstance(refused[0], de.AmendRejected)
    assert policy.states()[0].job.deadline_s == 150.0
    assert isinstance(policy.handle(ev.JobAmended("a", deadline_s=110.0), 6.0)[0], de.Amended)
    assert policy.states()[0].job.deadline_s == 110.0
    policy.handle(ev.JobSubmitted(make("b", 50.0, curve={1: 1.0})), 6.0)
    assert isinstance(policy.handle(ev.JobAmended("b", deadline_s=120.0), 7.0)[0], de.AmendRejected)
    assert isinstance(policy.handle(ev.JobAmended("b", deadline_s=160.0), 8.0)[0], de.Amended)
    assert [state.best_effort for state in policy.states()] == [False, False]


def test_a_promise_that_no_size_can_keep_is_announced(make: MakeJob, nodes: Any) -> None:
    policy = AdmittingEdf(nodes=nodes(1, 2))
    policy.handle(ev.JobSubmitted(make("a", 200.0, deadline=110.0, curve={1: 1.0, 2: 2.0})), 0.0)
    decided = policy.handle(ev.JobProgressed("a", 150.0), 40.0)
    assert [type(d) for d in decided] == [de.AtRisk]
    assert isinstance(decided[0], de.AtRisk)
    assert (decided[0].projected_s, policy.states()[0].at_risk) == (115.0, True)
    assert policy.handle(ev.JobProgressed("a", 140.0), 41.0) == []
    assert policy.handle(ev.JobProgressed("a", 100.0), 45.0) == [de.OnTrack("a", 110.0, 95.0)]


def test_promises_have_the_margins_of_the_configuration(make: MakeJob, nodes: Any) -> None:
    def answer(deadline: float, **margins: float) -> type[de.Decision]:
        policy = AdmittingEdf(SchedulerConfig(**margins), nodes(1, 1))
        return type(policy.handle(ev.JobSubmitted(make("a", 90.0, deadline=deadline, curve={1: 1.0})), 0.0)[0])

    assert answer(95.0) is de.Admit
    assert answer(95.0, deadline_margin_s=10.0) is de.Reject


def test_small_shares_keep_what_large_gangs_miss(make: MakeJob, nodes: Any, play: Any) -> None:
    """Three jobs that need 100 s on one slot each, or 50 s on all four, by 100 s."""
    jobs = [make(f"j{i}", 100.0, deadline=100.0, curve=FLAT) for i in range(3)]
    assert sum(r.met for r in play(Edf(nodes=nodes(1, 4)), jobs, nodes(1, 4)).result.records) == 2
    assert sum(r.met for r in play(ElasticEdf(nodes=nodes(1, 4)), jobs, nodes(1, 4)).result.records) == 3


def test_what_is_left_goes_where_a_slot_saves_most(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("steep", 400.0, deadline=2000.0, curve={1: 1.0, 2: 1.9}),
        make("flat", 400.0, deadline=2000.0, curve={1: 1.0, 2: 1.1}),
    ]
    played = play(ElasticEdf(nodes=nodes(1, 2)), [*jobs], nodes(1, 2))
    assert [size for _, size in played.sizes("steep")][-2] == 1  # each needs its share, and nothing is left
    played = play(ElasticEdf(nodes=nodes(3, 1)), jobs, nodes(3, 1))
    assert max(size for _, size in played.sizes("steep")) == 2


def test_a_job_whose_deadline_is_lost_takes_what_nobody_needs(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("lost", 100.0, deadline=50.0, curve={1: 1.0}),
        make("kept", 100.0, at=1.0, deadline=101.0, curve={1: 1.0}),
    ]
    played = play(ElasticEdf(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert played.ends() == {"lost": 200.0, "kept": 101.0}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_edf_never_breaks_a_promise_that_it_admitted(data: Any, make: MakeJob, nodes: Any, play: Any) -> None:
    pause = data.draw(st.sampled_from([0.0, 7.0, 30.0]))
    shape = data.draw(st.sampled_from([(1, 4), (2, 4), (3, 2)]))
    jobs = []
    for i in range(data.draw(st.integers(1, 10))):
        at = data.draw(st.floats(0.0, 400.0))
        speeds = data.draw(st.lists(st.floats(0.5, 5.0), min_size=3, max_size=3))
        jobs.append(
            make(
                f"j{i}",
                data.draw(st.floats(10.0, 600.0)),
                at=at,
                deadline=data.draw(st.one_of(st.none(), st.floats(at + 20.0, at + 900.0))),
                curve=dict(zip((1, 2, 4), speeds, strict=True)),
                pause=pause,
            )
        )
    played = play(AdmittingEdf(nodes=nodes(*shape)), sorted(jobs, key=lambda job: job.submitted_s), nodes(*shape))
    assert not any(record.late_though_admitted for record in played.result.records)
