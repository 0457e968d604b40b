"""Watches a job from a worker: polls it, and writes its progress to the task's log.

Every poll renews the job's lease. A temporary outage of the service is tolerated: the job keeps training meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import tzinfo

from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.client import PASSING, ElasticFlowClient, ElasticFlowError
from elasticflow_airflow.settings import AirflowSettings
from elasticflow_airflow.waiting.outages import Outage
from elasticflow_airflow.waiting.progress_lines import WORKER_LINE_EVERY_S, Logger, ProgressLog
from elasticflow_airflow.waiting.task_memory import TaskMemory

_SLICE_S = 0.5
"""A signal handler cannot end ``time.sleep``; short slices let the loop notice that the task was killed."""


class JobWatch:
    """Polls the job of ``memory``; records there what was logged, and since when the service is unavailable."""

    def __init__(
        self,
        client: ElasticFlowClient,
        memory: TaskMemory,
        *,
        timezone: tzinfo,
        log: Logger,
        settings: AirflowSettings,
        on_status: Callable[[JobStatus], None],
    ) -> None:
        self._on_status = on_status
        self._client = client
        self._memory = memory
        self._log = log
        self._progress = ProgressLog(log=log, timezone=timezone, every_s=WORKER_LINE_EVERY_S)
        self._settings = settings
        self._outage = Outage(memory, settings.service_away_s, log)

    def say(self, status: JobStatus) -> None:
        """Log what is new: each event with its reason, and periodically a line of progress."""
        progress, mark = self._progress, self._memory.mark
        events = self._client.events(status.job_id, mark.event_id) if progress.has_new_events(status, mark) else []
        self._memory.mark = progress.write(status, events, mark)

    def tell(self, status: JobStatus) -> None:
        """Log what is new, but only warn if the service fails: a missing log line must not fail a submitted job."""
        try:
            self.say(status)
        except ElasticFlowError as error:
            self._log.warning("%s; the job is submitted, and its events are said later", error)

    def look(self) -> JobStatus | None:
        """Renew the lease and log what is new; return None while the service is unavailable.

        Raises StaleClaim, JobNotFound, and the error of an outage that lasts longer than ``service_away_s`` seconds.
        """
        memory = self._memory
        try:
            status = self._client.renew(str(memory.job_id), memory.claim, "the Airflow task waits")
            self.say(status)
        except PASSING as error:
            if not self._outage.is_waited_out(error):
                raise
            return None
        self._outage.ended()
        self._on_status(status)
        return status

    def wait(self, limit_s: float | None, killed: Callable[[], bool]) -> JobStatus | None:
        """Poll until the job has ended, ``limit_s`` seconds have passed, or the task is killed.

        Returns the result of the last poll.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        status: JobStatus | None = None
        while not killed():
            status = self.look()
            if status is not None and status.state.terminal:
                return status
            left_s = self._settings.poll_interval_s if end is None else end - time.monotonic()
            if left_s <= 0:
                return status
            pause_until = time.monotonic() + min(left_s, self._settings.poll_interval_s)
            while not killed() and (rest_s := pause_until - time.monotonic()) > 0:
                time.sleep(min(rest_s, _SLICE_S))
        return status
