"""Runs a DAG by Airflow's own ``dag.test()``, on a simulated cluster or with real training, and returns the result.

Imports Airflow inside its functions: this module is loaded before the private home exists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.client import ElasticFlowClient, Endpoint
from elasticflow_airflow.deadlines import clock
from elasticflow_airflow.testing.cluster import SimulatedCluster, check_shape
from elasticflow_airflow.testing.dags import find_dag, store_dag, without_deadline_alerts, without_retry_delays
from elasticflow_airflow.testing.home import environment
from elasticflow_airflow.testing.results import ByTask, DagResult, JobOutcome, TaskOutcome
from elasticflow_airflow.testing.trainings import SimulatedTraining

if TYPE_CHECKING:
    from airflow.sdk import DAG

_DEFAULT_CONNECTION = "elasticflow_default"
_MOMENT_S = 1.0
"""Added to the clock after each simulated run, so that the next run gets its own id."""

Engine = Literal["simulated", "local"]


class DagSimulation:
    """The part of ``run_dag`` that lets simulated time pass when Airflow has nothing else to do.

    It sits between ``dag.test()`` and the DAG run. Of the tasks that could continue now, it holds back those that would
    only find their training still running; when there are no others, time passes until there is news for one of them.
    So every task is submitted at the moment at which production would have submitted it.
    """

    def __init__(self, cluster: SimulatedCluster, dag: DAG) -> None:
        self._cluster, self._dag = cluster, dag

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let :meth:`choose` decide which tasks ``dag.test()`` continues."""
        from airflow.models.dagrun import DagRun

        original = DagRun.update_state

        def update_state(run: Any, *args: Any, **kwargs: Any) -> Any:
            schedulable, callback = original(run, *args, **kwargs)
            if run.dag_id == self._dag.dag_id:
                schedulable = self.choose(schedulable, run.get_task_instances)
            return schedulable, callback

        with (
            clock.using(self._cluster.clock),
            self._cluster.running(),
            patch.object(DagRun, "update_state", update_state),
        ):
            yield

    def choose(self, schedulable: list[Any], everybody: Callable[[], list[Any]]) -> list[Any]:
        """Return the schedulable task instances that have something to do; lets time pass until there are some."""
        self._cluster.next_turn()
        looks = [ti for ti in schedulable if self._only_looks(ti)]
        busy = [ti for ti in schedulable if ti not in looks]
        while looks:
            busy += [ti for ti in looks if self._has_news(ti)]
            if busy:
                break
            if not self._cluster.live and self._somebody_waits(everybody(), looks):
                return looks  # sensors of future trainings, behind a task that waits in real time
            self._cluster.wait(self._hang_detector(looks), watched=any(self._is_sensor(ti) for ti in looks))
            if self._is_over(looks):
                return looks
        return busy

    def _somebody_waits(self, everybody: list[Any], looks: list[Any]) -> bool:
        from airflow.sdk import TaskInstanceState

        waits = (TaskInstanceState.UP_FOR_RESCHEDULE, TaskInstanceState.UP_FOR_RETRY, TaskInstanceState.DEFERRED)
        looking = {(ti.task_id, ti.map_index) for ti in looks}
        return any(ti.state in waits and (ti.task_id, ti.map_index) not in looking for ti in everybody)

    def _only_looks(self, ti: Any) -> bool:
        from airflow.sdk import TaskInstanceState

        if ti.state != TaskInstanceState.UP_FOR_RESCHEDULE:
            return False
        return self._is_sensor(ti) or self._cluster.has_job(self._identity(ti))

    def _has_news(self, ti: Any) -> bool:
        return self._cluster.has_any_news() if self._is_sensor(ti) else self._cluster.has_news(self._identity(ti))

    def _is_sensor(self, ti: Any) -> bool:
        from elasticflow_airflow.operators.sensor import ElasticTrainSensor

        task = self._dag.task_dict[ti.task_id]
        return issubclass(getattr(task, "operator_class", type(task)), ElasticTrainSensor)

    def _identity(self, ti: Any) -> JobIdentity:
        return JobIdentity(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=ti.map_index)

    def _hang_detector(self, looks: list[Any]) -> float:
        """Return until when these tasks wait at most: an expired ``execution_timeout`` must be noticed."""
        ends = [self._timeout_at(ti) for ti in looks]
        return min((end for end in ends if end > self._cluster.clock()), default=math.inf)

    def _is_over(self, looks: list[Any]) -> bool:
        return any(self._timeout_at(ti) <= self._cluster.clock() for ti in looks)

    def _timeout_at(self, ti: Any) -> float:
        limit = self._dag.task_dict[ti.task_id].execution_timeout
        since = None if limit is None or self._is_sensor(ti) else self._cluster.submitted_at(self._identity(ti))
        return math.inf if limit is None or since is None else float(since + limit.total_seconds() + 0.1)


