"""Chooses which promises to keep if not all can be kept: as many as possible, older ones before newer ones.

This is Moore and Hodgson's rule (Management Science 1968) with the age of a promise in place of the job's length. Jobs
are filled in the order of their limits. If one does not fit, the newest promises among those filled so far give way,
but only as many as necessary. Jobs that are filled already are not filled again for that, so that the cost grows with
the number of promises and not with its third power. The choice is proven like any other plan: placed on slots, with the
pauses of all migrations paid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Course, Work, course_of
from elasticflow_airflow.scheduler_core.planning.minimum_share import Filling, ShareStretch, minimum_share
from elasticflow_airflow.scheduler_core.planning.proof import deadline_order, prove
from elasticflow_airflow.scheduler_core.planning.share_placement import NoPlaceError, place

_MOST_VICTIMS = 32
"""How many newer promises may give way to an older one at first; most of them fit beside it afterwards."""
_EFFORT = 4096
"""Limit of the total number of jobs that are chosen among and placed in search of a better choice."""
_LEAST_ROUNDS = 3
"""Minimum number of rounds of choosing and placing, however many jobs there are."""
_PAID_AHEAD = (1, 0, 2)
"""Numbers of migrations that every job must afford before it is known which jobs migrate; each number is tried."""


def salvage(
    layout: Layout,
    filling: Filling,
    works: Sequence[Work],
    age: Mapping[str, int],
    now: float,
    avoid: int,
    rounds: int,
) -> dict[str, Course]:
    """Return proven courses of as many of ``works`` as can be kept; ``age`` numbers the promises, oldest first.

    ``filling`` is of the same cluster at the same moment.
    """
    able = [work for work in works if minimum_share(filling.free, work, now) is not None]
    planning = _Planning(layout, filling, age, now, avoid, rounds)
    best: dict[str, Course] = {}
    for number, ahead in enumerate(_PAID_AHEAD):
        if number and (number + 1) * len(able) > _EFFORT:
            break
        courses = planning.with_more(able, planning.chosen(able, ahead))
        if len(courses) > len(best):
            best = courses
    return best


@dataclass(frozen=True, slots=True)
class _Planning:
    """The inputs common to all plans; the fields are the arguments of :func:`salvage`."""

    layout: Layout
    filling: Filling
    age: Mapping[str, int]
    now: float
    avoid: int
    rounds: int

    def with_more(self, works: Sequence[Work], courses: dict[str, Course]) -> dict[str, Course]:
        """Try to also keep those of ``works`` without a course, the oldest first; all are planned anew each time."""
        kept = [work for work in works if work.job_id in courses]
        effort = _EFFORT
        for work in self._by_age(works):
            if work.job_id in courses:
                continue
            effort -= len(kept) + 1
            if effort < 0:
                break
            ordered = deadline_order([*kept, work])
            again, _ = prove(self.layout, self.filling, ordered, self.now, self.avoid, self.rounds)
            if again is not None:
                kept.append(work)
                courses = again
        return courses

    def chosen(self, works: Sequence[Work], ahead: int) -> dict[str, Course]:
        """Choose, place, and omit jobs that are then late; each round pays the migrations of the previous one."""
        extra = {work.job_id: ahead for work in works}
        top = max((work.sizes[-1] for work in works), default=1)
        best: dict[str, Course] = {}
        rounds = min(self.rounds, max(_LEAST_ROUNDS, _EFFORT // max(1, len(works))))
        give_up = 1
        while works and rounds:
            choice = _Choice(self.filling.free.copy(top), self.age, self.now, extra)
            choice.take(works)
            works = [work for work in works if work.job_id in choice.shares]
            ordered = deadline_order(works)
            try:
                holdings, migrations = place(self.layout, ordered, choice.shares, self.now, self.avoid)
            except NoPlaceError:
                works = self._by_age(works)[:-give_up]
                give_up *= 2
                continue
            rounds -= 1
            courses = {work.job_id: course_of(work, holdings[work.job_id], self.now) for work in ordered}
            late = [work.job_id for work in ordered if courses[work.job_id].promised_s > work.limit_s + TOLERANCE_S]
            for job_id in late:
                extra[job_id] = max(extra[job_id] + 1, migrations.get(job_id, 0))
                del courses[job_id]  # the jobs in time stay so without the late ones
            if len(courses) > len(best):
                best = courses
            if not late:
                break
        return best

    def _by_age(self, works: Sequence[Work]) -> list[Work]:
        """Return the works with the oldest promise first."""
        return sorted(works, key=lambda work: self.age[work.job_id])


class _Choice:
    """The jobs kept so far with their shares, and the capacity beside them."""

    def __init__(self, free: FreeCapacity, age: Mapping[str, int], now: float, extra: Mapping[str, int]) -> None:
        self.free = free
        self.age = age
        self.now = now
        self.extra = extra
        self.shares: dict[str, list[ShareStretch]] = {}
        self._newest: list[tuple[int, str, Work]] = []
        """A heap of the kept jobs, the newest promise first."""

    def take(self, works: Sequence[Work]) -> None:
        """Keep as many of ``works`` as fit."""
        for work in deadline_order(works):
            if not self._add(work):
                self._make_room(work)
        for work in sorted(works, key=lambda work: self.age[work.job_id]):
            if work.job_id not in self.shares:
                self._add(work)

    def _add(self, work: Work) -> bool:
        share = minimum_share(self.free, work, self.now, self.extra[work.job_id] * work.pause_s)
        if share is not None:
            self._keep(work, share)
        return share is not None

    def _keep(self, work: Work, share: list[ShareStretch]) -> None:
        for start, end, size in share:
            self.free.reserve(start, end, size)
        self._note(work, share)

    def _note(self, work: Work, share: list[ShareStretch]) -> None:
        self.shares[work.job_id] = share
        heappush(self._newest, (-self.age[work.job_id], work.job_id, work))

    def _make_room(self, work: Work) -> None:
        """Keep ``work`` in place of newer promises if few enough of them are in its way."""
        before = self.free
        self.free = before.copy()
        victims: list[tuple[Work, list[ShareStretch]]] = []
        many, fits = 1, False
        while not fits and many <= _MOST_VICTIMS:
            while len(victims) < many and self._newest and -self._newest[0][0] > self.age[work.job_id]:
                victims.append(self._drop_newest())
            fits = bool(victims) and self._add(work)
            if len(victims) < many:
                break
            many *= 2
        if not fits:
            self.free = before
        for victim, share in reversed(victims):
            if not fits:
                self._note(victim, share)
            elif self._still_fits(share):
                self._keep(victim, share)
            else:
                self._add(victim)

    def _still_fits(self, share: list[ShareStretch]) -> bool:
        return all(self.free.fits(start, end, size) for start, end, size in share)

    def _drop_newest(self) -> tuple[Work, list[ShareStretch]]:
        _, _, work = heappop(self._newest)
        share = self.shares.pop(work.job_id)
        for start, end, size in share:
            self.free.release(start, end, size)
        return work, share
