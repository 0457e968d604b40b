"""AOnline: newcomers are gathered into iterations; each gets a window and a gang that stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.aonline import AOnline

MakeJob = Callable[..., Job]

FLAT = {1: 1.0, 2: 1.25}
"""One slot is cheaper by the step."""


def kinds(decided: list[de.Decision]) -> list[type[de.Decision]]:
    return [type(d) for d in decided if isinstance(d, (de.Admit, de.Reject, de.Wait))]


def test_an_idle_cluster_decides_at_once_and_then_gathers(make: MakeJob, nodes: Any) -> None:
    policy = AOnline(nodes=nodes(1, 2))
    assert kinds(policy.handle(ev.JobSubmitted(make("a", 100.0, deadline=1000.0, curve=FLAT)), 0.0)) == [de.Admit]
    second = policy.handle(ev.JobSubmitted(make("b", 100.0, deadline=1000.0, curve=FLAT)), 10.0)
    assert kinds(second) == [de.Wait]
    assert second[-1] == de.WakeMeAt(60.0)
    assert kinds(policy.handle(ev.WakeUp(), 60.0)) == [de.Admit]


def test_who_cannot_wait_for_the_end_of_the_iteration_is_decided_now(make: MakeJob, nodes: Any) -> None:
    policy = AOnline(nodes=nodes(1, 2))
    policy.handle(ev.JobSubmitted(make("a", 100.0, deadline=1000.0, curve=FLAT)), 0.0)
    assert kinds(policy.handle(ev.JobSubmitted(make("b", 40.0, deadline=65.0, curve=FLAT)), 10.0)) == [de.Admit]


def test_the_best_pay_off_by_value_of_a_batch_comes_first(make: MakeJob, nodes: Any) -> None:
    policy = AOnline(nodes=nodes(1, 1))
    policy.handle(ev.JobSubmitted(make("a", 59.0, deadline=60.0)), 0.0)
    for job_id, steps in (("long", 90.0), ("short", 20.0)):  # one of them fits until 160
        policy.handle(ev.JobSubmitted(make(job_id, steps, deadline=165.0)), 10.0)
    policy.handle(ev.JobFinished("a"), 59.0)
    decided = policy.handle(ev.WakeUp(), 60.0)
    verdicts = {d.job_id: type(d) for d in decided if isinstance(d, (de.Admit, de.Reject))}
    assert verdicts == {"short": de.Admit, "long": de.Reject}


def test_a_gang_is_constant_from_its_start_to_its_end(make: MakeJob, nodes: Any, play: Any) -> None:
    cluster = nodes(2, 4)
    jobs = [make(f"j{i}", 200.0 + 40 * i, at=15.0 * i, deadline=500.0 + 100 * (i % 3), pause=5.0) for i in range(12)]
    played = play(AOnline(nodes=cluster), jobs, cluster)
    for record in played.result.records:
        assert record.changes == (record.rejected_s is None)
        assert not record.late_though_admitted
