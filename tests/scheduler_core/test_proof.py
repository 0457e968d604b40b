"""Joint plans in which gangs are moved: each move is paid for, and many jobs are proven in a few rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model.values import Job, Node, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.model.work import Course, Work, course_of, plan_of
from elasticflow_airflow.scheduler_core.planning.minimum_share import Filling, ShareShape, ShareStretch, fill
from elasticflow_airflow.scheduler_core.planning.proof import deadline_order, prove

SPEEDS = {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0}


def work_of(job_id: str, steps: float, limit_s: float, mask: int = 0, most: int = 8) -> Work:
    size = mask.bit_count()
    speeds = {many: speed for many, speed in SPEEDS.items() if many <= most}
    return Work(
        job_id=job_id,
        remaining=steps,
        since_s=0.0,
        mask=mask,
        size=size,
        speed_now=SPEEDS.get(size, 0.0),
        starting=False,
        sizes=tuple(speeds),
        speeds=speeds,
        startup_s=15.0,
        pause_s=10.0,
        tail_s=0.0,
        limit_s=limit_s,
    )


def nodes_of(*slots: int) -> Layout:
    return Layout([Node(node_id=f"n{i}", slots=many) for i, many in enumerate(slots)])


def proven(layout: Layout, works: Sequence[Work], rounds: int) -> dict[str, Course]:
    courses, unfit = prove(layout, Filling(layout, 0.0), deadline_order(works), 0.0, 0, rounds)
    assert courses is not None, f"not proven: {unfit}"
    return courses


def disjoint(courses: Sequence[Course]) -> bool:
    holdings = sorted(holding for course in courses for holding in course.holdings)
    return not any(a.mask & b.mask and b.start_s < a.end_s for i, a in enumerate(holdings) for b in holdings[i + 1 :])


def test_who_was_moved_keeps_its_last_slots_longer() -> None:
    works = [work_of("a", 500.0, 100.0, 0b0001, 1), work_of("b", 500.0, 100.0, 0b0100, 1), work_of("c", 900.0, 65.0)]
    courses = proven(nodes_of(4), works, rounds=1)
    moved = next(work.job_id for work in works[:2] if courses[work.job_id].holdings[0].mask != work.mask)
    assert courses[moved].promised_s == 60.0  # 500 steps at 10 steps/s, and a pause of 10 s
    assert courses[moved].holdings[-1].end_s == 60.0
    assert disjoint(list(courses.values()))


def test_who_was_moved_and_cannot_be_paid_is_not_promised() -> None:
    works = [work_of("a", 500.0, 55.0, 0b0001, 1), work_of("b", 500.0, 55.0, 0b0100, 1), work_of("c", 900.0, 65.0)]
    layout = nodes_of(4)
    assert prove(layout, Filling(layout, 0.0), deadline_order(works), 0.0, 0, 8)[0] is None


def test_who_was_moved_and_cannot_stay_gets_other_slots() -> None:
    """``e`` trains where ``b`` must begin, and nobody can make room for a pause of it: it goes on after ``a``."""
    works = [
        work_of("a", 400.0, 65.0, 0b100000, 1),
        work_of("b", 900.0, 85.0, 0, 2),
        work_of("c", 600.0, 55.0, 0, 4),
        work_of("d", 600.0, 100.0, 0, 1),
        work_of("e", 200.0, 85.0, 0b1, 1),
    ]
    courses = proven(nodes_of(4, 2), works, rounds=1)
    assert disjoint(list(courses.values()))
    assert all(courses[work.job_id].promised_s <= work.limit_s for work in works)
    assert courses["e"].holdings[0].start_s == courses["a"].holdings[-1].end_s


def test_nobody_gets_other_slots_before_its_release() -> None:
    works = [
        work_of("a", 300.0, 100.0, 0b100000, 1),
        replace(work_of("b", 900.0, 75.0, 0, 4), release_s=30.0, since_s=30.0),
        replace(work_of("c", 400.0, 85.0, 0, 1), release_s=30.0, since_s=30.0),
        replace(work_of("d", 200.0, 60.0, 0, 4), release_s=20.0, since_s=20.0),
        work_of("e", 300.0, 140.0, 0b10, 4),
    ]
    layout = nodes_of(4, 2)
    for rounds in (1, 8):
        courses, _ = prove(layout, Filling(layout, 0.0), deadline_order(works), 0.0, 0, rounds)
        releases = {work.job_id: work.release_s for work in works}
        for job_id, course in (courses or {}).items():
            assert course.holdings[0].start_s >= releases[job_id]


def test_spare_pauses_delay_the_end_only_and_never_beyond_the_limit() -> None:
    free = FreeCapacity(nodes_of(2), 0.0)
    works = [work_of("near", 500.0, 70.0, most=1), work_of("far", 500.0, 1000.0, most=1)]
    shares, unfit = fill(free, works, 0.0, {}, ShareShape.FLAT, spare_pauses=3)
    assert unfit is None
    assert shares == {"near": [ShareStretch(0.0, 70.0, 1)], "far": [ShareStretch(0.0, 95.0, 1)]}


def test_spare_pauses_that_cost_a_promise_are_not_spent() -> None:
    """Every second job gets its slot when another leaves: a pause later would be too late."""
    first = [work_of(f"first{i:03}", 500.0, 100.0, most=1) for i in range(128)]
    second = [work_of(f"second{i:03}", 500.0, 135.0, most=1) for i in range(128)]
    courses = proven(nodes_of(*[8] * 16), [*first, *second], rounds=1)
    assert {courses[work.job_id].promised_s for work in first} == {65.0}
    assert {courses[work.job_id].promised_s for work in second} == {130.0}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_jobs_are_proven_in_a_few_rounds(plan_checker: ModuleType, seed: int) -> None:
    """Each plan pays for every move, and all of them fit together: by an arithmetic that is not the planner's."""
    chance, works, jobs = random.Random(seed), list[Work](), dict[str, Job]()
    for number in range(400):
        limit_s = math.exp(chance.uniform(math.log(600.0), math.log(21_600.0)))
        size = chance.choices([1, 2, 4, 8], [55, 25, 15, 5])[0]
        steps = chance.uniform(0.5, 0.85) * limit_s * SPEEDS[size]
        work = work_of(f"j{number:03}", steps, limit_s)
        works.append(work)
        jobs[work.job_id] = Job(
            job_id=work.job_id,
            submitted_s=0.0,
            deadline_s=limit_s,
            total_steps=steps,
            curve=ScalingCurve(SPEEDS),
            costs=RescaleCosts(startup_s=work.startup_s, pause_s=work.pause_s, tail_s=0.0),
            max_workers=8,
        )
    layout = nodes_of(*[8] * 56)
    courses = proven(layout, works, rounds=2)
    assert disjoint(list(courses.values()))
    plans = {}
    for work in works:
        course = courses[work.job_id]
        assert course_of(work, course.holdings, 0.0).promised_s <= work.limit_s + 1e-3
        plans[work.job_id] = (jobs[work.job_id], plan_of(work, course, 0.0))
    assert plan_checker.check_joint(plans, [8] * 56, 0.0) == []
