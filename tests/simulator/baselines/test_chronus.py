"""Chronus: deadlines promised by leases; nobody is preempted within a term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, OnReject
from elasticflow_airflow.scheduler_core.simulator.baselines.chronus import Chronus

MakeJob = Callable[..., Job]


def test_a_lease_lasts_until_its_term_ends_and_deadlines_get_the_next(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 1)
    jobs = [make("free", 300.0), make("due", 50.0, at=10.0, deadline=200.0)]
    played = play(Chronus(nodes=cluster, lease_s=100.0), jobs, cluster)
    assert played.sizes("due") == [(100.0, 1), (150.0, 0)]  # not at 10: "free" has its lease until 100
    assert played.sizes("free") == [(0.0, 1), (100.0, 0), (150.0, 1), (350.0, 0)]


def test_a_term_is_promised_once(make: MakeJob, nodes: Any) -> None:
    policy = Chronus(nodes=nodes(1, 1), lease_s=100.0)
    policy.handle(ev.JobSubmitted(make("free", 300.0)), 0.0)
    first = policy.handle(ev.JobSubmitted(make("due", 50.0, at=10.0, deadline=200.0)), 10.0)[0]
    assert isinstance(first, de.Admit)
    assert (first.terms, str(first.reason)) == (de.Terms.DEADLINE, "1 leases of 1 slots among 1 terms")
    second = policy.handle(ev.JobSubmitted(make("too", 50.0, at=20.0, deadline=200.0)), 20.0)[0]
    assert isinstance(second, de.Reject)
    assert "not enough leases" in str(second.reason)
    later = policy.handle(ev.JobSubmitted(make("later", 50.0, at=20.0, deadline=300.0)), 20.0)[0]
    assert isinstance(later, de.Admit)


def test_the_plan_pays_a_start_in_every_lease(make: MakeJob, nodes: Any) -> None:
    def verdict(steps: float) -> type[de.Decision]:
        policy = Chronus(nodes=nodes(1, 1), lease_s=100.0)
        policy.handle(ev.JobSubmitted(make("free", 1e6, pause=20.0)), 0.0)
        return type(policy.handle(ev.JobSubmitted(make("due", steps, deadline=300.0, pause=20.0)), 0.0)[0])

    assert verdict(160.0) is de.Admit  # two leases with 80 steps each
    assert verdict(161.0) is de.Reject


def test_a_job_too_tight_for_that_is_pinned_to_idle_slots(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 1)
    tight = make("tight", 280.0, deadline=301.0, pause=20.0)
    rival = make("rival", 60.0, at=5.0, deadline=400.0, pause=20.0)
    played = play(Chronus(nodes=cluster, lease_s=100.0), [tight, rival], cluster)
    assert played.sizes("tight") == [(0.0, 1), (300.0, 0)]
    assert played.jobs["rival"].met


def test_chosen_sizes_are_the_smallest_that_keep_the_deadline(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 4)
    job = make("a", 300.0, deadline=201.0)  # asked for one slot, which cannot make it
    asked = play(Chronus(nodes=cluster, lease_s=100.0), [job], cluster)
    assert asked.jobs["a"].rejected_s == 0.0
    chosen = play(Chronus(nodes=cluster, lease_s=100.0, choose_size=True), [job], cluster)
    assert chosen.sizes("a") == [(0.0, 2), (150.0, 0)]


def test_who_waits_is_promised_idle_slots_once(make: MakeJob, nodes: Any) -> None:
    policy = Chronus(nodes=nodes(1, 1), lease_s=100.0)
    policy.handle(ev.JobSubmitted(make("first", 150.0, deadline=200.0)), 0.0)
    for name in ("one", "other"):
        waits = make(name, 30.0, at=10.0, deadline=195.0, on_reject=OnReject.WAIT)
        assert isinstance(policy.handle(ev.JobSubmitted(waits), 10.0)[0], de.Wait)
    decided = policy.handle(ev.JobCancelled("first"), 110.0)
    assert [d.job_id for d in decided if isinstance(d, de.Admit)] == ["one"]
    assert not [d for d in decided if isinstance(d, de.AtRisk)]  # it has its slots, though not yet
    admitted = [d for d in policy.handle(ev.JobFinished("one"), 140.0) if isinstance(d, de.Admit)]
    assert [d.job_id for d in admitted] == ["other"]


def test_no_slot_is_idle_at_the_moment_when_leases_are_given_out(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 1)
    jobs = [
        make("first", 100.0, deadline=100.0),
        make("promised", 100.0, at=10.0, deadline=200.0),
        make("waits", 60.0, at=50.0, deadline=190.0, on_reject=OnReject.WAIT),
    ]
    played = play(Chronus(nodes=cluster, lease_s=100.0), jobs, cluster)
    assert [record.met for record in played.result.records] == [True, True, False]
    assert played.jobs["waits"].rejected_s == pytest.approx(130.0, abs=1e-3)


def test_a_tail_is_a_part_of_the_lease(make: MakeJob, nodes: Any) -> None:
    def verdict(tail: float) -> type[de.Decision]:
        policy = Chronus(nodes=nodes(1, 1), lease_s=100.0)
        policy.handle(ev.JobSubmitted(make("holds", 100.0, deadline=100.0, tail=tail)), 0.0)
        policy.handle(ev.JobSubmitted(make("next", 90.0, deadline=200.0, tail=tail)), 0.0)
        return type(policy.handle(ev.JobSubmitted(make("last", 90.0, deadline=300.0, tail=tail)), 0.0)[0])

    assert verdict(10.0) is de.Admit
    assert verdict(11.0) is de.Reject


def test_best_effort_leases_go_to_the_shortest(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(1, 1)
    jobs = [make("long", 300.0), make("short", 30.0, at=1.0), make("middle", 90.0, at=2.0)]
    played = play(Chronus(nodes=cluster, lease_s=100.0), jobs, cluster)
    assert played.ends() == {"short": 130.0, "middle": 220.0, "long": 420.0}


def test_a_lease_must_have_a_length() -> None:
    with pytest.raises(ValueError, match="lease_s is -1"):
        Chronus(lease_s=-1)
