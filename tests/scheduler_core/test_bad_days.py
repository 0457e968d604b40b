"""Nodes and gangs come and go, owners leave, wake-ups are late: nothing is given twice and everybody gets served."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    Node,
    OnReject,
    Placement,
    RescaleCosts,
    ScalingCurve,
    Slot,
)

QUICK = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=3000, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))
TRUTH = {1: 1.0, 2: 1.7, 4: 2.9, 8: 4.0}

arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 400.0),
        st.floats(5.0, 300.0),
        st.one_of(st.none(), st.floats(1.0, 5.0)),
        st.booleans(),
        st.sampled_from([1, 2, 4]),
        st.sampled_from(list(OnReject)),
    ),
    min_size=1,
    max_size=10,
)
troubles = st.lists(
    st.tuples(
        st.floats(0.0, 600.0),
        st.sampled_from(
            [
                "node_lost",
                "node_back",
                "smaller",
                "busy",
                "drain",
                "gang_lost",
                "workers_lost",
                "park",
                "unpark",
                "wake",
            ]
        ),
        st.integers(0, 9),
    ),
    max_size=12,
)


def _live_through(world: ModuleType, sizes: list[int], jobs: list, trouble: list) -> None:
    config = SchedulerConfig(profile_budget_s=20.0, profile_startup_s=20.0, ageing_s=200.0)
    play = world.World(Scheduler(config, [Node(node_id=f"n{i}", slots=s) for i, s in enumerate(sizes)]))
    for number, (when, length, slack, known, least, choice) in enumerate(jobs):
        job = Job(
            job_id=f"j{number}",
            submitted_s=when,
            deadline_s=None if slack is None else when + 20.0 + length * slack,
            total_steps=length,
            curve=ScalingCurve(TRUTH) if known else None,
            costs=RescaleCosts(startup_s=8.0, pause_s=4.0, tail_s=2.0),
            min_workers=least,
            on_reject=choice,
            latest_deadline_s=None if slack is None else when + 1000.0,
        )
        play.submit(when, job, TRUTH)
    for when, what, number in trouble:
        node_id, size = f"n{number % len(sizes)}", sizes[number % len(sizes)]
        match what:
            case "node_lost":
                play.at(when, ev.NodeLost(node_id))
                play.at(when + 100.0, ev.NodeJoined(Node(node_id=node_id, slots=size)))
            case "node_back":
                play.at(when, ev.NodeJoined(Node(node_id=f"new{number}", slots=4)))
            case "smaller":
                play.at(when, ev.NodeJoined(Node(node_id=node_id, slots=max(1, size - 1 - number % 2))))
                play.at(when + 100.0, ev.NodeJoined(Node(node_id=node_id, slots=size)))
            case "drain":
                play.at(when, ev.NodeDraining(node_id, when + 50.0))
                play.at(when + 50.0, ev.NodeLost(node_id))
                play.at(when + 150.0, ev.NodeJoined(Node(node_id=node_id, slots=size)))
            case "gang_lost":
                play.at(when, ev.GangLost(f"j{number}"))
            case "workers_lost":
                dead = tuple(Slot(f"n{i}", number % 4) for i in range(len(sizes)))
                play.at(when, ev.GangReformed(f"j{number}", Placement(dead)))
            case "park":
                play.at(when, ev.JobParked(f"j{number}"))
                play.at(when + 70.0, ev.JobUnparked(f"j{number}"))
            case "unpark":
                play.at(when, ev.JobUnparked(f"j{number}"))
            case _:
                play.at(when, ev.WakeUp())
    play.run()
    largest = max(1 << (size.bit_length() - 1) for size in sizes)
    for run in play.runs.values():
        if run.job.min_workers <= largest:
            assert run.ended_s is not None, f"{run.job.job_id} never ended ({run.outcome})"
    risks: dict[str, bool] = {}
    for _, decision in play.log:
        if isinstance(decision, de.AtRisk | de.OnTrack):
            now_at_risk = isinstance(decision, de.AtRisk)
            assert risks.get(decision.job_id, False) != now_at_risk, "told twice in a row"
            risks[decision.job_id] = now_at_risk
    for late in play.late():  # only trouble makes a promise fail, and then it was said
        assert risks.get(late.split(":")[0]), late


sizes_of_nodes = st.sampled_from([[4], [2, 2], [8, 8], [4, 4, 4], [3, 3], [1, 2, 4], [6, 5]])


@QUICK
@given(sizes=sizes_of_nodes, jobs=arrivals, trouble=troubles)
def test_whatever_fails_slots_stay_single_and_work_gets_done(world: ModuleType, sizes, jobs, trouble) -> None:
    _live_through(world, sizes, jobs, trouble)


@pytest.mark.soak
@LONG
@given(sizes=sizes_of_nodes, jobs=arrivals, trouble=troubles)
def test_whatever_fails_at_length(world: ModuleType, sizes, jobs, trouble) -> None:
    _live_through(world, sizes, jobs, trouble)


def test_a_job_that_should_have_ended_gets_slots_again_after_it_has_lost_them() -> None:
    """Nobody says how much is really left of it, and a start costs nothing."""
    scheduler = Scheduler(nodes=[Node(node_id="n0", slots=1)])
    job = Job(
        job_id="a",
        submitted_s=0.0,
        deadline_s=100.0,
        total_steps=100.0,
        curve=ScalingCurve({1: 1.0}),
        costs=RescaleCosts(startup_s=0.0, pause_s=0.0),
    )
    scheduler.handle(ev.JobSubmitted(job), 0.0)
    for now in (100.0, 105.0, 110.0):
        scheduler.handle(ev.WakeUp(), now)
    scheduler.handle(ev.NodeLost("n0"), 112.0)
    decided = scheduler.handle(ev.NodeJoined(Node(node_id="n0", slots=1)), 120.0)
    assert [d.placement.workers for d in decided if isinstance(d, de.Resize)] == [1]
    for second in range(121, 300):
        assert not [d for d in scheduler.handle(ev.WakeUp(), float(second)) if isinstance(d, de.Suspend)]
