"""Joint plans that are their own proof: filled by counts, placed on slots, the pause of every migration checked."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from operator import attrgetter
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding, Work, course_of
from elasticflow_airflow.scheduler_core.planning.allocation import share_later
from elasticflow_airflow.scheduler_core.planning.minimum_share import Filling, ShareShape
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.share_placement import NoPlaceError, place

_SPARE = 3
"""How many spare pauses all jobs get in the second round, and how many more in each further one."""
_MANY = 256
"""From this many jobs on, some are surely migrated, and the first round has spare pauses, too."""

_FEW = 8
"""So many jobs that cannot pay for their migrations get other slots, if there are any."""


def prove(
    layout: Layout,
    filling: Filling,
    ordered: Sequence[Work],
    now: float,
    avoid: int,
    rounds: int,
    shape: ShareShape = ShareShape.FLAT,
) -> tuple[dict[str, Course] | None, str | None]:
    """Plan all jobs in the given order so that each meets its limit; (None, id that did not fit) if that fails.

    A job that was migrated holds its last slots longer, to pay for that, if they are free. If not, each round fills
    with as many extra pauses per job as it had migrations in the previous round's placement, and with spare ones for
    all jobs, as long as these cost no promise: among many jobs, other jobs are migrated in each round. ``filling`` is
    of the same cluster at the same moment.
    """
    extra: dict[str, int] = {}
    late: str | None = None
    spare, more = _SPARE if len(ordered) >= _MANY else 0, _SPARE
    for _ in range(rounds):
        shares, unfit = filling.shares(ordered, extra, shape, spare)
        if unfit is not None and spare:
            spare = more = 0
            shares, unfit = filling.shares(ordered, extra, shape)
        if unfit is not None:
            return None, unfit
        try:
            holdings, migrations = place(layout, ordered, shares, now, avoid)
        except NoPlaceError:
            return None, late
        courses = {work.job_id: course_of(work, holdings[work.job_id], now) for work in ordered}
        unpaid = _unpaid(layout, courses, ordered, now)
        if not unpaid:
            return courses, None
        for late in unpaid:
            extra[late] = max(extra.get(late, 0) + 1, migrations.get(late, 0))
        spare += more
    return None, late


def _unpaid(layout: Layout, courses: dict[str, Course], works: Sequence[Work], now: float) -> list[str]:
    """Return the jobs that end late because of their migrations, and cannot be helped where the others leave room.

    Those that can hold their last slots for longer, do; few others get other slots. ``courses`` changes.
    """
    late = [work for work in works if courses[work.job_id].promised_s > work.limit_s + TOLERANCE_S]
    if not late:
        return []
    draft = Draft(layout, now, courses)
    rest: list[Work] = []
    for work in late:
        course = _longer(draft, work, courses[work.job_id].holdings)
        if course is None:
            rest.append(work)
        else:
            courses[work.job_id] = course
    if len(rest) > _FEW:
        return [work.job_id for work in rest]
    unpaid: list[str] = []
    for work in rest:
        before = draft.drop(work.job_id)
        course = None if work.release_s > now else share_later(draft, work, work.limit_s)
        if course is not None:
            draft.put(work.job_id, course)
            courses[work.job_id] = course
        else:
            unpaid.append(work.job_id)
            if before is not None:
                draft.put(work.job_id, before)
    return unpaid


def _longer(draft: Draft, work: Work, holdings: Sequence[Holding]) -> Course | None:
    """Book the last slots of a late job for as long as it needs them; None if that is too late, or they are taken."""
    if not holdings:
        return None
    *before, last = holdings
    course = course_of(work, [*before, last._replace(end_s=INFINITY)], draft.now)
    if course.promised_s > work.limit_s + TOLERANCE_S:
        return None
    if draft.book.free_until(last.mask, last.end_s) < course.promised_s:
        return None
    draft.drop(work.job_id)
    draft.put(work.job_id, course)
    return course


limit_and_id = attrgetter("limit_s", "job_id")
"""The sort key of :func:`deadline_order`."""


def deadline_order(works: Sequence[Work]) -> list[Work]:
    """Return the earliest limit first; ties are ordered by id, so that the order does not depend on history."""
    return sorted(works, key=limit_and_id)


class Attempt(NamedTuple):
    """A filling order, and the shape of its shares."""

    order: list[Work]
    shape: ShareShape


def rescues(works: Sequence[Work], now: float, count: int) -> Generator[Attempt, str | None, None]:
    """Yield attempts for when the deadline order with one level per job fails; deterministic for the same jobs.

    First the deadline order with two levels, then up to ``count`` other orders with one and with two: by the latest
    possible start at the fastest size, and at the smallest; then alternately random perturbations of the deadline order
    and, as in squeaky wheel optimization (Joslin and Clements, JAIR 1999), the previous order with the job that did not
    fit filled earlier. The caller sends the id of that job after each attempt. Of many jobs, falling shares are not
    tried: they take the most time and seldom help.
    """
    by_id = {work.job_id: work for work in works}
    first = [work.job_id for work in deadline_order(works)]
    shapes = (ShareShape.FLAT, ShareShape.RISING) if len(works) >= _MANY else tuple(ShareShape)
    for shape in shapes[1:]:
        yield Attempt([by_id[job_id] for job_id in first], shape)

    def slack(work: Work, size: int) -> float:
        return work.limit_s - work.left_at(now) / work.speeds[size]

    chaos = random.Random(len(works))
    seen = {tuple(first)}
    made, last, unfit = 0, first, None
    for attempt in range(4 * count):
        if made >= count:
            return
        order: list[str] | None
        if attempt == 0:
            order = [w.job_id for w in sorted(works, key=lambda w: (slack(w, w.sizes[-1]), w.job_id))]
        elif attempt == 1:
            order = [w.job_id for w in sorted(works, key=lambda w: (slack(w, w.sizes[0]), w.job_id))]
        else:
            order = _promoted(last, unfit, seen) if attempt % 2 else None
            if order is None:
                blur = {w.job_id: chaos.uniform(-0.3, 0.3) * max(1.0, w.limit_s - now) for w in works}
                order = [w.job_id for w in sorted(works, key=lambda w: (w.limit_s + blur[w.job_id], w.job_id))]
        if tuple(order) not in seen:
            seen.add(tuple(order))
            made += 1
            for shape in shapes:
                unfit = yield Attempt([by_id[job_id] for job_id in order], shape)
            last = order


def _promoted(order: list[str], unfit: str | None, seen: set[tuple[str, ...]]) -> list[str] | None:
    """Return the order with ``unfit`` at half its position, or further to the front; None if all these were tried."""
    if unfit is None:
        return None
    place = order.index(unfit)
    while place > 0:
        place //= 2
        rest = [job_id for job_id in order if job_id != unfit]
        rest.insert(place, unfit)
        if tuple(rest) not in seen:
            return rest
    return None
