"""The calendar of the service: which runs are due, which have come, and what the scheduler is told of them.

Each submission may say when the next runs of its task are due, and a feed may say it of all tasks. What is due, and
what past runs were like, is kept in the store; the scheduler is told the difference to what it knows, so that a crash
at any point is repaired by the next pass. Rows in, rows and events out; calls no engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from elasticflow_airflow.api import JobSubmission
from elasticflow_airflow.api.event_data import RunExpectedData, RunMissedData
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.recurring_work import CalendarPolicy, ExpectedRun, PastRun, expect
from elasticflow_airflow.service.decisions import task_history
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext, costs_from
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord, TaskFacts
from elasticflow_airflow.service.store.documents.scheduler_values import curve_from_json
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.tables import IncarnationRow, JobRow, RecurringTaskRow
from elasticflow_airflow.times import moment

POLICY = CalendarPolicy()
_SAME_S = 1.0
"""Two due times closer than this are one."""
_KEPT = 50
"""How many past runs of a task are remembered."""


class RecurringRuns:
    """What this process told the scheduler: only the first pass, and one that learns something, looks at all tasks."""

    def __init__(self) -> None:
        self._told = False
        self._news = self._heard = 0
        self._next_release_at: float | None = None

    def hear(self) -> None:
        """Somebody has stored other due runs: the next pass looks again. For any thread."""
        self._news += 1

    def begin(self) -> None:
        """The scheduler is new: it knows of nothing."""
        self._told = False

    def keep(self, context: PassContext) -> None:
        """Release what does not come, and tell the scheduler of what is expected."""
        late = self._next_release_at is not None and context.now >= self._next_release_at
        news = self._news  # before the rows are read: what comes in between is seen in the next pass
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
        """When the first run that is due is given up, and the runs of which enough is known."""
        _release(context, task)
        runs = [(due_at, _expected(context.settings, context.tx, task, due_at)) for due_at in task.due]
        first_s = min((_release_at(run, due_at) for due_at, run in runs), default=math.inf)
        return first_s, [run for _, run in runs if run is not None]


def arrive(context: PassContext, job: JobRow, row: IncarnationRow) -> str:
    """Note that a run was submitted; the task by which the calendar knows it, empty when it was not expected.

    Only the first incarnation is the run that was due: a retry, or a task that was cleared, is not.
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
            f"the next run of this task is due {moment(dues[0])}"
            + (f", and {len(dues) - 1} more after it" if len(dues) > 1 else ""),
            row,
        )
    task.next_due_at, task.updated_at = min(task.due, default=None), context.now
    context.learned = True
    return job.recurring_key if expected else ""


def replace_due(task: RecurringTaskRow, due_at: Iterable[float], now: float) -> bool:
    """Take in what a timetable says at ``now`` of the runs to come, in a submission or a feed; True if that is news.

    What is due already may still come, and stays; what has come, or was given up, is not expected again.
    """
    over = [run.due_s for run in task.past]
    coming = {due for due in due_at if due > now and all(abs(due - known) > _SAME_S for known in over)}
    due = sorted({*(known for known in task.due if known <= now), *coming})
    if due == task.due:
        return False
    task.due, task.next_due_at, task.updated_at = due, min(due, default=None), now
    return True


def is_known(settings: ServiceSettings, reader: Reader, task: RecurringTaskRow) -> bool:
    """Whether enough is known of a task that slots can be kept free for its runs."""
    return _expected(settings, reader, task, task.next_due_at or 0.0) is not None


def expected_runs_of(settings: ServiceSettings, reader: Reader) -> dict[str, tuple[str, float, ExpectedRun | None]]:
    """By run id: the task's key, when it is due, and what is known of it (None: its speed or length is not)."""
    found = {}
    for task in reader.recurring_tasks():
        for due_at in task.due:
            found[_run_id(task, due_at)] = (task.recurring_key, due_at, _expected(settings, reader, task, due_at))
    return found


def _due_at(submission: JobSubmission, submitted_at: float) -> float:
    """When a run was due, if its submission says so; it cannot be later than it was submitted."""
    said = submission.due_at
    return submitted_at if said is None else min(said, submitted_at)


def _next_dues(submission: JobSubmission, submitted_at: float) -> list[float]:
    said = {*submission.next_runs_at, submission.next_run_at}
    return sorted(due for due in said if due is not None and due > submitted_at)


def _remember(task: RecurringTaskRow, run: PastRun) -> None:
    task.past = (*task.past, run)[-_KEPT:]


def _release(context: PassContext, task: RecurringTaskRow) -> None:
    """Give up runs that are so late that they will not come."""
    for due_at in list(task.due):
        if _release_at(_expected(context.settings, context.tx, task, due_at), due_at) > context.now:
            continue
        context.tx.rely_on(task, "due")
        task.due = [due for due in task.due if due != due_at]
        _remember(task, PastRun(due_s=due_at, came=False))
        context.tx.add_event(
            RunMissedData(due_at=due_at),
            f"the run of {name_of(task.recurring_key)} that was due {moment(due_at)} has not come: nothing is kept free"
            " for it any more",
        )
    task.next_due_at = min(task.due, default=None)


def _release_at(run: ExpectedRun | None, due_at: float) -> float:
    return due_at + POLICY.late_min_s if run is None else run.forgotten_s(POLICY)


def _expected(settings: ServiceSettings, reader: Reader, task: RecurringTaskRow, due_at: float) -> ExpectedRun | None:
    """A due run as the scheduler knows it; None while its speed or its length is not known."""
    facts = task.facts
    past = task_history.past_of(reader.history(task.recurring_key, facts.signature))
    given = facts.scaling_curve
    speeds = task_history.speeds_to_plan_with(given, past.measured) if given else past.speeds
    if not speeds:
        return None
    sigma, sigmas = task_history.sigmas_of(past, given, settings.scheduler_config())
    limits = [size for size in (facts.max_workers, facts.logical_workers) if size is not None]
    return expect(
        task.past,
        run_id=_run_id(task, due_at),
        task=task.recurring_key,
        due_s=due_at,
        curve=curve_from_json(speeds),
        costs=costs_from(settings, past.costs, InPlaceRecord()),
        min_workers=facts.min_workers,
        max_workers=min(limits, default=None),
        speed_sigma=sigma,
        speed_sigmas=sigmas,
    )


def _run_id(task: RecurringTaskRow, due_at: float) -> str:
    return f"{task.recurring_key}@{due_at:.3f}"


def owner_of(recurring_key: str) -> tuple[str, str]:
    """The namespace and the DAG that a task belongs to."""
    return task_of(recurring_key)[:2]


def task_of(recurring_key: str) -> tuple[str, str, str]:
    """Namespace, DAG and task id of a task, whichever of its mapped instances it is."""
    namespace, dag_id, task_id, _ = json.loads(recurring_key)
    return str(namespace), str(dag_id), str(task_id)


def name_of(recurring_key: str) -> str:
    """A task as people write it."""
    _, dag_id, task_id, map_index = json.loads(recurring_key)
    return f"{dag_id}.{task_id}" + (f"[{map_index}]" if map_index >= 0 else "")
