"""The calendar of the service: tracks which runs are due and which have come, and tells the scheduler about them.

A submission may state when the next runs of its task are due, and a feed may state it for all tasks. Due runs and facts
about past runs are kept in the store; the scheduler is told the difference to what it knows, so that the next pass
repairs a crash at any point. Rows in, rows and events out; calls no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elasticflow_airflow.api import JobSubmission
from elasticflow_airflow.api.event_data import RunExpectedData, RunMissedData
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, PastRun, expect
from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.service.decisions import task_history
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext, costs_from
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord, TaskFacts
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.tables import IncarnationRow, JobRow, RecurringTaskRow

POLICY = CalendarPolicy()
_SAME_S = 1.0
"""Due times closer together than this are the same run."""
_KEPT = 50
"""How many past runs of a task are kept."""


class RecurringRuns:
    """Keeps the scheduler's expected runs up to date; all tasks are read only in the first pass and after changes."""

    def __init__(self) -> None:
        self._told = False
        self._news = self._heard = 0
        self._next_release_at: float | None = None

    def hear(self) -> None:
        """Have the next pass read all tasks again, as other due runs were stored. For any thread."""
        self._news += 1

    def begin(self) -> None:
        """Note that the scheduler is new and knows of no runs."""
        self._told = False

    def keep(self, context: PassContext) -> None:
        """Give up runs that did not come, and tell the scheduler which runs are expected."""
        late = self._next_release_at is not None and context.now >= self._next_release_at
        news = self._news  # read before the rows, so that later news is seen in the next pass
        if self._told and not context.learned and not late and news == self._heard:
            return
        expected: dict[str, ExpectedRun] = {}
        self._next_release_at = None
        for task in context.tx.recurring_tasks():
            if task.recurring_key in context.faults:
                continue
            with context.on_behalf_of(task.recurring_key, "expecting the runs of this task"):
                release_at, runs = self._look(context, task)
                if self._next_release_at is None or release_at < self._next_release_at:
                    self._next_release_at = release_at
                expected |= {run.run_id: run for run in runs}
        known = {run.run_id: run for run in context.scheduler.expected_runs()}
        for run_id in known.keys() - expected.keys():
            feed(context, ev.RunForgotten(run_id))
        for run_id, run in expected.items():
            if known.get(run_id) != run:
                feed(context, ev.RunExpected(run))
        self._told, self._heard, context.learned = True, news, False

    @staticmethod
    def _look(context: PassContext, task: RecurringTaskRow) -> tuple[float, list[ExpectedRun]]:
        """Return when the first due run will be given up, and the runs of which enough is known."""
        _release(context, task)
        runs = [(due_at, _expected(context.settings, context.tx, task, due_at)) for due_at in task.due]
        first_s = min((_release_at(run, due_at) for due_at, run in runs), default=math.inf)
        return first_s, [run for _, run in runs if run is not None]


def arrive(context: PassContext, job: JobRow, row: IncarnationRow) -> str:
    """Note that a run was submitted; return its task's key in the calendar, empty if the run was not expected.

    Only the first incarnation counts as the due run: a retry or a cleared task does not.
    """
    dues = _next_dues(row.submission, row.submitted_at)
    task = context.tx.recurring_task(job.recurring_key)
    if row.incarnation != 1 or (task is None and not dues):
        return ""
    expected = [due for due in task.due if due - POLICY.early_s <= context.now] if task is not None else []
    if task is None:
        task = RecurringTaskRow(
            recurring_key=job.recurring_key, due=[], past=(), facts=TaskFacts(), updated_at=context.now
        )
        context.tx.add(task)
    context.tx.rely_on(task, "due")
    if not expected and not dues:
        return ""  # somebody ran it by hand
    due_at = min(expected) if expected else _due_at(row.submission, row.submitted_at)
    task.due = [due for due in task.due if due != due_at]
    _remember(
        task,
        PastRun(
            due_s=due_at,
            late_s=max(0.0, row.submitted_at - due_at),
            steps=float(row.total_steps or 0),
            deadline_after_s=0.0 if row.deadline_at is None else row.deadline_at - due_at,
        ),
    )
    task.facts = TaskFacts(
        signature=row.signature,
        scaling_curve=row.submission.scaling_curve,
        min_workers=row.submission.min_workers,
        max_workers=row.submission.max_workers,
        logical_workers=row.logical_workers,
    )
    if dues:
        replace_due(task, dues, row.submitted_at)
        context.event(
            RunExpectedData(due_at=dues),
            Reason(
                "the next run of this task is due {due_at:moment}"
                + (", and {more} more after it" if len(dues) > 1 else ""),
                due_at=dues[0],
                more=len(dues) - 1,
            ),
            row,
        )
    task.next_due_at, task.updated_at = min(task.due, default=None), context.now
    context.learned = True
    return job.recurring_key if expected else ""


