"""The future runs of the DAGs in a file, as submissions for ``airflow elasticflow forecast``.

Reads DAG files and the training code beside them; needs no metadata database, no scheduler and no run. A value that
only a run can provide (such as an XCom) is left out if a forecast does not need it, and reported if it does.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pendulum
from airflow.sdk import DAG
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.definitions.param import ParamsDict

from elasticflow_airflow.api import JobIdentity, PlannedRun
from elasticflow_airflow.api.training_options import FORECAST
from elasticflow_airflow.client import SnapshotError
from elasticflow_airflow.deadlines.dag_deadline import alerts_of
from elasticflow_airflow.deadlines.parse import DeadlineError
from elasticflow_airflow.deadlines.timetables import KnownRun, TimetableError, next_runs
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.operators.decorators import ElasticTrainDecoratedOperator
from elasticflow_airflow.operators.elastic_train import ElasticTrainOperator
from elasticflow_airflow.settings import AirflowSettings
from elasticflow_airflow.task.arguments import ArgumentError
from elasticflow_airflow.task.run_deadline import RunOfDag
from elasticflow_airflow.task.task_submission import RunFacts, prepare
from elasticflow_airflow.waiting.task_memory import TaskMemory

log = logging.getLogger(__name__)

MOST_RUNS = 500
"""Maximum number of planned runs in one forecast request."""
_MOST_MAPPED = 100


class BadDagFileError(ValueError):
    """A DAG file that cannot be read, or a task in it that could not be submitted."""


class NeedsARunError(ValueError):
    """A template that needs a value that only a run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A task, or one of its runs, that cannot be forecast before it runs."""

    task: str
    reason: str
    due: datetime | None = None


@dataclass(slots=True, kw_only=True)
class PlannedRuns:
    """The due runs by connection, the tasks that cannot be forecast, and the best-effort tasks."""

    runs: dict[str, list[PlannedRun]] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)
    best_effort: list[str] = field(default_factory=list)
    tasks: int = 0


def read_dags(files: Sequence[str]) -> list[DAG]:
    """Return the DAGs of these files. Raises BadDagFileError with Airflow's import errors."""
    from airflow.dag_processing.dagbag import DagBag

    dags: list[DAG] = []
    for name in files:
        path = Path(name)
        if not path.exists():
            raise BadDagFileError(f"{name} is not there: give the path of a DAG file or of a folder with some")
        bag = DagBag(dag_folder=str(path.resolve()), safe_mode=False)
        if bag.import_errors:
            raise BadDagFileError("\n".join(f"{where}: {error}" for where, error in sorted(bag.import_errors.items())))
        if not bag.dags:
            raise BadDagFileError(f"{name} has no DAG")
        dags += [bag.dags[dag_id] for dag_id in sorted(bag.dags)]
    return dags


def connections_of(dags: Sequence[DAG]) -> set[str]:
    """Return the connections that the DAGs' elastic tasks refer to, except templates, which are rendered later."""
    found: set[str] = set()
    for task in (task for dag in dags for task in dag.tasks if issubclass(_kind_of(task), ElasticTrainOperator)):
        given = task.partial_kwargs if isinstance(task, MappedOperator) else vars(task)
        conn_id = given.get("elasticflow_conn_id", ElasticFlowHook.default_conn_name)
        if isinstance(conn_id, str) and "{{" not in conn_id:
            found.add(conn_id)
    return found


def plan(dags: Sequence[DAG], *, namespaces: Mapping[str, str], now: datetime, window: timedelta) -> PlannedRuns:
    """Return the runs of all elastic tasks that are due from ``now`` on, within ``window``.

    ``namespaces`` maps connection ids to namespaces; "" is the key for all others. Raises BadDagFileError for a task
    that could not be submitted as it is.
    """
    made = PlannedRuns()
    for dag in dags:
        for task in dag.tasks:
            operators = _operators_of(task)
            if operators is None:
                continue
            made.tasks += 1
            if not isinstance(operators, str):
                for map_index, operator in operators:
                    _plan_task(made, dag, operator, map_index, namespaces, now, window)
            else:
                made.unknown.append(Unknown(task=f"{dag.dag_id}.{task.task_id}", reason=operators))
    return made


