"""The async client, for triggers: the same calls as the blocking one, and the stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState

from elasticflow_airflow.client import calls, insight_calls, owner_calls
from elasticflow_airflow.client.calls import Call
from elasticflow_airflow.client.embedded import EMBEDDED_START_LIMIT_S, ensure_service
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import ServiceUnavailable, raise_for_answer
from elasticflow_airflow.client.exchange import RETRIED, give_up_after, pause_between, read_answer, unreachable
from elasticflow_airflow.client.snapshot import Snapshot
from elasticflow_airflow.diagnosis import Diagnosis
from elasticflow_airflow.insight import (
    CalendarAnswer,
    CalendarRequest,
    CapacityAnswer,
    ClusterHistory,
    ClusterNow,
    JobStory,
    RunOfTask,
    StackDump,
    WhatIf,
    WhatIfRequest,
)
from elasticflow_airflow.wire import (
    AmendAnswer,
    AmendRequest,
    Attachment,
    Drain,
    DryRun,
    Event,
    ForecastAnswer,
    Health,
    JobStatus,
    JobSubmission,
    LogPiece,
    PlannedRun,
)
from elasticflow_airflow.wire.owners import OwnedJobs, OwnersAnswer, OwnersReport, UnownedJob

T = TypeVar("T")

log = logging.getLogger(__name__)

_STREAM_SILENCE_S = 45.0
"""The service sends a comment every 15 s; three missing ones mean that the stream is dead."""


class AsyncElasticFlowClient:
    """The async twin of :class:`~elasticflow_airflow.client.sync.ElasticFlowClient`: same arguments, same errors."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retry_for_s: float = 60.0,
        timeout_s: float = 10.0,
        on_away: Callable[[str], None] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.retry_for_s = retry_for_s
        self._timeout_s = timeout_s
        self._on_away = on_away
        self._http = endpoint.open_async_client(timeout_s, transport)

    async def __aenter__(self) -> AsyncElasticFlowClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> Health:
        """Ask how the service is, and what its slots do."""
        return await self._run(calls.health())

    async def version(self) -> dict[str, str]:
        """Ask for the service's version (``version``), API version (``api``), and clock (``at``, UTC seconds)."""
        return await self._run(calls.version())

    async def doctor(self) -> Diagnosis:
        """Have the service look over itself and its machine."""
        return await self._run(calls.doctor())

    async def has_snapshot(self, sha256: str) -> bool:
        """Whether the service has this code already."""
        return await self._run(calls.has_snapshot(sha256))

    async def upload_snapshot(self, snapshot: Snapshot) -> bool:
        """Send the code unless the service has it; True when it was sent."""
        if await self.has_snapshot(snapshot.sha256):
            return False
        await self._run(calls.upload_snapshot(snapshot))
        return True

    async def submit(self, submission: JobSubmission) -> Attachment:
        """Submit, or attach to the live job or unacknowledged success of the same specification."""
        return await self._run(calls.submit(submission))

    async def dry_run(self, submission: JobSubmission) -> DryRun:
        """What admission control would say to a submission now; nothing is submitted."""
        return await self._run(calls.dry_run(submission))

    async def forecast(self, hours: float = 24.0, planned: Sequence[PlannedRun] = ()) -> ForecastAnswer:
        """What will become of everything that is due in the next hours, planned runs too, and what is missing."""
        return await self._run(calls.forecast(hours, planned))

    async def attach(self, job_id: str, lease_s: float | None = None) -> Attachment:
        """Take a new claim on the current incarnation. Raises JobNotFound."""
        return await self._run(calls.attach(job_id, lease_s))

    async def status(self, job_id: str) -> JobStatus:
        """Everything about one job. Raises JobNotFound."""
        return await self._run(calls.status(job_id))

    async def list_jobs(
        self,
        state: str | None = None,
        dag_id: str | Sequence[str] | None = None,
        live: bool | None = None,
        limit: int | None = None,
        *,
        namespace: str | None = None,
        run_id: str | None = None,
        task_id: str | None = None,
        map_index: int | None = None,
        cursor: str | None = None,
    ) -> list[JobStatus]:
        """List jobs, newest first: at most ``limit`` (default 100, most 1,000) of those that all of this is true of.

        The next page begins after ``cursor``, which is the ``cursor`` of the last job of the page before.
        """
        call = calls.list_jobs(
            state,
            dag_id,
            live,
            limit,
            namespace=namespace,
            run_id=run_id,
            task_id=task_id,
            map_index=map_index,
            cursor=cursor,
        )
        return await self._run(call)

    async def amend(self, job_id: str, request: AmendRequest) -> AmendAnswer:
        """Change a job's deadline or value, if that can be promised. Raises StaleClaim, JobNotFound."""
        return await self._run(calls.amend(job_id, request))

    async def drain(self, node_id: str, until_at: float | None) -> Drain:
        """Say when a node goes away (UTC seconds): its workers are moved before. None: it stays after all."""
        return await self._run(calls.drain(node_id, until_at))

    async def cancel(self, job_id: str, claim: int, reason: str = "") -> JobStatus:
        """Cancel a job. Raises StaleClaim when a newer attempt owns it, JobNotFound."""
        return await self._run(calls.claimed("cancel", job_id, claim, reason))

    async def acknowledge(self, job_id: str, claim: int, reason: str = "") -> JobStatus:
        """Say that Airflow has recorded the success: the next submit trains anew. Raises StaleClaim, JobNotFound."""
        return await self._run(calls.claimed("acknowledge", job_id, claim, reason))

    async def renew(self, job_id: str, claim: int, reason: str = "") -> JobStatus:
        """Renew the job's lease and see how it stands. Raises StaleClaim, JobNotFound."""
        return await self._run(calls.claimed("lease", job_id, claim, reason))

    async def events(self, job_id: str, after: int = 0, limit: int = 500) -> list[Event]:
        """Read a job's events with an id greater than ``after``, oldest first."""
        return await self._run(calls.events(job_id, after, limit))

    async def read_log(
        self, job_id: str, log_name: str, offset: int = 0, limit: int = 65536, incarnation: int | None = None
    ) -> LogPiece:
        """Read a worker's log from a byte offset on."""
        return await self._run(calls.read_log(job_id, log_name, offset, limit, incarnation))

    async def stream_events(self, job_id: str | None = None, after: int = 0) -> AsyncIterator[Event]:
        """Follow events as they happen, without end; a broken stream is taken up where it broke.

        Raises ServiceUnavailable when nobody answers for ``retry_for_s``.
        """
        while True:
            # A stream that delivered something starts the clock of the next outage anew.
            lines: httpx.Response = await self._retrying()(self._open_stream, job_id, after)
            try:
                async for event in _parse_events(lines):
                    after = max(after, event.event_id)
                    yield event
            except httpx.TransportError as error:
                log.info("the stream of events broke (%s); going on after event %d", error, after)
            finally:
                await lines.aclose()
            await asyncio.sleep(0.2)  # a server that closes at once is not asked in a tight loop

    async def _open_stream(self, job_id: str | None, after: int) -> httpx.Response:
        params: dict[str, str | int] = {"after": after}
        if job_id is not None:
            params["job_id"] = job_id
        request = self._http.build_request(
            "GET",
            "/v1/events",
            params=params,
            headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)},
            timeout=httpx.Timeout(self._timeout_s, read=_STREAM_SILENCE_S),
        )
        try:
            response = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise unreachable(error, self.endpoint) from error
        if response.status_code >= 400:
            await response.aread()
            raise_for_answer(response, str(self.endpoint))
        return response

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=RETRIED,
            stop=give_up_after(self.retry_for_s),
            wait=pause_between(),
            before_sleep=self._while_away,
            reraise=True,
        )

    async def cluster(self) -> ClusterNow:
        """Every slot and who holds it, and all live jobs, each with why it has its size or waits."""
        return await self._run(insight_calls.cluster())

    async def history(
        self, from_at: float | None = None, until_at: float | None = None, parts: int = 96
    ) -> ClusterHistory:
        """What was, what is planned and what was asked for between two moments; by default a day around now."""
        return await self._run(insight_calls.history(from_at, until_at, parts))

    async def story(self, job_id: str, incarnation: int | None = None) -> JobStory:
        """Everything about one incarnation of a job, by default the current one. Raises JobNotFound."""
        return await self._run(insight_calls.story(job_id, incarnation))

    async def runs(self, job_id: str, limit: int = 10) -> list[RunOfTask]:
        """A run and the last others of the same recurring task, newest first. Raises JobNotFound."""
        return await self._run(insight_calls.runs(job_id, limit))

    async def what_if(self, request: WhatIfRequest) -> WhatIf:
        """The outlook with other deadlines, or with more or fewer nodes; nothing is changed."""
        return await self._run(insight_calls.what_if(request))

    async def capacity(self, hours: float = 24.0) -> CapacityAnswer:
        """Which nodes nobody needs in the next hours, or how many more are wanted; nothing is changed."""
        return await self._run(insight_calls.capacity(hours))

    async def feed_calendar(self, request: CalendarRequest) -> CalendarAnswer:
        """Say when the runs of recurring tasks are due, so that slots are kept free for them."""
        return await self._run(insight_calls.feed_calendar(request))

    async def owned_jobs(self, namespace: str, after: str = "") -> OwnedJobs:
        """The live jobs of a namespace with their claims: those with an id greater than ``after``, a page of them."""
        return await self._run(owner_calls.owned_jobs(namespace, after))

    async def report_owners(self, report: OwnersReport) -> OwnersAnswer:
        """Say what has become of the task instances of jobs: those of owners that are gone are cancelled."""
        return await self._run(owner_calls.report_owners(report))

    async def unowned_jobs(self, silent_s: float | None = None) -> list[UnownedJob]:
        """Live jobs whose owner is gone, or for which nobody has asked for so many seconds (by default 60)."""
        return await self._run(owner_calls.unowned_jobs(silent_s))

    async def stacks(self, job_id: str) -> StackDump:
        """What each worker of a job is doing right now. Raises JobNotFound."""
        return await self._run(insight_calls.stacks(job_id))

    async def _run(self, call: Call[T]) -> T:
        answer: T = await self._retrying()(self._exchange, call)
        return answer

    async def _exchange(self, call: Call[T]) -> T:
        try:
            response = await self._http.request(
                call.method,
                call.path,
                params=dict(call.params),
                content=call.body,
                headers={} if call.body is None else {"Content-Type": call.content_type},
                timeout=max(self._timeout_s, call.timeout_s or 0.0),
            )
        except httpx.TransportError as error:
            raise unreachable(error, self.endpoint) from error
        return read_answer(call, response, self.endpoint)

    async def _while_away(self, state: RetryCallState) -> None:
        if state.attempt_number == 1:
            reason = str(state.outcome.exception()) if state.outcome is not None else ""
            log.warning("%s; trying again for %.0f s", reason, self.retry_for_s)
            if self._on_away is not None:
                self._on_away(reason)
        if self.endpoint.embedded_state_dir is not None:
            try:
                limit_s = min(EMBEDDED_START_LIMIT_S, self.retry_for_s)
                await asyncio.to_thread(ensure_service, self.endpoint.embedded_state_dir, limit_s=limit_s)
            except ServiceUnavailable as error:
                log.warning("the embedded service could not be started again: %s", error)


async def _parse_events(response: httpx.Response) -> AsyncIterator[Event]:
    """Read server-sent events: ``data:`` lines up to an empty line make one message; comments are dropped."""
    data: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data), extra="ignore")
            data = []
