"""Expected runs as work that newcomers have to fit beside: who is reserved for, how much, and from when on.

A stand-in is planned like any work, only that it cannot begin before it is expected to have come; it books nothing for
good. As long as admission proves a joint plan that includes the stand-ins, the run that comes finds its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elasticflow_airflow.scheduler_core.calendar import CalendarPolicy, ExpectedRun
from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.draft import Draft
from elasticflow_airflow.scheduler_core.filling import minimum_share
from elasticflow_airflow.scheduler_core.placement import Layout
from elasticflow_airflow.scheduler_core.planner import Planner
from elasticflow_airflow.scheduler_core.proof import deadline_order
from elasticflow_airflow.scheduler_core.work import INFINITY, TOLERANCE_S, Course, Holding, Work

_HALF = 0.5
_TRIES = 8
"""How many other orders are tried before stand-ins are given up."""


def stand_in(
    run: ExpectedRun, layout: Layout, config: SchedulerConfig, now: float, parts: Sequence[float]
) -> Work | None:
    """An expected run as work, at the first of the quantiles ``parts`` at which it can be done in time alone.

    None when it cannot at any: what cannot be kept is not reserved for.
    """
    largest = 1 << (layout.levels - 1)
    usable = run.curve.usable(run.min_workers, min(run.max_workers or largest, largest))
    if not usable:
        return None
    speeds = {size: speed * (1.0 - config.speed_error) for size, speed in usable.items()}
    limit = run.deadline_s - config.deadline_margin_s
    for part in parts:
        release = max(now, run.due_s + run.lateness.quantile(part))
        work = Work(
            job_id=f"expected {run.run_id}",
            remaining=run.steps.quantile(part),
            since_s=release,
            mask=0,
            size=0,
            speed_now=0.0,
            starting=False,
            sizes=tuple(speeds),
            speeds=speeds,
            startup_s=run.costs.startup_s,
            pause_s=run.costs.pause_s,
            tail_s=run.costs.tail_s,
            limit_s=limit,
            release_s=release,
        )
        if release + work.least_time_s() <= limit + TOLERANCE_S:
            return work
    return None


def footprint(work: Work) -> float:
    """Least slot-seconds that keep the limit from the release on."""
    window = work.limit_s - work.release_s
    least = INFINITY
    for size in work.sizes:
        seconds = work.startup_s + work.remaining / work.speeds[size] + work.tail_s
        if seconds <= window + TOLERANCE_S:
            least = min(least, size * seconds)
    return least


def reserved(
    runs: Iterable[ExpectedRun], layout: Layout, config: SchedulerConfig, policy: CalendarPolicy, now: float
) -> list[Work]:
    """Stand-ins for the runs that are reserved for, in order of their release.

    Sure runs all have one. Of uncertain ones whose times overlap, as many as their expected use adds up to: each adds
    its footprint times its probability to what is owed, and gets a stand-in when at least half of it is owed. One run
    that comes three times in ten is not reserved for; of ten such runs, three are.
    """
    found: list[tuple[ExpectedRun, Work]] = []
    for run in runs:
        work = stand_in(run, layout, config, now, (policy.quantile, _HALF))
        if work is not None:
            found.append((run, work))
    found.sort(key=lambda item: (item[1].release_s, item[1].job_id))
    kept: list[Work] = []
    owed, until = 0.0, -INFINITY
    for run, work in found:
        if run.probability >= policy.sure:
            kept.append(work)
            continue
        if work.release_s >= until:
            owed = 0.0
        until = max(until, work.limit_s)
        use = footprint(work)
        owed += run.probability * use
        if owed >= _HALF * use:
            kept.append(work)
            owed -= use
    return kept


def keepable(planner: Planner, stand_ins: Sequence[Work]) -> list[Work]:
    """Those of the stand-ins that can be kept beside the promises, so that one that cannot does not veto everybody.

    All, if they fit beside the stored plan as it is, or if a joint plan proves them. Else whoever fits in order of
    deadlines among the promises, after them, or beside the stored plan, whichever way keeps most.
    """
    fitting = _fitting(planner, stand_ins)
    if len(fitting) == len(stand_ins):
        return fitting
    promises = [*planner.promised(), *planner.turns()]
    left_out = _left_out(planner, deadline_order([*promises, *stand_ins]), {work.job_id for work in stand_ins})
    if left_out is not None:
        kept = [work for work in stand_ins if work.job_id not in left_out]
        if _joint(planner, kept):
            return kept
    if _joint(planner, stand_ins, rescue=_TRIES):
        return list(stand_ins)
    after = [*deadline_order(promises), *deadline_order(stand_ins)]
    left_out = _left_out(planner, after, {work.job_id for work in stand_ins})
    kept = [] if left_out is None else [work for work in stand_ins if work.job_id not in left_out]
    return kept if len(kept) > len(fitting) else fitting


def _joint(planner: Planner, stand_ins: Sequence[Work], rescue: int = 0) -> bool:
    """Whether a plan proves the promises and the stand-ins together."""
    before, planner.expected = planner.expected, stand_ins
    proven = planner.fresh(guarded=True, rescue=rescue) is not None
    planner.expected = before
    return proven


def _left_out(planner: Planner, ordered: Sequence[Work], may: Collection[str]) -> set[str] | None:
    """Which of the works named in ``may`` do not fit by counts in this order; None when another does not."""
    free, left_out = planner.free.copy(), set[str]()
    for work in ordered:
        share = minimum_share(free, work, planner.now)
        if share is not None:
            for start, end, size in share:
                free.reserve(start, end, size)
        elif work.job_id in may:
            left_out.add(work.job_id)
        else:
            return None
    return left_out


def _fitting(planner: Planner, stand_ins: Sequence[Work]) -> list[Work]:
    """As many stand-ins as fit beside the stored plan, the earliest deadline first."""
    draft, fitting = planner.stored(), list[Work]()
    for work in sorted(stand_ins, key=lambda work: (work.limit_s, work.job_id)):
        course = place_from(draft, work)
        if course is not None:
            draft.put(work.job_id, course)
            fitting.append(work)
    return fitting


def beside(draft: Draft, stand_ins: Sequence[Work]) -> Draft | None:
    """The draft with all stand-ins booked beside what is in it; None when one does not fit. ``draft`` stays."""
    twin = draft.copy()
    for work in sorted(stand_ins, key=lambda work: (work.limit_s, work.job_id)):
        course = place_from(twin, work)
        if course is None:
            return None
        twin.put(work.job_id, course)
    return twin


def place_from(draft: Draft, work: Work) -> Course | None:
    """The earliest start from the release on at which a size keeps the limit in free slots, the smallest such size."""
    book, limit = draft.book, work.limit_s + TOLERANCE_S / 2
    release = max(work.release_s, draft.now)
    for start in [release, *(when for when in book.times if when > release)]:
        if start == INFINITY or start + work.least_time_s() > limit:
            break
        for size in work.sizes:
            end = start + work.startup_s + work.remaining / work.speeds[size] + work.tail_s
            if end > limit:
                continue
            block = draft.layout.find(book.free_over(start, end), size)
            if block:
                return Course((Holding(start, end, block),), end - work.tail_s, end)
    return None
