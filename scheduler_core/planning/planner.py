"""Plans for all jobs together: keep the stored plan or plan afresh, then give the rest to jobs without a promise.

*The plan is the proof*: a draft is adopted only if every promised job that was on course keeps its limit in it, with
every start-up, pause, migration and tail paid. Stored courses stay valid as long as reality follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, overdue
from elasticflow_airflow.scheduler_core.jobs.profiling import is_measured_at, known_speeds, sizes_to_measure, window_s
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Work
from elasticflow_airflow.scheduler_core.planning.allocation import as_soon_as_possible, grow, while_free, window
from elasticflow_airflow.scheduler_core.planning.exploring import try_next_size
from elasticflow_airflow.scheduler_core.planning.minimum_share import Filling, ShareShape
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft, mask_at
from elasticflow_airflow.scheduler_core.planning.proof import Attempt, deadline_order, prove, rescues
from elasticflow_airflow.scheduler_core.planning.salvaging import salvage

_LEAST_ROUNDS = 3
"""How often the filling is repeated in other orders at least, however many the jobs."""
_ANEW = 64
"""How many jobs without a course get the best free course; all others keep their stored course if it is free, and can
grow later."""


def stored(adopted: Draft | None, layout: Layout, now: float, jobs: Iterable[LiveJob]) -> Draft:
    """Return the stored courses of jobs as a draft. ``adopted``: one that has most of them, if there is any."""
    courses = {job.job_id: job.course for job in jobs if job.course is not None}
    return Draft(layout, now, courses) if adopted is None else adopted.later(layout, now, courses)


class Planner:
    """Plans over one layout of the cluster at one moment. Reads jobs, and nobody may change them while it is used."""

    def __init__(self, config: SchedulerConfig, filling: Filling, jobs: Sequence[LiveJob]) -> None:
        self.config = config
        self.layout = filling.layout
        self.jobs = jobs
        self.now = filling.now
        self.filling = filling
        self.expected: Sequence[Work] = ()
        """Stand-ins for expected runs, which a newcomer must fit beside."""
        self.reservations: Mapping[str, Course] = {}
        """Where the stored plan keeps slots free for expected runs."""
        self.adopted: Draft | None = None
        """The draft that was adopted last: most stored courses are still those of it."""

    @property
    def are_many(self) -> bool:
        """Whether there are so many jobs that planning all anew is not the first thing to try."""
        return len(self.jobs) > self.config.afresh_first_up_to

    @cached_property
    def _overdue(self) -> set[str]:
        """Ids of the jobs that should have ended and still hold their slots."""
        soon_s = self.now + TOLERANCE_S
        ending = (job for job in self.jobs if job.course is not None and job.course.promised_s <= soon_s)
        return {job.job_id for job in ending if overdue(job, self.now)}

    @cached_property
    def longest_pause_s(self) -> float:
        """The longest pause of any job that holds slots."""
        return max((job.job.costs.pause_s for job in self.jobs if job.mask), default=0.0)

    def work(self, job: LiveJob) -> Work:
        """Return a job as work; an overdue job holds its slots a little longer."""
        work = job.work(self.layout, self.config)
        course = job.course
        if self._overdue and course is not None and job.job_id in self._overdue:
            size = job.mask.bit_count()
            end = course.holdings[-1].end_s if course.holdings else self.now + self.config.overdue_s
            rest = max(end, self.now + 2 * TOLERANCE_S) - work.tail_s
            return replace(
                work, remaining=0.0, since_s=rest, sizes=(size,), speeds={size: 1.0}, speed_now=1.0, limit_s=INFINITY
            )
        return work

    def bound(self, job: LiveJob, work: Work) -> Work:
        """Return the work limited by its deadline minus the margin, if the job can still keep that."""
        margin = self.config.deadline_margin_s
        if margin == 0.0 or work.limit_s == INFINITY:
            return work
        planned = job.course.promised_s if job.course is not None else INFINITY
        return job.limited(work, max(work.limit_s - margin, min(work.limit_s, planned)))

    def promised(self) -> list[Work]:
        """Return the jobs whose promise every plan must keep, as work."""
        return self._promised.copy()

    @cached_property
    def _promised(self) -> list[Work]:
        return [self.bound(job, self.work(job)) for job in self.jobs if job.promised and not job.at_risk]

    @cached_property
    def turns(self) -> tuple[Work, ...]:
        """Best-effort jobs that waited too long as work that newcomers may not displace: a planned turn each."""
        turns: list[Work] = []
        for job in self.jobs:
            if not (job.competes and job.best_effort and job.course is not None and job.course.holdings):
                continue
            work, first = job.work(self.layout, self.config), job.course.holdings[0]
            if job.mask and self.now < job.turn_until_s:
                end = job.turn_until_s
            elif not job.mask and self._aged(job):
                end = max(first.start_s, self.now) + self.config.ageing_s
            else:
                continue
            size = first.mask.bit_count()
            end = min(end, first.end_s)
            seconds = max(0.0, min(end - first.start_s, end - self.now) - (0.0 if job.mask else work.startup_s))
            turns.append(_stand_in(work, size, seconds, max(work.since_s, self.now), end))
        return tuple(turns)

    @cached_property
    def kept_at_risk(self) -> tuple[Work, ...]:
        """Jobs at risk as work that newcomers must leave room for.

        A job that may still meet its deadline is not displaced from the slots that it holds. A late job must end by the
        time that it would reach with its fewest workers from its deadline on, or by its planned end if that is later,
        no matter how many newcomers follow.
        """
        stand_ins: list[Work] = []
        late: list[tuple[int, Work]] = []
        for job in self.jobs:
            if not (job.at_risk and job.promised) or job.job_id in self._overdue:
                continue
            work = job.work(self.layout, self.config)
            if not work.sizes:
                continue
            if work.soonest_s(self.now) > work.limit_s + TOLERANCE_S:
                slowest = work.speeds[work.sizes[0]]
                if job.competes and slowest > 0.0 and job.course is not None and job.course.finish_s < INFINITY:
                    rest_s = work.startup_s + work.left_at(self.now) / slowest + work.tail_s
                    end = max(work.limit_s + rest_s, job.course.promised_s)
                    late.append((job.promise, replace(work, limit_s=end + TOLERANCE_S)))
                continue
            if not job.mask:
                continue
            end = work.limit_s
            if job.course is not None and job.course.holdings:
                end = min(end, max(job.course.promised_s, job.course.holdings[-1].end_s))
            begin = max(work.since_s, self.now)
            if end > begin + TOLERANCE_S:
                stand_ins.append(_stand_in(work, work.size, end - begin, begin, end))
        late.sort(key=lambda one: one[0])
        return (*stand_ins, *(work for _, work in late[:_MOST_AT_RISK]))

    def _aged(self, job: LiveJob) -> bool:
        """Return whether a best-effort job has waited too long."""
        return (
            job.competes
            and job.best_effort
            and not job.mask
            and self.now - job.waiting_since_s >= self.config.ageing_s - TOLERANCE_S
        )

    def held(self) -> int:
        """Return all slots that jobs hold now."""
        mask = 0
        for job in self.jobs:
            mask |= job.mask
        return mask

    def stored(self) -> Draft:
        """Return the stored courses as a draft."""
        return stored(self.adopted, self.layout, self.now, self.jobs)

    def fresh(self, newcomer: Work | None = None, *, rescue: int = 0, guarded: bool = False) -> Draft | None:
        """Plan all promises anew, and the newcomer; None if no order that was tried proves them all.

        ``guarded``: include the turns of best-effort jobs that waited too long and the needs of jobs at risk, as
        stand-ins that :meth:`unguarded` drops, and the expected runs, whose stand-ins stay as their reservations.
        """
        works = self.works(newcomer, guarded=guarded)
        draft, _ = self._proven(deadline_order(works), self.config.proof_rounds)
        if draft is not None:
            comes = newcomer is not None and not newcomer.size
            draft.planned_anew = len(works) == len(self._promised) + comes
        elif rescue and (found := self._rescued(works, rescue)) is not None:
            draft, _ = found
        return draft

    def rescued(self, newcomer: Work, rescue: int) -> tuple[Draft, Attempt] | None:
        """Plan as :meth:`fresh` does if ``guarded``, for a newcomer for whom that has failed: in other ways only.

        Also returns what has succeeded.
        """
        return self._rescued(self.works(newcomer, guarded=True), rescue)

    def attempt(self, attempt: Attempt, rounds: int) -> Draft | None:
        """Plan this work in this way; None if that does not prove it in so many rounds."""
        return self._proven(attempt.order, rounds, attempt.shape)[0]

    def works(self, newcomer: Work | None, *, guarded: bool) -> list[Work]:
        """Return what a fresh plan must have; ``guarded`` as for :meth:`fresh`."""
        works = self.promised()
        if guarded:
            works += [*self.turns, *self.kept_at_risk, *self.expected]
        return works if newcomer is None else [*works, newcomer]

    def _rescued(self, works: Sequence[Work], rescue: int) -> tuple[Draft, Attempt] | None:
        if not all(work.sizes for work in works):
            return None
        rounds = min(self.config.proof_rounds, max(_LEAST_ROUNDS, self.config.proof_effort // (len(works) + 1)))
        attempts = rescues(works, self.now, rescue)
        attempt = next(attempts, None)
        while attempt is not None:
            draft, unfit = self._proven(attempt.order, rounds, attempt.shape)
            if draft is not None:
                return draft, attempt
            try:
                attempt = attempts.send(unfit)
            except StopIteration:
                break
        return None

    def unguarded(self, draft: Draft) -> Draft:
        """Remove the stand-ins of jobs; the jobs themselves are placed by :meth:`complete`."""
        for job in self.jobs:
            if job.best_effort or job.at_risk:
                draft.drop(job.job_id)
        return draft

    def reserve(self, draft: Draft) -> Draft:
        """Add the stored reservations of expected runs that have none in the draft, if they are free in it."""
        for job_id, course in self.reservations.items():
            if job_id not in draft.courses and draft.is_free(course):
                draft.put(job_id, course)
        return draft

    def _proven(
        self, ordered: list[Work], rounds: int, shape: ShareShape = ShareShape.FLAT
    ) -> tuple[Draft | None, str | None]:
        """Return a proven draft of all work, or None and the job that did not fit."""
        courses, unfit = prove(self.layout, self.filling, ordered, self.now, self.held(), rounds, shape)
        return (None, unfit) if courses is None else (self._draft(courses), None)

    def _draft(self, courses: dict[str, Course]) -> Draft:
        for job in self.jobs:
            if job.course is not None and job.job_id in self._overdue and job.job_id in courses:
                booked = courses[job.job_id].holdings
                courses[job.job_id] = Course(booked, job.course.finish_s, job.course.promised_s)
        draft = Draft(self.layout, self.now, courses)
        draft.shares = {job_id: mask_at(course, self.now).bit_count() for job_id, course in courses.items()}
        return draft

    def salvage(self) -> Draft:
        """Return a draft that keeps as many promises as possible, older ones first, and omits the others."""
        age = {job.job_id: job.promise for job in self.jobs}
        rounds = self.config.proof_rounds
        return self._draft(salvage(self.layout, self.filling, self.promised(), age, self.now, self.held(), rounds))

    def complete(self, draft: Draft) -> Draft:
        """Plan jobs without a (keepable) promise into the rest, then let jobs grow. Changes and returns ``draft``.

        Existing courses are kept unless their job needs a better one.
        """
        measured = [job for job in self.jobs if job.phase is Phase.PROFILING]
        for job in measured:
            if job.profiling is None:  # the slots that it trains on meanwhile are open to others
                draft.drop(job.job_id)
        in_need = self._in_need(draft)
        for job in in_need:
            if not job.mask:  # slots booked for its later turn are free for jobs before it
                draft.drop(job.job_id)
        for place, job in enumerate(in_need):
            draft.drop(job.job_id)
            course = self._as_before(draft, job) if place >= _ANEW else None
            course = course or self._place(draft, job)
            if course is not None:
                draft.put(job.job_id, course)
        for job in measured:
            meanwhile = None if job.job_id in draft.courses or job.trial else self._train_meanwhile(draft, job)
            if meanwhile is not None:
                draft.put(job.job_id, meanwhile)
        grow(draft, (self.work(job) for job in self.jobs if job.competes), self.config)
        self._explore(draft)
        return draft

    def _as_before(self, draft: Draft, job: LiveJob) -> Course | None:
        """Return the stored course of a job at risk, if it is still free."""
        if job.best_effort or job.course is None or not job.course.holdings or not draft.is_free(job.course):
            return None
        return job.course

    def _explore(self, draft: Draft) -> None:
        """Let running jobs try a size that was never measured, unless a job without slots waits for some."""
        if self.config.explore_gain <= 0.0 or any(self._hungry(job) for job in self.jobs if not job.mask):
            return
        for job in self.jobs:
            if job.competes and job.mask and job.job_id not in self._overdue:
                course = try_next_size(draft, job, self.work(job), self.config)
                if course is not None:
                    draft.drop(job.job_id)
                    draft.put(job.job_id, course)

    def _in_need(self, draft: Draft) -> list[LiveJob]:
        """Return the jobs that need a course: at risk first, then profiling, then best effort by turn."""
        risk: list[LiveJob] = []
        profiling: list[LiveJob] = []
        best_effort: list[LiveJob] = []
        for job in self.jobs:
            course = draft.courses.get(job.job_id)
            if course is not None:
                is_planned = course.holdings and course.finish_s < INFINITY
                if (is_planned and job.promised) or job.job_id in self._overdue:
                    continue
            if job.phase is Phase.PROFILING:
                profiling.append(job)
            elif not job.competes:
                continue
            elif course is None or not course.holdings or (job.best_effort and not mask_at(course, self.now)):
                (best_effort if job.best_effort else risk).append(job)
            elif not job.best_effort and course.finish_s == INFINITY:
                risk.append(job)  # newly free slots may allow more progress
        risk.sort(key=lambda job: job.promise)
        profiling.sort(key=lambda job: (job.mask == 0, job.number))
        best_effort.sort(key=lambda job: self._turn(job, self._somebody_aged))
        return risk + profiling + best_effort

    def _turn(self, job: LiveJob, aged: bool) -> tuple[int, float, int]:
        """Return the sort key of a turn: jobs that waited too long, running jobs, waiting jobs, jobs that ran long.

        ``aged``: some job has waited too long.
        """
        if job.mask == 0:
            return (0 if self._aged(job) else 2, job.waiting_since_s, job.number)
        ran = self.now - job.running_since_s
        return (3 if ran >= self.config.ageing_s and aged else 1, job.running_since_s, job.number)

    @cached_property
    def _somebody_aged(self) -> bool:
        return any(job.best_effort and self._aged(job) for job in self.jobs)

    def _place(self, draft: Draft, job: LiveJob) -> Course | None:
        work = self.work(job)
        if job.phase is Phase.PROFILING:
            return self._profile(draft, job)
        if not work.sizes:
            return None
        if not job.best_effort:
            return as_soon_as_possible(draft, work)
        size = work.sizes[0]
        if work.size > size and work.size in work.sizes:
            free = draft.book.free_now
            part = self.layout.find(work.mask & free, size)
            if part and not self._hungry(job):
                kept = while_free(draft, work, work.size)
                if kept is not None and mask_at(kept, self.now) == work.mask:
                    return kept
        return while_free(draft, work, size)

    def _hungry(self, but: LiveJob) -> bool:
        """Return whether any other job has no slots and wants some."""
        return any(
            job is not but and not job.mask and (job.phase is Phase.PROFILING or job.competes) for job in self.jobs
        )

    def _profile(self, draft: Draft, job: LiveJob) -> Course | None:
        run = job.profiling
        if run is not None and job.mask:
            holding = window(draft, job.mask, run.size, max(run.until_s - self.now, 2 * TOLERANCE_S))
            if holding is not None and holding.mask == job.mask:
                return Course((holding,), INFINITY, INFINITY)
            return None
        for size in sizes_to_measure(job, self.layout, self.now, self.config):
            held = window(draft, job.mask, size, window_s(job, self.config))
            if held is not None:
                return Course((held,), INFINITY, INFINITY)
        return None

    def _train_meanwhile(self, draft: Draft, job: LiveJob) -> Course | None:
        """Return a course for a job that waits to be measured: at a known size, on its current slots if possible."""
        work = self.work(job)
        sizes = sorted(known_speeds(job).keys() & set(work.sizes), key=lambda size: (size != work.size, -size))
        for size in sizes:
            course = while_free(draft, work, size)
            if course is not None and mask_at(course, self.now):
                return Course(course.holdings, INFINITY, INFINITY)
        return None

    def starved(self, draft: Draft) -> int:
        """Return how many jobs get no first worker soon; those that waited too long count twice."""
        patience = self.now + self.config.patience_pauses * self.longest_pause_s + TOLERANCE_S
        count = 0
        for job in self.jobs:
            course = draft.courses.get(job.job_id)
            starts = course is not None and course.holdings and course.holdings[0].start_s <= patience
            if starts and (job.phase is not Phase.PROFILING or self._measures(draft, job)):
                continue
            if (job.competes or job.phase is Phase.PROFILING) and job.job_id not in self._overdue:
                count += 2 if self._aged(job) else 1
        return count

    def lateness(self, draft: Draft) -> tuple[int, float]:
        """Return how many promised jobs have no planned end, and the total seconds by which the others are late.

        If many are late, only the oldest promises count, because the others come after them in any plan.
        """
        late: list[tuple[int, str, float]] = []
        for job in self.jobs:
            deadline = job.job.deadline_s
            if deadline is None or not job.promised:
                continue
            course = draft.courses.get(job.job_id)
            by_s = course.promised_s - deadline if course is not None else INFINITY
            if by_s > TOLERANCE_S and job.job_id not in self._overdue:
                late.append((job.promise, job.job_id, by_s))
        oldest = [by_s for _, _, by_s in sorted(late)[:_MOST_AT_RISK]]
        return oldest.count(INFINITY), sum(by_s for by_s in oldest if by_s < INFINITY)

    @staticmethod
    def _measures(draft: Draft, job: LiveJob) -> bool:
        """Return whether a profiled job gets slots of a size at which its speed is to be measured."""
        return job.profiling is not None or is_measured_at(job, draft.mask_now(job.job_id).bit_count())

    def luxury(self, draft: Draft) -> bool:
        """Return whether planning afresh could free slots: a job holds more than its share, or slots are idle."""
        if draft.book.free_now:
            return True
        for job in self.jobs:
            if job.competes:
                size = draft.mask_now(job.job_id).bit_count()
                work = job.work(self.layout, self.config)
                least = work.sizes[0] if job.best_effort and work.sizes else job.share
                if size > least:
                    return True
                if job.best_effort and size and self._somebody_aged:
                    return True
        return False


_MOST_AT_RISK = 16


def _stand_in(work: Work, size: int, seconds: float, begin: float, end: float) -> Work:
    """Return work that needs ``seconds`` on ``size`` slots between ``begin`` and ``end``."""
    return replace(
        work,
        remaining=seconds,
        since_s=begin,
        speed_now=1.0,
        sizes=(size,),
        speeds={size: 1.0},
        tail_s=0.0,
        limit_s=end + TOLERANCE_S,
    )