class RunDag:
    """Value of the fixture ``run_dag``: call it with a DAG. See :meth:`__call__`."""

    def __init__(
        self,
        prepare: Callable[[], None],
        cluster: Callable[[float | None], SimulatedCluster],
        local: Callable[[int], Endpoint],
    ) -> None:
        self._prepare, self._cluster, self._local = prepare, cluster, local
        self.results: list[DagResult] = []
        """Results of the runs of this test, oldest first."""

    @property
    def cluster(self) -> SimulatedCluster:
        """The simulated cluster of this test, with its clock and everything that it knows about its jobs."""
        return self._cluster(None)

    def __call__(
        self,
        dag: DAG | str | Path | Any,
        *,
        dag_id: str | None = None,
        engine: Engine = "simulated",
        nodes: int | None = None,
        slots: int | None = None,
        simulated: Mapping[str, SimulatedTraining] | None = None,
        simulated_curves: Mapping[str, Mapping[int, float]] | None = None,
        run_after: datetime | None = None,
        logical_date: datetime | None = None,
        conf: dict[str, Any] | None = None,
        retry_delays: bool = False,
        **options: Any,
    ) -> DagResult:
        """Run a DAG once, to its end, and return the result. A failed run is a result, too.

        ``dag``: a DAG, or the path of the file that defines it (``dag_id`` selects among several).

        ``engine="simulated"``: real scheduling, modelled workers, no real time, no torch. The cluster has ``nodes``
        nodes of ``slots`` slots (default: 1 of 4; kept for the next run of the same test).
        ``simulated`` defines by task id how trainings behave, ``simulated_curves`` only how fast they are (steps/s by
        workers); the default is ``scaling_curve=``, else a built-in curve. The clock starts at ``run_after`` (an aware
        datetime; default: now) and continues from run to run of a test, as does what the service has learned.

        ``engine="local"``: the scripts really train, on this machine (torch needed), with ``slots`` slots.

        ``conf``: the run's configuration. ``retry_delays=True`` waits, in real time, before a retry. ``options`` go
        to ``dag.test()``. Raises DagError when there is no DAG, ValueError for arguments that are invalid or do not
        go together.
        """
        check_shape(nodes=nodes, slots=slots)
        self._prepare()
        found = find_dag(dag, dag_id)
        trainings = _trainings(found, simulated or {}, simulated_curves or {})
        for name, moment in (("run_after", run_after), ("logical_date", logical_date)):
            if moment is not None and moment.tzinfo is None:
                raise ValueError(
                    f"{name}={moment} has no time zone: give one, such as pendulum.datetime(..., tz='UTC')"
                )
        moments: dict[str, Any] = {"run_after": run_after, "logical_date": logical_date or run_after}
        with ExitStack() as stack:
            if not retry_delays:
                stack.enter_context(without_retry_delays(found))
            if engine == "simulated":
                cluster = self._cluster(None if run_after is None else run_after.timestamp())
                endpoint = cluster.endpoint
                moments = _simulated_moments(cluster, run_after, logical_date)
                shape = (nodes or cluster.shape[0], slots or cluster.shape[1])
                if shape != cluster.shape:
                    cluster.resize(nodes=shape[0], slots=shape[1])
                cluster.trainings = trainings
                stack.enter_context(environment(_simulated_environment(found, endpoint)))
                stack.enter_context(DagSimulation(cluster, found).running())
                stack.callback(lambda: cluster.move_to(cluster.clock() + _MOMENT_S))
            elif engine == "local":
                if trainings or nodes is not None:
                    raise ValueError('nodes=, simulated= and simulated_curves= belong to engine="simulated"')
                endpoint = self._local(slots or 2)
                stack.enter_context(environment(_connections(found, endpoint)))
            else:
                raise ValueError(f'engine={engine!r} is none of "simulated" and "local"')
            errors = stack.enter_context(_errors_noted())
            given = {name: moment for name, moment in moments.items() if moment is not None}
            shadow = without_deadline_alerts(found)
            store_dag(shadow)
            run = shadow.test(run_conf=conf, **given, **options)
            if engine == "simulated":
                self.cluster.settle()
            self.results.append(_result(found, run, endpoint, errors))
            return self.results[-1]


def _simulated_moments(
    cluster: SimulatedCluster, run_after: datetime | None, logical_date: datetime | None
) -> dict[str, Any]:
    """Return the dates of the run, and advance the clock to its due time unless that has passed already."""
    import pendulum

    if run_after is not None:
        cluster.move_to(run_after.timestamp())
    due = run_after or pendulum.from_timestamp(cluster.clock())
    return {"run_after": due, "logical_date": logical_date or due}


