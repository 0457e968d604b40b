"""Reports to the service when the runs of all elastic tasks are due; for a cron task beside scheduler or api-server.

A submission reports when its own task is due next. This module also covers tasks that have not run for a long time, and
DAGs that were paused, changed or deleted. Neither can replace the other: a submission needs no cron task to be set up,
and a task may not read the metadata database, which alone knows all DAGs. Both use :mod:`timetables`, and the service
applies the same rule to both (``replace_due`` in the service).

Reads Airflow's metadata database (serialized DAGs; no DAG file is imported).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pendulum

from elasticflow_airflow.api.insight import CalendarAnswer, CalendarRequest, DueRuns, TaskOfNamespace, WholeNamespace
from elasticflow_airflow.deadlines.timetables import (
    CALENDAR_MOST,
    CALENDAR_WINDOW,
    KnownRun,
    TimetableError,
    next_runs,
    recurs,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger(__name__)

_FIELDS = frozenset({"global_batch_size", "latest_deadline", "elasticflow_conn_id"})
"""Template fields that identify an elastic task, since subclasses and decorated functions have other class names."""
_DEFAULT_CONN_ID = "elasticflow_default"
_DAGS_AT_ONCE = 100
_TASKS_AT_ONCE = 250
"""Number of tasks, with all their runs, that the service accepts in one request."""
_MOST_INDEXES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTaskOfDag:
    """An elastic task as a serialized DAG describes it."""

    task_id: str
    conn_id: str
    mapped: bool

    @property
    def names_service(self) -> bool:
        """Whether the task's connection is known before a run, so not a template."""
        return "{{" not in self.conn_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDue:
    """The due times of an elastic task's runs; none for a paused DAG."""

    dag_id: str
    task_id: str
    conn_id: str
    map_indexes: tuple[int, ...]
    due: tuple[datetime, ...]

    def names(self) -> set[str]:
        """Return the names of the task's instances, as the service writes them."""
        name = f"{self.dag_id}.{self.task_id}"
        return {name if index < 0 else f"{name}[{index}]" for index in self.map_indexes}


@dataclass(slots=True, kw_only=True)
class Found:
    """The tasks that are due, and those that could not be determined.

    ``unsure``: (dag_id, task_id) of existing tasks whose due times or service are unknown here. ``former``: connections
    of deleted DAGs, whose services may still expect their runs.
    """

    read_at: datetime
    tasks: list[TaskDue] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unsure: list[tuple[str, str]] = field(default_factory=list)
    former: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Told:
    """The responses of the services that were reached, and the errors of the others, by connection.

    ``leftovers``: errors of connections that only deleted DAGs refer to.
    """

    answers: dict[str, CalendarAnswer] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    leftovers: dict[str, Exception] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """Return warnings on leftovers, which are not errors."""
        return [
            f"{conn_id}: only DAGs that are no more name it, and it was not told: {error}"
            for conn_id, error in self.leftovers.items()
        ]


def elastic_tasks(serialized: Mapping[str, Any]) -> list[ElasticTaskOfDag]:
    """Return the elastic tasks of a serialized DAG, without deserializing it."""
    found: list[ElasticTaskOfDag] = []
    for entry in serialized.get("dag", {}).get("tasks", ()):
        task = entry.get("__var", entry)
        if not set(task.get("template_fields", ())) >= _FIELDS:
            continue
        mapped = bool(task.get("_is_mapped"))
        given = task.get("partial_kwargs", {}) if mapped else task
        conn_id = given.get("elasticflow_conn_id") or _DEFAULT_CONN_ID
        found.append(ElasticTaskOfDag(task_id=task["task_id"], conn_id=str(conn_id), mapped=mapped))
    return found


def read_elastic_tasks(session: Session, dag_ids: Sequence[str]) -> Iterator[tuple[Any, list[ElasticTaskOfDag]]]:
    """Yield the newest serialized DAG of each id that has elastic tasks, with these tasks; reads DAGs in batches."""
    from airflow.models.serialized_dag import SerializedDagModel

    for some in chunks(dag_ids, _DAGS_AT_ONCE):
        for row in SerializedDagModel.get_latest_serialized_dags(dag_ids=list(some), session=session):
            if tasks := elastic_tasks(row.data or {}):
                yield row, tasks


