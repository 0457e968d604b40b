"""Joint plans that prove themselves: filled by counts, placed on slots, every pause of every migration checked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from elasticflow_airflow.scheduler_core.filling import fill
from elasticflow_airflow.scheduler_core.placement import Layout
from elasticflow_airflow.scheduler_core.rolling import NoPlaceError, place
from elasticflow_airflow.scheduler_core.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.work import TOLERANCE_S, Course, Work, course_of


def prove(
    layout: Layout, free: FreeCapacity, ordered: Sequence[Work], now: float, avoid: int, rounds: int
) -> tuple[dict[str, Course] | None, str | None]:
    """Plan all jobs in the given order so that each meets its limit; (None, who did not fit) if that fails.

    Each round fills with as many extra pauses per job as placing the round before made migrations. ``free`` is the
    capacity without any of the jobs; it stays as it is.
    """
    extra: dict[str, int] = {}
    late: str | None = None
    for _ in range(rounds):
        shares, unfit = fill(free.copy(), ordered, now, extra)
        if unfit is not None:
            return None, unfit
        try:
            holdings, migrations = place(layout, ordered, shares, now, avoid)
        except NoPlaceError:
            return None, late
        courses: dict[str, Course] = {}
        late = None
        for work in ordered:
            course = course_of(work, holdings[work.job_id], now)
            courses[work.job_id] = course
            if course.promised_s > work.limit_s + TOLERANCE_S:
                late = work.job_id
                extra[work.job_id] = max(extra.get(work.job_id, 0) + 1, migrations.get(work.job_id, 0))
        if late is None:
            return courses, None
    return None, late


def deadline_order(works: Sequence[Work]) -> list[Work]:
    """Earliest limit first; equal ones by id, so that the order does not depend on history."""
    return sorted(works, key=lambda work: (work.limit_s, work.job_id))


def rescue_orders(works: Sequence[Work], now: float, count: int) -> Iterator[list[Work]]:
    """Up to ``count`` other orders of filling, in the sequence in which they are worth trying.

    By the latest possible start at the fastest size, at the smallest size, then random perturbations of the deadline
    order; always the same ones for the same jobs.
    """
    first = [work.job_id for work in deadline_order(works)]
    seen = {tuple(first)}

    def slack(work: Work, size: int) -> float:
        return work.limit_s - work.left_at(now) / work.speeds[size]

    chaos = random.Random(len(works))
    made = 0
    for attempt in range(4 * count):
        if made >= count:
            return
        if attempt == 0:
            order = sorted(works, key=lambda w: (slack(w, w.sizes[-1]), w.job_id))
        elif attempt == 1:
            order = sorted(works, key=lambda w: (slack(w, w.sizes[0]), w.job_id))
        else:
            blur = {w.job_id: chaos.uniform(-0.3, 0.3) * max(1.0, w.limit_s - now) for w in works}
            order = sorted(works, key=lambda w: (w.limit_s + blur[w.job_id], w.job_id))
        name = tuple(work.job_id for work in order)
        if name not in seen:
            seen.add(name)
            made += 1
            yield order
