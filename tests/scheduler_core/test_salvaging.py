"""More is promised than can be kept: what is kept is proven, the older promise first, and nobody is forgotten."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.cluster.free_windows import first_window
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings, FreeCapacity
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Node, Phase, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.model.work import Holding, Work
from elasticflow_airflow.scheduler_core.planning.minimum_share import Filling
from elasticflow_airflow.scheduler_core.planning.salvaging import salvage

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NOW = 1000.0


@st.composite
def jobs(draw: st.DrawFn, most: int = 24) -> list[Job]:
    """Jobs whose deadlines each can keep alone, mostly too many of them."""
    found = []
    for number in range(draw(st.integers(1, most))):
        least = draw(st.sampled_from([1, 1, 2, 4]))
        steps = draw(st.floats(10.0, 500.0))
        costs = RescaleCosts(
            startup_s=draw(st.sampled_from([0.0, 20.0])), pause_s=draw(st.sampled_from([0.0, 5.0, 40.0]))
        )
        found.append(
            Job(
                job_id=f"j{number:02}",
                submitted_s=NOW,
                deadline_s=NOW + costs.startup_s + steps / least**0.8 * draw(st.floats(1.0, 4.0)),
                total_steps=steps,
                curve=ScalingCurve({size: size**0.8 for size in (1, 2, 4, 8)}),
                min_workers=least,
                max_workers=draw(st.sampled_from([least, 8])),
                costs=costs,
            )
        )
    return found


def promised(found: list[Job]) -> list[JobState]:
    return [
        JobState(
            job=job,
            phase=Phase.ADMITTED,
            best_effort=False,
            remaining_steps=job.total_steps,
            as_of_s=NOW,
            number=number,
            promise=number,
        )
        for number, job in enumerate(found)
    ]


def nodes(sizes: list[int]) -> list[Node]:
    return [Node(node_id=f"n{number}", slots=size) for number, size in enumerate(sizes)]


SHAPES = st.sampled_from([[2], [4], [4, 4], [8], [3, 3], [8, 8]])


@QUICK
@given(found=jobs(), sizes=SHAPES)
def test_whoever_is_kept_has_a_proof_and_everybody_else_is_announced_and_finished(
    plan_checker: ModuleType, found: list[Job], sizes: list[int]
) -> None:
    scheduler = Scheduler(None, nodes(sizes))
    decisions = scheduler.restore(promised(found), NOW)
    at_risk = {state.job.job_id for state in scheduler.states() if state.at_risk}
    assert {d.job_id for d in decisions if isinstance(d, de.AtRisk)} == at_risk
    largest = max(plan_checker.buddy_blocks(sizes))
    plans = {}
    for job in found:
        plan = scheduler.plan_of(job.job_id)
        if job.min_workers > largest:
            assert job.job_id in at_risk
            continue
        assert plan is not None, f"{job.job_id} is forgotten"
        plans[job.job_id] = (replace(job, deadline_s=None) if job.job_id in at_risk else job, plan)
    assert not plan_checker.check_joint(plans, sizes, NOW)


@QUICK
@given(found=jobs(), sizes=SHAPES)
def test_a_promise_that_everybody_shares_is_kept_for_the_oldest(found: list[Job], sizes: list[int]) -> None:
    """Equal jobs with one deadline: those who are kept are older than those who are not."""
    same = [replace(found[0], job_id=job.job_id) for job in found]
    scheduler = Scheduler(None, nodes(sizes))
    scheduler.restore(promised(same), NOW)
    risks = [state.at_risk for state in scheduler.states()]
    assert risks == sorted(risks)


@QUICK
@given(found=jobs(), sizes=SHAPES, gone=st.integers(1, 3))
def test_stored_plans_of_a_larger_cluster_do_not_outlive_it(
    plan_checker: ModuleType, found: list[Job], sizes: list[int], gone: int
) -> None:
    larger = Scheduler(None, nodes(sizes + [sizes[0]] * gone))
    larger.restore(promised(found), NOW)
    scheduler = Scheduler(None, nodes(sizes))
    scheduler.restore(larger.states(), NOW)
    plans = [plan for job in found if (plan := scheduler.plan_of(job.job_id)) is not None]
    assert not plan_checker.check_capacity(plans, plan_checker.buddy_blocks(sizes))
    for state in scheduler.states():
        plan = scheduler.plan_of(state.job.job_id)
        if not state.at_risk:
            assert plan is not None
            assert plan.promised_s <= state.job.deadline_s + 1e-3


def _work(number: int, steps: float, limit_s: float, size: int = 1) -> Work:
    return Work(f"j{number}", steps, 0.0, 0, 0, 0.0, False, (size,), {size: 1.0}, 0.0, 0.0, 0.0, limit_s)


def test_a_wide_old_promise_is_kept_instead_of_newer_ones_which_come_first() -> None:
    layout = Layout(nodes([4]))
    works = [_work(0, 100.0, 110.0, size=4), *[_work(number, 50.0, 60.0) for number in range(1, 5)]]
    kept = salvage(layout, Filling(layout, 0.0), works, {f"j{n}": n for n in range(5)}, 0.0, 0, 8)
    assert set(kept) == {"j0"}


def test_newer_promises_are_given_up_only_where_that_helps() -> None:
    layout = Layout(nodes([2]))
    works = [_work(0, 1000.0, 110.0), *[_work(number, 100.0, 110.0) for number in range(1, 3)]]
    kept = salvage(layout, Filling(layout, 0.0), works, {f"j{n}": n for n in range(3)}, 0.0, 0, 8)
    assert set(kept) == {"j1", "j2"}


BOOKED = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(1, 255)), max_size=25)


@QUICK
@given(booked=BOOKED, wanted=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 12)), max_size=8))
def test_a_window_is_the_first_there_is_whatever_was_looked_for_before(booked, wanted) -> None:
    layout = Layout(nodes([8]))
    book = Bookings(layout, 0.0)
    for start, length, mask in booked:
        mask &= book.free_over(start, start + length)
        if mask:
            book.take(Holding(float(start), float(start + length), mask))
    for size, length in wanted:
        found = first_window(book, layout, size, float(length), float("inf"))
        starts = [when for when in book.times if layout.find(book.free_over(when, when + length), size)]
        assert found is not None
        assert found[0] == starts[0]
        assert found[1].bit_count() == size
        book.take(Holding(found[0], found[0] + length, found[1]))


@QUICK
@given(gangs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10), st.sampled_from([1, 2, 4])), max_size=60))
def test_what_is_released_is_free_as_before(gangs) -> None:
    free = FreeCapacity(Layout(nodes([8, 4])), 0.0)
    kept, gone = gangs[::2], gangs[1::2]
    for start, length, size in gangs:
        free.reserve(float(start), float(start + length), size)
    for start, length, size in gone:
        free.release(float(start), float(start + length), size)
    other = FreeCapacity(Layout(nodes([8, 4])), 0.0)
    for start, length, size in kept:
        other.reserve(float(start), float(start + length), size)
    for when in range(32):
        mine, theirs = free.segment(when + 0.5), other.segment(when + 0.5)
        assert (free.rows[:, mine] == other.rows[:, theirs]).all()
        assert free.largest[mine] == other.largest[theirs]