def find_due_runs(
    session: Session,
    *,
    now: datetime,
    window: timedelta = CALENDAR_WINDOW,
    dag_ids: Sequence[str] | None = None,
) -> Found:
    """Find when the elastic tasks of all DAGs, or of ``dag_ids``, are due from ``now`` on. Read-only."""
    from airflow.models.dag import DagModel
    from sqlalchemy import select

    read_at = pendulum.now("UTC")
    query = select(DagModel).where(DagModel.is_stale.is_(False)).order_by(DagModel.dag_id)
    if dag_ids is not None:
        query = query.where(DagModel.dag_id.in_(dag_ids))
    models = {model.dag_id: model for model in session.scalars(query)}
    found = Found(read_at=read_at)
    for missing in sorted(set(dag_ids or ()) - models.keys()):
        found.problems.append(f"DAG {missing!r} is not there: is it parsed yet, and is the id right?")
    for row, tasks in read_elastic_tasks(session, list(models)):
        try:
            due = _due(row.dag, models[row.dag_id], now, now + window)
        except TimetableError as error:
            found.problems.append(f"DAG {row.dag_id!r}: {error}")
            found.unsure += [(row.dag_id, task.task_id) for task in tasks]
            continue
        for task in tasks:
            if not task.names_service:
                found.problems.append(
                    f"task {row.dag_id}.{task.task_id}: elasticflow_conn_id={task.conn_id!r} is a template: which"
                    " service to tell is known in a run only"
                )
                found.unsure.append((row.dag_id, task.task_id))
                continue
            indexes = _map_indexes(session, row.dag_id, task.task_id) if task.mapped else (-1,)
            found.tasks.append(
                TaskDue(dag_id=row.dag_id, task_id=task.task_id, conn_id=task.conn_id, map_indexes=indexes, due=due)
            )
    if dag_ids is None:
        found.former = _former_connections(session) - {task.conn_id for task in found.tasks}
    return found


def feed_services(
    found: Found, post: Callable[[str, Callable[[str], CalendarRequest]], CalendarAnswer], *, whole: bool
) -> Told:
    """Send the due runs to the services, by connection; an unavailable service does not affect the others.

    ``post`` sends a request, built for the namespace of a connection, to the service of that connection. ``whole``:
    these are the tasks of all DAGs, so the services forget any others in the same namespace.
    """
    from airflow.sdk.exceptions import AirflowException

    from elasticflow_airflow.client import ElasticFlowError

    by_conn: dict[str, list[TaskDue]] = defaultdict(list)
    for task in found.tasks:
        by_conn[task.conn_id].append(task)
    told = Told()
    for conn_id in sorted(by_conn.keys() | (found.former if whole else set())):
        try:
            told.answers[conn_id] = _feed_service(found, by_conn[conn_id], whole, partial(post, conn_id))
        except (ElasticFlowError, AirflowException) as error:
            (told.leftovers if conn_id in found.former else told.errors)[conn_id] = error
    return told


def feed_calendar(*, now: datetime | None = None, window: timedelta = CALENDAR_WINDOW) -> dict[str, CalendarAnswer]:
    """Find the due runs and send them to the services, like ``airflow elasticflow feed``.

    Returns the responses by connection. Requires access to the metadata database, so it does not work in a task. Raises
    ElasticFlowError if a service is unavailable, after all others have been updated.
    """
    from airflow.utils.session import create_session

    from elasticflow_airflow.client import ElasticFlowError

    with create_session() as session:
        found = find_due_runs(session, now=now or pendulum.now("UTC"), window=window)
    told = feed_services(found, post_to_service, whole=True)
    for problem in (*found.problems, *told.warnings()):
        log.warning("%s", problem)
    if told.errors:
        services = "; ".join(f"{conn_id}: {error}" for conn_id, error in told.errors.items())
        raise ElasticFlowError(f"not every service was told: {services}") from next(iter(told.errors.values()))
    return told.answers


def post_to_service(conn_id: str, make: Callable[[str], CalendarRequest]) -> CalendarAnswer:
    """Send a request to the service of a connection. Raises ElasticFlowError, UnusableConnection."""
    from elasticflow_airflow.client import ElasticFlowClient, for_looking
    from elasticflow_airflow.hooks import ElasticFlowHook

    hook = ElasticFlowHook(conn_id)
    with ElasticFlowClient(for_looking(hook.endpoint(start=False)), retry_for_s=10.0) as client:
        return client.feed_calendar(make(hook.namespace))


