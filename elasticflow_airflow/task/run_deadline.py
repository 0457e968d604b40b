"""The deadlines of one run of an elastic task, and its DAG's next due times for the service's calendar.

Combines what the author wrote (``deadlines``), what the DAG defines (``dag_deadline``, ``timetables``) and what earlier
runs have shown (``downstream``). Each deadline is computed once per run and kept in the task's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from typing import Any, Protocol

import pendulum
from airflow.sdk import Variable
from airflow.sdk.exceptions import AirflowRuntimeError

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.client import ElasticFlowError
from elasticflow_airflow.deadlines.dag_deadline import alerts_of, time_from_dag
from elasticflow_airflow.deadlines.downstream import EndedJob, reserve_for
from elasticflow_airflow.deadlines.parse import (
    Reserve,
    TimeFromDag,
    TrainingDeadline,
    declared_reserve,
    training_deadline,
    written,
)
from elasticflow_airflow.deadlines.timetables import (
    CALENDAR_MOST,
    CALENDAR_WINDOW,
    KnownRun,
    TimetableError,
    next_run,
    next_runs,
)
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.waiting.task_memory import TaskMemory

log = logging.getLogger(__name__)

ARITHMETIC_LABEL = "deadline_arithmetic"
"""Label of a submission that explains how its deadline was computed, for the pages."""
_LISTED = 100
_LIST_WITHIN_S = 5.0


class Deadlined(Protocol):
    """The arguments of an elastic task that concern its deadline."""

    task_id: str
    deadline: Any
    deadline_of: str | None
    downstream_reserve: timedelta
    latest_deadline: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfDag:
    """A run of a DAG. ``next_dagrun`` asks Airflow for the next run if the timetable cannot be read in this process."""

    run_type: str
    run_after: datetime
    logical_date: datetime | None = None
    interval_start: datetime | None = None
    interval_end: datetime | None = None
    timetable: Any = None
    alerts: tuple[Any, ...] = ()
    dag_end: datetime | None = None
    next_dagrun: Callable[[], datetime | None] = field(default=lambda: None)

    def known(self) -> KnownRun:
        """Return the run as the starting point from which its timetable computes the next runs."""
        return KnownRun(run_after=self.run_after, interval_start=self.interval_start, interval_end=self.interval_end)

    def next_due(self) -> datetime | None:
        """Return when the next run is due; None if none is, or it is unknown."""
        if self.timetable is None:
            return None
        try:
            return next_run(self.timetable, after=self.run_after, known=self.known(), latest=self.dag_end)
        except TimetableError as error:
            log.warning("%s; asking Airflow for the DAG's next run instead", error)
        due = self.next_dagrun()
        return due if due is not None and due > self.run_after else None


def run_of_dag(context: Mapping[str, Any], dag_alerts: Sequence[Any] = ()) -> RunOfDag:
    """Read a run from Airflow's context. ``dag_alerts``: alerts at parse time, used if the context's DAG has none."""
    dag_run, dag, task_instance = context["dag_run"], context["dag"], context["ti"]
    kind = dag_run.run_type
    return RunOfDag(
        run_type=str(getattr(kind, "value", kind)),
        run_after=pendulum.instance(dag_run.run_after or dag_run.start_date),
        logical_date=getattr(dag_run, "logical_date", None),
        interval_start=getattr(dag_run, "data_interval_start", None),
        interval_end=getattr(dag_run, "data_interval_end", None),
        timetable=getattr(dag, "timetable", None),
        alerts=alerts_of(dag) or tuple(dag_alerts),
        dag_end=getattr(dag, "end_date", None),
        next_dagrun=lambda: task_instance.get_dag(task_instance.dag_id).next_dagrun,
    )


class DeadlinesOfRun:
    """Computes the deadlines of one run. The history of downstream durations is read once, and only if needed.

    ``ended_jobs`` lists past trainings; None for a run that is only planned: no task process may ask Airflow then.
    """

    def __init__(
        self,
        task: Deadlined,
        run: RunOfDag,
        identity: JobIdentity,
        timezone: tzinfo,
        memory: TaskMemory,
        *,
        now: datetime,
        ended_jobs: Callable[[JobIdentity], Sequence[EndedJob]] | None = None,
    ) -> None:
        self._task, self._run, self._identity, self._timezone = task, run, identity, timezone
        self._memory, self._now, self._ended_jobs = memory, now, ended_jobs
        self._reserve: Reserve | None = None
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def compute(self, argument: str) -> float | None:
        """Return ``deadline`` or ``latest_deadline`` in UTC seconds.

        It is computed once per run, so a retry or a clear does not move it. Raises DeadlineError.
        """
        task = self._task
        given = getattr(task, argument)
        from_dag = given is None and argument == "deadline" and task.deadline_of is not None
        if given is None and not from_dag:
            return None
        reserve_s = task.downstream_reserve.total_seconds() if task.deadline_of is not None else 0.0
        said = repr((written(given), task.deadline_of, reserve_s))
        kept = self._memory.deadlines.get(argument)
        if kept is None or kept["given"] != said:
            computed = self._computed(self._from_dag() if from_dag else given, argument)
            kept = {"given": said, "at": computed.at.timestamp(), "arithmetic": computed.arithmetic}
            self._memory.deadlines[argument] = kept
        self.notes.append(str(kept["arithmetic"]))
        return float(kept["at"])

    def _computed(self, given: Any, argument: str) -> TrainingDeadline:
        deadline_of = self._task.deadline_of
        own = deadline_of in (None, self._task.task_id)
        return training_deadline(
            given,
            run_due=self._run.run_after,
            timezone=self._timezone,
            deadline_of=None if own else deadline_of,
            reserve=None if own or deadline_of is None else self._what_comes_after(deadline_of),
            now=self._now,
            argument=argument,
        )

    def _what_comes_after(self, deadline_of: str) -> Reserve:
        if self._reserve is None and self._ended_jobs is None:
            self._reserve = declared_reserve(self._task.downstream_reserve, deadline_of)
        if self._reserve is None:
            before = self._run.logical_date or self._run.run_after
            reserve, warning = reserve_for(
                self._identity, before, deadline_of, self._task.downstream_reserve, ended_jobs=self._ended_jobs
            )
            self._reserve = reserve
            if warning is not None:
                self.warnings.append(warning)
        return self._reserve

    def _from_dag(self) -> TimeFromDag:
        assert self._task.deadline_of is not None  # checked by the caller
        return time_from_dag(
            self._run.alerts,
            due=self._run.run_after,
            logical_date=self._run.logical_date,
            next_run=self._run.next_due,
            variable=_variable,
            deadline_of=self._task.deadline_of,
        )


def due_times(run: RunOfDag, *, replays: bool, now: datetime, began_too_late: bool = False) -> dict[str, Any]:
    """Return the calendar fields of a submission: due_at, next_run_at, next_runs_at; none for an unscheduled run.

    Manual and asset-triggered runs, backfills and clears have no due time. A run that catches up (the next one is
    already due) returns nothing, since the calendar would learn that this task comes days late. For the same reason a
    run that began after its deadline (the DAG was paused until then) returns only the next due times.
    """
    if run.run_type != "scheduled" or replays or run.timetable is None:
        return {}
    due = {} if began_too_late else {"due_at": run.run_after.timestamp()}
    try:
        first = next_run(run.timetable, after=run.run_after, known=run.known(), latest=run.dag_end)
        if first is None:
            return due
        if first <= now:
            return {}
        window = next_runs(
            run.timetable,
            after=run.run_after,
            known=run.known(),
            until=now + CALENDAR_WINDOW,
            most=CALENDAR_MOST,
            latest=run.dag_end,
        )
    except TimetableError as error:
        log.warning("the service is not told when the next runs are due: %s", error)
        return {}
    return {
        **due,
        "next_run_at": first.timestamp(),
        "next_runs_at": tuple(coming.run_after.timestamp() for coming in window),
    }


def _variable(key: str) -> str:
    """Read an Airflow Variable. Raises KeyError."""
    try:
        return str(Variable.get(key))
    except (AirflowRuntimeError, KeyError) as error:
        raise KeyError(key) from error


def ended_jobs(hook: ElasticFlowHook, mine: JobIdentity) -> list[EndedJob]:
    """List a task's past successful trainings from the service, newest first; none if the service is unavailable."""
    try:
        with hook.client(retry_for_s=_LIST_WITHIN_S) as client:
            jobs = client.list_jobs(
                state="succeeded",
                dag_id=mine.dag_id,
                limit=_LISTED,
                namespace=mine.namespace,
                task_id=mine.task_id,
                map_index=mine.map_index,
            )
    except ElasticFlowError as error:
        log.warning("past trainings could not be listed: %s", error)
        return []
    return [
        EndedJob(run_id=job.identity.run_id, ended_at=job.result.finished_at)
        for job in jobs
        if job.identity.run_id != mine.run_id and job.result is not None and job.result.finished_at is not None
    ]
