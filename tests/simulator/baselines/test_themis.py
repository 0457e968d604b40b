"""Themis: the ratio of finish times, leases, and who bids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.themis import Themis, alone_s

MakeJob = Callable[..., Job]


def test_alone_a_job_has_one_nth_of_the_cluster(make: MakeJob, nodes: Any) -> None:
    policy = Themis(nodes=nodes(2, 4))
    view = policy.view(policy.live_job(make("a", 100.0, asks=4), 0.0), 0.0)
    assert alone_s(view, 100.0, slots=8, contenders=2) == 25.0  # four slots are its part: all that it asks for
    assert alone_s(view, 100.0, slots=8, contenders=1) == 25.0  # more would be no use
    assert alone_s(view, 100.0, slots=8, contenders=8) == 100.0  # a part of one slot: a quarter of the time


def test_a_lease_is_not_broken_and_then_the_worst_ratio_wins(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("a", 1000.0, curve={1: 1.0}),
        make("b", 1000.0, at=1.0, curve={1: 1.0}),
        make("c", 10.0, at=2.0, curve={1: 1.0}),
    ]
    played = play(Themis(nodes=nodes(1, 1), lease_s=100.0), jobs, nodes(1, 1))
    # At 100 s rho is (100 + 10 - 2) / 30 for c, (100 + 1000 - 1) / 3000 for b, (100 + 900) / 3000 for a.
    assert played.sizes("c") == [(100.0, 1), (110.0, 0)]
    # At 110 s it is 1109 / 2000 for b and 1010 / 2000 for a; at 200 s 1109 and 1100: leases end on a common clock, and
    # b's is renewed. At 300 s it is 1109 and 1200.
    assert played.sizes("b")[:2] == [(110.0, 1), (300.0, 0)]
    assert played.sizes("a")[:3] == [(0.0, 1), (100.0, 0), (300.0, 1)]


def test_with_nobody_else_a_lease_is_renewed_for_nothing(make: MakeJob, nodes: Any, play: Any) -> None:
    played = play(Themis(nodes=nodes(1, 1), lease_s=100.0), [make("a", 1000.0, pause=5.0)], nodes(1, 1))
    assert played.jobs["a"].changes == 1
    assert played.ends() == {"a": 1005.0}


@pytest.mark.parametrize(("filter_f", "second"), [(0.0, "middling"), (0.9, "running")])
def test_only_the_worst_part_bids_and_the_rest_takes_what_is_left(
    filter_f: float, second: str, make: MakeJob, nodes: Any, play: Any
) -> None:
    """At 100 s leases on both slots end, and one job: rho is 0.67 for who runs, and 0.68 and 0.80 for who waits."""
    jobs = [
        make("running", 10_000.0, curve={1: 1.0}),
        make("ends", 100.0, curve={1: 1.0}),
        make("middling", 5000.0, at=1.0, curve={1: 1.0}),
        make("worst", 500.0, at=2.0, curve={1: 1.0}),
    ]
    played = play(Themis(nodes=nodes(1, 2), lease_s=100.0, filter_f=filter_f), jobs, nodes(1, 2))
    assert played.jobs["worst"].started_s == 100.0
    held = {job_id: [at for at, size in played.sizes(job_id) if size] for job_id in ("running", "middling")}
    assert (100.0 in held["middling"]) == (second == "middling")
    # Who runs already goes on without a break, and without a bid.
    assert any(at == 100.0 and size == 0 for at, size in played.sizes("running")) == (second == "middling")


def test_long_starts_make_long_leases(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 5000.0, curve={1: 1.0}, pause=100.0), make("b", 5000.0, at=1.0, curve={1: 1.0}, pause=100.0)]
    played = play(Themis(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert played.sizes("a")[1] == (2000.0, 0)
