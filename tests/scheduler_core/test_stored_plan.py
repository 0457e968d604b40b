"""The bookings of the stored plan, adapted to what has changed, are those that booking all anew would give."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import (
    Job,
    Node,
    OnReject,
    Placement,
    RescaleCosts,
    ScalingCurve,
)
from elasticflow_airflow.scheduler_core.model.work import Course, Holding
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft


def steps_of(book: Bookings) -> list[tuple[float, int]]:
    """The times at which other slots are taken, and which."""
    found: list[tuple[float, int]] = []
    for when_s, taken in zip(book.times, book.taken, strict=True):
        if not found or found[-1][1] != taken:
            found.append((when_s, taken))
    return found


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Course]:
    """Courses on slots of their own, with gaps, of up to three holdings each."""
    courses: dict[str, Course] = {}
    for slot in range(draw(st.integers(1, 6))):
        when_s = 0.0
        for turn in range(draw(st.integers(0, 3))):
            holdings: list[Holding] = []
            for _ in range(draw(st.integers(1, 3))):
                start_s = when_s + draw(st.integers(0, 3))
                when_s = start_s + draw(st.integers(1, 4))
                holdings.append(Holding(start_s, when_s, 1 << slot))
            courses[f"{slot}.{turn}"] = Course(tuple(holdings), when_s, when_s)
    return courses


@given(before=plans(), after=plans(), kept=st.sets(st.integers(0, 20)), now_s=st.integers(0, 12), busy=st.booleans())
@settings(max_examples=500, deadline=None)
def test_adapted_bookings_are_those_made_anew(
    before: dict[str, Course], after: dict[str, Course], kept: set[int], now_s: int, busy: bool
) -> None:
    layout = Layout([Node(node_id="n", slots=8, busy=frozenset({7} if busy else ()))])
    slots = {index % 6 for index in kept}  # those on which nothing changes: only what is over has been cut off
    courses = {name: course for name, course in after.items() if int(name[0]) not in slots}
    for name, course in before.items():
        if int(name[0]) in slots:
            left = tuple(h for h in course.holdings if h.end_s > now_s)
            courses[name] = Course(left, course.finish_s, course.promised_s)
    draft, anew = Draft(layout, 0.0, before), Draft(layout, float(now_s), courses)
    stood = steps_of(draft.book)
    adapted = draft.later(layout, float(now_s), courses)
    assert steps_of(adapted.book) == steps_of(anew.book)
    assert adapted.courses == anew.courses
    for job_id in list(adapted.courses):
        adapted.drop(job_id)
    assert steps_of(draft.book) == stood
    assert draft.courses == before


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_stored_plan_is_adapted_truly(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Jobs come and go, are slower than planned, lose workers, and nodes change; no slot is ever booked twice."""
    adapted: list[bool] = []
    later = Draft.later

    def compared(draft: Draft, layout: Layout, now: float, courses: Mapping[str, Course]) -> Draft:
        found, anew = later(draft, layout, now, courses), Draft(layout, now, courses)
        assert steps_of(found.book) == steps_of(anew.book)
        assert anew.book.is_disjoint
        adapted.append(found.book.taken[0] != 0)
        return found

    monkeypatch.setattr(Draft, "later", compared)
    chaos, now = random.Random(seed), 0.0
    nodes = [Node(node_id=f"n{i}", slots=4) for i in range(4)]
    scheduler = Scheduler(SchedulerConfig(), nodes)
    for number in range(60):
        now += chaos.uniform(0.0, 60.0)
        speed = chaos.uniform(0.5, 2.0)
        job = Job(
            job_id=f"j{number}",
            submitted_s=now,
            deadline_s=None if number % 5 == 0 else now + chaos.uniform(100.0, 2000.0),
            total_steps=speed * chaos.uniform(20.0, 900.0),
            curve=ScalingCurve({1: speed, 2: 1.8 * speed, 4: 3.0 * speed}),
            costs=RescaleCosts(startup_s=5.0, pause_s=2.0, tail_s=1.0),
            on_reject=chaos.choice(list(OnReject)),
            latest_deadline_s=now + 4000.0,
        )
        scheduler.handle(ev.JobSubmitted(job), now)
        for state in scheduler.states():
            luck, size = chaos.random(), state.placement.workers
            if not size or luck > 0.3:
                continue
            now += 0.1
            if luck < 0.05:
                scheduler.handle(ev.JobFinished(state.job.job_id), now)
            elif luck < 0.08:  # Some of its workers have died, and the others go on.
                left = Placement(state.placement.slots[: max(1, size // 2)])
                scheduler.handle(ev.GangReformed(state.job.job_id, left), now)
            elif luck < 0.1:
                scheduler.handle(ev.GangLost(state.job.job_id), now)
            else:
                left = (state.remaining_steps or 0.0) * chaos.uniform(0.9, 1.1)
                scheduler.handle(ev.JobProgressed(state.job.job_id, left, 0.9 * speed), now)
        if number == 30:
            scheduler.handle(ev.NodeDraining("n0", now + 500.0), now)
        if number == 45:
            scheduler.handle(ev.NodeLost("n0"), now)
            scheduler.handle(ev.NodeJoined(nodes[0]), now)
    assert len(adapted) > 100