def _trainings(
    dag: DAG, simulated: Mapping[str, SimulatedTraining], curves: Mapping[str, Mapping[int, float]]
) -> dict[str, SimulatedTraining]:
    from dataclasses import replace

    for name in [*simulated, *curves]:
        if name.partition("[")[0] not in dag.task_dict:
            raise ValueError(f"the DAG {dag.dag_id} has no task {name!r}; it has {', '.join(dag.task_dict)}")
    found = dict(simulated)
    for name, curve in curves.items():
        if name in simulated and simulated[name].steps_per_s is not None:
            raise ValueError(f"simulated_curves[{name!r}] beside simulated[{name!r}].steps_per_s: give one of the two")
        found[name] = replace(found.get(name, SimulatedTraining()), steps_per_s=dict(curve))
    return found


def _connections(dag: DAG, endpoint: Endpoint) -> dict[str, str]:
    """Return variables that point every connection of the DAG's elastic tasks to the service of the test."""
    ids = {_DEFAULT_CONNECTION}
    for task in dag.task_dict.values():
        named = getattr(task, "partial_kwargs", {}).get("elasticflow_conn_id") or getattr(
            task, "elasticflow_conn_id", None
        )
        if isinstance(named, str) and "{{" not in named:
            ids.add(named)
    where = json.dumps({"conn_type": "elasticflow", "host": f"unix://{endpoint.socket_path}"})
    return {f"AIRFLOW_CONN_{conn_id.upper()}": where for conn_id in ids}


def _simulated_environment(dag: DAG, endpoint: Endpoint) -> dict[str, str]:
    return {
        **_connections(dag, endpoint),
        "AIRFLOW__ELASTICFLOW__DAG_TEST_POKE_S": "0",
        "AIRFLOW__ELASTICFLOW__POLL_INTERVAL_S": "0.001",
        "AIRFLOW__ELASTICFLOW__MIN_DEFERRAL_S": "0",
    }


@contextmanager
def _errors_noted() -> Iterator[dict[tuple[str, int], str]]:
    """Record the errors that tasks raise, by task id and map index."""
    from airflow.listeners import hookimpl
    from airflow.sdk.listener import get_listener_manager

    noted: dict[tuple[str, int], str] = {}

    class Notes:
        @hookimpl  # type: ignore[untyped-decorator, unused-ignore]  # pluggy's marker is not typed everywhere
        def on_task_instance_failed(self, task_instance: Any, error: Any) -> None:
            index = -1 if task_instance.map_index is None else task_instance.map_index
            kind = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
            noted[task_instance.task_id, index] = f"{kind}{error}"

    manager, notes = get_listener_manager(), Notes()
    manager.pm.register(notes)
    try:
        yield noted
    finally:
        manager.pm.unregister(notes)


def _result(dag: DAG, run: Any, endpoint: Endpoint, errors: Mapping[tuple[str, int], str]) -> DagResult:
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    with create_session() as session:
        query = XComModel.get_many(run_id=run.run_id, key="return_value", dag_ids=run.dag_id)
        rows: Any = session.scalars(query).all()
        returned = {(row.task_id, row.map_index): XComModel.deserialize_value(row) for row in rows}
    tasks = {}
    order = [task.task_id for task in dag.topological_sort()]  # type: ignore[no-untyped-call]  # untyped in Airflow
    for ti in sorted(run.get_task_instances(), key=lambda ti: (order.index(ti.task_id), ti.map_index)):
        key = (ti.task_id, ti.map_index)
        state = None if ti.state is None else str(getattr(ti.state, "value", ti.state))
        outcome = TaskOutcome(
            task_id=ti.task_id,
            map_index=ti.map_index,
            state=state,
            tries=ti.try_number,
            returned=returned.get(key),
            error=errors.get(key),
        )
        tasks[outcome.key] = outcome
    jobs = {}
    with ElasticFlowClient(endpoint, retry_for_s=5.0) as client:
        for status in client.list_jobs(dag_id=run.dag_id, limit=1000):
            if status.identity.run_id == run.run_id:
                index = status.identity.map_index
                key_of_job = status.identity.task_id if index < 0 else f"{status.identity.task_id}[{index}]"
                jobs[key_of_job] = JobOutcome(status, tuple(_all_events(client, status.job_id)))
    return DagResult(
        dag_id=run.dag_id,
        run_id=run.run_id,
        state=str(getattr(run.state, "value", run.state)),
        tasks=ByTask("task instance", tasks),
        jobs=ByTask("job", {key: jobs[key] for key in tasks if key in jobs}),
    )


def _all_events(client: ElasticFlowClient, job_id: str) -> Iterator[Any]:
    after = 0
    while events := client.events(job_id, after):
        yield from events
        after = events[-1].event_id
