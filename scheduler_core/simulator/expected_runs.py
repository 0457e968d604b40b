"""Announces expected runs to a simulated scheduler, as the workflow engine would. Never uses the future.

At any time it knows the timetables (a task's period and first due time) and the runs submitted so far. Whether a due
run will be submitted, when, and how long it will take is learned from those alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Decision
from elasticflow_airflow.scheduler_core.model.recurring_work import PastRun, expect
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.scheduler import Scheduler
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import TraceJob

_HORIZON_S = 2 * 86400.0
"""How far ahead runs are announced."""
_KEPT = 30
"""Number of past runs kept per task."""
_SAME_S = 60.0
"""Due times of a task closer together than this are merged: cron has no shorter period."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """The due times of a task: first at ``first_s``, then every ``period_s``, up to and including ``last_s``."""

    first_s: float
    period_s: float
    last_s: float

    def due(self, after_s: float, until_s: float) -> list[float]:
        """Return the due times later than ``after_s`` and not later than ``until_s``."""
        number = max(0, int((after_s - self.first_s) // self.period_s) + 1)
        found = []
        while (when := self.first_s + number * self.period_s) <= min(until_s, self.last_s):
            found.append(when)
            number += 1
        return found


def timetables(rows: Iterable[TraceJob]) -> dict[str, Timetable]:
    """Return the timetables of a trace's expected tasks; the period is the smallest gap between two due times.

    A task with only one due time has no period and is left out: its next run cannot be predicted. Due times within a
    minute of each other are merged, so that clock jitter does not produce a period of a second.
    """
    dues: dict[str, set[float]] = defaultdict(set)
    last = 0.0
    for row in rows:
        last = max(last, row.submitted_s)
        if row.expected and row.due_s is not None:
            dues[row.task].add(row.due_s)
    found = {}
    for task, times in dues.items():
        ordered: list[float] = []
        for due in sorted(times):
            if not ordered or due - ordered[-1] >= _SAME_S:
                ordered.append(due)
        if len(ordered) > 1:
            found[task] = Timetable(ordered[0], min(b - a for a, b in pairwise(ordered)), last)
    return found


@dataclass(slots=True)
class _Task:
    timetable: Timetable
    history: list[PastRun] = field(default_factory=list)
    open: list[float] = field(default_factory=list)
    """Due times that were announced, but whose run has been neither submitted nor given up on."""
    last: Job | None = None


class CalendarFeed:
    """A policy that wraps the scheduler and, at every submission, announces the expected runs of a trace's tasks."""

    def __init__(self, scheduler: Scheduler, rows: Sequence[TraceJob]) -> None:
        self._scheduler = scheduler
        self._tasks = {task: _Task(table) for task, table in timetables(rows).items()}
        self._dues = {row.job_id: row.due_s for row in rows if row.expected and row.due_s is not None}

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Pass an event on to the scheduler; after a submission, also announce the runs expected next."""
        if not isinstance(event, ev.JobSubmitted):
            return self._scheduler.handle(event, now)
        for name, task in self._tasks.items():
            self._give_up(name, task, now)
        decided = self._scheduler.handle(event, now)
        submitted, due = self._tasks.get(event.job.task), self._dues.get(event.job.job_id)
        if submitted is not None and due is not None:
            self._learn(submitted, event.job, due, now)
        for name, task in self._tasks.items():
            self._announce(name, task, now, anew=task is submitted)
        return decided

    def _learn(self, task: _Task, job: Job, due: float, now: float) -> None:
        if due in task.open:
            task.open.remove(due)
        late, after = now - due, 0.0 if job.deadline_s is None else job.deadline_s - due
        run = PastRun(due_s=due, late_s=late, steps=job.total_steps or 0.0, deadline_after_s=after)
        task.history = [*task.history, run][-_KEPT:]
        task.last = job

    def _give_up(self, name: str, task: _Task, now: float) -> None:
        known = {run.run_id for run in self._scheduler.expected_runs()}
        for due in [when for when in task.open if when < now]:
            if _run_id(name, due) not in known:  # the scheduler has released it
                task.open.remove(due)
                task.history = [*task.history, PastRun(due_s=due, came=False)][-_KEPT:]

    def _announce(self, name: str, task: _Task, now: float, *, anew: bool) -> None:
        """Announce the runs within the horizon; ``anew``: repeat earlier ones, as more is known of the task."""
        job = task.last
        if job is None or job.curve is None:
            return
        known = set(task.open)
        for due in task.timetable.due(now, now + _HORIZON_S):
            if due in known and not anew:
                continue
            run = expect(
                task.history,
                run_id=_run_id(name, due),
                task=name,
                due_s=due,
                curve=job.curve,
                costs=job.costs,
                min_workers=job.min_workers,
                max_workers=job.max_workers,
            )
            if run is not None:
                if due not in known:
                    task.open.append(due)
                self._scheduler.handle(ev.RunExpected(run), now)


def _run_id(task: str, due_s: float) -> str:
    return f"{task} {due_s:.0f}"
