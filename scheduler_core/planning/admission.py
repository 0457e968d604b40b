"""Admission control: one newcomer at a time, admitted only with a joint plan that proves every promise.

See ElasticFlow, ASPLOS 2023, section 4.1. A job that is at risk already does not block newcomers. If filling in
deadline order fails, other placements in time and other orders are tried. A rejection offers the earliest deadline that
the same procedure admits at this moment. Slots of draining nodes count until these go (``cluster/availability.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest
from itertools import accumulate

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.explain import is_past
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job, OnReject, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Work, course_of
from elasticflow_airflow.scheduler_core.planning.allocation import share_later, share_now
from elasticflow_airflow.scheduler_core.planning.lookahead import Lookahead
from elasticflow_airflow.scheduler_core.planning.making_room import make_room
from elasticflow_airflow.scheduler_core.planning.minimum_share import minimum_share
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner
from elasticflow_airflow.scheduler_core.planning.proof import deadline_order, limit_and_id
from elasticflow_airflow.scheduler_core.planning.protection_price import Protection
from elasticflow_airflow.scheduler_core.planning.reservations import beside

_DOUBLINGS = 6
_LATER = 64
"""For so many promises that end after a newcomer's limit, it is asked what they leave free."""


@dataclass(slots=True)
class AdmissionVerdict:
    """The outcome: a draft with the newcomer, or the reason for a refusal."""

    draft: Draft | None
    reason: Reason
    earliest_deadline_s: float | None
    priced_out: bool = False
    """It was refused though it fits, for others that are expected."""


def no_block(job: Job, layout: Layout, now: float) -> Reason:
    """Return the reason of a job that fits no block of the cluster: what it needs, and what exists."""
    largest = layout.largest(layout.availability.at(now))
    most = Reason(" and at most {most}", most=job.max_workers) if job.max_workers else ""
    sizes = "" if job.curve is None else str(sorted(job.curve.steps_per_s))
    return Reason(
        "no usable number of workers: it needs at least {least}{most}{known}, and the largest block of the cluster is "
        "{largest:#slot}",
        least=job.min_workers,
        most=most,
        known=Reason(", its speed is known at {sizes}", sizes=sizes) if sizes else "",
        largest=largest,
    )


