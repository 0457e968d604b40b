"""The scheduler's memory: nodes, live jobs, stored courses; keeps them up to date and adopts drafts.

Turns an adopted draft into decisions. What to plan is decided elsewhere (:mod:`planner`, :mod:`scheduler`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticflow_airflow.scheduler_core.cluster.nodes import neighbours
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.jobs.at_risk import who_is_at_risk
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob, ProfilingRun, overdue
from elasticflow_airflow.scheduler_core.jobs.profiling import is_measured_at, wait_limit, window_s
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import (
    Decision,
    Purpose,
    Resize,
    Suspend,
    WakeMeAt,
)
from elasticflow_airflow.scheduler_core.model.explain import change
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.recurring_work import Calendar, CalendarPolicy, stand_in_id
from elasticflow_airflow.scheduler_core.model.values import Node, Phase, Placement
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding, course_of
from elasticflow_airflow.scheduler_core.planning.exploring import unmeasured
from elasticflow_airflow.scheduler_core.planning.minimum_share import Filling
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft, mask_at
from elasticflow_airflow.scheduler_core.planning.planner import Planner, stored

_SLACK_S = 1e-3
"""If an end moves by less than this, the bookings stay as they are."""


class SchedulerState:
    """Everything that the scheduler remembers."""

    def __init__(self, config: SchedulerConfig, nodes: Iterable[Node], calendar: CalendarPolicy | None = None) -> None:
        self.config = config
        self.calendar = Calendar(calendar)
        self.reservations: dict[str, Course] = {}
        """Reservations for expected runs, by the ids of their stand-ins: part of the stored plan."""
        self.nodes = {node.node_id: node for node in nodes}
        self.jobs: dict[str, LiveJob] = {}
        self.layout = Layout(self.nodes.values())
        self._filling = Filling(self.layout, -INFINITY)
        """What the proofs of one moment have in common."""
        self._adopted: Draft | None = None
        """The draft of the stored courses, up to what has changed since; it is never changed itself."""
        self.hopeful_s = -INFINITY
        """When a fresh plan is next tried for jobs at risk, after one did not help, and for any of very many jobs."""
        self.starves = False
        """Whether some of very many jobs wait for slots that a fresh plan may free, which is tried at ``hopeful_s``."""
        self.ask_again_s = -INFINITY
        """When admission of waiting jobs is retried at the latest, because a job left without a promise."""
        self.broken = False
        """Whether stored courses no longer prove their promises, so that everything must be planned afresh."""
        self._cut: set[str] = set()
        """Jobs whose stored course was cut short."""
        self.late: set[str] = set()
        """Jobs whose stored course must be recomputed from their actual state."""

    def constants(self) -> dict[int, object]:
        """Return the values that are replaced and never mutated, by identity: a copy of the state may share them."""
        found: list[object] = [self.config, self.layout, *self.nodes.values(), *self.calendar.runs.values()]
        found.append(self._adopted)
        for job in self.jobs.values():
            found += job.constants()
        return {id(value): value for value in found}

    def planner(self, now: float) -> Planner:
        """Return a planner over the current jobs."""
        return self.planner_over(list(self.jobs.values()), now)

    def planner_over(self, jobs: Sequence[LiveJob], now: float) -> Planner:
        """Return a planner over ``jobs``, with the reservations of runs that may still come in time for them."""
        if self._filling.now != now or self._filling.layout is not self.layout:
            self._filling = Filling(self.layout, now)
        planner = Planner(self.config, self._filling, jobs)
        planner.adopted = self._adopted
        if self.reservations:
            names = {stand_in_id(run_id) for run_id in self.calendar.runs}
            planner.reservations = {
                name: course
                for name, course in self.reservations.items()
                if name in names and course.holdings[0].start_s > now + TOLERANCE_S
            }
        return planner

    # -- the cluster ---------------------------------------------------------------------------------------------

    def change_nodes(self, nodes: Iterable[Node]) -> None:
        """Switch to a new set of nodes; stored courses are moved to the new addresses, or break."""
        old = self.layout
        self.nodes = {node.node_id: node for node in nodes}
        self.reservations = {}
        self.layout = layout = Layout(self.nodes.values(), neighbours(job.placement for job in self.jobs.values()))
        for job in self.jobs.values():
            job.mask = layout.mask_of(job.placement)
            job.changed()
            if job.course is None:
                continue
            holdings = []
            for start, end, mask in job.course.holdings:
                slots = [old.slots[i] for i in range(mask.bit_length()) if mask >> i & 1]
                moved = layout.mask_of(Placement(tuple(slots)))
                usable = layout.availability.at(start) & layout.availability.at(end - TOLERANCE_S)
                if moved.bit_count() != len(slots) or moved & ~usable:
                    self._break(job)
                    break
                holdings.append(Holding(start, end, moved))
            else:
                job.course = Course(tuple(holdings), job.course.finish_s, job.course.promised_s)

    def _break(self, job: LiveJob) -> None:
        job.course = None
        if job.promised:
            self.broken = True

    # -- time passes ---------------------------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Update stored courses: drop what is over, and follow what happened later or otherwise than planned."""
        for job in list(self.jobs.values()):
            course = job.course
            if course is None:
                continue
            holdings = course.holdings
            if holdings and holdings[0].end_s <= now + TOLERANCE_S:
                holdings = tuple(h for h in holdings if h.end_s > now + TOLERANCE_S)
                course = job.course = Course(holdings, course.finish_s, course.promised_s)
            if not holdings:
                self._ran_out(job, course, now)
                continue
            first = holdings[0]
            behind = first.start_s < now - TOLERANCE_S and first.mask != job.mask
            if behind or job.job_id in self.late:
                self.late.discard(job.job_id)
                self._follow(job, holdings, now)
        self.late.clear()

    def _ran_out(self, job: LiveJob, course: Course, now: float) -> None:
        """Handle a course without bookings left: the job is overdue and keeps its slots, or it must be planned.

        At first nothing is booked for an overdue job, because the report of its end may be on its way; jobs that should
        get its slots wait (see ``_order``). After ``overdue_s`` it is booked for a little longer, repeatedly.
        """
        if not job.mask or course.finish_s == INFINITY or job.phase is not Phase.ADMITTED:
            self._break(job)
        elif now >= course.promised_s + self.config.overdue_s - TOLERANCE_S:
            until = now + self.config.overdue_s
            job.course = Course((Holding(now, until, job.mask),), course.finish_s, course.promised_s)
            for other in self.jobs.values():
                booked = other.course.holdings if other is not job and other.course is not None else ()
                if any(h.mask & job.mask and h.start_s < until and h.end_s > now for h in booked):
                    self._break(other)

    def _follow(self, job: LiveJob, holdings: tuple[Holding, ...], now: float) -> None:
        """Recompute a course from the job's actual state; book longer if needed and if the slots are free."""
        work = job.work(self.layout, self.config)
        before = job.course
        last = holdings[-1]
        open_end = [*holdings[:-1], Holding(last.start_s, INFINITY, last.mask)]
        course = course_of(work, open_end, now)
        if course.finish_s == INFINITY:
            job.course = Course(holdings, INFINITY, INFINITY)
            if job.promised:
                self._break(job)
            return
        need = course.promised_s
        if len(course.holdings) == len(holdings) and abs(need - last.end_s) <= _SLACK_S:
            job.course = Course(holdings, course.finish_s, course.promised_s)
        elif len(course.holdings) < len(holdings) or need < last.end_s:
            if before is None or self._matters(before, course, now) or len(course.holdings) < len(holdings):
                job.course = course if course.holdings[-1].end_s > now + TOLERANCE_S else before
                if job.course is not None:
                    job.course = Course(job.course.holdings, course.finish_s, course.promised_s)
            else:
                job.course = Course(holdings, course.finish_s, course.promised_s)
        else:
            if self._free_beside_others(job, last.mask, max(last.end_s, now), now) >= need:
                job.course = course
            elif need - last.end_s <= self.config.deviation_s and before is not None:
                job.course = Course(holdings, course.finish_s, course.promised_s)
            else:
                self._break(job)
                return
        deadline = job.job.deadline_s
        if job.promised and deadline is not None and course.promised_s > deadline + TOLERANCE_S and not job.at_risk:
            self.broken = True

    def stay(self, job: LiveJob, before: Course, now: float) -> None:
        """Book the slots that a job holds for as long as it had any booked, and no other job these; none: it breaks."""
        end_s = max((h.end_s for h in before.holdings), default=now)
        end_s = min(max(end_s, now + 2 * TOLERANCE_S), self._free_beside_others(job, job.mask, now, now))
        if end_s <= now + TOLERANCE_S:
            self._break(job)
            return
        job.course = before._replace(holdings=(Holding(now, end_s, job.mask),))
        self.late.add(job.job_id)

    def _free_beside_others(self, job: LiveJob, mask: int, start_s: float, now: float) -> float:
        """Return until when no other job has booked these slots from ``start_s`` on."""
        others = (other for other in self.jobs.values() if other is not job)
        self._adopted = stored(self._adopted, self.layout, now, others)
        return self._adopted.book.free_until(mask, start_s)

    def _matters(self, before: Course, after: Course, now: float) -> bool:
        moved = abs(before.finish_s - after.finish_s)
        left = max(0.0, before.finish_s - now) if before.finish_s < INFINITY else INFINITY
        return moved > self.config.deviation_s and moved > self.config.deviation_fraction * left

    # -- adopting ------------------------------------------------------------------------------------------------

    def adopt(self, draft: Draft, now: float, out: list[Decision], why: Reason) -> None:
        """Store the courses of ``draft`` and order the sizes that they have now."""
        self._store(draft)
        out += who_is_at_risk(self.jobs.values(), self.config, now)
        self._order(now, out, why)

    def keep(self, draft: Draft, now: float) -> None:
        """Store the promises of ``draft`` and order nothing yet; other jobs keep their courses if free in the draft.

        A best-effort job keeps the part of its course before another booking of its slots, until everything is planned
        again (:meth:`forget_what_was_cut`). Changes ``draft``.
        """
        for job in self.jobs.values():
            course = job.course
            if course is None or job.job_id in draft.courses:
                continue
            free = [(h, draft.book.free_until(h.mask, max(h.start_s, now))) for h in course.holdings]
            if all(until >= h.end_s for h, until in free):
                draft.put(job.job_id, course)
            elif job.best_effort:
                self._cut.add(job.job_id)
                first, until = free[0]
                if until > max(first.start_s, now):
                    holdings = (first._replace(end_s=min(first.end_s, until)),)
                    draft.put(job.job_id, course._replace(holdings=holdings))
        self._store(draft)

    def forget_what_was_cut(self) -> None:
        """Drop the courses that were cut short, so that their jobs are planned anew."""
        for job_id in self._cut & self.jobs.keys():
            self.jobs[job_id].course = None
        self._cut.clear()

    def _store(self, draft: Draft) -> None:
        self._adopted = draft
        names = [stand_in_id(run_id) for run_id in self.calendar.runs]
        self.reservations = {name: draft.courses[name] for name in names if name in draft.courses}
        for job in self.jobs.values():
            job.course = draft.courses.get(job.job_id)
            job.held_back = job.job_id in draft.held_back
            if draft.shares is not None:
                job.share = draft.shares.get(job.job_id, 0)
        if draft.shares is not None:
            self.broken = False

    def _order(self, now: float, out: list[Decision], why: Reason) -> None:
        """Resize and suspend jobs so that each holds the slots that its course has now."""
        wanted: list[tuple[int, int, LiveJob, int]] = []
        for job in self.jobs.values():
            is_out = job.phase is Phase.PARKED or job.phase is Phase.WAITING
            target = 0 if is_out else mask_at(job.course, now)
            if target != job.mask and (is_out or not overdue(job, now)):
                wanted.append((target.bit_count() - job.mask.bit_count(), job.number, job, target))
        if not wanted:
            return
        wanted.sort(key=lambda item: item[:2])
        changing = {job.job_id for _, _, job, _ in wanted}
        staying = 0
        for job in self.jobs.values():
            if job.job_id not in changing:
                staying |= job.mask
        while True:  # a job that waits for an overdue gang keeps its slots, which may make others wait
            held = [item for item in wanted if item[3] & staying]
            if not held:
                break
            for item in held:
                wanted.remove(item)
                staying |= item[2].mask
                self.late.add(item[2].job_id)
        for _, _, job, target in wanted:
            if target == 0:
                out.append(Suspend(job.job_id, Reason("gives up its slots: {why}", why=why)))
        for _, _, job, target in wanted:
            if target:
                self._resize(job, target, now, out, why)
            else:
                job.hold(self.layout, self.config, 0, now)
                job.profiling = None

    def _resize(self, job: LiveJob, target: int, now: float, out: list[Decision], why: Reason) -> None:
        work = job.work(self.layout, self.config)
        before, after = job.mask.bit_count(), target.bit_count()
        cost = work.standstill_s(now)
        end = job.course.finish_s if job.course is not None else INFINITY
        saved = None
        if 0 < before < after and work.speed(before) > 0.0:
            saved = max(now, work.since_s) + work.left_at(now) / work.speed(before) - end
        purpose = Purpose.PROFILE if job.phase is Phase.PROFILING else Purpose.TRAIN
        job.hold(self.layout, self.config, target, now)
        if purpose is Purpose.PROFILE and not is_measured_at(job, after):
            reason = Reason(
                "trains with {after:#worker} on slots that no promise needs, until it can be measured with more",
                after=after,
            )
        elif purpose is Purpose.PROFILE:
            job.profiling = ProfilingRun(after, now + window_s(job, self.config))
            unsure = ": its curve alone is not sure enough for a promise" if job.trial else ""
            reason = Reason(
                "measures its speed with {after:#worker} on slots that no promise needs{unsure}",
                after=after,
                unsure=unsure,
            )
        elif after > before > 0 and unmeasured(job, after):
            job.failed_sizes.add(after)  # only one trial; if its speed gets known, it is in the curve
            reason = Reason(
                "tries {after:#worker} instead of {before}: its speed there is not known, and slots are idle",
                after=after,
                before=before,
            )
        else:
            reason = change(before, after, cost_s=cost, saved_s=saved, end_s=end, why=why)
        out.append(Resize(job.job_id, job.placement, purpose, reason))

    # -- when to plan again --------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Return whether a stored course says that its job should hold other slots by now, or may grow again."""
        for job in self.jobs.values():
            is_other = job.course is not None and mask_at(job.course, now) != job.mask
            if is_other and job.job_id not in self.late and not overdue(job, now):
                return True
            if job.held_back and job.grows_again(now, self.config):
                return True
        return False

    def wake(self, now: float) -> list[Decision]:
        """Return the next time at which the plan itself requires an action."""
        times: list[float] = []
        soon_s = now + TOLERANCE_S
        waits = at_risk = False
        for job in self.jobs.values():
            course = job.course
            if course is not None:
                held = 0
                for start, end, mask in course.holdings:
                    if start > soon_s:
                        times.append(start)
                        break
                    if end > soon_s:
                        held = held or mask
                        if end < INFINITY:
                            done = course.finish_s < INFINITY and end >= course.promised_s - TOLERANCE_S
                            times.append(end + self.config.overdue_s if done and course.promised_s > now else end)
                if held != job.mask:
                    if not overdue(job, now):  # a change is due but was not ordered: nothing was planned at this moment
                        times.append(now + (1.0 if job.job_id in self.late else 2 * TOLERANCE_S))
                    elif not course.holdings:
                        times.append(course.promised_s + self.config.overdue_s)
            at_risk = at_risk or job.at_risk
            if job.held_back and (grows_from_s := job.grows_from_s(self.config)) < INFINITY:
                times.append(grows_from_s)
            if job.phase is Phase.PROFILING:
                if job.profiling is not None:
                    times.append(job.profiling.until_s)
                elif (limit := wait_limit(job, self.layout, now, self.config)) is not None:
                    times.append(max(limit, now + 1.0))  # the limit moves later while the job trains
                    if job.judged:
                        times.append(max(job.thorough_s, now + 1.0))
            elif job.phase is Phase.WAITING:
                waits = True
                if job.job.deadline_s is not None:  # a time that has come is not postponed, whatever else happens
                    due = (job.until_s, job.asked_s + self.config.waiting_retry_s)
                    times += [max(at_s, now + 2 * TOLERANCE_S) for at_s in due]
            elif job.best_effort and not job.mask and job.competes:
                times.append(job.waiting_since_s + self.config.ageing_s)
        if waits:
            expiry = self.calendar.next_expiry()
            times += [self.ask_again_s] if expiry is None else [self.ask_again_s, expiry]
        if (self.starves or at_risk) and any(job.mask for job in self.jobs.values()):
            times.append(self.hopeful_s)
        later = [t for t in times if t > soon_s]
        return [WakeMeAt(min(later))] if later else []
