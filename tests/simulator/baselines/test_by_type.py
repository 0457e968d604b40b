"""One scheduler a type of GPU: who is offered where, and one clock for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import mixed_cluster
from elasticflow_airflow.scheduler_core.simulator.policies import make_policy

MakeJob = Callable[..., Job]


def typed(job: Job, **speeds: float) -> Job:
    curves = {name: ScalingCurve({1: speed, 2: 2 * speed}) for name, speed in speeds.items()}
    return replace(job, curve=min(curves.values(), key=lambda curve: curve.steps_per_s[1]), curves=curves)


@pytest.fixture
def nodes() -> tuple[Node, ...]:
    return mixed_cluster([("fast", 1, 2), ("slow", 1, 2)])


def stands_on(decided: list[de.Decision]) -> dict[str, str]:
    return {d.job_id: d.placement.slots[0].node_id.split("-")[0] for d in decided if isinstance(d, de.Resize)}


def test_whoever_makes_it_on_the_slow_type_leaves_the_fast_one(make: MakeJob, nodes: Any) -> None:
    policy = make_policy("elasticflow+types", nodes)
    easy = policy.handle(ev.JobSubmitted(typed(make("easy", 100.0, deadline=300.0), fast=4.0, slow=1.0)), 0.0)
    assert stands_on(easy) == {"easy": "slow"}
    hard = policy.handle(ev.JobSubmitted(typed(make("hard", 100.0, deadline=40.0), fast=4.0, slow=1.0)), 0.0)
    assert stands_on(hard) == {"hard": "fast"}
    assert [type(d) for d in hard].count(de.Admit) == 1
    assert not any(isinstance(d, de.Reject) for d in hard)


def test_best_effort_begins_with_the_fast_type(make: MakeJob, nodes: Any) -> None:
    policy = make_policy("elasticflow+types", nodes)
    decided = policy.handle(ev.JobSubmitted(typed(make("free", 100.0), fast=4.0, slow=1.0)), 0.0)
    assert stands_on(decided) == {"free": "fast"}


def test_a_refusal_by_all_types_is_one_with_the_best_offer(make: MakeJob, nodes: Any) -> None:
    policy = make_policy("elasticflow+types", nodes)
    decided = policy.handle(ev.JobSubmitted(typed(make("no", 800.0, deadline=50.0), fast=4.0, slow=1.0)), 0.0)
    rejects = [d for d in decided if isinstance(d, de.Reject)]
    assert len(rejects) == 1
    offer = rejects[0].earliest_deadline_s
    assert offer is not None
    assert offer <= 110.0  # on the fast type; the slow one would need 400 s
    assert policy.states() == ()


def test_a_type_that_a_job_has_no_curve_for_is_not_asked(make: MakeJob, nodes: Any) -> None:
    policy = make_policy("elasticflow+types", nodes)
    only = typed(make("only", 10.0, deadline=1000.0), fast=1.0)
    assert stands_on(policy.handle(ev.JobSubmitted(only), 0.0)) == {"only": "fast"}
    nowhere = policy.handle(ev.JobSubmitted(typed(make("nowhere", 10.0, deadline=1000.0), other=1.0)), 0.0)
    assert isinstance(nowhere[0], de.Reject)
    assert "none of the types" in str(nowhere[0].reason)
