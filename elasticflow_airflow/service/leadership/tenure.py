"""What exists only while this process decides: the engine and the loop. The rest of the service asks the *seat* for it.

Handlers of requests must not find a loop that decides no more, and must do without one between two leaders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticflow_airflow.engines.port import Engine, EngineNode
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.service.autoscaling import Autoscaling
from elasticflow_airflow.service.decisions.foresight import Foresight
from elasticflow_airflow.service.job_files.candidates import CandidateService
from elasticflow_airflow.service.loop.reconcile import Reconciler
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.renewals import Renewals


@dataclass(slots=True)
class Tenure:
    """The engine and the loop of one time in office. ``autoscaling`` is None where nobody provides machines."""

    engine: Engine
    reconciler: Reconciler
    candidates: CandidateService
    autoscaling: Autoscaling | None = None
    _loop: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._loop = threading.Thread(target=self.reconciler.run, name="reconcile", daemon=True)

    def begin(self) -> None:
        """Start the threads."""
        if self.autoscaling is not None:
            self.autoscaling.start()
        self._loop.start()

    def end(self, wait_s: float) -> None:
        """Stop the loop, waiting for its current pass up to ``wait_s``, and release the engine; workers go on."""
        self.reconciler.stop()
        if self._loop.is_alive():
            self._loop.join(wait_s)
        if self.autoscaling is not None:
            self.autoscaling.close()
        self.candidates.close()
        self.engine.close()


class Seat:
    """Gives access to the tenure of this process, if it has one. Thread-safe."""

    def __init__(self, tell_of_runs: Callable[[], None] = lambda: None) -> None:
        """``tell_of_runs`` lets the leader know that due runs were stored, if it is another process."""
        self._tell_of_runs = tell_of_runs
        self.renewals = Renewals()
        """Requests of owners for their jobs, counted in the handlers' threads."""
        self._tenure: Tenure | None = None
        self.vacancy: list[str] = []
        """Why nobody decides here although this process should; sentences for people."""

    def fill(self, tenure: Tenure) -> None:
        """Begin a tenure."""
        self.vacancy = []
        self._tenure = tenure

    def leave(self) -> Tenure | None:
        """End the tenure, and return it."""
        tenure, self._tenure = self._tenure, None
        return tenure

    @property
    def is_filled(self) -> bool:
        """Whether this process decides."""
        return self._tenure is not None

    @property
    def engine(self) -> Engine:
        """The engine. Raises Refusal 503 if this process does not decide."""
        tenure = self._tenure
        if tenure is None:
            raise no_leader()
        return tenure.engine

    def has_files(self, job_id: str, incarnation: int) -> bool:
        """Return whether an incarnation has files, as far as this process can know."""
        tenure = self._tenure
        return tenure is not None and tenure.engine.files.exists(job_id, incarnation)

    def nodes(self) -> tuple[EngineNode, ...]:
        """Return the nodes as the loop saw them last; none if there is no loop here."""
        tenure = self._tenure
        return () if tenure is None else tenure.reconciler.nodes

    def problems(self) -> list[str]:
        """Return the problems of the loop."""
        tenure = self._tenure
        return list(self.vacancy) if tenure is None else tenure.reconciler.problems

    def copy_scheduler(self) -> Scheduler | None:
        """Return a copy of the scheduler for trials; None if there is none here, or none yet."""
        tenure = self._tenure
        return None if tenure is None else tenure.reconciler.copy_scheduler()

    def foresee(self) -> Foresight | None:
        """Return what the last pass decided; None if there was none here."""
        tenure = self._tenure
        return None if tenure is None else tenure.reconciler.foresee()

    def device_type(self) -> str:
        """Return the device type of the slots; empty if it is not known here."""
        tenure = self._tenure
        return "" if tenure is None else tenure.reconciler.device_type

    def hear_of_runs(self) -> None:
        """Have whoever decides look at the due runs that were stored."""
        tenure = self._tenure
        if tenure is None:
            self._tell_of_runs()
        else:
            tenure.reconciler.hear_of_runs()


def no_leader() -> Refusal:
    """Return the refusal of a request that only a leader can answer."""
    return Refusal(
        503,
        "no_leader",
        "no service decides at this moment: one takes over within seconds",
        "ask again",
        retry_after_s=1.0,
    )
