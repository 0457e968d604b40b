"""Waits for a job in the triggerer: renews its lease, logs its progress, and cancels it if the task is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.client import AsyncElasticFlowClient, JobNotFound, StaleClaim
from elasticflow_airflow.deadlines.parse import zone_from
from elasticflow_airflow.exceptions import ServiceAway, ServiceRefused
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.waiting.cancelling import cancel_job, go_on, is_kill
from elasticflow_airflow.waiting.progress_lines import TRIGGER_LINE_EVERY_S, ProgressLog, ProgressMark
from elasticflow_airflow.waiting.retrying_client import RetryingClient
from elasticflow_airflow.waiting.scheduler_rounds import held_back


class ElasticFlowJobTrigger(BaseTrigger):
    """Fires ``{"job_id", "claim", "outcome", "event_id"}`` once the job has ended.

    ``outcome`` is ``"ended"``, ``"stale"`` (a newer attempt has taken the job over), ``"gone"`` (the service does not
    know the job), ``"away"`` (the service did not answer for ``service_away_s``), ``"refused"`` (it refused this client
    for as long; the event then has a ``"why"``), or with ``alarm`` ``"at_risk"`` (the job may miss its deadline; not
    fired while ``told``, which means that the task was already notified). ``event_id`` is the last event that was
    logged. ``claim`` is sent with every call, so a trigger of an older attempt changes nothing. ``state_dir`` names the
    embedded service that the worker used. Times are in seconds. ``min_deferral_s`` delays an early end: see
    ``[elasticflow] min_deferral_s``.
    """

    def __init__(
        self,
        job_id: str,
        claim: int,
        elasticflow_conn_id: str = ElasticFlowHook.default_conn_name,
        state_dir: str | None = None,
        timezone: str = "UTC",
        poll_interval_s: float = 5.0,
        min_deferral_s: float = 15.0,
        service_away_s: float = 3600.0,
        last_event_id: int = 0,
        alarm: bool = False,
        told: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow has no types here
        self.job_id = job_id
        self.claim = claim
        self.elasticflow_conn_id = elasticflow_conn_id
        self.state_dir = state_dir
        self.timezone = timezone
        self.poll_interval_s = poll_interval_s
        self.min_deferral_s = min_deferral_s
        self.service_away_s = service_away_s
        self.last_event_id = last_event_id
        self.alarm = alarm
        self.told = told
        self._mark = ProgressMark(event_id=last_event_id)
        self._why = ""
        self._service = RetryingClient(elasticflow_conn_id, state_dir, service_away_s, self.log)
        self._cancelling: asyncio.Task[None] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class's path and its arguments as JSON-compatible values."""
        return (
            "elasticflow_airflow.triggers.ElasticFlowJobTrigger",
            {
                "job_id": self.job_id,
                "claim": self.claim,
                "elasticflow_conn_id": self.elasticflow_conn_id,
                "state_dir": self.state_dir,
                "timezone": self.timezone,
                "poll_interval_s": self.poll_interval_s,
                "min_deferral_s": self.min_deferral_s,
                "service_away_s": self.service_away_s,
                "last_event_id": self.last_event_id,
                "alarm": self.alarm,
                "told": self.told,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait until the job has ended, then fire once."""
        try:
            async with held_back(self.min_deferral_s):
                outcome = await self._wait()
                await self._service.aclose()
        except asyncio.CancelledError as cancelled:
            if is_kill(cancelled) and not self._timed_out():
                self._cancel()  # at once, because the next cancel may arrive before on_kill()
            raise
        event = {"job_id": self.job_id, "claim": self.claim, "outcome": outcome, "event_id": self.last_event_id}
        if self._why:
            event["why"] = self._why
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]  # Airflow has no types here

    async def on_kill(self) -> None:
        """Cancel the job: a user set the deferred task's state or cleared it. A newer attempt's job is left alone."""
        await asyncio.shield(self._cancel())

    async def cleanup(self) -> None:
        """Close the client. Never touches the job, because this also runs when the triggerer restarts."""
        if self._cancelling is None:
            await self._service.aclose()

    def _cancel(self) -> asyncio.Task[None]:
        """Cancel the job once, with the client that polled it; the returned task continues after this trigger ends."""
        if self._cancelling is None:
            self._cancelling = go_on(cancel_job(self._service, self.job_id, self.claim, self.task_instance, self.log))
        return self._cancelling

    def _timed_out(self) -> bool:
        """Whether the deferral has timed out, by Airflow's ``timeout_after``. The resumed task then cancels the job."""
        limit: datetime | None = getattr(self, "timeout_after", None)
        return limit is not None and (limit if limit.tzinfo else limit.replace(tzinfo=UTC)) < datetime.now(UTC)

    async def _wait(self) -> str:
        """Poll until there is an outcome."""
        while True:
            try:
                status = await self._service.ask(self._look)
            except StaleClaim as error:
                self.log.warning("%s", error)
                return "stale"
            except JobNotFound as error:
                self.log.error("%s", error)
                return "gone"
            except ServiceAway as error:
                self.log.error("%s", error)
                return "away"
            except ServiceRefused as error:
                self.log.error("%s", error)
                self._why = str(error)
                return "refused"
            if status is not None:
                if status.state.terminal:
                    return "ended"
                if self.alarm and status.at_risk and not self.told:
                    return "at_risk"
                self.told = self.told and status.at_risk
            await asyncio.sleep(self.poll_interval_s)

    async def _look(self, client: AsyncElasticFlowClient) -> JobStatus:
        status = await client.renew(self.job_id, self.claim, "the Airflow task waits")
        progress = ProgressLog(log=self.log, timezone=zone_from(self.timezone), every_s=TRIGGER_LINE_EVERY_S)
        new = progress.has_new_events(status, self._mark)
        events = await client.events(self.job_id, self._mark.event_id) if new else []
        self._mark = progress.write(status, events, self._mark)
        self.last_event_id = self._mark.event_id
        return status
