"""Sends a submission whatever comes in between: a signal between request and answer must not lose the claim.

The claim is the only way to a job that trains by then.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from elasticflow_airflow.api import Attachment, JobSubmission, State
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint, JobNotFound, StaleClaim
from elasticflow_airflow.waiting.dag_test_leases import LeasedJob, lease_renewer
from elasticflow_airflow.waiting.task_memory import TaskMemory


class InFlight:
    """A submission under way, in a thread and by a client of its own: Ctrl-C and timeouts reach only who waits for it.

    With ``keep``, the thread hands the job to the lease renewer, which cancels it when this process leaves, however
    often Ctrl-C was pressed.
    """

    def __init__(self, endpoint: Endpoint, submission: JobSubmission, *, retry_for_s: float, keep: bool) -> None:
        self._endpoint, self._submission, self._retry_for_s, self._keep = endpoint, submission, retry_for_s, keep
        self._answer: Future[Attachment] = Future()
        threading.Thread(target=self._submit, name="elasticflow-submit").start()

    def answer(self) -> Attachment:
        """Wait for the answer. Raises what the client raises."""
        return self._answer.result()

    def job(self, limit_s: float, log: Any) -> LeasedJob | None:
        """Give it some more time to be answered; the job, if there is one."""
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
    """Attach to the success that an earlier try has acknowledged; None where that is not so.

    Airflow may try such a task again that nobody cleared: a scheduler that was killed, or reads late, writes its own
    opinion over the recorded success; or Airflow had given the try up, which lived on. It gets its result, and trains
    no second time. Whether that try remembers that it has returned does not count: Airflow may have taken it no more.
    """
    if memory.attempt is None or attempt <= memory.attempt:
        return None
    if memory.max_tries != max_tries or memory.job_id != job_id:
        return None  # It was cleared: whoever does that wants it to train anew.
    try:
        status = client.status(job_id)
        if status.state is State.SUCCEEDED and status.acknowledged:
            return client.attach(job_id)
    except JobNotFound:
        pass
    return None


def acknowledge_for_clear(client: ElasticFlowClient, job_id: str, memory: TaskMemory, max_tries: int) -> bool:
    """Make up for an acknowledgement that never arrived, when a task was cleared since; whether there was one to make.

    Airflow ends a process soon after it has recorded its success, also when the service was away just then. Who clears
    such a task wants it to run again. A retry returns the result instead, and so does a clear of a task that failed
    with it, because its model could not be handed on.
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
