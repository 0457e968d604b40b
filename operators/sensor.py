"""A sensor that waits until a training of another task, run or DAG ends, has a checkpoint, or is at risk."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, Context, PokeReturnValue
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from elasticflow_airflow.api import JobIdentity, JobStatus
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, JobNotFound
from elasticflow_airflow.exceptions import ServiceAway, ServiceRefused, as_task_error
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.links import job_url
from elasticflow_airflow.sensor_trigger import ElasticFlowSensorTrigger
from elasticflow_airflow.settings import AirflowSettings, deferrable_by_default
from elasticflow_airflow.task.alarms import describe
from elasticflow_airflow.task.arguments import ArgumentError, is_late, present
from elasticflow_airflow.task.mapping import names_checked
from elasticflow_airflow.task.task_submission import is_dag_test
from elasticflow_airflow.waiting.outages import Outage
from elasticflow_airflow.waiting.sensing import LATEST, SUCCEEDED, UNTIL, Seen, asks_for_events, judge
from elasticflow_airflow.waiting.task_memory import TaskMemory

if TYPE_CHECKING:
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

_ANSWER_WITHIN_S = 30.0


class ElasticTrainSensor(BaseSensorOperator):
    """Wait for the job of an elastic task of another DAG, task or run.

    The job is selected by ``external_dag_id`` and ``external_task_id`` (with its task groups: ``"group.train"``), the
    run ``external_run_id`` (default: this run's id, which is right for a task of this DAG and for a DAG of the same
    schedule; ``"latest"``: the run that submitted last) and, for a mapped task, ``external_map_index``; or by
    ``job_id``. If the job does not exist yet, the sensor waits for it.

    ``until`` is the condition: ``"succeeded"`` (default; any other end fails this task), ``"ended"`` (any end),
    ``"checkpoint"`` (a checkpoint is usable while the training continues) or ``"at_risk"`` (the job may miss its
    deadline; if it ends without having been at risk, this task is skipped).

    The sensor defers if ``deferrable`` is set (default: ``[elasticflow] deferrable``), else it uses its ``mode``,
    ``"poke"`` or ``"reschedule"``; under ``dag.test()`` a deferrable sensor is rescheduled. ``poke_interval`` (seconds;
    default 5), ``timeout``, ``soft_fail`` and the rest are those of Airflow's sensors. An unavailable service is
    tolerated for up to ``[elasticflow] service_away_s``. The sensor is read-only: it never claims the job or renews its
    lease.

    Returns what is known about the job (see ``on_at_risk``), with the ``checkpoint_path`` and ``step`` of the awaited
    checkpoint. Raises ArgumentError at DAG parse.
    """

    template_fields: Sequence[str] = (
        "external_dag_id",
        "external_task_id",
        "external_run_id",
        "job_id",
        "elasticflow_conn_id",
    )
    ui_color = "#e9f6ec"

    def __init__(
        self,
        *,
        external_dag_id: str | None = None,
        external_task_id: str | None = None,
        external_run_id: str = "{{ run_id }}",
        external_map_index: int = -1,
        job_id: str | None = None,
        until: str = SUCCEEDED,
        deferrable: bool | None = None,
        elasticflow_conn_id: str = ElasticFlowHook.default_conn_name,
        poke_interval: timedelta | float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.external_dag_id = external_dag_id
        self.external_task_id = external_task_id
        self.external_run_id = external_run_id
        self.external_map_index = external_map_index
        self.job_id = job_id
        self.until = until
        self.deferrable = deferrable_by_default() if deferrable is None else deferrable
        self.elasticflow_conn_id = elasticflow_conn_id
        self._given = {name: getattr(self, name) for name in self.template_fields}
        if (job_id is None) == (external_task_id is None):
            raise ArgumentError(
                f"give exactly one of external_task_id= (with external_dag_id= of another DAG) and job_id="
                f" (external_task_id={external_task_id!r}, job_id={job_id!r})"
            )
        if job_id is not None and external_dag_id is not None:
            raise ArgumentError(f"external_dag_id={external_dag_id!r} beside job_id={job_id!r}: leave one of them out")
        if until not in UNTIL:
            raise ArgumentError(f"until={until!r} is none of {', '.join(map(repr, UNTIL))}")
        for name, value in self._given.items():
            if value is not None and not is_late(value) and (not isinstance(value, str) or not value.strip()):
                raise ArgumentError(f"{name}={value!r} must be a str with content")
        if isinstance(external_map_index, bool) or not isinstance(external_map_index, int) or external_map_index < -1:
            raise ArgumentError(f"external_map_index={external_map_index!r} must be a map index from 0, or -1")
        if not isinstance(self.deferrable, bool):
            raise ArgumentError(f"deferrable={deferrable!r} must be True or False")

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        """Begin a mapped sensor (Airflow's dynamic task mapping)."""
        return names_checked(super().partial(**kwargs), kwargs)

    def resolve_template_files(self) -> None:
        """Check that an external task of the same DAG exists. Airflow calls this once the DAG file has been read."""
        super().resolve_template_files()
        task_id = self.external_task_id
        if task_id is None or self.external_dag_id is not None or is_late(task_id) or self.dag is None:
            return
        if task_id not in self.dag.task_ids:
            known = ", ".join(sorted(set(self.dag.task_ids) - {self.task_id})) or "no other"
            raise ArgumentError(
                f"external_task_id={task_id!r} is no task of DAG {self.dag.dag_id!r} (it has {known}): write the full"
                " id, like 'group.train', or give external_dag_id= for a task of another DAG"
            )

    def execute(self, context: Context) -> Any:
        """Poke once, then wait: deferred, rescheduled or by poking, depending on where this runs."""
        try:
            for name in self.template_fields:
                present(name, getattr(self, name), self._given[name])
        except ArgumentError as error:
            raise AirflowFailException(str(error)) from error  # the next try would end the same way
        if self.deferrable and is_dag_test(context):
            # dag.test() has a single process: awaiting a trigger in it would keep the awaited job's task from running.
            pause_s = AirflowSettings.read().dag_test_poke_s
            self.mode, self.poke_interval = "reschedule", min(self.poke_interval, pause_s)
            return super().execute(context)
        if not self.deferrable:
            return super().execute(context)
        found = self.poke(context)
        if not found.is_done:
            self._defer(context)
        return found.xcom_value

    def poke(self, context: Context) -> PokeReturnValue:
        """Poll the job once. Tolerates an unavailable service; raises ServiceAway when it stays away for too long.

        Fails or skips the task when the condition can no longer be met.
        """
        store, attempt, settings = context["task_state_store"], context["ti"].try_number, AirflowSettings.read()
        known = TaskMemory.load(store)
        memory = known if known.attempt == attempt else TaskMemory(attempt=attempt)
        outage = Outage(memory, settings.service_away_s, self.log)
        try:
            hook = ElasticFlowHook(self.elasticflow_conn_id)
            with hook.client(retry_for_s=min(_ANSWER_WITHIN_S, settings.service_away_s)) as client:
                status, seen = self._look(client, self._target(context, hook))
        except (ElasticFlowError, AirflowException) as error:
            if memory.answered:
                is_waited_out = outage.is_waited_out(error)
            else:  # An error on the first poll is reported at once.
                is_waited_out = outage.is_waited_out_at_start(error, is_dag_test=is_dag_test(context))
            if not is_waited_out:
                if isinstance(error, ElasticFlowError):
                    raise as_task_error(error) from error
                raise
            memory.save(store)
            return PokeReturnValue(is_done=False)
        if memory.away_since is not None or not memory.answered:
            outage.ended()
            memory.answered = True
            memory.save(store)
        if seen.outcome == "waiting":
            self.log.info("%s; waiting until it is %s", seen.why, self.until)
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._conclude(context, seen, status))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Resume after the trigger has fired. Relies on ``event`` alone: the service may be unavailable by now."""
        if event["outcome"] == "error":
            raise AirflowException(str(event["why"]))
        if event["outcome"] == "away":
            raise ServiceAway(str(event["why"]))
        if event["outcome"] == "refused":
            raise ServiceRefused(str(event["why"]))
        seen = Seen(outcome=str(event["outcome"]), why=str(event["why"]), checkpoint=event["checkpoint"])
        return self._conclude(context, seen, JobStatus.model_validate(event["status"]))

    def _target(self, context: Context, hook: ElasticFlowHook) -> JobIdentity | str | None:
        """Return the job to wait for: a job id, or an identity to look up the latest run of."""
        if self.job_id is not None:
            return self.job_id
        identity = JobIdentity(
            namespace=hook.namespace,
            dag_id=self.external_dag_id or context["ti"].dag_id,
            run_id=self.external_run_id,
            task_id=str(self.external_task_id),
            map_index=self.external_map_index,
        )
        return identity if self.external_run_id == LATEST else identity.job_id

    def _look(self, client: ElasticFlowClient, target: JobIdentity | str | None) -> tuple[JobStatus | None, Seen]:
        status: JobStatus | None
        if isinstance(target, JobIdentity):
            jobs = client.list_jobs(
                dag_id=target.dag_id,
                limit=1,
                namespace=target.namespace,
                task_id=target.task_id,
                map_index=target.map_index,
            )
            status = next(iter(jobs), None)
        else:
            try:
                status = client.status(str(target))
            except JobNotFound:
                status = None
        events = client.events(status.job_id) if status is not None and asks_for_events(self.until) else []
        return status, judge(self.until, status, events)

    def _conclude(self, context: Context, seen: Seen, status: JobStatus | None) -> dict[str, Any]:
        self.log.info("%s", seen.why)
        if seen.outcome == "over":
            raise AirflowSkipException(f"{seen.why}: there is nothing to wait for any more")
        if seen.outcome == "failed":
            if self.soft_fail:
                raise AirflowSkipException(f"{seen.why} (soft_fail=True)")
            raise AirflowFailException(f"{seen.why}; it was waited for until it is {self.until}")
        assert status is not None  # the remaining outcomes imply a job
        identity = status.identity
        self.log.info("%s", job_url(identity.dag_id, identity.run_id, identity.task_id, identity.map_index))
        return {**describe(status, context["dag"].timezone), **(seen.checkpoint or {})}

    def _defer(self, context: Context) -> NoReturn:
        hook, settings = ElasticFlowHook(self.elasticflow_conn_id), AirflowSettings.read()
        target = self._target(context, hook)
        state_dir = hook.endpoint(start=False).embedded_state_dir
        latest = target if isinstance(target, JobIdentity) else None
        self.defer(
            trigger=ElasticFlowSensorTrigger(
                until=self.until,
                job_id=None if latest is not None else str(target),
                dag_id=None if latest is None else latest.dag_id,
                task_id=None if latest is None else latest.task_id,
                map_index=self.external_map_index,
                namespace=hook.namespace,
                elasticflow_conn_id=self.elasticflow_conn_id,
                state_dir=None if state_dir is None else str(state_dir),
                poll_interval_s=self.poke_interval,
                min_deferral_s=settings.min_deferral_s,
                service_away_s=settings.service_away_s,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )
