"""Expected runs as work that newcomers must fit beside: which runs get a reservation, how much, and from when on.

A stand-in is planned like any work, but cannot start before its run is expected to have been submitted. Its course in
the joint plan that admits a newcomer is its reservation: part of the stored plan, kept while possible, so that the run
finds its slots. Only promises may displace it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elasticflow_airflow.scheduler_core.cluster.free_windows import Vain, first_window_from
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.jobs.learned_speed import promised
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, stand_in_id
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding, Work, course_of
from elasticflow_airflow.scheduler_core.planning.minimum_share import minimum_share
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner
from elasticflow_airflow.scheduler_core.planning.proof import deadline_order

_HALF = 0.5
_TRIES = 2
"""Number of alternative orders that are tried before stand-ins are given up."""


def stand_in(
    run: ExpectedRun, layout: Layout, config: SchedulerConfig, now: float, parts: Sequence[float], unseen: float
) -> Work | None:
    """Return an expected run as work, at the first of the quantiles ``parts`` at which it alone can be done in time.

    Few observed runs probably do not include the largest: lengths and latenesses are extended by ``unseen`` divided by
    their number (except at the median, which is the last resort).

    Returns None if it cannot be in time at any quantile: runs that cannot be kept get no reservation.
    """
    largest = layout.largest_block
    otherwise = config.speed_sigma if run.speed_sigma is None else run.speed_sigma
    believed = promised(run.curve, lambda size: run.speed_sigmas.get(size, otherwise), config)
    speeds = believed.usable(run.min_workers, min(run.max_workers or largest, largest))
    if not speeds:
        return None
    limit = run.deadline_s - config.deadline_margin_s
    seen = len(run.steps.values)
    for part in parts:
        longer = 1.0 + (unseen / seen if part > _HALF else 0.0)
        release = max(now, run.due_s + run.lateness.quantile(part) * longer)
        work = Work(
            job_id=stand_in_id(run.run_id),
            remaining=run.steps.quantile(part) * longer,
            since_s=release,
            mask=0,
            size=0,
            speed_now=0.0,
            starting=False,
            sizes=tuple(speeds),
            speeds=speeds,
            startup_s=run.costs.startup_s,
            pause_s=run.costs.pause_s,
            join_s=run.costs.join_s,
            tail_s=run.costs.tail_s,
            limit_s=limit,
            release_s=release,
        )
        if release + work.least_time_s() <= limit + TOLERANCE_S:
            return work
    return None


def stand_ins(
    runs: Iterable[ExpectedRun], layout: Layout, config: SchedulerConfig, policy: CalendarPolicy, now: float
) -> list[Work]:
    """Return a stand-in for each run that alone can be done in time, with the length and lateness of the policy."""
    parts = (policy.quantile, _HALF)
    found = (stand_in(run, layout, config, now, parts, policy.unseen) for run in runs)
    return [work for work in found if work is not None]


def footprint(work: Work) -> float:
    """Return the least slot-seconds that keep the limit from the release on."""
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
    """Return stand-ins for the runs that get a reservation, in order of their release.

    Every sure run gets one. Of uncertain runs that overlap in time, as many get one as their expected use adds up to:
    each adds its footprint times its probability to a balance, and gets a stand-in if the balance is at least half of
    its footprint. A single run that comes three times in ten gets no reservation; of ten such runs, three do.
    """
    found = [(run, work) for run in runs for work in stand_ins([run], layout, config, policy, now)]
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


def keepable(planner: Planner, works: Sequence[Work]) -> list[Work]:
    """Return the stand-ins that can be kept beside the promises, so that one that cannot does not block all newcomers.

    These are all if they fit beside the stored plan, or if a joint plan proves them. Otherwise they are those that fit
    in deadline order among the promises, after the promises, or beside the stored plan, whichever keeps the most.
    """
    fitting = _place(planner.reserve(planner.stored()), works)
    if len(fitting) == len(works):
        return fitting
    promises = [*planner.promised(), *planner.turns, *planner.kept_at_risk]
    left_out = _left_out(planner, deadline_order([*promises, *works]), {work.job_id for work in works})
    if left_out is not None:
        kept = [work for work in works if work.job_id not in left_out]
        if _joint(planner, kept):
            return kept
    if _joint(planner, works, rescue=_TRIES):
        return list(works)
    after = [*deadline_order(promises), *deadline_order(works)]
    left_out = _left_out(planner, after, {work.job_id for work in works})
    kept = [] if left_out is None else [work for work in works if work.job_id not in left_out]
    return kept if len(kept) > len(fitting) else fitting


def _joint(planner: Planner, works: Sequence[Work], rescue: int = 0) -> bool:
    """Return whether a plan proves the promises and the stand-ins together."""
    before, planner.expected = planner.expected, works
    proven = planner.fresh(guarded=True, rescue=rescue) is not None
    planner.expected = before
    return proven


def _left_out(planner: Planner, ordered: Sequence[Work], may: Collection[str]) -> set[str] | None:
    """Return which works of ``may`` do not fit by counts in this order; None if any other work does not fit."""
    free, left_out = planner.filling.free.copy(), set[str]()
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


def beside(draft: Draft, works: Sequence[Work]) -> Draft | None:
    """Return a copy of ``draft`` with all stand-ins booked beside its courses; None if one does not fit."""
    twin = draft.copy()
    return twin if len(_place(twin, works)) == len(works) else None


def _place(draft: Draft, works: Sequence[Work]) -> list[Work]:
    """Book stand-ins, the earliest deadline first, and return those booked: unchanged if still sufficient, else anew.

    If there is no room for a run that is now expected to be later or longer, its old reservation stays.
    """
    placed, anew = list[Work](), list[Work]()
    for work in deadline_order(works):
        before = draft.courses.get(work.job_id)
        (placed if before is not None and _does(work, before, draft.now) else anew).append(work)
    vain: dict[float, Vain] = {}
    for work in anew:
        before = draft.drop(work.job_id)
        if before is not None:
            vain.clear()
        course = place_from(draft, work, vain) or before
        if course is not None:
            draft.put(work.job_id, course)
            placed.append(work)
    return placed


def _does(work: Work, course: Course, now: float) -> bool:
    """Return whether an earlier reservation still suffices: its run may now be expected to be later or longer."""
    begins = course.holdings[0].start_s
    return (
        begins >= work.release_s - TOLERANCE_S
        and course_of(work, course.holdings, now).promised_s <= work.limit_s + TOLERANCE_S
    )


def place_from(draft: Draft, work: Work, vain: dict[float, Vain] | None = None) -> Course | None:
    """Find the earliest start from the release on that keeps the limit in free slots, with the smallest such size.

    ``vain`` caches failed searches in this draft by the time at which they begin, as long as no slots are given back.
    """
    limit, release = work.limit_s + TOLERANCE_S / 2, max(work.release_s, draft.now)
    failed = Vain() if vain is None else vain.setdefault(release, Vain())
    best: Course | None = None
    latest = INFINITY
    for size in work.sizes:
        seconds = work.startup_s + work.remaining / work.speeds[size] + work.tail_s
        if release + seconds > limit:
            continue
        by = min(limit - seconds, latest)
        found = first_window_from(draft.book, draft.layout, size, seconds, release, by, failed)
        if found is not None and found[0] < latest:
            start, block = found
            latest, end = start, start + seconds
            best = Course((Holding(start, end, block),), end - work.tail_s, end)
    return best