def _feed_service(
    found: Found,
    its: Sequence[TaskDue],
    whole: bool,
    post: Callable[[Callable[[str], CalendarRequest]], CalendarAnswer],
) -> CalendarAnswer:
    taken, unknown, forgotten = 0, [], []
    for some in chunks([(task, index) for task in its for index in task.map_indexes], _TASKS_AT_ONCE):
        answer = post(lambda namespace, some=some: _request(namespace, some))  # type: ignore[misc]  # bound
        taken += answer.taken
        unknown += answer.unknown
    if whole:  # last, so that the tasks that the requests above name are known to exist
        forgotten = post(lambda namespace: _nothing_else(namespace, found, its)).forgotten
    return CalendarAnswer(taken=taken, unknown=unknown, forgotten=forgotten)


def _nothing_else(namespace: str, found: Found, its: Sequence[TaskDue]) -> CalendarRequest:
    """Build the request that a namespace has no other tasks than these and those of other connections.

    Two connections may refer to the same service under different addresses; the report of one must not undo that of the
    other.
    """
    mine = {(task.dag_id, task.task_id) for task in its if len(task.map_indexes) < _MOST_INDEXES}
    others = {(task.dag_id, task.task_id) for task in found.tasks} | {*found.unsure}
    tasks = [
        TaskOfNamespace(dag_id=task.dag_id, task_id=task.task_id, map_indexes=list(task.map_indexes))
        for task in its
        if (task.dag_id, task.task_id) in mine
    ]
    tasks += [TaskOfNamespace(dag_id=dag_id, task_id=task_id) for dag_id, task_id in sorted(others - mine)]
    return CalendarRequest(
        tasks=[], whole=WholeNamespace(namespace=namespace, read_at=found.read_at.timestamp(), tasks=tasks)
    )


def _former_connections(session: Session) -> set[str]:
    """Return the connections of the elastic tasks of deleted DAGs."""
    from airflow.models.dag import DagModel
    from sqlalchemy import select

    gone = list(session.scalars(select(DagModel.dag_id).where(DagModel.is_stale.is_(True)).order_by(DagModel.dag_id)))
    found = read_elastic_tasks(session, gone)
    return {task.conn_id for _, tasks in found for task in tasks if task.names_service}


def _request(namespace: str, some: Sequence[tuple[TaskDue, int]]) -> CalendarRequest:
    return CalendarRequest(
        tasks=[
            DueRuns(
                namespace=namespace,
                dag_id=task.dag_id,
                task_id=task.task_id,
                map_index=index,
                due_at=[due.timestamp() for due in task.due],
            )
            for task, index in some
        ]
    )


def _due(dag: Any, model: Any, now: datetime, until: datetime) -> tuple[datetime, ...]:
    """Return when the runs of a DAG are due. Starts from Airflow's own next run, which takes past runs into account."""
    if model.is_paused or not recurs(dag.timetable):
        return ()
    first = model.next_dagrun_create_after
    after, known = now, None
    found: list[datetime] = []
    if first is not None:
        known = KnownRun(
            run_after=first,
            interval_start=model.next_dagrun_data_interval_start,
            interval_end=model.next_dagrun_data_interval_end,
        )
        after = max(now, first)
        if now < first <= until:
            found.append(first)
    runs = next_runs(
        dag.timetable,
        after=after,
        known=known,
        until=until,
        most=CALENDAR_MOST - len(found),
        earliest=dag.start_date,
        latest=dag.end_date,
    )
    return (*found, *(run.run_after for run in runs))


def _map_indexes(session: Session, dag_id: str, task_id: str) -> tuple[int, ...]:
    """Return the map indexes of a mapped task in its newest run, the best guess for the next run."""
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy import select

    mine = (TaskInstance.dag_id == dag_id, TaskInstance.task_id == task_id, TaskInstance.map_index >= 0)
    newest = session.scalar(
        select(TaskInstance.run_id)
        .join(DagRun, (DagRun.dag_id == TaskInstance.dag_id) & (DagRun.run_id == TaskInstance.run_id))
        .where(*mine)
        .order_by(DagRun.run_after.desc())
        .limit(1)
    )
    if newest is None:
        return ()
    indexes = session.scalars(
        select(TaskInstance.map_index)
        .where(*mine, TaskInstance.run_id == newest)
        .order_by(TaskInstance.map_index)
        .limit(_MOST_INDEXES)
    )
    return tuple(indexes)


def chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the values in portions of at most ``size``."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