def _kind_of(task: Any) -> type[Any]:
    """Return the class of a task's operator, mapped or not."""
    kind: type[Any] = task.operator_class if isinstance(task, MappedOperator) else type(task)
    return kind


def _operators_of(task: Any) -> list[tuple[int, ElasticTrainOperator]] | str | None:
    """Return the elastic tasks of a task by map index, or why they are unknown; None if it is not elastic."""
    kind = _kind_of(task)
    if not issubclass(kind, ElasticTrainOperator):
        return None
    if issubclass(kind, ElasticTrainDecoratedOperator):
        return "its function decides in a run what is trained"
    if not isinstance(task, MappedOperator):
        return [(-1, task)]
    try:
        return [(i, task.unmap(given)) for i, given in enumerate(itertools.islice(_expanded(task), _MOST_MAPPED))]  # type: ignore[misc]  # unmap() of a subclass of ours makes ours
    except NeedsARunError as error:
        return str(error)


def _expanded(task: MappedOperator) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each instance if ``expand(...)`` has literal values. Raises NeedsARunError otherwise."""
    value = getattr(task.expand_input, "value", None)
    if isinstance(value, Mapping) and all(isinstance(one, (list, tuple, dict)) for one in value.values()):
        columns = [list(one.items() if isinstance(one, dict) else one) for one in value.values()]
        for row in itertools.product(*columns):
            yield dict(zip(value, row, strict=True))
    elif isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value):
        yield from (dict(one) for one in value)
    else:
        raise NeedsARunError("it is mapped over what only a run knows")


def _plan_task(
    made: PlannedRuns,
    dag: DAG,
    operator: ElasticTrainOperator,
    map_index: int,
    namespaces: Mapping[str, str],
    now: datetime,
    window: timedelta,
) -> None:
    name = f"{dag.dag_id}.{operator.task_id}" + (f"[{map_index}]" if map_index >= 0 else "")
    if operator.best_effort:
        made.best_effort.append(name)
        return
    try:
        due = next_runs(dag.timetable, after=now, until=now + window, earliest=dag.start_date, latest=dag.end_date)
    except TimetableError as error:
        made.unknown.append(Unknown(task=name, reason=str(error)))
        return
    snapshot = None
    for run in due:
        try:
            task, given = _rendered(operator, dag, run)
        except NeedsARunError as error:
            made.unknown.append(Unknown(task=name, reason=str(error), due=run.run_after))
            continue
        conn_id = str(task.elasticflow_conn_id)
        facts = _facts(dag, task, run, map_index, namespaces.get(conn_id, namespaces.get("", "default")))
        try:
            prepared = prepare(task, given, facts, TaskMemory(), AirflowSettings.read(), snapshot=snapshot)
            planned = PlannedRun(submission=prepared.submission, due_at=run.run_after.timestamp())
        except (ArgumentError, DeadlineError, SnapshotError, ValueError) as error:
            raise BadDagFileError(f"task {name}, due {run.run_after:%Y-%m-%d %H:%M %Z}: {error}") from error
        snapshot = prepared.snapshot
        made.runs.setdefault(conn_id, []).append(planned)


def _facts(dag: DAG, task: ElasticTrainOperator, run: KnownRun, map_index: int, namespace: str) -> RunFacts:
    identity = JobIdentity(
        namespace=namespace,
        dag_id=dag.dag_id,
        run_id=f"planned__{run.run_after.isoformat()}",
        task_id=task.task_id,
        map_index=map_index,
    )
    return RunFacts(
        identity=identity,
        run=RunOfDag(
            run_type="scheduled",
            run_after=run.run_after,
            logical_date=run.interval_start or run.run_after,
            interval_start=run.interval_start,
            interval_end=run.interval_end,
            timetable=dag.timetable,
            alerts=alerts_of(dag),
            dag_end=dag.end_date,
        ),
        timezone=dag.timezone,
        dag_folder=Path(dag.folder).absolute(),
        bundle_root=None,
        attempt=1,
        max_tries=0,
        is_dag_test=False,
        replays=True,  # so that nothing is reported to the calendar
    )


def _rendered(operator: ElasticTrainOperator, dag: DAG, run: KnownRun) -> tuple[ElasticTrainOperator, dict[str, Any]]:
    """Return a copy of the operator with the arguments that a forecast needs, rendered, and its given arguments.

    Arguments that a forecast does not need are left out.
    """
    task = copy.copy(operator)
    given = dict(operator._given)
    context = _context(operator, dag, run)
    environment = dag.get_template_env()
    for name in operator.template_fields:
        value = getattr(operator, name)
        if value is None or name not in FORECAST:
            _set(task, given, name, () if name == "script_args" else None)
            continue
        try:
            _put(task, name, operator.render_template(value, context, environment))
        except NeedsARunError as error:
            if FORECAST[name] == "needed":
                raise NeedsARunError(f"{name}={value!r} {error}") from None
            _set(task, given, name, None)  # the service knows the length of the last run
            if name == "latest_deadline":
                _put(task, "on_reject", "fail")  # no later deadline is known to be acceptable
        except Exception as error:
            raise NeedsARunError(f"{name}={value!r} cannot be rendered before a run: {error!r}") from error
    _put(task, "secret_env", None)
    return task, given


def _set(task: ElasticTrainOperator, given: dict[str, Any], name: str, value: Any) -> None:
    _put(task, name, value)
    given[name] = value


def _put(task: ElasticTrainOperator, name: str, value: Any) -> None:
    object.__setattr__(task, name, value)  # past Airflow's own __setattr__, which looks for XComArgs to wire up


class _OnlyInARun:
    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise NeedsARunError(f"needs a run: it asks for {self.__name}.{attribute}")


def _context(operator: ElasticTrainOperator, dag: DAG, run: KnownRun) -> Any:
    from airflow.sdk.execution_time import macros

    due = pendulum.instance(run.run_after)
    logical = pendulum.instance(run.interval_start or run.run_after)
    end = pendulum.instance(run.interval_end or run.run_after)
    given: tuple[Any, ...] = (dag.params, operator.params)
    params = {name: value for one in given for name, value in ParamsDict(one).dump().items()}
    run_id = f"scheduled__{logical.isoformat()}"
    return {
        "dag": dag,
        "task": operator,
        "params": params,
        "ds": logical.strftime("%Y-%m-%d"),
        "ds_nodash": logical.strftime("%Y%m%d"),
        "ts": logical.isoformat(),
        "ts_nodash": logical.strftime("%Y%m%dT%H%M%S"),
        "logical_date": logical,
        "data_interval_start": logical,
        "data_interval_end": end,
        "run_id": run_id,
        "dag_run": SimpleNamespace(
            run_id=run_id,
            run_after=due,
            logical_date=logical,
            data_interval_start=logical,
            data_interval_end=end,
            conf={},
            run_type="scheduled",
        ),
        "conf": _OnlyInARun("conf"),
        "macros": macros,
        **{name: _OnlyInARun(name) for name in ("ti", "task_instance", "var", "conn", "task_state_store")},
    }


def trimmed(made: PlannedRuns) -> tuple[PlannedRuns, int]:
    """Return the plan with at most MOST_RUNS runs per connection, and the number of runs left out."""
    kept = {conn_id: sorted(runs, key=lambda run: run.due_at)[:MOST_RUNS] for conn_id, runs in made.runs.items()}
    left_out = sum(len(runs) - len(kept[conn_id]) for conn_id, runs in made.runs.items())
    return PlannedRuns(runs=kept, unknown=made.unknown, best_effort=made.best_effort, tasks=made.tasks), left_out