def replace_due(task: RecurringTaskRow, due_at: Iterable[float], now: float) -> bool:
    """Replace a task's future due times by those known at ``now`` (from a submission or feed); True if they changed.

    Runs that are due already may still come and stay; runs that have come or were given up are not expected again.
    """
    over = [run.due_s for run in readable(task.past) or ()]
    coming = {due for due in due_at if due > now and all(abs(due - known) > _SAME_S for known in over)}
    due = sorted({*(known for known in task.due if known <= now), *coming})
    if due == task.due:
        return False
    task.due, task.next_due_at, task.updated_at = due, min(due, default=None), now
    return True


def is_known(settings: ServiceSettings, reader: Reader, task: RecurringTaskRow) -> bool:
    """Return whether enough is known of a task to keep slots free for its runs."""
    return _expected(settings, reader, task, task.next_due_at or 0.0) is not None


def expected_runs_of(settings: ServiceSettings, reader: Reader) -> dict[str, tuple[str, float, ExpectedRun | None]]:
    """Return by run id: the task's key, the due time, and the expected run (None: its speed or length is unknown)."""
    found = {}
    for task in reader.recurring_tasks():
        for due_at in task.due:
            found[_run_id(task, due_at)] = (task.recurring_key, due_at, _expected(settings, reader, task, due_at))
    return found


def _due_at(submission: JobSubmission, submitted_at: float) -> float:
    """Return when a run was due: as its submission states, but not later than it was submitted."""
    said = submission.due_at
    return submitted_at if said is None else min(said, submitted_at)


def _next_dues(submission: JobSubmission, submitted_at: float) -> list[float]:
    said = {*submission.next_runs_at, submission.next_run_at}
    return sorted(due for due in said if due is not None and due > submitted_at)


def _remember(task: RecurringTaskRow, run: PastRun) -> None:
    task.past = (*(readable(task.past) or ()), run)[-_KEPT:]


def _release(context: PassContext, task: RecurringTaskRow) -> None:
    """Give up due runs that are so late that they are not expected any more."""
    for due_at in list(task.due):
        if _release_at(_expected(context.settings, context.tx, task, due_at), due_at) > context.now:
            continue
        context.tx.rely_on(task, "due")
        task.due = [due for due in task.due if due != due_at]
        _remember(task, PastRun(due_s=due_at, came=False))
        context.tx.add_event(
            RunMissedData(due_at=due_at),
            Reason(
                "the run of {task:task} that was due {due_at:moment} has not come: nothing is kept free for it any "
                "more",
                task=task.recurring_key,
                due_at=due_at,
            ),
        )
    task.next_due_at = min(task.due, default=None)


def _release_at(run: ExpectedRun | None, due_at: float) -> float:
    return due_at + POLICY.late_min_s if run is None else run.forgotten_s(POLICY)


def _expected(settings: ServiceSettings, reader: Reader, task: RecurringTaskRow, due_at: float) -> ExpectedRun | None:
    """Return a due run as the scheduler knows it; None while its speed or its length is unknown."""
    facts, runs = readable(task.facts), readable(task.past)
    if facts is None or runs is None:
        return None
    past = task_history.past_of(reader.history(task.recurring_key, facts.signature))
    given = facts.scaling_curve
    speeds = task_history.speeds_to_plan_with(given, past.measured) if given else past.speeds
    if not speeds:
        return None
    sigma, sigmas = task_history.sigmas_of(past, given, settings.scheduler_config())
    limits = [size for size in (facts.max_workers, facts.logical_workers) if size is not None]
    return expect(
        runs,
        run_id=_run_id(task, due_at),
        task=task.recurring_key,
        due_s=due_at,
        curve=ScalingCurve(speeds),
        costs=costs_from(settings, past.costs, InPlaceRecord()),
        min_workers=facts.min_workers,
        max_workers=min(limits, default=None),
        speed_sigma=sigma,
        speed_sigmas=sigmas,
    )


def _run_id(task: RecurringTaskRow, due_at: float) -> str:
    return f"{task.recurring_key}@{due_at:.3f}"
