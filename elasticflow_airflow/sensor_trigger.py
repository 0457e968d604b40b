"""Waits in the triggerer for a sensor's condition: a job's end, a checkpoint of it, or its being at risk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.client import AsyncElasticFlowClient, ElasticFlowError, JobNotFound
from elasticflow_airflow.exceptions import ServiceAway, ServiceRefused
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.waiting.retrying_client import RetryingClient
from elasticflow_airflow.waiting.scheduler_rounds import held_back
from elasticflow_airflow.waiting.sensing import Seen, asks_for_events, judge


class ElasticFlowSensorTrigger(BaseTrigger):
    """Fires ``{"status", "outcome", "why", "checkpoint"}`` once a job meets a sensor's condition, or cannot any more.

    ``status`` is the job's last status. The job is selected by ``job_id``, or by ``dag_id``, ``task_id`` and
    ``map_index``, of the run that submitted last. ``outcome`` is that of ``sensing.Seen``, or ``"error"``, or
    ``"away"`` (the service did not answer for ``service_away_s``), or ``"refused"`` (it refused this client for as
    long). The trigger takes no claim and renews no lease. Times are in seconds.
    """

    def __init__(
        self,
        until: str,
        job_id: str | None = None,
        dag_id: str | None = None,
        task_id: str | None = None,
        map_index: int = -1,
        namespace: str = "default",
        elasticflow_conn_id: str = ElasticFlowHook.default_conn_name,
        state_dir: str | None = None,
        poll_interval_s: float = 5.0,
        min_deferral_s: float = 15.0,
        service_away_s: float = 3600.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow has no types here
        self.until = until
        self.job_id = job_id
        self.dag_id = dag_id
        self.task_id = task_id
        self.map_index = map_index
        self.namespace = namespace
        self.elasticflow_conn_id = elasticflow_conn_id
        self.state_dir = state_dir
        self.poll_interval_s = poll_interval_s
        self.min_deferral_s = min_deferral_s
        self.service_away_s = service_away_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class's path and its arguments as JSON-compatible values."""
        names = (
            "until", "job_id", "dag_id", "task_id", "map_index", "namespace", "elasticflow_conn_id", "state_dir",
            "poll_interval_s", "min_deferral_s", "service_away_s",
        )  # fmt: skip
        return (
            "elasticflow_airflow.sensor_trigger.ElasticFlowSensorTrigger",
            {name: getattr(self, name) for name in names},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until there is an outcome, then fire once."""
        async with held_back(self.min_deferral_s):
            event = await self._wait()
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]  # Airflow has no types here

    async def _wait(self) -> dict[str, Any]:
        said = ""
        async with RetryingClient(self.elasticflow_conn_id, self.state_dir, self.service_away_s, self.log) as service:
            while True:
                try:
                    found = await service.ask(self._look)
                except ServiceAway as error:
                    return _event(None, Seen(outcome="away", why=str(error)))
                except ServiceRefused as error:
                    return _event(None, Seen(outcome="refused", why=str(error)))
                except ElasticFlowError as error:
                    return _event(None, Seen(outcome="error", why=str(error)))
                if found is not None:
                    status, seen = found
                    if seen.outcome != "waiting":
                        return _event(status, seen)
                    if seen.why != said:
                        said = seen.why
                        self.log.info("%s; waiting until it is %s", said, self.until)
                await asyncio.sleep(self.poll_interval_s)

    async def _look(self, client: AsyncElasticFlowClient) -> tuple[JobStatus | None, Seen]:
        status: JobStatus | None
        if self.job_id is not None:
            try:
                status = await client.status(self.job_id)
            except JobNotFound:
                status = None
        else:
            jobs = await client.list_jobs(
                dag_id=self.dag_id,
                limit=1,
                namespace=self.namespace,
                task_id=self.task_id,
                map_index=self.map_index,
            )
            status = next(iter(jobs), None)
        events = await client.events(status.job_id) if status is not None and asks_for_events(self.until) else []
        return status, judge(self.until, status, events)


def _event(status: JobStatus | None, seen: Seen) -> dict[str, Any]:
    """Return all that the task needs to resume: the service may be unavailable by then, so the task does not ask it."""
    told = None if status is None else status.model_dump(mode="json")
    return {"status": told, "outcome": seen.outcome, "why": seen.why, "checkpoint": seen.checkpoint}
