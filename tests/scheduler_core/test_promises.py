"""Properties of the scheduler in a virtual world with exact curves, whatever arrives and whenever."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, RescaleCosts, ScalingCurve

QUICK = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=3000, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))

clusters = st.one_of(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([[8, 8], [2, 2, 2], [4, 4, 4, 4], [3, 3], [6]]),
)

# What is drawn a hundred times for each story is made once: making and checking it takes longer than drawing.
SPEED, GAIN, LENGTH_S = st.floats(0.2, 5.0), st.floats(0.9, 2.05), st.floats(1.0, 400.0)
WINDOW, LATEST, WHEN_S = st.floats(0.3, 4.0), st.floats(1.0, 3.0), st.floats(1000.0, 1600.0)
STARTUP_S, SWITCH_S = st.sampled_from([0.0, 5.0, 30.0]), st.sampled_from([0.0, 1.0, 13.0, 30.0])
TAIL_S = st.sampled_from([0.0, 2.0, 20.0])
SIZES, YES = st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=1), st.booleans()
ONE_IN_FIVE, UP_TO_8, UP_TO_3 = st.integers(0, 4), st.integers(1, 8), st.integers(0, 3)
LEAST, MOST = st.sampled_from([1, 1, 1, 2]), st.sampled_from([None, None, 2, 4])
CHOICE = st.sampled_from([OnReject.FAIL, OnReject.WAIT, OnReject.BEST_EFFORT, OnReject.LATE])
PAUSE_S = st.one_of(st.just(0.0), st.floats(0.0, 150.0))


@st.composite
def curves(draw: st.DrawFn) -> ScalingCurve:
    speed = draw(SPEED)
    table = {1: speed}
    for size in (2, 4, 8, 16):
        speed *= draw(GAIN)
        table[size] = speed
    sizes = draw(SIZES)
    if draw(YES):
        sizes = {1, 2, 4, 8, 16}
    return ScalingCurve({n: table[n] for n in sizes})


CURVES = curves()


@st.composite
def jobs(draw: st.DrawFn, number: int, *, arrival: float) -> Job:
    curve = draw(CURVES)
    slowest = min(curve.steps_per_s.values())
    length_s = draw(LENGTH_S)
    costs = RescaleCosts(
        startup_s=draw(STARTUP_S),
        pause_s=draw(SWITCH_S),
        tail_s=draw(TAIL_S),
    )
    best_effort = draw(ONE_IN_FIVE) == 0
    window = length_s * draw(WINDOW) + costs.startup_s + costs.tail_s
    return Job(
        job_id=f"j{number}",
        submitted_s=arrival,
        deadline_s=None if best_effort else arrival + window,
        total_steps=length_s * slowest,
        curve=curve,
        costs=costs,
        min_workers=draw(LEAST),
        max_workers=draw(MOST),
        on_reject=draw(CHOICE),
        latest_deadline_s=arrival + draw(LATEST) * window,
    )


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[int], list[Job], list[tuple[float, object]], bool, bool]:
    nodes = draw(clusters)
    count = draw(UP_TO_8)
    arrival, arrivals = 1000.0, []
    for number in range(count):
        arrival += draw(PAUSE_S)
        arrivals.append(draw(jobs(number, arrival=arrival)))
    others: list[tuple[float, object]] = []
    for _ in range(draw(UP_TO_3)):
        when = draw(WHEN_S)
        job_id = f"j{draw(st.integers(0, count - 1))}"
        others.append(
            (
                when,
                draw(
                    st.sampled_from(
                        [
                            ev.JobCancelled(job_id),
                            ev.JobAmended(job_id, deadline_s=when + 100.0),
                            ev.JobAmended(job_id, best_effort=True),
                            ev.NodeJoined(Node(node_id="new", slots=4)),
                            ev.WakeUp(),
                        ]
                    )
                ),
            )
        )
    return nodes, arrivals, others, draw(YES), draw(YES)


CONFIGS = st.sampled_from(
    [SchedulerConfig(), SchedulerConfig(afresh_up_to=0), SchedulerConfig(afresh_up_to=0, afresh_first_up_to=0)]
)
"""For a newcomer without free slots everything is planned anew; or somebody makes room first, as beside many jobs; or
it is promised what others leave later first, as beside thousands."""


def _nodes(sizes: list[int]) -> list[Node]:
    return [Node(node_id=f"n{i}", slots=size) for i, size in enumerate(sizes)]


def _tell(world: ModuleType, story: tuple, config: SchedulerConfig | None = None, lag_s: float = 0.0):
    sizes, arrivals, others, reports, started = story
    play = world.World(Scheduler(config, _nodes(sizes)), reports=reports, gang_started=started, lag_s=lag_s)
    for job in arrivals:
        play.submit(job.submitted_s, job)
    for when, event in others:
        play.at(when, event)
    play.run()
    return play


def _promises_hold(world: ModuleType, story: tuple, config: SchedulerConfig) -> None:
    play = _tell(world, story, config)
    assert not play.late()
    assert not [d for _, d in play.log if isinstance(d, de.AtRisk)]
    largest = max(1 << (size.bit_length() - 1) for size in story[0])
    for run in play.runs.values():
        most = min(largest, run.job.max_workers or largest)
        if run.deadline_s is None and (run.job.min_workers > most):
            continue  # best effort that this cluster cannot run, or whose speed here nobody knows
        assert run.ended_s is not None, f"{run.job.job_id} never ended ({run.outcome})"


@QUICK
@given(story=stories(), config=CONFIGS)
def test_an_admitted_job_never_misses_its_deadline_and_no_slot_is_given_twice(world: ModuleType, story, config) -> None:
    _promises_hold(world, story, config)


@QUICK
@given(story=stories(), config=CONFIGS)
def test_promises_hold_where_new_workers_have_to_start_before_they_join(world: ModuleType, story, config) -> None:
    """A gang that grows or moves goes on at its old speed for as long as a start takes, and then stands still."""
    sizes, arrivals, others, _, _ = story
    joining = [replace(job, costs=replace(job.costs, join_s=job.costs.startup_s)) for job in arrivals]
    _promises_hold(world, (sizes, joining, others, False, False), config)


@pytest.mark.soak
@LONG
@given(story=stories(), config=CONFIGS)
def test_promises_hold_at_length(world: ModuleType, story, config) -> None:
    _promises_hold(world, story, config)


@QUICK
@given(story=stories())
def test_same_events_same_decisions(world: ModuleType, story) -> None:
    assert _tell(world, story).log == _tell(world, story).log


class _Watching(Scheduler):
    """Checks the plans after every event, with the independent checker."""

    checker: ModuleType
    sizes: list[int]

    def handle(self, event, now):
        before = self.states() if isinstance(event, ev.JobSubmitted) else None
        decisions = super().handle(event, now)
        if before is not None:
            refused = [d for d in decisions if isinstance(d, de.Reject)]
            if refused and not [d for d in decisions if not isinstance(d, de.Reject | de.WakeMeAt)]:
                assert self.states() == before, "a rejected arrival changed something"
                self._offer(event.job, refused[0], now)
        self._plans(now)
        return decisions

    def _plans(self, now: float) -> None:
        plans = []
        for state in self.states():
            plan = self.plan_of(state.job.job_id)
            if plan is None or math.isinf(plan.finish_s) or plan.finish_s <= now:
                continue
            plans.append(plan)
            problems = self.checker.check_plan(
                state.job if not state.best_effort else replace(state.job, deadline_s=None),
                plan,
                state.as_of_s,
                state.remaining_steps,
                size_now=state.placement.workers,
                free_from=max(state.as_of_s, state.no_progress_until_s),
                starting=state.starting,
            )
            assert not problems, problems
        late = [
            replace(plan, segments=tuple(part for part in plan.segments if part.end_s > now + 0.01)) for plan in plans
        ]
        assert not self.checker.check_capacity(late, self.checker.buddy_blocks(self.sizes))

    def _offer(self, job: Job, refused: de.Reject, now: float) -> None:
        if refused.earliest_deadline_s is None:
            return
        twin = Scheduler(self.config, self.nodes())
        twin.__dict__.update(_deep(self))
        again = twin.handle(ev.JobSubmitted(replace(job, deadline_s=refused.earliest_deadline_s)), now)
        assert isinstance(again[0], de.Admit), (refused, again[0])


def _deep(scheduler: Scheduler) -> dict:
    import copy

    return copy.deepcopy({k: v for k, v in scheduler.__dict__.items() if k not in ("checker",)})


def _best_effort(number: int, steps: float = 1.0, sizes: tuple[int, ...] = (1,), startup_s: float = 0.0) -> Job:
    return Job(
        job_id=f"j{number}",
        submitted_s=1000.0,
        deadline_s=None,
        total_steps=steps,
        curve=ScalingCurve(dict.fromkeys(sizes, 1.0)),
        costs=RescaleCosts(startup_s=startup_s, tail_s=20.0),
    )


NO_SIZE_FITS = (
    [2],
    [
        _best_effort(0),
        _best_effort(1, startup_s=30.0),
        _best_effort(2, 14.0, startup_s=30.0),
        _best_effort(3, sizes=(4,)),
        replace(_best_effort(4), submitted_s=1064.0, deadline_s=1085.0),
    ],
    [],
    True,
    False,
)
"""A best-effort job whose curve has no size of this cluster: it once made the planner divide by zero."""


@QUICK
@example(story=NO_SIZE_FITS, config=SchedulerConfig())
@given(story=stories(), config=CONFIGS)
def test_plans_are_whole_offers_are_honoured_and_rejections_leave_no_trace(
    world: ModuleType, plan_checker: ModuleType, story, config
) -> None:
    sizes, arrivals, others, reports, started = story
    others = [(when, event) for when, event in others if not isinstance(event, ev.NodeJoined)]
    scheduler = _Watching(config, _nodes(sizes))
    scheduler.checker, scheduler.sizes = plan_checker, sizes
    play = world.World(scheduler, reports=reports, gang_started=started)
    for job in arrivals:
        play.submit(job.submitted_s, job)
    for when, event in others:
        play.at(when, event)
    play.run()
    assert not play.late()


def _promises_hold_over_a_restart(world: ModuleType, story: tuple, crash: float) -> None:
    sizes, arrivals, others, reports, started = story
    play = world.World(Scheduler(None, _nodes(sizes)), reports=reports, gang_started=started)
    for job in arrivals:
        play.submit(job.submitted_s, job)
    for when, event in others:
        play.at(when, event)
    play.run(until=crash)
    play.now = crash
    states, nodes = play.scheduler.states(), play.scheduler.nodes()
    play.scheduler = Scheduler(None, nodes)
    play.obey(play.scheduler.restore(states, crash))
    play.run()
    assert not play.late()


@QUICK
@given(story=stories(), crash=st.floats(1000.0, 1500.0))
def test_a_restored_scheduler_goes_on_and_keeps_the_promises(world: ModuleType, story, crash: float) -> None:
    _promises_hold_over_a_restart(world, story, crash)


@pytest.mark.soak
@LONG
@given(story=stories(), crash=st.floats(1000.0, 1500.0))
def test_promises_hold_over_a_restart_at_length(world: ModuleType, story, crash: float) -> None:
    _promises_hold_over_a_restart(world, story, crash)


@QUICK
@given(story=stories())
def test_a_margin_covers_wake_ups_that_come_late(world: ModuleType, story) -> None:
    play = _tell(world, story, SchedulerConfig(deadline_margin_s=15.0), lag_s=0.4)
    assert not play.late()


@QUICK
@given(story=stories(), factor=st.floats(0.88, 1.0))
def test_a_stated_error_of_the_curves_covers_slower_jobs(world: ModuleType, story, factor: float) -> None:
    """exp(-0.1 z) is 0.8797 at nine in ten."""
    sizes, arrivals, _, _, started = story
    play = world.World(Scheduler(SchedulerConfig(speed_sigma=0.1), _nodes(sizes)), reports=True, gang_started=started)
    for job in arrivals:
        play.submit(job.submitted_s, job, {n: speed * factor for n, speed in job.curve.steps_per_s.items()})
    play.run()
    assert not play.late()


@QUICK
@given(
    story=stories(),
    factor=st.floats(0.88, 1.1),
    outlier=st.lists(st.tuples(st.integers(0, 6), st.floats(0.3, 3.0)), min_size=1, max_size=4),
)
def test_one_noisy_report_breaks_no_promise_and_announces_no_risk(world: ModuleType, story, factor, outlier) -> None:
    """Speeds are inside the stated error, and one report of each job says something else, a third or thrice as much."""
    sizes, arrivals, _, _, started = story
    scheduler = Scheduler(SchedulerConfig.served(explore_gain=0.0), _nodes(sizes))
    play = world.World(scheduler, reports=True, gang_started=started, outlier=outlier)
    for job in arrivals:
        play.submit(job.submitted_s, job, {n: speed * factor for n, speed in job.curve.steps_per_s.items()})
    play.run()
    assert not play.late()
    assert not [decision for _, decision in play.log if isinstance(decision, de.AtRisk)]


def _crowds(arrivals: list[Job], apart_s: float) -> list[list[Job]]:
    """The same jobs, but those that come soon after another one come with it."""
    found: list[list[Job]] = []
    for job in arrivals:
        if found and job.submitted_s - found[-1][0].submitted_s <= apart_s:
            later_s = found[-1][0].submitted_s - job.submitted_s
            deadline_s = None if job.deadline_s is None else job.deadline_s + later_s
            found[-1].append(replace(job, submitted_s=job.submitted_s + later_s, deadline_s=deadline_s))
        else:
            found.append([job])
    return found


class _WatchingCrowds(_Watching):
    def submitted(self, jobs, now):
        jobs, before = list(jobs), self.states()
        decisions = super().submitted(jobs, now)
        verdicts = [d.job_id for d in decisions if isinstance(d, de.Admit | de.Reject | de.Wait)]
        assert [job.job_id for job in jobs if job.job_id in verdicts] == [job.job_id for job in jobs]
        if all(isinstance(d, de.Reject | de.WakeMeAt) for d in decisions):
            assert self.states() == before, "rejected arrivals changed something"
        self._plans(now)
        return decisions


@QUICK
@given(story=stories(), apart_s=st.sampled_from([30.0, 200.0, math.inf]))
def test_promises_hold_for_those_who_come_together(world: ModuleType, plan_checker: ModuleType, story, apart_s) -> None:
    sizes, arrivals, others, reports, started = story
    others = [(when, event) for when, event in others if not isinstance(event, ev.NodeJoined)]
    scheduler = _WatchingCrowds(None, _nodes(sizes))
    scheduler.checker, scheduler.sizes = plan_checker, sizes
    play = world.World(scheduler, reports=reports, gang_started=started, joint=True)
    for crowd in _crowds(arrivals, apart_s):
        play.submit_together(crowd[0].submitted_s, crowd)
    for when, event in others:
        play.at(when, event)
    play.run()
    assert not play.late()
    assert not [d for _, d in play.log if isinstance(d, de.AtRisk)]


@QUICK
@given(story=stories())
def test_whoever_comes_alone_is_decided_on_as_ever(world: ModuleType, story) -> None:
    sizes, arrivals, others, reports, started = story
    alone = _tell(world, story)
    play = world.World(Scheduler(None, _nodes(sizes)), reports=reports, gang_started=started)
    for job in arrivals:
        play.submit_together(job.submitted_s, [job])
    for when, event in others:
        play.at(when, event)
    play.run()
    assert play.log == alone.log


def test_the_first_of_a_crowd_that_takes_the_last_slots_is_promised_and_the_others_hear_why(world: ModuleType) -> None:
    play = world.World(Scheduler(None, _nodes([2])))
    job = replace(_best_effort(0, 100.0), deadline_s=1150.0)
    play.submit_together(1000.0, [replace(job, job_id=f"j{number}") for number in range(4)])
    play.run(until=1000.0)
    verdicts = [play.verdict(f"j{number}") for number in range(4)]
    assert [type(verdict) for verdict in verdicts] == [de.Admit, de.Admit, de.Reject, de.Reject]
    assert all(verdict.plan.segments for verdict in verdicts[:2])
    assert "beside the 2 promised jobs" in str(verdicts[3].reason)
    play.run()
    assert not play.late()


def test_a_crowd_does_not_take_the_turn_of_best_effort_that_waited_long(world: ModuleType) -> None:
    """Its course has no end, and the first of the crowd is booked after the turn: the second may not come before."""
    play = world.World(Scheduler(SchedulerConfig(ageing_s=100.0), _nodes([1])))
    one = replace(_best_effort(0), costs=RescaleCosts())
    play.submit(1000.0, replace(one, job_id="first", deadline_s=1150.0, total_steps=120.0))
    play.submit(1000.0, replace(one, job_id="aged", total_steps=5000.0))
    fits = replace(one, job_id="after", deadline_s=1330.0, total_steps=50.0)
    play.submit_together(1130.0, [fits, replace(fits, job_id="at once", deadline_s=1190.0)])
    play.run(until=1131.0)
    assert isinstance(play.verdict("after"), de.Admit)
    assert isinstance(play.verdict("at once"), de.Reject)
    assert play.runs["aged"].slots, "it goes on"
