"""The blocking client, for Airflow task processes and the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import httpx
from tenacity import RetryCallState, Retrying

from elasticflow_airflow.client import calls, insight_calls, owner_calls
from elasticflow_airflow.client.calls import Call
from elasticflow_airflow.client.embedded import EMBEDDED_START_LIMIT_S, ensure_service
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import ServiceUnavailable
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


class ElasticFlowClient:
    """Calls the service, and goes on trying while it is away.

    ``retry_for_s``: how long a call is repeated when nobody answers, in seconds; 0 tries once. ``timeout_s``: limit of
    one exchange. ``on_away`` is told, once per outage, that the service does not answer. With an embedded endpoint a
    service that is gone is started again. Raises the errors of ``client.errors``. Not for several threads at once.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retry_for_s: float = 60.0,
        timeout_s: float = 10.0,
        on_away: Callable[[str], None] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.retry_for_s = retry_for_s
        self._timeout_s = timeout_s
        self._on_away = on_away
        self._http = endpoint.open_client(timeout_s, transport)

    def __enter__(self) -> ElasticFlowClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def health(self) -> Health:
        """Ask how the service is, and what its slots do."""
        return self._run(calls.health())

    def version(self) -> dict[str, str]:
        """Ask for the service's version (``version``), API version (``api``), and clock (``at``, UTC seconds)."""
        return self._run(calls.version())

    def doctor(self) -> Diagnosis:
        """Have the service look over itself and its machine."""
        return self._run(calls.doctor())

    def has_snapshot(self, sha256: str) -> bool:
        """Whether the service has this code already."""
        return self._run(calls.has_snapshot(sha256))

    def upload_snapshot(self, snapshot: Snapshot) -> bool:
        """Send the code unless the service has it; True when it was sent."""
        if self.has_snapshot(snapshot.sha256):
            return False
        self._run(calls.upload_snapshot(snapshot))
        return True

    def submit(self, submission: JobSubmission) -> Attachment:
        """Submit, or attach to the live job or unacknowledged success of the same specification."""
        return self._run(calls.submit(submission))

    def dry_run(self, submission: JobSubmission) -> DryRun:
        """What admission control would say to a submission now; nothing is submitted."""
        return self._run(calls.dry_run(submission))

    def forecast(self, hours: float = 24.0, planned: Sequence[PlannedRun] = ()) -> ForecastAnswer:
        """What will become of everything that is due in the next hours, planned runs too, and what is missing."""
        return self._run(calls.forecast(hours, planned))

    def attach(self, job_id: str, lease_s: float | None = None) -> Attachment:
        """Take a new claim on the current incarnation. Raises JobNotFound."""
        return self._run(calls.attach(job_id, lease_s))

    def status(self, job_id: str) -> JobStatus:
        """Everything about one job. Raises JobNotFound."""
        return self._run(calls.status(job_id))

    def list_jobs(
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
        return self._run(call)

    def amend(self, job_id: str, request: AmendRequest) -> AmendAnswer:
        """Change a job's deadline or value, if that can be promised. Raises StaleClaim, JobNotFound."""
        return self._run(calls.amend(job_id, request))

    def drain(self, node_id: str, until_at: float | None) -> Drain:
        """Say when a node goes away (UTC seconds): its workers are moved before. None: it stays after all."""
        return self._run(calls.drain(node_id, until_at))

    def cancel(self, job_id: str, claim: int, reason: str = "") -> JobStatus:
        """Cancel a job. Raises StaleClaim when a newer attempt owns it, JobNotFound."""
        return self._run(calls.claimed("cancel", job_id, claim, reason))

    def acknowledge(self, job_id: str, claim: int, reason: str = "") -> JobStatus:
        """Say that Airflow has recorded the success: the next submit trains anew. Raises StaleClaim, JobNotFound."""
        return self._run(calls.claimed("acknowledge", job_id, claim, reason))

    def renew(self, job_id: str, claim: int, reason: str = "") -> JobStatus:
        """Renew the job's lease and see how it stands. Raises StaleClaim, JobNotFound."""
        return self._run(calls.claimed("lease", job_id, claim, reason))

    def events(self, job_id: str, after: int = 0, limit: int = 500) -> list[Event]:
        """Read a job's events with an id greater than ``after``, oldest first."""
        return self._run(calls.events(job_id, after, limit))

    def read_log(
        self, job_id: str, log_name: str, offset: int = 0, limit: int = 65536, incarnation: int | None = None
    ) -> LogPiece:
        """Read a worker's log from a byte offset on."""
        return self._run(calls.read_log(job_id, log_name, offset, limit, incarnation))

    def cluster(self) -> ClusterNow:
        """Every slot and who holds it, and all live jobs, each with why it has its size or waits."""
        return self._run(insight_calls.cluster())

    def history(self, from_at: float | None = None, until_at: float | None = None, parts: int = 96) -> ClusterHistory:
        """What was, what is planned and what was asked for between two moments; by default a day around now."""
        return self._run(insight_calls.history(from_at, until_at, parts))

    def story(self, job_id: str, incarnation: int | None = None) -> JobStory:
        """Everything about one incarnation of a job, by default the current one. Raises JobNotFound."""
        return self._run(insight_calls.story(job_id, incarnation))

    def runs(self, job_id: str, limit: int = 10) -> list[RunOfTask]:
        """A run and the last others of the same recurring task, newest first. Raises JobNotFound."""
        return self._run(insight_calls.runs(job_id, limit))

    def what_if(self, request: WhatIfRequest) -> WhatIf:
        """The outlook with other deadlines, or with more or fewer nodes; nothing is changed."""
        return self._run(insight_calls.what_if(request))

    def capacity(self, hours: float = 24.0) -> CapacityAnswer:
        """Which nodes nobody needs in the next hours, or how many more are wanted; nothing is changed."""
        return self._run(insight_calls.capacity(hours))

    def feed_calendar(self, request: CalendarRequest) -> CalendarAnswer:
        """Say when the runs of recurring tasks are due, so that slots are kept free for them."""
        return self._run(insight_calls.feed_calendar(request))

    def owned_jobs(self, namespace: str, after: str = "") -> OwnedJobs:
        """The live jobs of a namespace with their claims: those with an id greater than ``after``, a page of them."""
        return self._run(owner_calls.owned_jobs(namespace, after))

    def report_owners(self, report: OwnersReport) -> OwnersAnswer:
        """Say what has become of the task instances of jobs: those of owners that are gone are cancelled."""
        return self._run(owner_calls.report_owners(report))

    def unowned_jobs(self, silent_s: float | None = None) -> list[UnownedJob]:
        """Live jobs whose owner is gone, or for which nobody has asked for so many seconds (by default 60)."""
        return self._run(owner_calls.unowned_jobs(silent_s))

    def stacks(self, job_id: str) -> StackDump:
        """What each worker of a job is doing right now. Raises JobNotFound."""
        return self._run(insight_calls.stacks(job_id))

    def _run(self, call: Call[T]) -> T:
        retrying = Retrying(
            retry=RETRIED,
            stop=give_up_after(self.retry_for_s),
            wait=pause_between(),
            before_sleep=self._while_away,
            reraise=True,
        )
        answer: T = retrying(self._exchange, call)
        return answer

    def _exchange(self, call: Call[T]) -> T:
        try:
            response = self._http.request(
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

    def _while_away(self, state: RetryCallState) -> None:
        if state.attempt_number == 1:
            reason = str(state.outcome.exception()) if state.outcome is not None else ""
            log.warning("%s; trying again for %.0f s", reason, self.retry_for_s)
            if self._on_away is not None:
                self._on_away(reason)
        if self.endpoint.embedded_state_dir is not None:
            try:
                ensure_service(self.endpoint.embedded_state_dir, limit_s=min(EMBEDDED_START_LIMIT_S, self.retry_for_s))
            except ServiceUnavailable as error:
                log.warning("the embedded service could not be started again: %s", error)
