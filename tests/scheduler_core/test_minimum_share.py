"""Minimum satisfactory share by hand."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.model.work import Holding, Work, course_of, legs_of, plan_of
from elasticflow_airflow.scheduler_core.planning.minimum_share import (
    Filling,
    ShareShape,
    ShareStretch,
    fill,
    minimum_share,
)


@pytest.fixture
def free() -> FreeCapacity:
    return FreeCapacity(Layout([Node(node_id="n", slots=4)]), 0.0)


def work(**fields: object) -> Work:
    plain = Work(
        job_id="a",
        remaining=100.0,
        since_s=0.0,
        mask=0,
        size=0,
        speed_now=0.0,
        starting=False,
        sizes=(1, 2, 4),
        speeds={1: 1.0, 2: 1.6, 4: 2.5},
        startup_s=0.0,
        pause_s=0.0,
        tail_s=0.0,
        limit_s=100.0,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # tests name the fields


def test_the_smallest_level_that_meets_the_deadline_is_taken(free: FreeCapacity) -> None:
    assert minimum_share(free, work(), 0.0) == [ShareStretch(0.0, 100.0, 1)]
    assert minimum_share(free, work(limit_s=99.0), 0.0) == [ShareStretch(0.0, 62.5, 2)]
    assert minimum_share(free, work(limit_s=62.0), 0.0) == [ShareStretch(0.0, 40.0, 4)]
    assert minimum_share(free, work(limit_s=39.0), 0.0) is None


def test_start_up_and_tail_count(free: FreeCapacity) -> None:
    assert minimum_share(free, work(startup_s=10.0, tail_s=5.0), 0.0) == [ShareStretch(0.0, 77.5, 2)]


def test_keeping_the_size_costs_nothing_and_changing_it_a_pause(free: FreeCapacity) -> None:
    running = work(mask=0b11, size=2, speed_now=1.6, pause_s=20.0, limit_s=62.5)
    assert minimum_share(free, running, 0.0) == [ShareStretch(0.0, 62.5, 2)]
    assert minimum_share(free, replace(running, limit_s=62.0), 0.0) == [ShareStretch(0.0, 60.0, 4)]


def test_a_level_follows_what_is_free(free: FreeCapacity) -> None:
    free.reserve(0.0, 50.0, 2)
    # two until 50 (80 steps), then four: 20 / 2.5 = 8 s
    assert minimum_share(free, work(limit_s=60.0), 0.0) == [ShareStretch(0.0, 50.0, 2), ShareStretch(50.0, 58.0, 4)]
    # with a pause of 5 s the change still pays for the deadline
    assert minimum_share(free, work(limit_s=63.5, pause_s=5.0, sizes=(1, 4)), 0.0) is None


def test_extra_pauses_are_paid(free: FreeCapacity) -> None:
    assert minimum_share(free, work(limit_s=100.0), 0.0, 5.0) == [ShareStretch(0.0, 67.5, 2)]


def test_jobs_are_filled_one_after_another_and_the_first_that_does_not_fit_is_named(free: FreeCapacity) -> None:
    first, second = work(job_id="x", limit_s=41.0), work(job_id="y", limit_s=79.0)
    shares, unfit = fill(free, [first, second], 0.0, {})
    assert shares == {"x": [ShareStretch(0.0, 40.0, 4)]}
    assert unfit == "y"  # from 40 on, 39 s with four are 97.5 steps


def test_the_walk_through_holdings_pays_every_change() -> None:
    job = work(startup_s=10.0, pause_s=5.0, tail_s=2.0, limit_s=1e9)
    holdings = [Holding(0.0, 30.0, 0b1), Holding(30.0, 50.0, 0b11), Holding(60.0, 200.0, 0b1)]
    legs, finish = legs_of(job, holdings, 0.0)
    assert [leg.ready_s for leg in legs] == [10.0, 35.0, 70.0]  # start-up, pause, start-up after the gap
    assert finish == 70.0 + 100 - 20 - 1.6 * 15
    plan = plan_of(job, course_of(job, holdings, 0.0), 0.0)
    assert [segment.lost_s for segment in plan.segments] == [10.0, 5.0, 10.0]
    assert plan.promised_s == plan.finish_s + 2.0


def test_a_pause_under_way_is_paid_to_its_end_and_a_start_up_again_when_disturbed() -> None:
    starting = work(mask=0b1, size=1, speed_now=1.0, since_s=20.0, starting=True, startup_s=20.0, pause_s=5.0)
    assert legs_of(starting, [Holding(10.0, 500.0, 0b1)], 10.0)[1] == 120.0
    assert legs_of(starting, [Holding(10.0, 500.0, 0b11)], 10.0)[1] == 10.0 + 20.0 + 62.5


def slot_seconds(shares: list[ShareStretch]) -> float:
    return sum(share.size * (share.end_s - share.start_s) for share in shares)


@pytest.mark.parametrize("shape", [ShareShape.FALLING, ShareShape.RISING])
def test_two_levels_end_just_in_time_and_cost_fewer_slot_seconds(free: FreeCapacity, shape: ShareShape) -> None:
    """2 would end at 62.5: 125 slot-seconds. 1 for 68 s and 2 for 20 s make 100 steps, too: 108 (no pause here)."""
    asked = work(limit_s=88.0)
    shares, unfit = fill(free, [asked], 0.0, {}, shape)
    assert unfit is None
    found = shares["a"]
    assert [share.size for share in found] == ([2, 1] if shape is ShareShape.FALLING else [1, 2])
    assert found[-1].end_s == pytest.approx(88.0, abs=1.5)
    assert found[-1].end_s <= 88.0
    assert slot_seconds(found) == pytest.approx(108.0, abs=2.0)
    course = course_of(asked, [Holding(s.start_s, s.end_s, (1 << s.size) - 1) for s in found], 0.0)
    assert course.promised_s <= 88.0 + 1e-5


def test_two_levels_only_where_the_pause_between_them_is_repaid(free: FreeCapacity) -> None:
    dear = work(limit_s=88.0, pause_s=30.0, startup_s=0.0)
    assert fill(free, [dear], 0.0, {}, ShareShape.FALLING)[0]["a"] == [ShareStretch(0.0, 62.5, 2)]


def test_two_levels_make_room_where_one_does_not() -> None:
    """Three jobs that each need 2 at some time, on four slots: one level each leaves the last without."""
    layout = Layout([Node(node_id="n", slots=4)])
    works = [work(job_id=name, limit_s=88.0) for name in ("a", "b", "c")]
    assert fill(FreeCapacity(layout, 0.0), works, 0.0, {})[1] == "c"
    assert fill(FreeCapacity(layout, 0.0), works, 0.0, {}, ShareShape.FALLING)[1] is None


@pytest.mark.parametrize("seed", range(20))
def test_what_orders_have_in_common_is_filled_once_and_says_the_same(seed: int) -> None:
    """Orders that begin like the last one, end before it, or differ get the shares that each gets by itself."""
    chance, layout = random.Random(seed), Layout([Node(node_id="n", slots=8)])
    speeds = {size: size**0.8 for size in (1, 2, 4, 8)}
    works = [
        work(
            job_id=f"j{i}",
            remaining=chance.uniform(1.0, 400.0),
            sizes=(sizes := chance.choice([(1,), (2,), (1, 2), (1, 2, 4), (2, 4, 8)])),
            speeds={size: speeds[size] for size in sizes},
            startup_s=10.0,
            pause_s=5.0,
            tail_s=2.0,
            limit_s=chance.uniform(100.0, 1500.0),
        )
        for i in range(14)
    ]
    filling, ordered = Filling(layout, 0.0), works.copy()
    for _ in range(60):
        ordered.insert(chance.randrange(14), ordered.pop(chance.randrange(14)))
        asked = ordered[: chance.choice([14, 14, chance.randrange(1, 14)])]
        extra = {f"j{chance.randrange(14)}": 2} if chance.random() < 0.3 else {}
        shape, spare = chance.choice([ShareShape.FLAT, *ShareShape]), chance.choice([0, 0, 0, 2])
        alone = FreeCapacity(layout, 0.0)
        assert filling.shares(asked, extra, shape, spare) == fill(alone, asked, 0.0, extra, shape, spare)
        alone = FreeCapacity(layout, 0.0)
        fill(alone, asked, 0.0, {})
        left = filling.left(asked, layout.largest_block)
        count = len(alone.times)
        assert left.times == alone.times
        assert (left.rows[:, :count] == alone.rows[:, :count]).all()
        assert (left.largest[:count] == alone.largest[:count]).all()
        left.reserve(0.0, 1e6, 1)  # what was returned is a copy


def test_a_copy_fills_by_itself() -> None:
    filling = Filling(Layout([Node(node_id="n", slots=4)]), 0.0)
    asked = work()
    filling.shares([asked], {})
    twin = deepcopy(filling)
    assert twin.shares([asked], {}) == filling.shares([asked], {})
    assert twin.free is not filling.free


def test_what_is_withheld_is_taken_from_every_size_where_it_is_expected(free: FreeCapacity) -> None:
    free.reserve(5.0, 15.0, 2)
    free.withhold(np.array([0.0, 10.0, 20.0, 30.0]), np.array([1, 0, 9], dtype=np.int32))
    sizes = (1, 2, 4)
    before = [(0.0, 5.0, 2), (5.0, 10.0, 1), (10.0, 15.0, 2), (15.0, 20.0, 4)]
    assert free.placeable(sizes, 0.0, 40.0) == [*before, (20.0, 30.0, 0), (30.0, 40.0, 4)]
    assert free.slot_seconds(0.0, 40.0) == 5 * 3 + 5 * 1 + 5 * 2 + 5 * 4 + 10 * 4
    free.reserve(12.0, 13.0, 1)
    assert free.fits(12.0, 13.0, 1)
    assert not free.fits(12.0, 13.0, 2)
