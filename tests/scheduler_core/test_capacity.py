"""What can go and what is wanted: tried on made-up clusters, and then really done."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, Spread
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.outlook.capacity import CapacityOutlook, Need, capacity
from elasticflow_airflow.scheduler_core.outlook.forecast import join, keeps_runs, missed_runs

QUICK = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=1500, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))
LINEAR = ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0})
HORIZON_S = 5000.0


def cluster(*sizes: int) -> Scheduler:
    nodes = [Node(node_id=f"n{number}", slots=size) for number, size in enumerate(sizes)]
    return Scheduler(SchedulerConfig(), nodes, CalendarPolicy(unseen=0.0))


def job(name: str, deadline: float | None, steps: float | None, **given: object) -> Job:
    values = {"curve": LINEAR, **given}
    return Job(job_id=name, submitted_s=0.0, deadline_s=deadline, total_steps=steps, **values)


def submit(scheduler: Scheduler, *jobs: Job) -> list[de.Decision]:
    return [decision for one in jobs for decision in scheduler.handle(ev.JobSubmitted(one), 0.0)]


def expect(scheduler: Scheduler, name: str = "run", due: float = 1000.0, **given: object) -> None:
    """A run that keeps four slots busy for 75 of the 100 seconds from its due time to its deadline."""
    values = {"task": name, "deadline_after_s": 100.0, "steps": Spread((300.0,)), "curve": LINEAR, **given}
    scheduler.handle(ev.RunExpected(ExpectedRun(run_id=name, due_s=due, **values)), 0.0)


def ask(scheduler: Scheduler, *wanting: Job, now: float = 0.0) -> CapacityOutlook:
    return capacity(copy.deepcopy(scheduler), now, now + HORIZON_S, wanting)


def gone(outlook: CapacityOutlook) -> list[str]:
    return [node.node_id for node in outlook.releasable]


# -- what can go ---------------------------------------------------------------------------------------------------


def test_nobody_needs_an_empty_cluster():
    found = ask(cluster(4, 4))
    assert gone(found) == ["n0", "n1"]
    assert str(found.reason) == "2 of 2 nodes (8 slots) not needed until 1970-01-01 01:23:20 UTC"
    assert "no job is live" in str(found.releasable[0].reason)
    assert (found.wanted, found.hopeless) == (None, ())


def test_a_cluster_without_nodes_has_nothing_to_release():
    found = ask(cluster())
    assert (found.releasable, found.wanted) == ((), None)
    assert str(found.reason) == "there is no node, and no want"


def test_asking_changes_nothing_of_the_original():
    scheduler = cluster(4, 4)
    submit(scheduler, job("a", 1000.0, 100.0))
    before = scheduler.states()
    ask(scheduler)
    assert scheduler.states() == before
    assert len(scheduler.nodes()) == 2


def test_a_promise_keeps_what_it_needs_and_idle_nodes_go_first():
    scheduler = cluster(4, 4, 4)
    submit(scheduler, job("tight", 110.0, 400.0))
    (stands,) = {slot.node_id for slot in scheduler.states()[0].placement.slots}
    found = ask(scheduler)
    assert gone(found) == [name for name in ("n0", "n1", "n2") if name != stands]
    assert all(node.idle for node in found.releasable)


def test_who_has_time_to_spare_moves_together():
    """Each holds a node of its own, as there is room; both fit on one and keep their deadlines."""
    scheduler = cluster(4, 4)
    submit(scheduler, job("a", 1000.0, 400.0), job("b", 1000.0, 400.0))
    assert all(state.placement.workers == 4 for state in scheduler.states())
    (node,) = ask(scheduler).releasable
    assert (node.idle, node.slots) == (False, 4)
    assert "can move" in str(node.reason)


@pytest.mark.parametrize(("pause_s", "releasable"), [(10.0, 1), (30.0, 0)])
def test_moving_costs_a_pause_that_a_deadline_may_not_have(pause_s, releasable):
    scheduler = cluster(2, 2)
    costs = RescaleCosts(pause_s=pause_s)
    submit(scheduler, *(job(name, 220.0, 200.0, costs=costs, max_workers=1) for name in ("a", "b", "c")))
    (alone,) = [state for state in scheduler.states() if state.placement.slots[0].node_id == "n1"]
    scheduler.handle(ev.JobCancelled("a" if alone.job.job_id != "a" else "b"), 0.0)
    found = ask(scheduler)
    assert [node.idle for node in found.releasable] == [False] * releasable


def test_one_node_stays_for_whoever_is_live():
    scheduler = cluster(4, 4, 4)
    submit(scheduler, job("a", 4000.0, 1.0))
    scheduler.handle(ev.JobParked("a"), 0.0)
    assert len(gone(ask(scheduler))) == 2


def test_an_expected_run_keeps_its_node():
    scheduler = cluster(4, 4)
    expect(scheduler)
    assert gone(ask(scheduler)) == ["n0"]
    expect(scheduler, "other")
    assert gone(ask(scheduler)) == []
    assert str(ask(scheduler).reason) == "no node can go, and nobody wants more"


def test_a_run_beyond_the_horizon_keeps_nothing():
    scheduler = cluster(4)
    expect(scheduler, due=2 * HORIZON_S)
    assert gone(ask(scheduler)) == ["n0"]


def test_best_effort_keeps_its_first_worker_and_not_its_luxury():
    scheduler = cluster(2, 2, 2)
    submit(scheduler, job("free", None, None), job("twins", None, None, min_workers=2))
    found = ask(scheduler)
    assert len(found.releasable) == 1
    submit(scheduler, job("third", None, None, min_workers=2))
    assert gone(ask(scheduler)) == []


def test_of_uneven_nodes_the_small_ones_go_where_only_a_large_one_does():
    scheduler = cluster(8, 1, 2, 1)
    curve = ScalingCurve({8: 8.0})
    submit(scheduler, job("large", 1100.0, 8000.0, curve=curve))
    assert gone(ask(scheduler)) == ["n1", "n2", "n3"]


def test_a_node_that_cannot_go_does_not_keep_others():
    """n0 comes first by its name, and is the only one on which the run that is expected can be done in time."""
    scheduler = cluster(4, 2, 2, 1)
    expect(scheduler, curve=ScalingCurve({4: 4.0}))
    scheduler.handle(ev.NodeLost("n2"), 0.0)
    assert gone(ask(scheduler)) == ["n1", "n3"]


def test_nodes_that_go_away_or_are_held_by_others_are_neither():
    scheduler = cluster(4, 4)
    scheduler.handle(ev.NodeDraining("n0", 2000.0), 0.0)
    scheduler.handle(ev.NodeJoined(Node(node_id="n2", slots=4, busy=frozenset({1}))), 0.0)
    assert gone(ask(scheduler)) == ["n1"]
    submit(scheduler, job("a", 1000.0, 10.0))
    assert gone(ask(scheduler)) == []


def test_who_was_rejected_and_fits_now_keeps_its_place():
    """Else nodes that came for it would go again before it is submitted again."""
    scheduler = cluster(4, 4)
    late = job("late", 110.0, 400.0)
    submit(scheduler, job("a", 110.0, 400.0), late)
    assert len(gone(ask(scheduler))) == 0
    scheduler.handle(ev.JobCancelled("late"), 0.0)
    assert len(gone(ask(scheduler))) == 1
    assert len(gone(ask(scheduler, late))) == 0


# -- what is wanted ------------------------------------------------------------------------------------------------


def test_a_rejected_job_wants_a_node():
    scheduler = cluster(4)
    late = job("late", 110.0, 400.0)
    submit(scheduler, job("a", 110.0, 400.0), late)
    wanted = ask(scheduler, late).wanted
    assert wanted is not None
    assert (wanted.nodes, wanted.slots_per_node) == (1, 4)
    assert [(want.job_id, want.need, want.deadline_s) for want in wanted.by] == [("late", Need.REJECTED, 110.0)]
    assert "1 more node of 4 slots would be enough for 1 rejected job" in str(wanted.reason)
    assert ask(scheduler, late, late).wanted == wanted
    assert ask(scheduler).wanted is None
    assert ask(scheduler, late, now=120.0).wanted is None  # its deadline is past
    assert ask(scheduler, job("a", 110.0, 400.0)).wanted is None  # another incarnation of it is live


def test_everybody_who_wants_is_named_in_the_order_of_deadlines():
    scheduler = cluster(4)
    submit(scheduler, job("a", 1050.0, 4000.0), job("waits", 1040.0, 4000.0, on_reject=OnReject.WAIT))
    submit(scheduler, job("free", None, None), job("unknown", 3000.0, None, curve=None))
    expect(scheduler, due=900.0)
    wanted = ask(scheduler, job("again", 990.0, 3900.0)).wanted
    assert wanted is not None
    assert [(want.job_id or want.run_id, want.need) for want in wanted.by] == [
        ("again", Need.REJECTED),
        ("run", Need.MISSED),
        ("waits", Need.WAITING),
        ("unknown", Need.UNMEASURED),
        ("free", Need.BEST_EFFORT),
    ]
    assert wanted.nodes is not None
    assert 3 <= wanted.nodes <= 5
    assert all(want.reason for want in wanted.by)


def test_a_promise_at_risk_wants_its_node_back():
    scheduler = cluster(4, 4)
    submit(scheduler, job("a", 1050.0, 4000.0), job("b", 1050.0, 4000.0))
    scheduler.handle(ev.NodeLost("n1"), 10.0)
    wanted = ask(scheduler, now=10.0).wanted
    assert wanted is not None
    assert (wanted.nodes, [want.need for want in wanted.by]) == (1, [Need.AT_RISK])


def test_whom_nothing_helps_is_named_and_asks_for_nothing():
    scheduler = cluster(4, 4)
    hopeless = job("hopeless", 50.0, 4000.0)
    found = ask(scheduler, hopeless)
    assert found.wanted is None
    assert [want.job_id for want in found.hopeless] == ["hopeless"]
    assert str(found.hopeless[0].reason) == (
        "hopeless whatever the cluster: 4 workers, its fastest size, need 16 min 40 s, and 50 s are left"
    )
    assert gone(found) == ["n0", "n1"]
    assert str(found.reason).endswith("no further node would help 1 rejected job")


def test_who_can_be_helped_is_helped_beside_whom_nothing_helps():
    scheduler = cluster(4)
    submit(scheduler, job("a", 110.0, 400.0))
    found = ask(scheduler, job("late", 110.0, 400.0), job("hopeless", 50.0, 4000.0))
    assert found.wanted is not None
    assert (found.wanted.nodes, [want.job_id for want in found.wanted.by]) == (1, ["late"])
    assert [want.job_id for want in found.hopeless] == ["hopeless"]
    assert str(found.reason).startswith("1 more node of 4 slots would be enough for 1 rejected job; no further node")


def test_who_is_late_whatever_comes_is_not_made_later():
    """Nothing helps it any more, and yet both its nodes are needed: on one it would end later still."""
    scheduler = cluster(4, 4)
    curve = ScalingCurve({4: 4.0, 8: 8.0})
    submit(scheduler, job("a", 500.0, 3900.0, curve=curve))
    scheduler.handle(ev.JobProgressed("a", 4500.0), 10.0)
    found = ask(scheduler, now=10.0)
    assert found.wanted is None
    assert [want.need for want in found.hopeless] == [Need.AT_RISK]
    assert found.releasable == ()


def test_without_any_node_nobody_can_say_how_many():
    scheduler = cluster()
    submit(scheduler, job("free", None, None))
    wanted = ask(scheduler).wanted
    assert wanted is not None
    assert (wanted.nodes, wanted.slots_per_node) == (None, 0)
    assert "there is no node to size further ones by" in str(wanted.reason)


def test_further_nodes_are_of_the_type_that_there_is():
    scheduler = Scheduler(SchedulerConfig(), [Node(node_id="a", slots=4, gpu_type="h200")])
    submit(scheduler, job("a", 110.0, 400.0))
    wanted = ask(scheduler, job("late", 110.0, 400.0)).wanted
    assert wanted is not None
    assert (wanted.nodes, wanted.gpu_type) == (1, "h200")


# -- and then really done ------------------------------------------------------------------------------------------


@st.composite
def curves(draw: st.DrawFn) -> ScalingCurve:
    speed = draw(st.floats(0.2, 5.0))
    table = {1: speed}
    for size in (2, 4, 8):
        speed *= draw(st.floats(0.9, 2.05))
        table[size] = speed
    return ScalingCurve(table)


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[int], list[Job], list[ExpectedRun], float, int | None]:
    """A cluster, jobs that arrive from 1000 s on, runs that are expected, when is asked, and which node goes away."""
    sizes = draw(
        st.one_of(
            st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=6),
            st.lists(st.integers(1, 7), min_size=1, max_size=4),
            st.sampled_from([[8, 8, 8], [4, 4, 4, 4, 4], [2] * 8, [3, 3], [6]]),
        )
    )
    arrival, arrivals = 1000.0, []
    for number in range(draw(st.integers(0, 6))):
        arrival += draw(st.one_of(st.just(0.0), st.floats(0.0, 60.0)))
        curve, length_s = draw(curves()), draw(st.floats(1.0, 400.0))
        costs = RescaleCosts(
            startup_s=draw(st.sampled_from([0.0, 5.0, 30.0])),
            pause_s=draw(st.sampled_from([0.0, 1.0, 13.0])),
            tail_s=draw(st.sampled_from([0.0, 2.0, 20.0])),
        )
        window = length_s * draw(st.floats(0.3, 4.0)) + costs.startup_s + costs.tail_s
        arrivals.append(
            Job(
                job_id=f"j{number}",
                submitted_s=arrival,
                deadline_s=None if draw(st.integers(0, 3)) == 0 else arrival + window,
                total_steps=length_s * min(curve.steps_per_s.values()),
                curve=None if draw(st.integers(0, 7)) == 0 else curve,
                costs=costs,
                min_workers=draw(st.sampled_from([1, 1, 1, 2])),
                max_workers=draw(st.sampled_from([None, None, 2, 4])),
                on_reject=draw(st.sampled_from([OnReject.FAIL, OnReject.WAIT, OnReject.BEST_EFFORT])),
            )
        )
    asked = arrival + draw(st.floats(0.0, 120.0))
    runs = []
    for number in range(draw(st.integers(0, 3))):
        curve, length_s = draw(curves()), draw(st.floats(1.0, 300.0))
        runs.append(
            ExpectedRun(
                run_id=f"r{number}",
                task=f"t{number}",
                due_s=asked + draw(st.floats(0.0, 300.0)),
                deadline_after_s=length_s * draw(st.floats(0.5, 3.0)),
                steps=Spread((length_s * curve.steps_per_s[1],)),
                curve=curve,
            )
        )
    return sizes, arrivals, runs, asked, draw(st.sampled_from([None, None, None, 0]))


def played(world: ModuleType, story: tuple):
    sizes, arrivals, runs, asked, drained = story
    nodes = [Node(node_id=f"n{number}", slots=size) for number, size in enumerate(sizes)]
    play = world.World(Scheduler(SchedulerConfig(), nodes))
    for one in arrivals:
        play.submit(one.submitted_s, one, None if one.curve else {1: 1.0, 2: 1.9, 4: 3.0, 8: 4.0})
    for run in runs:
        play.at(1000.0, ev.RunExpected(run))
    if drained is not None:
        play.at(asked, ev.NodeDraining(f"n{drained}", asked + 50.0))
    play.run(asked)
    play.now = asked
    return play


def really_released(world: ModuleType, story: tuple) -> None:
    """What was said to be releasable is drained and taken away: all that was promised and expected is kept."""
    play, now = played(world, story), story[3]
    rejected = [run.job for run in play.runs.values() if run.outcome == "rejected" and run.job.curve is not None]
    found = capacity(copy.deepcopy(play.scheduler), now, now + HORIZON_S, rejected)
    assert not (found.releasable and found.wanted)
    before = copy.deepcopy(play.scheduler)
    names = [node.node_id for node in found.releasable]
    stays = [node for node in before.nodes() if node.draining_until_s is None]
    assert set(names) <= {node.node_id for node in stays}
    assert len(names) == len(set(names))
    if before.states():
        assert len(names) < len(stays) or not stays
    if not names:
        return
    play.tell(ev.WakeUp())
    risky = {state.job.job_id for state in play.scheduler.states() if state.at_risk}
    had = {state.job.job_id for state in play.scheduler.states() if state.best_effort and state.placement.slots}
    missed = {one.run_id for one in missed_runs(play.scheduler, now, now + HORIZON_S)}
    begun = len(play.log)
    for node_id in names:
        play.tell(ev.NodeDraining(node_id, now))
        assert not any(slot.node_id == node_id for run in play.runs.values() for slot in run.slots)
        play._happen(ev.NodeLost(node_id))
    states = play.scheduler.states()
    assert {state.job.job_id for state in states if state.at_risk} <= risky
    assert had <= {state.job.job_id for state in states if state.placement.slots}
    assert keeps_runs(play.scheduler, now, {run.run_id for run in play.scheduler.expected_runs()} - missed)
    assert missed or not missed_runs(play.scheduler, now, now + HORIZON_S)
    play.run()
    at_risk = {decision.job_id for _, decision in play.log[begun:] if isinstance(decision, de.AtRisk)}
    assert at_risk <= risky
    assert [said for said in play.late() if said.partition(":")[0] not in risky] == []


def really_added(world: ModuleType, story: tuple) -> None:
    """So many nodes come as were wanted: nobody wants anything any more but the hopeless."""
    play, now = played(world, story), story[3]
    rejected = [run.job for run in play.runs.values() if run.outcome == "rejected" and run.job.curve is not None]
    found = capacity(copy.deepcopy(play.scheduler), now, now + HORIZON_S, rejected)
    if found.wanted is None or found.wanted.nodes is None:
        return
    assert not found.releasable
    scheduler = copy.deepcopy(play.scheduler)
    scheduler.handle(ev.WakeUp(), now)
    shape = Node(node_id="more", slots=found.wanted.slots_per_node, gpu_type=found.wanted.gpu_type)
    join(scheduler, shape, range(found.wanted.nodes), now)
    after = capacity(scheduler, now, now + HORIZON_S, rejected)
    assert after.wanted is None
    assert {(one.job_id, one.run_id) for one in after.hopeless} <= {(one.job_id, one.run_id) for one in found.hopeless}


@QUICK
@given(story=stories())
def test_what_is_released_is_missed_by_nobody(world: ModuleType, story) -> None:
    really_released(world, story)


@QUICK
@given(story=stories())
def test_what_is_wanted_does(world: ModuleType, story) -> None:
    really_added(world, story)


@pytest.mark.soak
@LONG
@given(story=stories())
def test_both_hold_at_length(world: ModuleType, story) -> None:
    really_released(world, story)
    really_added(world, story)