class AdmissionControl:
    """Admission of one newcomer beside the jobs of a planner."""

    def __init__(
        self,
        planner: Planner,
        newcomer: LiveJob,
        protection: Protection | None,
        *,
        thorough: bool,
        lookahead: Lookahead,
    ) -> None:
        """``thorough``: try other orders, too, and give a reason and an offer if refused; else a quick yes or no.

        ``lookahead``: the newcomers that are decided on next.
        """
        self.lookahead = lookahead
        self.planner = planner
        self.job = newcomer
        self.protection = protection
        self.thorough = thorough
        self._filled: dict[int, FreeCapacity] = {}
        """By the number of promises that were filled first, what they leave free."""
        self.priced_out = False
        """Whether the last try failed because of what is kept free for others, regardless of other capacity."""

    @cached_property
    def stored(self) -> Draft:
        """The stored plan without the newcomer."""
        stored = self.planner.reserve(self.planner.stored())
        stored.drop(self.job.job_id)
        return stored

    @cached_property
    def room(self) -> Draft | None:
        """The stored plan with the expected runs beside it; None if they do not all fit there."""
        return beside(self.stored, self.planner.expected) if self.planner.expected else self.stored

    @cached_property
    def base(self) -> Draft | None:
        """A fresh plan of the other promises; None if even they cannot be proven without the newcomer."""
        base = self.planner.fresh(guarded=True)
        if base is not None:
            base.drop(self.job.job_id)
        return base

    def decide(self) -> AdmissionVerdict:
        """Try everything for the newcomer's own deadline."""
        config = self.planner.config
        work = self.job.work(self.planner.layout, config)
        deadline = self.job.job.deadline_s
        if deadline is None:
            raise ValueError(f"job {self.job.job_id!r} has no deadline; only a deadline needs admission")
        problem = self._impossible(work)
        if problem is not None:
            return AdmissionVerdict(None, problem, None)
        tries = self._effort(config.rescue_orders) if self.thorough else 0
        found = self._try(work, deadline - config.deadline_margin_s, tries)
        if found is None and not self.thorough:
            return AdmissionVerdict(None, Reason("nothing has changed for it"), None)
        if found is not None:
            return AdmissionVerdict(found, self._why_admitted(found), deadline)
        if self.priced_out:
            self.priced_out = self._fits_without_price(work, deadline - config.deadline_margin_s)
        priced_out, reason = self.priced_out, self._why_not(work, deadline)  # before other deadlines are tried
        return AdmissionVerdict(None, reason, self._earliest(work), priced_out)

    def _fits_without_price(self, work: Work, limit: float) -> bool:
        protection, self.protection = self.protection, None
        found = self._try(work, limit, 0)
        self.protection = protection
        return found is not None

    def _effort(self, tries: int) -> int:
        """Limit the number of tries by their cost, so that decisions stay fast with many jobs."""
        return min(tries, max(2, self.planner.config.rescue_effort // (len(self.planner.jobs) + 1))) if tries else 0

    def _impossible(self, work: Work) -> Reason | None:
        if not work.sizes:
            return no_block(self.job.job, self.planner.layout, self.planner.now)
        if work.speeds[work.sizes[-1]] <= 0.0:
            return Reason(
                "its speed is not known, so no deadline can be promised; give scaling_curve= (steps/s by workers)"
            )
        if work.remaining == INFINITY:
            return Reason(
                "the number of steps is not known, so no deadline can be promised; give steps=, or epochs= and samples="
            )
        return None

    def _try(self, work: Work, limit: float, rescue: int) -> Draft | None:
        newcomer = replace(work, limit_s=limit)
        if self.planner.now + self._least(work) > limit + TOLERANCE_S:
            return None
        self.priced_out = not self._leaves_room(newcomer, limit)
        if self.priced_out:
            found = self._as_reserved(newcomer, limit)
            self.priced_out = found is None
            return found
        draft = self.lookahead.found(self.planner, newcomer)
        if draft is not None:
            return self.planner.unguarded(draft)
        if self.room is not None and (course := share_now(self.room, newcomer, limit)) is not None:
            return self._with(self.room, course)
        if self.room is not None and (draft := make_room(self.planner, self.room, newcomer)) is not None:
            return draft
        local = self.planner.are_many and not newcomer.size  # Whether who holds slots moves, a fresh plan decides.
        if local and (draft := self._later_in(self.room, newcomer, limit)) is not None:
            return draft
        draft = self.lookahead.plan(self.planner, newcomer)
        if draft is not None:
            return self.planner.unguarded(draft)
        if not local and (draft := self._later_in(self.room, newcomer, limit)) is not None:
            return draft
        if (draft := self._later_in(self.base, newcomer, limit)) is not None:
            return self.planner.unguarded(draft)
        # Tried late, because the other ways often find a smaller share and leave the rest of the reservation to others.
        if (found := self._as_reserved(newcomer, limit)) is not None:
            return found
        if rescue:
            draft = self.lookahead.rescue(self.planner, newcomer, rescue)
            if draft is not None:
                return self.planner.unguarded(draft)
        return None

    def _later_in(self, draft: Draft | None, newcomer: Work, limit: float) -> Draft | None:
        """Return a draft with the newcomer on slots that others leave; None if it would be late there."""
        if draft is None or (course := share_later(draft, newcomer, limit)) is None:
            return None
        return self._with(draft, course)

    def _as_reserved(self, work: Work, limit: float) -> Draft | None:
        """Return a draft with the slots reserved for the job before it was submitted, if they still suffice."""
        kept, now = self.job.reservation, self.planner.now
        if kept is None:
            return None
        holdings = [h._replace(start_s=max(h.start_s, now)) for h in kept.holdings if h.end_s > now + TOLERANCE_S]
        if not holdings:
            return None
        if holdings[-1].end_s < limit:
            holdings[-1] = holdings[-1]._replace(end_s=limit)
        course = course_of(work, holdings, now)
        free = self.stored.is_free(course)
        return self._with(self.stored, course) if free and course.promised_s <= limit + TOLERANCE_S else None

    def _leaves_room(self, work: Work, limit: float) -> bool:
        """Return whether it fits beside the expected use of cheaper arrivals (always with first-come admission).

        It is enough to fit beside the arrivals at their expected times or, because they may come at other times, by
        slot-seconds: until the limit, and until that of each later promise.
        """
        if self.protection is None:
            return True
        planner = self.planner
        trusting, waits = self._trusting, self.job.phase is Phase.WAITING
        expected = self.protection.expectation(
            work, self._worth(limit), planner.now, limit, agreed=trusting, sure=trusting or waits
        )
        if expected is None:
            return False
        if waits:  # it is asked again and again, and one time expectations are too low
            expected = expected.times(planner.config.waiting_caution)
        if not expected.slots.any():
            return True
        if self._keeps_free(expected.needed, limit):
            return True
        left = self._beside(self._earlier(limit)).copy()
        left.withhold(expected.edges, expected.whole_slots())
        return minimum_share(left, work, planner.now) is not None

    def _keeps_free(self, slot_s: float, limit: float) -> bool:
        """Return whether so many slot-seconds are free until a limit and until that of each later promise.

        Each time beside the promises that end by then: what is free until the limit alone may be what a later promise
        needs, and would be taken from those that are expected after it.
        """
        now, earlier, later = self.planner.now, self._earlier(limit), self._soon_after(limit)
        if self._surely_keeps_free(slot_s, limit, earlier, later):
            return True
        planner, untils = self.planner, [limit, *(work.limit_s for work in later)]
        used = planner.filling.used(deadline_order([*earlier, *later]), planner.layout.largest_block)
        taken = list(accumulate(used, initial=0.0))[len(earlier) :]
        return all(
            planner.filling.free.slot_seconds(now, until) - taken[count] >= slot_s
            for count, until in enumerate(untils)
            if count + 1 == len(untils) or untils[count + 1] > until
        )

    def _earlier(self, limit: float) -> list[Work]:
        """Return the other promises that end by a limit."""
        return [one for one in self.planner.promised() if one.limit_s <= limit and one.job_id != self.job.job_id]

    def _soon_after(self, limit: float) -> list[Work]:
        """Return the other promises that end after a limit, the next ones first, up to a number."""
        others = (one for one in self.planner.promised() if one.job_id != self.job.job_id)
        return nsmallest(_LATER, (one for one in others if limit < one.limit_s < INFINITY), key=limit_and_id)

    def _surely_keeps_free(self, slot_s: float, limit: float, earlier: Sequence[Work], later: Sequence[Work]) -> bool:
        """As :meth:`_keeps_free`, but False if only a filling can say.

        Where all fit side by side from now on, a filling gives each the smallest size that keeps its limit, at once.
        """
        now, free = self.planner.now, self.planner.filling.free
        room, used = free.least(), 0.0
        last = len(earlier) - 1
        if last < 0 and free.slot_seconds(now, limit) < slot_s:
            return False
        for count, work in enumerate((*earlier, *later)):
            sizes = (
                (size, end) for size in work.sizes if (end := work.end_s(now, size)) <= work.limit_s + TOLERANCE_S / 2
            )
            size, end = next(sizes, (0, now))
            if not size or work.release_s > now:
                return False
            for level in range(size.bit_length()):
                room[level] -= size
            until = max(limit, work.limit_s)
            used += size * (min(end, until) - now)
            if min(room) < 0 or (count >= last and free.slot_seconds(now, until) - used < slot_s):
                return False
        return True

    def _beside(self, earlier: Sequence[Work]) -> FreeCapacity:
        """Return what is free beside the promises that end by a limit; the same ones are filled once a verdict."""
        if len(earlier) not in self._filled:  # Of two limits, the later one's promises include the earlier one's.
            top = self.planner.layout.largest_block
            self._filled[len(earlier)] = self.planner.filling.left(deadline_order(earlier), top)
        return self._filled[len(earlier)]

    @property
    def _trusting(self) -> bool:
        """Whether, as far as is known, everybody fits (see :mod:`protection_price`)."""
        planner = self.planner
        return (
            planner.config.objective is Objective.AUTO
            and self.protection is not None
            and not self.protection.is_short(planner.now)
        )

    def _worth(self, limit: float) -> float:
        """Return the newcomer's value if it is promised for ``limit``."""
        return self.job.job.value_at(limit + self.planner.config.deadline_margin_s)

    def _with(self, draft: Draft, course: Course) -> Draft:
        twin = draft.copy()
        twin.put(self.job.job_id, course)
        return twin

    def _least(self, work: Work) -> float:
        """Return the seconds until its result if it had the whole cluster."""
        return work.soonest_s(self.planner.now) - self.planner.now

    def _earliest(self, work: Work) -> float | None:
        """Return the earliest deadline that would be admitted now, by bisection from impossible to surely possible.

        Beside very many jobs, the earliest in the stored plan, unless the job itself accepts a later deadline.
        """
        config, now = self.planner.config, self.planner.now
        is_brief = self.planner.are_many and not self.job.job.on_reject.takes_later
        certain = self._earliest_in(self.room, work)
        if certain == INFINITY or not is_brief:
            certain = min(certain, self._earliest_in(self.base, work))
        if certain == INFINITY:
            return None
        asked = self.job.job.deadline_s
        low = max(now + self._least(work), (asked - config.deadline_margin_s) if asked is not None else now)
        # A job whose value falls with time does not fit better later beside what is kept free for others.
        hopes = self.protection is not None and self.job.job.on_reject is not OnReject.LATE
        for _ in range(_DOUBLINGS if hopes else 0):
            if self._try(work, certain, 0) is not None:
                break
            certain = now + 2.0 * (certain - now)  # what is kept free for others leaves room only later
        high = certain
        for _ in range(0 if is_brief else self._effort(config.offer_probes)):
            if high - low <= max(1.0, 0.01 * (high - now)):
                break
            middle = (low + high) / 2
            if self._try(work, middle, 0) is not None:
                high = middle
            else:
                low = middle
        for limit in dict.fromkeys((high, certain)):
            offer = limit + config.deadline_margin_s + config.offer_margin_s
            for rounded in (math.ceil(offer / config.offer_round_s) * config.offer_round_s, offer):
                if self._try(work, rounded - config.deadline_margin_s, 0) is not None:
                    return rounded
        return None

    @staticmethod
    def _earliest_in(draft: Draft | None, work: Work) -> float:
        """Return when the newcomer would be done at the earliest beside a draft (infinite: never)."""
        course = None if draft is None else share_later(draft, replace(work, limit_s=INFINITY), INFINITY)
        return INFINITY if course is None else course.promised_s

    def _why_admitted(self, draft: Draft) -> Reason:
        course = draft.courses[self.job.job_id]
        first = course.holdings[0]
        begins = "now" if first.start_s <= self.planner.now + TOLERANCE_S else "at {start:moment}"
        deadline = self.job.job.deadline_s or 0.0
        return Reason(
            f"the plan begins {begins} with {{workers:#worker}} and is done at {{end:moment}}, {{spare:duration}} "
            f"before the "
            "deadline {deadline:moment}",
            start=first.start_s,
            workers=first.mask.bit_count(),
            end=course.promised_s,
            spare=deadline - course.promised_s,
            deadline=deadline,
        )

    def _why_not(self, work: Work, deadline: float) -> Reason:
        """Return which capacity is missing, and when."""
        now = self.planner.now
        limit = deadline - self.planner.config.deadline_margin_s
        if self.priced_out:
            objective, short = self.planner.config.objective, Reason("")
            if objective is Objective.AUTO and self.protection is not None and not self._trusting:
                short = Reason(", as slots were short at {when:moment}", when=self.protection.short_at_s)
            return Reason(
                "would take slots that jobs which need fewer for the same value are expected to need before "
                "{deadline:moment} (objective: {objective}{short}); a value well above {value:g}, or the objective "
                "first-come, would admit it",
                deadline=deadline,
                objective=str(objective),
                short=short,
                value=self._worth(limit),
            )
        costs = Reason(
            "start-up {startup:duration} and tail {tail:duration} included", startup=work.startup_s, tail=work.tail_s
        )
        if deadline <= now:
            return is_past(deadline, now)
        if limit <= now:
            return Reason(
                "hopeless: promises are kept {margin:duration} early, and {left:duration} are left before "
                "{deadline:moment}",
                margin=self.planner.config.deadline_margin_s,
                left=deadline - now,
                deadline=deadline,
            )
        window = limit - now
        enough = None
        for size in work.sizes:
            needed = work.delay_s(now, size) + work.left_at(now) / work.speeds[size] + work.tail_s
            if needed <= window + TOLERANCE_S:
                enough = (size, needed)
                break
        if enough is None:
            size = work.sizes[-1]
            fastest = "the fastest size that is known of it" if self.job.job.partial else "its fastest size here"
            return Reason(
                f"hopeless even with the cluster to itself: {{size:#worker}}, {fastest}, need {{need:duration}} "
                f"({{costs}}), "
                "and {left:duration} are left before {deadline:moment}",
                size=size,
                need=self._least(work),
                costs=costs,
                left=window,
                deadline=deadline,
            )
        size, needed = enough
        base = self.base or self.stored
        worst, free = self._scarcest(base, size, limit)
        slots = self.planner.layout.availability.at(now).bit_count()
        others = sum(1 for job in self.planner.jobs if job.promised)
        coming = len(self.planner.expected)
        have = "at most {free:#worker} at a time" if free else "none"
        return Reason(
            "needs {size:#worker} for {need:duration} ({costs}) before {deadline:moment}; beside the {others} promised "
            f"jobs{{coming}}, of the cluster's {{slots}} slots {have} are available between {{begin:moment}} and "
            f"{{end:moment}}",
            size=size,
            need=needed,
            costs=costs,
            deadline=deadline,
            others=others,
            coming=Reason(" and {runs:#expected run}", runs=coming) if coming else "",
            slots=slots,
            free=free,
            begin=worst[0],
            end=worst[1],
        )

    def _scarcest(self, draft: Draft, size: int, limit: float) -> tuple[tuple[float, float], int]:
        """Find the period before ``limit`` with the least free capacity beside the promises."""
        now = self.planner.now
        free = FreeCapacity(self.planner.layout, now)
        promised = {job.job_id for job in self.planner.jobs if job.promised}
        promised |= {work.job_id for work in self.planner.expected}
        for job_id, course in draft.courses.items():
            if job_id in promised:
                for start, end, mask in course.holdings:
                    free.reserve(max(start, now), end, mask.bit_count())
        sizes = tuple(1 << level for level in range(size.bit_length()))
        runs = free.placeable(sizes, now, limit)
        start, end, least = min(runs, key=lambda run: (run[2], run[0] - run[1]))
        return (start, end), least
