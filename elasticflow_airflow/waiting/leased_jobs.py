"""The jobs of this process, with the claims by which it may cancel and acknowledge them.

In a ``dag.test()`` they are also kept alive while the process lives, and cancelled when it exits: one task runs at a
time and the pokes of a waiting task may be minutes apart, while its lease is short so that a killed test leaves nothing
behind. So a background thread renews the leases of this process's jobs, and at exit, including Ctrl-C, jobs that have
not ended are cancelled. In production the triggerer renews leases, and a process that ends must not end the job.
"""

from __future__ import annotations

import atexit
import logging
import threading
from dataclasses import dataclass

from elasticflow_airflow.api import State
from elasticflow_airflow.client import (
    ElasticFlowClient,
    ElasticFlowError,
    Endpoint,
    JobNotFound,
    ServiceUnavailable,
    StaleClaim,
)

log = logging.getLogger(__name__)

ENDED_LATER = "Airflow's report that its task is gone, or its lease, will end it"
LEASE_S = 60.0
ORPHAN_S = 300.0
_RENEW_EVERY_S = 10.0
_CANCEL_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedJob:
    """A job and the claim by which this process may cancel and acknowledge it."""

    endpoint: Endpoint
    job_id: str
    claim: int

    def cancel(self, reason: str, *, within_s: float = _CANCEL_WITHIN_S) -> str:
        """Cancel the job within ``within_s`` seconds; return the result as text, also if the service is unavailable."""
        try:
            with ElasticFlowClient(self.endpoint, retry_for_s=within_s / 2, timeout_s=within_s / 2) as client:
                status = client.cancel(self.job_id, self.claim, reason)
        except StaleClaim:
            return f"job {self.job_id} belongs to a newer attempt by now: not cancelled"
        except JobNotFound:
            return f"job {self.job_id} is not known to the service any more"
        except ServiceUnavailable as error:
            return f"job {self.job_id} could not be cancelled now ({error}); {ENDED_LATER}"
        finally:
            lease_renewer().forget(self.job_id)  # renewing its lease would keep an unwanted job alive
        if status.state.terminal and status.state is not State.CANCELLED:
            return f"job {self.job_id} is {status.state.value} already: nothing to cancel"
        return f"job {self.job_id}: cancelled at step {status.step} ({reason})"

    def acknowledge(self) -> str:
        """Confirm to the service that Airflow has recorded the success; return the result as text."""
        try:
            with ElasticFlowClient(self.endpoint, retry_for_s=30.0) as client:
                client.acknowledge(self.job_id, self.claim, "the Airflow task succeeded")
        except StaleClaim:
            return f"job {self.job_id} belongs to a newer attempt by now: not acknowledged"
        except ElasticFlowError as error:
            return f"the success of job {self.job_id} could not be acknowledged now ({error})"
        return f"job {self.job_id} acknowledged"


class LeaseRenewer:
    """The jobs of this process's ``dag.test()`` runs. One per process: ``lease_renewer()``. Thread-safe."""

    def __init__(self) -> None:
        self._jobs: dict[str, LeasedJob] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._interrupted: set[str] = set()

    def keep(self, job: LeasedJob) -> None:
        """Renew this job's lease from now on; a newer claim replaces an older one."""
        with self._lock:
            self._jobs[job.job_id] = job
            if self._thread is None:
                atexit.register(self.close)
                self._thread = threading.Thread(target=self._renew, name="elasticflow-leases", daemon=True)
                self._thread.start()

    def forget(self, job_id: str) -> None:
        """Stop renewing a job's lease, because it has ended or has another owner."""
        with self._lock:
            self._jobs.pop(job_id, None)

    def kept(self) -> list[LeasedJob]:
        """Return the jobs whose leases are renewed."""
        with self._lock:
            return list(self._jobs.values())

    def interrupt(self, run_id: str) -> None:
        """Record that Ctrl-C was pressed inside a task of this run, and cancel all kept jobs.

        Airflow treats Ctrl-C as a failure of that task and continues, so the run's other tasks learn of it here.
        """
        self._interrupted.add(run_id)
        self.cancel_all("Ctrl-C in dag.test()")

    def was_interrupted(self, run_id: str) -> bool:
        """Whether Ctrl-C was pressed inside a task of this run."""
        return run_id in self._interrupted

    def cancel_all(self, reason: str) -> None:
        """Cancel all kept jobs."""
        for job in self.kept():
            log.warning("%s", job.cancel(reason))

    def close(self) -> None:
        """Cancel the jobs that have not ended and stop the thread; called at process exit."""
        self._wake.set()
        self.cancel_all("the process of dag.test() ended")

    def _renew(self) -> None:
        while not self._wake.wait(_RENEW_EVERY_S):
            for job in self.kept():
                try:
                    with ElasticFlowClient(job.endpoint, retry_for_s=_RENEW_EVERY_S) as client:
                        status = client.renew(job.job_id, job.claim, "dag.test() is alive")
                except (StaleClaim, JobNotFound) as error:
                    log.info("lease of job %s is no longer renewed here: %s", job.job_id, error)
                    self.forget(job.job_id)
                except ElasticFlowError as error:
                    log.warning("lease of job %s could not be renewed: %s", job.job_id, error)
                else:
                    if status.state.terminal:
                        self.forget(job.job_id)


_lease_renewer = LeaseRenewer()


def lease_renewer() -> LeaseRenewer:
    """Return this process's lease renewer."""
    return _lease_renewer
