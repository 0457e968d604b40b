"""A set of courses under construction, with their booked slots. It has no effect until it is adopted."""

from __future__ import annotations

from collections.abc import Mapping

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Course


class Draft:
    """Courses by job id, disjoint in slots and time."""

    def __init__(self, layout: Layout, now: float, courses: Mapping[str, Course]) -> None:
        self.layout = layout
        self.now = now
        self.courses = dict(courses)
        self.book = Bookings.of(layout, now, (h for course in courses.values() for h in course.holdings))
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

    def is_free(self, course: Course, beside: Course | None = None) -> bool:
        """Return whether all slots of a course are free; those of ``beside``, which it would replace, count as free."""
        own = () if beside is None else beside.holdings
        return all(not mask & ~self.book.free_over(start, end, own) for start, end, mask in course.holdings)

    def mask_now(self, job_id: str) -> int:
        """Return the slots that the draft gives a job now."""
        return mask_at(self.courses.get(job_id), self.now)

    def copy(self) -> Draft:
        """Return an independent copy."""
        twin = object.__new__(Draft)
        twin.layout, twin.now, twin.shares, twin.planned_anew = self.layout, self.now, self.shares, False
        twin.courses, twin.held_back = self.courses.copy(), self.held_back.copy()
        twin.book = self.book.copy()
        return twin


def mask_at(course: Course | None, when_s: float) -> int:
    """Return the slots that a course holds at a time."""
    if course is not None:
        for start, end, mask in course.holdings:
            if start <= when_s + TOLERANCE_S and when_s + TOLERANCE_S < end:
                return mask
    return 0
