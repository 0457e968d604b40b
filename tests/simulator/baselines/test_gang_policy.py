"""What all policies without promises have in common: books of progress, events of every kind, life after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, Placement, Slot
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import GangPolicy
from elasticflow_airflow.scheduler_core.simulator.baselines.edf import Edf
from elasticflow_airflow.scheduler_core.simulator.baselines.fifo import GangFifo
from elasticflow_airflow.scheduler_core.simulator.baselines.gandiva import Gandiva
from elasticflow_airflow.scheduler_core.simulator.baselines.tiresias import Tiresias
from elasticflow_airflow.scheduler_core.simulator.run import Disturbance

MakeJob = Callable[..., Job]


def placed(decisions: list[de.Decision]) -> dict[str, Placement]:
    return {d.job_id: d.placement for d in decisions if isinstance(d, de.Resize)}


class Auditor:
    """A policy that checks before each end that it knew exactly when it would come."""

    def __init__(self, policy: GangPolicy) -> None:
        self.policy = policy
        self.ends = 0

    def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
        if isinstance(event, ev.JobFinished):
            expected = self.policy.projected_finish_s(event.job_id)
            assert expected == pytest.approx(now, abs=1e-6)
            self.ends += 1
        return self.policy.handle(event, now)


@pytest.mark.parametrize("kind", [GangFifo, Edf, Gandiva, Tiresias])
def test_progress_is_counted_as_the_simulator_charges_it(
    kind: type[GangPolicy], make: MakeJob, nodes: Any, play: Any
) -> None:
    curve = {1: 1.0, 2: 1.7, 4: 2.6, 8: 2.4}
    jobs = [
        make(
            f"j{i}", 300.0 + 170.0 * i, at=23.0 * i, deadline=900.0 - 20.0 * i, asks=1 << i % 4, curve=curve, pause=9.0
        )
        for i in range(12)
    ]
    auditor = Auditor(kind(nodes=nodes(2, 4)))
    played = play(auditor, jobs, nodes(2, 4))
    assert auditor.ends == 12
    changes = sum(record.changes for record in played.result.records)
    assert changes > 12 or kind is GangFifo


def test_a_job_that_has_made_its_last_step_keeps_its_slots_until_it_is_gone(
    make: MakeJob, nodes: Any, play: Any
) -> None:
    jobs = [
        make("ends", 100.0, deadline=500.0, curve={1: 1.0}, tail=50.0),
        make("urgent", 100.0, at=120.0, deadline=200.0, curve={1: 1.0}, tail=50.0),
    ]
    played = play(Edf(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert played.ends() == {"ends": 150.0, "urgent": 300.0}


def test_a_gang_is_started_elsewhere_when_its_node_is_lost(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 1000.0, asks=4, pause=10.0)]
    lost = Disturbance(160.0, ev.NodeLost("n0"))
    played = play(GangFifo(nodes=nodes(2, 4)), jobs, nodes(2, 4), disturbances=[lost], checkpoint_s=100.0)
    # 150 s of steps, 50 s of them since the last checkpoint; then a start and the other 600 steps.
    assert played.ends() == {"a": 160.0 + 10.0 + 600.0 / 4}
    last = next(change for change in played.changes if change.at_s == 160.0 and change.slots)
    assert {slot.node_id for slot in last.slots} == {"n1"}


def test_a_gang_leaves_a_draining_node_in_time(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 4000.0, asks=4, pause=10.0)]
    gone = [Disturbance(100.0, ev.NodeDraining("n0", 400.0)), Disturbance(400.0, ev.NodeLost("n0"))]
    played = play(GangFifo(nodes=nodes(2, 4)), jobs, nodes(2, 4), disturbances=gone)
    assert [at for at, _ in played.sizes("a")][:2] == [0.0, 340.0]
    assert played.ends() == {"a": 10.0 + 1000.0 + 10.0}


def test_a_node_that_joins_is_used_at_once(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 400.0, asks=4), make("b", 400.0, asks=4)]
    joined = Disturbance(30.0, ev.NodeJoined(Node(node_id="n1", slots=4)))
    played = play(GangFifo(nodes=nodes(1, 4)), jobs, nodes(1, 4), disturbances=[joined])
    assert played.ends() == {"a": 100.0, "b": 130.0}


def test_parked_jobs_hold_nothing_and_come_back(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(1, 4))
    policy.handle(ev.JobSubmitted(make("a", 400.0, asks=4)), 0.0)
    decided = policy.handle(ev.JobSubmitted(make("b", 400.0, asks=4)), 1.0)
    assert placed(decided) == {}
    decided = policy.handle(ev.JobParked("a"), 10.0)
    assert [d.job_id for d in decided if isinstance(d, de.Suspend)] == ["a"]
    assert list(placed(decided)) == ["b"]
    policy.handle(ev.JobFinished("b"), 110.0)
    decided = policy.handle(ev.JobUnparked("a"), 120.0)
    assert list(placed(decided)) == ["a"]
    assert policy.projected_finish_s("a") == pytest.approx(120.0 + 90.0)


def test_cancelled_and_failed_jobs_make_room(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(1, 4))
    for job_id in ("a", "b", "c"):
        policy.handle(ev.JobSubmitted(make(job_id, 400.0, asks=4)), 0.0)
    assert list(placed(policy.handle(ev.JobCancelled("a"), 5.0))) == ["b"]
    assert list(placed(policy.handle(ev.JobFailed("b"), 6.0))) == ["c"]
    assert policy.handle(ev.JobFinished("a"), 7.0) == []  # gone already


def test_a_lost_gang_is_started_again_from_what_it_reports(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(1, 4))
    policy.handle(ev.JobSubmitted(make("a", 400.0, asks=4, pause=10.0)), 0.0)
    policy.handle(ev.GangStarted("a", policy.states()[0].placement), 10.0)
    decided = policy.handle(ev.GangLost("a"), 60.0)
    assert list(placed(decided)) == ["a"]
    policy.handle(ev.JobProgressed("a", 320.0), 61.0)
    assert policy.projected_finish_s("a") == pytest.approx(70.0 + 80.0)


def test_a_gang_that_has_shrunk_by_itself_is_made_whole(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(1, 4))
    policy.handle(ev.JobSubmitted(make("a", 400.0, asks=4)), 0.0)
    three = Placement(tuple(Slot("n0", index) for index in (0, 1, 3)))
    decided = policy.handle(ev.GangReformed("a", three), 20.0)
    assert placed(decided)["a"].workers == 4
    assert placed(decided)["a"].slots[:3] == three.slots  # those that live keep their ranks


def test_reports_of_speed_move_the_curve(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(1, 4))
    policy.handle(ev.JobSubmitted(make("a", 400.0, asks=4)), 0.0)
    policy.handle(ev.JobProgressed("a", 200.0, steps_per_s=2.0), 50.0)
    curve = policy.states()[0].job.curve
    assert curve is not None
    assert dict(curve.steps_per_s) == {1: 1.0, 2: 2.0, 4: 2.0, 8: 8.0}


def test_a_slow_slot_is_left(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(2, 4))
    policy.handle(ev.JobSubmitted(make("a", 400.0, asks=4)), 0.0)
    slow = policy.states()[0].placement.slots[0]
    decided = policy.handle(ev.SlotSlow("a", slow, until_s=1e6), 10.0)
    assert slow not in placed(decided)["a"].slots


def test_amendments_hold_at_once_where_nothing_is_promised(make: MakeJob, nodes: Any) -> None:
    policy = Edf(nodes=nodes(1, 1))
    policy.handle(ev.JobSubmitted(make("a", 400.0, deadline=500.0, curve={1: 1.0})), 0.0)
    policy.handle(ev.JobSubmitted(make("b", 100.0, deadline=900.0, curve={1: 1.0})), 1.0)
    decided = policy.handle(ev.JobAmended("b", deadline_s=200.0, value=3.0), 10.0)
    assert de.Amended("b", 200.0, 3.0, None) in decided
    assert list(placed(decided)) == ["b"]


def test_a_job_without_a_curve_runs_at_what_it_asks_for_and_learns(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(1, 4))
    job = replace(make("a", 400.0, asks=2), curve=None)
    assert placed(policy.handle(ev.JobSubmitted(job), 0.0))["a"].workers == 2
    assert policy.projected_finish_s("a") is None
    policy.handle(ev.JobProgressed("a", 300.0, steps_per_s=3.0), 30.0)
    assert policy.projected_finish_s("a") == pytest.approx(130.0)


def test_a_job_that_fits_no_block_is_refused(make: MakeJob, nodes: Any) -> None:
    policy = GangFifo(nodes=nodes(3, 2))
    decided = policy.handle(ev.JobSubmitted(make("a", 10.0, curve={8: 1.0})), 0.0)
    assert isinstance(decided[0], de.Reject)
    assert policy.states() == ()
    policy.handle(ev.JobSubmitted(make("b", 10.0)), 0.0)
    with pytest.raises(ValueError, match="live already"):
        policy.handle(ev.JobSubmitted(make("b", 10.0)), 0.0)
