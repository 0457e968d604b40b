"""Stores the timetables of an Airflow: when the runs of its recurring tasks are due.

Runs in the threads of HTTP handlers. Writes a few hundred rows per transaction, so that the loop does not wait long.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.api.insight import CalendarAnswer, CalendarRequest, DueRuns, WholeNamespace
from elasticflow_airflow.api.submission import name_of, task_of
from elasticflow_airflow.service.decisions import recurring_runs
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.job_documents import TaskFacts
from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import RecurringTaskRow

MOST_RUNS = 50_000
"""The most due runs in one request."""
_AHEAD_S = 366 * 86400.0
_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class CalendarService:
    """Handles calendar requests. ``changed`` makes the loop read the calendar again."""

    store: Store
    settings: ServiceSettings
    changed: Callable[[], None]
    clock: Callable[[], float]

    def feed(self, request: CalendarRequest) -> CalendarAnswer:
        """Replace the future runs of the named tasks, and delete those of tasks that no longer exist.

        Raises Refusal 422.
        """
        now = self.clock()
        wanted = _by_key(request, now)
        keys = list(wanted)
        unknown: list[str] = []
        news = False
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            news |= self._write(some, wanted, now)
            with self.store.read() as reader:
                tasks = reader.recurring_tasks_of(some)
                reader.load_histories(some)
                unknown += [
                    name_of(key)
                    for key in some
                    if key not in tasks or not recurring_runs.is_known(self.settings, reader, tasks[key])
                ]
        forgotten = self._forget_all_but(request.whole, wanted, now) if request.whole is not None else []
        if news or forgotten:
            self.changed()
        return CalendarAnswer(taken=len(keys), unknown=sorted(unknown), forgotten=sorted(map(name_of, forgotten)))

    def _forget_all_but(self, whole: WholeNamespace, named: Container[str], now: float) -> list[str]:
        """Delete the future runs of a namespace's tasks that no longer exist; returns their keys.

        Leaves out other namespaces, and tasks that were updated after ``whole.read_at``: they may be new.
        """
        there = _Tasks.of(whole)
        with self.store.read() as reader:
            gone = [
                task.recurring_key
                for task in reader.recurring_tasks()
                if task.recurring_key not in named and there.lack(task.recurring_key)
            ]
        forgotten: list[str] = []
        for start in range(0, len(gone), _AT_ONCE):
            with self.store.write() as tx:
                for key, task in tx.recurring_tasks_of(gone[start : start + _AT_ONCE]).items():
                    if task.updated_at <= whole.read_at and recurring_runs.replace_due(task, (), now):
                        forgotten.append(key)
        return forgotten

    def _write(self, keys: list[str], wanted: dict[str, DueRuns], now: float) -> bool:
        news = False
        with self.store.write() as tx:
            known = tx.recurring_tasks_of(keys)
            for key in keys:
                task = known.get(key)
                if task is None:
                    if not any(due > now for due in wanted[key].due_at):
                        continue
                    task = RecurringTaskRow(recurring_key=key, due=[], past=(), facts=TaskFacts(), updated_at=now)
                    tx.add(task)
                news |= recurring_runs.replace_due(task, wanted[key].due_at, now)
        return news


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The recurring tasks that exist in a namespace."""

    namespace: str
    named: frozenset[str]
    whole: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, message: WholeNamespace) -> _Tasks:
        named = (
            _key(message.namespace, task.dag_id, task.task_id, index)
            for task in message.tasks
            for index in task.map_indexes or ()
        )
        whole = ((task.dag_id, task.task_id) for task in message.tasks if task.map_indexes is None)
        return cls(message.namespace, frozenset(named), frozenset(whole))

    def lack(self, key: str) -> bool:
        namespace, dag_id, task_id = task_of(key)
        return namespace == self.namespace and key not in self.named and (dag_id, task_id) not in self.whole


def _key(namespace: str, dag_id: str, task_id: str, map_index: int) -> str:
    parts = {"namespace": namespace, "dag_id": dag_id, "run_id": "", "task_id": task_id, "map_index": map_index}
    return JobIdentity.as_stored(parts).recurring_key


def _by_key(request: CalendarRequest, now: float) -> dict[str, DueRuns]:
    found: dict[str, DueRuns] = {}
    runs = sum(len(one.due_at) for one in request.tasks)
    if runs > MOST_RUNS:
        raise Refusal(
            422, "invalid", f"tasks: {runs} due runs in one request", f"send at most {MOST_RUNS}, the next two days"
        )
    for one in request.tasks:
        key = _key(one.namespace, one.dag_id, one.task_id, one.map_index)
        name = name_of(key)
        if key in found:
            raise Refusal(422, "invalid", f"tasks: {name} is there twice", "give all due runs of a task together")
        far = [due for due in one.due_at if not 0.0 <= due <= now + _AHEAD_S]
        if far:
            hint = "times are UTC seconds (not milliseconds), at most a year ahead"
            raise Refusal(422, "invalid", f"tasks: due_at={far[0]:.0f} of {name} is no time of the near future", hint)
        found[key] = one
    return found
