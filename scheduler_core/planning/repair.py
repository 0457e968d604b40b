"""Repairs a plan in which some promises no longer hold, and leaves the other promises as they are.

Stored courses share no slots, so valid ones still prove their promises if another job turns out to be slower or has
lost its slots. A job that must be planned again gets the capacity that is free beside the others, and may displace jobs
without a promise. If it runs, and could only go on later or elsewhere, those that wait for its slots wait longer
instead, where their deadlines allow it. If that is not enough, all promises are planned anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.cluster.free_windows import first_window
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, overdue
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Course, Holding, Work, course_of
from elasticflow_airflow.scheduler_core.planning.allocation import share_later, share_now
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner

_RESCUE_EFFORT = 800
"""Limit of alternative filling orders times jobs per order that are tried before a promise is given up."""
_MOST_ONE_BY_ONE = 64
"""Up to so many promises that no longer hold are helped one by one; more break together, as with a node."""
Promise = tuple[LiveJob, Work]
"""A job whose promise is to be kept, and its work, limited by its deadline."""


class Kept(NamedTuple):
    """Work and the stored course that still proves its promise."""

    work: Work
    course: Course


def mend(planner: Planner, rescue: int) -> Draft:
    """Return a plan with as many promises as can be kept; of several, the one with the fewest changes.

    ``rescue`` is the number of alternative filling orders that are tried before a promise is given up.
    """
    healthy, ailing = _by_health(planner)
    mended, lost = _beside_the_others(planner, healthy, ailing)
    interrupted = any(job.mask and mended.mask_now(job.job_id) != job.mask for job, _ in ailing)
    if (lost or interrupted) and (draft := _before_those_that_wait(planner, healthy, ailing)) is not None:
        return _with_the_rest(planner, draft)
    if lost and 1 < len(ailing) <= _MOST_ONE_BY_ONE:
        draft, rest = _one_by_one(planner, healthy, ailing)
        if rest < lost:
            mended, lost = draft, rest
    if lost == 0:
        return mended
    if planner.kept_at_risk and (draft := planner.fresh(guarded=True)) is not None:
        return planner.unguarded(draft)
    draft = planner.fresh(rescue=min(rescue, _RESCUE_EFFORT // len(planner.jobs)))
    if draft is not None:
        return draft
    if lost == 1:
        return mended  # keeping more would be keeping all, and that was tried
    draft = planner.salvage()
    _help(draft, [(job, work) for job, work in _promised(planner) if job.job_id not in draft.courses])
    kept = sum(job.promised and not job.at_risk for job in planner.jobs) - lost
    return draft if len(draft.courses) > kept else mended


def _before_those_that_wait(planner: Planner, healthy: Mapping[str, Kept], ailing: Sequence[Promise]) -> Draft | None:
    """Return a draft in which running jobs keep their slots until they are done; None if it does not keep all promises.

    Right-shift rescheduling (Abumaizar and Svestka, Int. J. of Production Research, 1997): those booked on the slots
    begin later, in the order in which they were to begin. It costs them the time that was lost; to give the slots up
    would cost another start-up.
    """
    now = planner.now
    stays: dict[str, Course] = {}
    slots = 0
    for job, work in ailing:
        if work.size in work.sizes and work.speeds[work.size] > 0.0:
            end = work.since_s + work.remaining / work.speeds[work.size] + work.tail_s
            if end > work.limit_s + TOLERANCE_S:
                return None
            stays[job.job_id] = course_of(work, [Holding(now, max(end, now + TOLERANCE_S), work.mask)], now)
            slots |= work.mask
    if not stays:
        return None
    behind = {job_id for job_id, (_, course) in healthy.items() if any(h.mask & slots for h in course.holdings)}
    draft = Draft(planner.layout, now, {job_id: one.course for job_id, one in healthy.items() if job_id not in behind})
    for job_id, course in stays.items():
        if not draft.is_free(course):
            return None  # the node is about to leave
        draft.put(job_id, course)
    for job_id in sorted(behind, key=lambda job_id: (healthy[job_id].course.holdings[0].start_s, job_id)):
        work, course = healthy[job_id]
        found = course if draft.is_free(course) else _same_later(draft, work, course) or _keeping(draft, work)
        if found is None:
            return None
        draft.put(job_id, found)
    return None if _help(draft, [(job, work) for job, work in ailing if job.job_id not in stays]) else draft


def _one_by_one(planner: Planner, healthy: Mapping[str, Kept], ailing: Sequence[Promise]) -> tuple[Draft, int]:
    """Help each job by itself, so that one that cannot be kept costs no other its promise; return how many cannot.

    Those that run keep their slots if those that wait for these can wait longer.
    """
    kept, lost = dict(healthy), 0
    for job, work in ailing:
        draft = _before_those_that_wait(planner, kept, [(job, work)])
        if draft is None:
            draft = _draft_of(planner, kept)
            if _help(draft, [(job, work)]):
                lost += 1
                continue
        kept[job.job_id] = Kept(work, draft.courses[job.job_id])
        kept = {job_id: Kept(one.work, draft.courses[job_id]) for job_id, one in kept.items()}
    return _with_the_rest(planner, _draft_of(planner, kept)), lost


def _beside_the_others(planner: Planner, healthy: Mapping[str, Kept], ailing: Sequence[Promise]) -> tuple[Draft, int]:
    """Return a draft that changes only invalid courses, and how many promises it does not keep.

    Older promises come first. A job that cannot be repaired continues as before if its slots are not needed.
    """
    draft = _draft_of(planner, healthy)
    lost = _help(draft, ailing)
    return _with_the_rest(planner, draft), lost


def _draft_of(planner: Planner, kept: Mapping[str, Kept]) -> Draft:
    return Draft(planner.layout, planner.now, {job_id: one.course for job_id, one in kept.items()})


def _by_health(planner: Planner) -> tuple[dict[str, Kept], list[Promise]]:
    """Return the promised jobs whose courses are valid, and those that must be planned again, oldest promises first."""
    healthy: dict[str, Kept] = {}
    ailing: list[Promise] = []
    for job, work in _promised(planner):
        course = job.course
        kept = course is not None and course.holdings and course.promised_s <= work.limit_s + TOLERANCE_S
        if course is not None and (kept or overdue(job, planner.now)):
            healthy[job.job_id] = Kept(work, course)
        else:
            ailing.append((job, work))
    return healthy, ailing


def _with_the_rest(planner: Planner, draft: Draft) -> Draft:
    """Return the draft with the stored courses of all other jobs that are free in it."""
    rest = ((j.job_id, j.course) for j in planner.jobs if j.course is not None and j.job_id not in draft.courses)
    free = {job_id: course for job_id, course in rest if draft.is_free(course)}
    return Draft(planner.layout, planner.now, free | draft.courses)


def _promised(planner: Planner) -> list[Promise]:
    """Return the jobs whose promise is to be kept, the oldest promise first."""
    jobs = sorted((job for job in planner.jobs if job.promised and not job.at_risk), key=lambda job: job.promise)
    return [(job, planner.bound(job, planner.work(job))) for job in jobs]


def _help(draft: Draft, ailing: Sequence[Promise]) -> int:
    """Add the jobs to the draft that can be in time beside the others; return how many cannot."""
    lost = 0
    for job, work in ailing:
        found = _keeping(draft, work)
        if found is None:
            lost += 1
        else:
            draft.put(job.job_id, found)
    return lost


def _same_later(draft: Draft, work: Work, course: Course) -> Course | None:
    """Return the first free course with as many workers as planned, for a job that has not begun."""
    if work.size or len(course.holdings) != 1:
        return None
    size = course.holdings[0].mask.bit_count()
    if size not in work.sizes or work.speeds[size] <= 0.0:
        return None
    seconds = work.startup_s + work.remaining / work.speeds[size] + work.tail_s
    found = first_window(draft.book, draft.layout, size, seconds, work.limit_s - seconds + TOLERANCE_S / 2)
    if found is None:
        return None
    return course_of(work, [Holding(found[0], found[0] + seconds, found[1])], draft.now)


def _keeping(draft: Draft, work: Work) -> Course | None:
    if not work.sizes or work.speeds[work.sizes[-1]] <= 0.0:
        return None
    return share_now(draft, work, work.limit_s) or share_later(draft, work, work.limit_s)
