"""A set of courses under construction, with their booked slots. It has no effect until it is adopted."""

from __future__ import annotations

from collections.abc import Mapping

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Course

_FEW = 8
"""With up to so many other courses, the bookings of a draft are adapted; with more, to book all anew is as fast."""
_ROOM = 64


class Draft:
    """Courses by job id, disjoint in slots and time."""

    def __init__(self, layout: Layout, now: float, courses: Mapping[str, Course]) -> None:
        self.layout = layout
        self.now = now
        self.courses = dict(courses)
        self.book = Bookings.of(layout, now, (h for course in courses.values() for h in course.holdings))
        self._most_segments = 2 * len(self.book.times) + _ROOM
        """With more, most of them are of holdings that are gone: it is time to book all anew."""
        self.shares: dict[str, int] | None = None
        self.planned_anew = False
        """Whether all promises were just planned together, for no other plan of them all to be better."""
        self.held_back: set[str] = set()
        """Jobs for whose growth there are slots, but which must not grow yet."""

    def put(self, job_id: str, course: Course) -> None:
        """Book a course (the job must have none)."""
        for holding in course.holdings:
            self.book.take(holding)
        self.courses[job_id] = course

    def drop(self, job_id: str) -> Course | None:
        """Remove and return a job's course and release its bookings."""
        course = self.courses.pop(job_id, None)
        if course is not None:
            for holding in course.holdings:
                self.book.give_back(holding)
        return course

    def later(self, layout: Layout, now: float, courses: Mapping[str, Course]) -> Draft:
        """Return a draft of ``courses``, not earlier than this one, which stays as it is.

        The fewer courses differ from those here, the less it costs.
        """
        is_untidy = len(self.book.times) > self._most_segments or not self.book.is_disjoint
        if layout is not self.layout or now < self.now or layout.availability.changes or is_untidy:
            return Draft(layout, now, courses)
        before = self.courses
        come = [
            (job_id, course)
            for job_id, course in courses.items()
            if (known := before.get(job_id)) is not course and not _holds_the_same(known, course, now)
        ]
        gone = [before[job_id] for job_id, _ in come if job_id in before]
        gone += [course for job_id, course in before.items() if job_id not in courses]
        unusable = ~layout.availability.slots  # to give them back would make them free
        if len(come) + len(gone) > _FEW or any(mask & unusable for course in gone for _, _, mask in course.holdings):
            return Draft(layout, now, courses)
        twin = self._with(self.book.since(now), courses)
        for course in gone:  # before others are booked on the same slots
            for holding in course.holdings:
                twin.book.give_back(holding)
        for _, course in come:
            if any(end <= start for start, end, _ in course.holdings) or not twin.is_free(course):
                return Draft(layout, now, courses)  # Who gives back what another has booked, too, makes it free.
            for holding in course.holdings:
                twin.book.take(holding)
        return twin

    def is_free(self, course: Course, beside: Course | None = None) -> bool:
        """Return whether all slots of a course are free; those of ``beside``, which it would replace, count as free."""
        own = () if beside is None else beside.holdings
        return all(not mask & ~self.book.free_over(start, end, own) for start, end, mask in course.holdings)

    def mask_now(self, job_id: str) -> int:
        """Return the slots that the draft gives a job now."""
        return mask_at(self.courses.get(job_id), self.now)

    def copy(self) -> Draft:
        """Return an independent copy."""
        twin = self._with(self.book.copy(), self.courses)
        twin.shares, twin.held_back = self.shares, self.held_back.copy()
        return twin

    def _with(self, book: Bookings, courses: Mapping[str, Course]) -> Draft:
        twin = object.__new__(Draft)
        twin.layout, twin.now, twin.book, twin._most_segments = self.layout, book.now, book, self._most_segments
        twin.courses, twin.shares, twin.planned_anew, twin.held_back = dict(courses), None, False, set()
        return twin


def _holds_the_same(before: Course | None, after: Course, now: float) -> bool:
    """Return whether two courses hold the same slots from ``now`` on."""
    if before is None:
        return False
    if before.holdings is after.holdings or before.holdings == after.holdings:
        return True
    left = [(max(start, now), end, mask) for start, end, mask in before.holdings if end > now]
    return left == [(max(start, now), end, mask) for start, end, mask in after.holdings if end > now]


def mask_at(course: Course | None, when_s: float) -> int:
    """Return the slots that a course holds at a time."""
    if course is not None:
        for start, end, mask in course.holdings:
            if start <= when_s + TOLERANCE_S and when_s + TOLERANCE_S < end:
                return mask
    return 0
