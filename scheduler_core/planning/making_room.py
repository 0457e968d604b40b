"""Makes room for a newcomer where slots are used beyond what promises need: one running job goes back to fewer slots.

Growth uses all slots of a busy cluster (ElasticFlow, ASPLOS 2023, section 4.2), so that nothing is free when a job
arrives. Most newcomers need only a few slots: taking them from the job that loses least leaves all other courses as
they are, where a fresh plan would fill and place all jobs anew. Marginal returns are weighed as growth weighs them.
Beside few jobs a fresh plan costs little, and weighs all against all (``SchedulerConfig.afresh_up_to``).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding, Work, course_of
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner

_TRIES = 4
"""How many jobs are tried for each size of the newcomer, those that lose least first."""


class _Concession(NamedTuple):
    """A job that can go on with fewer slots and keep its promise."""

    rate_s: float
    """The slot-seconds that it saves by each slot that it gives up, negated: what growing back would bring."""
    job_id: str
    work: Work
    size: int
    end_s: float

    @property
    def freed(self) -> int:
        return self.work.size - self.size


def make_room(planner: Planner, draft: Draft, newcomer: Work) -> Draft | None:
    """Return the draft with the newcomer on slots that another job gives up now; None if no single job makes room.

    Both keep their limits, with the pause of the change paid. The newcomer gets as many slots as save it more time than
    they saved the other. ``draft`` does not change.
    """
    if newcomer.size or len(planner.jobs) <= planner.config.afresh_up_to:
        return None  # Whether a job that holds slots already has to move, and what that costs, a fresh plan decides.
    starts = list(_starts(newcomer, planner.now))
    if not starts:
        return None
    concessions = [found for work in planner.promised() if (found := _concession(draft, work)) is not None]
    if not concessions:
        return None
    twin = draft.copy()
    for size, end_s, rate_s in reversed(starts):
        offers = (one for one in concessions if one.freed >= size and one.rate_s < rate_s)
        for one in nsmallest(_TRIES, offers):
            if _concede(twin, one, newcomer, size, end_s):
                return twin
    return None


def _starts(work: Work, now: float) -> Iterator[tuple[int, float, float]]:
    """Yield the sizes at which a newcomer keeps its limit, its end, and the slot-seconds that each more slot saves."""
    before: tuple[int, float] | None = None
    for size in work.sizes:
        end_s = work.end_s(now, size)
        if end_s <= work.limit_s:
            rate_s = INFINITY if before is None else (before[0] * before[1] - size * (end_s - now)) / (size - before[0])
            yield size, end_s, rate_s
            before = size, end_s - now


def _concession(draft: Draft, work: Work) -> _Concession | None:
    """Return how a job goes back to its next smaller size; None if it cannot."""
    course, now = draft.courses.get(work.job_id), draft.now
    if course is None or len(course.holdings) != 1 or course.holdings[0].mask != work.mask:
        return None
    size = max((size for size in work.sizes if size < work.size), default=0)
    if not size:
        return None
    end_s = work.end_s(now, size)
    if end_s > work.limit_s:
        return None
    saved = size * (end_s - now) - work.size * (course.promised_s - now)
    return _Concession(saved / (work.size - size), work.job_id, work, size, end_s)


def _concede(draft: Draft, one: _Concession, newcomer: Work, size: int, end_s: float) -> bool:
    """Shrink a job, and start the newcomer on slots that are free then; False, and nothing has changed, if none are."""
    before = draft.drop(one.job_id)
    assert before is not None
    if smaller := _fitting(draft, one.work, one.size, one.end_s, before.holdings[0].mask):
        draft.put(one.job_id, smaller)
        if course := _fitting(draft, newcomer, size, end_s, draft.book.everything):
            draft.put(newcomer.job_id, course)
            return True
        draft.drop(one.job_id)
    draft.put(one.job_id, before)
    return False


def _fitting(draft: Draft, work: Work, size: int, end_s: float, among: int) -> Course | None:
    """Return the course of a job on free slots among these from now on; None if there are none, or it ends too late."""
    block = draft.layout.find(draft.book.free_over(draft.now, end_s) & among, size)
    course = course_of(work, [Holding(draft.now, end_s, block)], draft.now) if block else None
    return course if course is not None and course.promised_s <= work.limit_s + TOLERANCE_S else None
