"""Tells the service when the runs of all elastic tasks are due: for a cron task beside the scheduler or the api-server.

A submission says when its own task is due next; this also knows of tasks that have not run for long, of DAGs that were
paused or changed. Reads Airflow's metadata database (serialized DAGs; no DAG file is imported).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pendulum

from elasticflow_airflow.insight import CalendarAnswer, CalendarRequest, DueRuns
from elasticflow_airflow.timetables import CALENDAR_MOST, CALENDAR_WINDOW, KnownRun, TimetableError, next_runs, recurs

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger(__name__)

_FIELDS = frozenset({"global_batch_size", "latest_deadline", "elasticflow_conn_id"})
"""Template fields by which an elastic task is known: subclasses and decorated functions have names of their own."""
_DEFAULT_CONN_ID = "elasticflow_default"
_DAGS_AT_ONCE = 100
_TASKS_AT_ONCE = 250
"""With all their runs, this is what the service takes in at once."""
_MOST_INDEXES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTaskOfDag:
    """An elastic task as a serialized DAG describes it."""

    task_id: str
    conn_id: str
    mapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDue:
    """When the runs of an elastic task are due; none for a paused DAG."""

    dag_id: str
    task_id: str
    conn_id: str
    map_indexes: tuple[int, ...]
    due: tuple[datetime, ...]

    def names(self) -> set[str]:
        """Its instances as the service names them."""
        name = f"{self.dag_id}.{self.task_id}"
        return {name if index < 0 else f"{name}[{index}]" for index in self.map_indexes}


@dataclass(slots=True, kw_only=True)
class Found:
    """What is due, and what could not be told."""

    tasks: list[TaskDue] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def elastic_tasks(serialized: Mapping[str, Any]) -> list[ElasticTaskOfDag]:
    """The elastic tasks of a serialized DAG, without deserializing it."""
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


def find_due_runs(
    session: Session,
    *,
    now: datetime,
    window: timedelta = CALENDAR_WINDOW,
    dag_ids: Sequence[str] | None = None,
) -> Found:
    """Look up when the elastic tasks of all DAGs, or of these, are due from ``now`` on. Reads only."""
    from airflow.models.dag import DagModel
    from airflow.models.serialized_dag import SerializedDagModel
    from sqlalchemy import select

    query = select(DagModel).where(DagModel.is_stale.is_(False)).order_by(DagModel.dag_id)
    if dag_ids is not None:
        query = query.where(DagModel.dag_id.in_(dag_ids))
    models = {model.dag_id: model for model in session.scalars(query)}
    found = Found()
    for missing in sorted(set(dag_ids or ()) - models.keys()):
        found.problems.append(f"DAG {missing!r} is not there: is it parsed yet, and is the id right?")
    for some in _chunks(list(models), _DAGS_AT_ONCE):
        for row in SerializedDagModel.get_latest_serialized_dags(dag_ids=list(some), session=session):
            tasks = elastic_tasks(row.data or {})
            if not tasks:
                continue
            try:
                due = _due(row.dag, models[row.dag_id], now, now + window)
            except TimetableError as error:
                found.problems.append(f"DAG {row.dag_id!r}: {error}")
                continue
            for task in tasks:
                if "{{" in task.conn_id:
                    found.problems.append(
                        f"task {row.dag_id}.{task.task_id}: elasticflow_conn_id={task.conn_id!r} is a template: which"
                        " service to tell is known in a run only"
                    )
                    continue
                indexes = _map_indexes(session, row.dag_id, task.task_id) if task.mapped else (-1,)
                found.tasks.append(
                    TaskDue(
                        dag_id=row.dag_id,
                        task_id=task.task_id,
                        conn_id=task.conn_id,
                        map_indexes=indexes,
                        due=due,
                    )
                )
    return found


def feed_services(
    tasks: Sequence[TaskDue], post: Callable[[str, Callable[[str], CalendarRequest]], CalendarAnswer]
) -> dict[str, CalendarAnswer]:
    """Send what is due to the services, by connection; the answers of each.

    ``post`` sends a request, made for the namespace of a connection, to the service of that connection.
    """
    by_conn: dict[str, list[TaskDue]] = defaultdict(list)
    for task in tasks:
        by_conn[task.conn_id].append(task)
    answers: dict[str, CalendarAnswer] = {}
    for conn_id, its in sorted(by_conn.items()):
        taken, unknown = 0, []
        for some in _chunks([(task, index) for task in its for index in task.map_indexes], _TASKS_AT_ONCE):
            answer = post(conn_id, lambda namespace, some=some: _request(namespace, some))  # type: ignore[misc]  # bound
            taken += answer.taken
            unknown += answer.unknown
        answers[conn_id] = CalendarAnswer(taken=taken, unknown=unknown)
    return answers


def feed_calendar(*, now: datetime | None = None, window: timedelta = CALENDAR_WINDOW) -> dict[str, CalendarAnswer]:
    """Find what is due and tell the services: what ``airflow elasticflow feed`` does; the answers by connection.

    Where the metadata database can be read, so not in a task. Raises ElasticFlowError when a service is away.
    """
    from airflow.utils.session import create_session

    with create_session() as session:
        found = find_due_runs(session, now=now or pendulum.now("UTC"), window=window)
    for problem in found.problems:
        log.warning("%s", problem)
    return feed_services(found.tasks, post_to_service)


def post_to_service(conn_id: str, make: Callable[[str], CalendarRequest]) -> CalendarAnswer:
    """Send a request to the service of a connection. Raises ElasticFlowError, AirflowNotFoundException."""
    from elasticflow_airflow.client import ElasticFlowClient
    from elasticflow_airflow.hooks import ElasticFlowHook

    hook = ElasticFlowHook(conn_id)
    with ElasticFlowClient(hook.endpoint(start=False), retry_for_s=10.0) as client:
        return client.feed_calendar(make(hook.namespace))


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
    """When the runs of a DAG are due; Airflow's own next one counts, as it knows how the last one went."""
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
    """The map indexes of a mapped task in its newest run: the best guess at those of the next."""
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


def _chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
