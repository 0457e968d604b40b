"""Sends a submission such that a signal between request and response cannot lose the claim.

Without the claim the task could not control the job, which may be training by then.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from elasticflow_airflow.api import Attachment, JobSubmission, State
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint, JobNotFound, StaleClaim
from elasticflow_airflow.waiting.leased_jobs import LeasedJob, lease_renewer
from elasticflow_airflow.waiting.task_memory import TaskMemory


class InFlight:
    """A submission in progress, in its own thread and client: Ctrl-C and timeouts interrupt only the waiting caller.

    With ``keep``, the thread passes the job to the lease renewer, which cancels it when this process exits, however
    often Ctrl-C was pressed.
    """

    def __init__(self, endpoint: Endpoint, submission: JobSubmission, *, retry_for_s: float, keep: bool) -> None:
        self._endpoint, self._submission, self._retry_for_s, self._keep = endpoint, submission, retry_for_s, keep
        self._answer: Future[Attachment] = Future()
        threading.Thread(target=self._submit, name="elasticflow-submit").start()

    def answer(self) -> Attachment:
        """Wait for the response. Raises what the client raises."""
        return self._answer.result()

    def job(self, limit_s: float, log: Any) -> LeasedJob | None:
        """Wait up to ``limit_s`` seconds for the response; return the job, or None."""
        try:
            attachment = self._answer.result(timeout=limit_s)
        except (ElasticFlowError, TimeoutError) as error:
            log.warning("interrupted while submitting: %s", error or "the service has not answered yet")
            return None
        return self._own(attachment)

    def _own(self, attachment: Attachment) -> LeasedJob:
        return LeasedJob(endpoint=self._endpoint, job_id=attachment.job.job_id, claim=attachment.claim)

    def _submit(self) -> None:
        try:
            with ElasticFlowClient(self._endpoint, retry_for_s=self._retry_for_s) as client:
                attachment = client.submit(self._submission)
            if self._keep and not attachment.job.state.terminal:
                lease_renewer().keep(self._own(attachment))
            self._answer.set_result(attachment)
        except BaseException as error:  # noqa: BLE001 - raised by result(), in the thread that waits
            self._answer.set_exception(error)


def attach_for_retry(
    client: ElasticFlowClient, job_id: str, memory: TaskMemory, attempt: int, max_tries: int
) -> Attachment | None:
    """Attach to a success that an earlier try acknowledged; return None if there is none.

    Airflow may retry such a task although it was not cleared: a scheduler that was killed, or reads late, overwrites
    the recorded success, or Airflow had declared the try dead while it was still running. The retry gets the result and
    does not train again. Whether the earlier try remembers that it returned is irrelevant, because Airflow may not have
    accepted its result.
    """
    if memory.attempt is None or attempt <= memory.attempt:
        return None
    if memory.max_tries != max_tries or memory.job_id != job_id:
        return None  # The task was cleared, so it is to train again.
    try:
        status = client.status(job_id)
        if status.state is State.SUCCEEDED and status.acknowledged:
            return client.attach(job_id)
    except JobNotFound:
        pass
    return None


def acknowledge_for_clear(client: ElasticFlowClient, job_id: str, memory: TaskMemory, max_tries: int) -> bool:
    """Send the missing acknowledgement of a success whose task was cleared since; return whether one was missing.

    Airflow ends a process soon after it has recorded its success, even if the service was unavailable at that time. A
    task that is cleared then is to train again. A retry returns the result instead, and so does a cleared task that
    failed after the success because its model could not be passed on.
    """
    if not memory.returned or memory.max_tries is None or max_tries <= memory.max_tries or memory.job_id != job_id:
        return False
    try:
        status = client.status(job_id)
        if status.state is not State.SUCCEEDED or status.acknowledged:
            return False
        client.acknowledge(job_id, memory.claim, "the Airflow task was cleared after its success")
    except (JobNotFound, StaleClaim):
        return False
    return True
