"""A simulated cluster: the real service in this process, with modelled workers and a simulated clock.

Scheduler, store, rules and HTTP API are those of production; tasks reach them by a Unix socket. Only the workers are
modelled. Time stands still while Airflow works, and jumps when Airflow can only wait. Does not know Airflow.
"""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from elasticflow_airflow.api import JobIdentity, JobStatus, State
from elasticflow_airflow.client import Endpoint
from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.port import GangSpec, GangState
from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.service.assembly import assemble
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import EventRow, IncarnationRow, JobRow
from elasticflow_airflow.testing.serving import LookCounter, Server
from elasticflow_airflow.testing.simulated_engine import SimulatedEngine
from elasticflow_airflow.testing.trainings import SimulatedTraining

_DAY_S = 86_400.0
_LONGEST_WAIT_S = 30 * _DAY_S
_LOOKS = 2
"""Number of times that the loop checks the trainings' progress before the next known event ..."""
_SHORTEST_LOOK_S = 15.0
"""... but with at least this interval ..."""
_MEASURING_LOOK_S = 1.0
"""... or this one while a speed is measured; ..."""
_PATIENT_LOOK_S = 60.0
"""... and at most this one while workers hang, until the service notices."""
_SOON_S = 0.25
_GETTING_ON = frozenset({"starting", "running", "saving", "tail", "ended"})
_RENEW_S = 20.0
_SETTLE_S = 120.0
_ANSWER_WITHIN_S = 3.0
"""Clients time out after 10 s."""


class SimulationStuckError(Exception):
    """Nothing happened for a very long simulated time."""


@dataclass(frozen=True, slots=True)
class News:
    """The facts about a job to which a waiting task reacts."""

    incarnation: int
    state: State | None
    """The final state; None while the job is not over."""
    at_risk: bool
    deadline_passed: bool
    saved: bool = False
    """There is a checkpoint. Set only for sensors, which watch another task's job."""


def check_shape(**shape: int | None) -> None:
    """Raise ValueError, naming the argument, for a cluster without a slot. None: not given."""
    for name, number in shape.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: give at least 1")


class SimulatedCluster:
    """The service over ``nodes`` nodes of ``slots`` slots, in simulated time. Thread-safe. Must be closed.

    ``trainings`` defines, by task id (for a mapped task also ``task[index]``), how trainings behave; it can be changed
    while the cluster runs, and applies to workers started afterwards. ``empty_store`` is a file that caches the empty
    database for later clusters: creating a database takes longer than copying one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 1,
        slots: int = 4,
        start_at: float | None = None,
        empty_store: Path | None = None,
    ) -> None:
        check_shape(nodes=nodes, slots=slots)
        self._now_s = time.time() if start_at is None else start_at
        self._started_s = self._now_s
        self._lock = threading.RLock()
        self.trainings: dict[str, SimulatedTraining] = {}
        self._engine = SimulatedEngine(folder / "jobs", nodes, slots, self.clock, self._behaviour)
        self._settings = ServiceSettings(
            state_dir=folder,
            engine="fake",
            running_interval_s=_DAY_S,  # events wake the loop
            inventory_interval_s=1e-6,  # the shape may change between two runs
            checkpoint_interval_s=600.0,
            log_level="error",
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if empty_store is not None:
            _lay_out_store(self._settings.store_url(), folder / "elasticflow.db", empty_store)
        self._notifier = _Stepping(self._pass)
        self._parts, self._reconciler, self._candidates = assemble(
            self._settings,
            self._engine,
            self._notifier,
            clock=self.clock,
            monotonic=lambda: self._now_s - self._started_s,
        )
        self._passing = False
        self._happened: tuple[object, ...] = ()
        self._renewed_s = self._now_s
        self._looks: dict[tuple[str, str], int] = {}
        self._runs = False
        self._stuck_error: SimulationStuckError | None = None
        self._seen: dict[str, News] = {}
        self._watched: dict[str, News] = {}
        self.endpoint = Endpoint(socket_path=folder / "service.sock")
        self._pass()
        self._server = Server(LookCounter(build_app(self._parts, None), self._looked_at), self.endpoint)

    # -- time ----------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Return the simulated time, in UTC seconds."""
        return self._now_s

    def move_to(self, at: float) -> None:
        """Let time pass until ``at`` (UTC seconds); does nothing if that has passed already."""
        with self._lock:
            if not self._live():
                self._now_s = max(self._now_s, at)
            while self._now_s < at:
                self._step(at, owned=False)

    def settle(self, limit_s: float = _SETTLE_S) -> None:
        """Let jobs that are being cancelled end, for at most ``limit_s``: their workers save and leave."""
        with self._lock:
            end_s = self._now_s + limit_s
            while self.live and self._now_s < end_s:
                self._step(end_s, owned=True)

    def wait(self, until: float = math.inf, *, watched: bool = False, answer_within_s: float = math.inf) -> None:
        """Let time pass until there is news of a job for its waiting task, or until ``until`` (UTC seconds).

        ``watched``: a sensor waits, too, for which a first checkpoint is news. ``answer_within_s``: limit in real
        time, after which the caller may ask again. Raises SimulationStuckError when nothing happens for 30 days.
        """
        with self._lock:
            before, end_s = self._news(watched), min(until, self._now_s + _LONGEST_WAIT_S)
            return_at_s = time.monotonic() + answer_within_s
            while self._news(watched) == before and self._now_s < end_s:
                if time.monotonic() > return_at_s:
                    return
                self._step(end_s, owned=True)
            if self._now_s >= end_s and end_s < until:
                raise SimulationStuckError(self._stuck())

    @property
    def live(self) -> bool:
        """Whether there is a job that is not over."""
        return any(not row.terminal for row in self._live())

    def has_job(self, identity: JobIdentity) -> bool:
        """Return whether a task has a job, in any namespace."""
        return self._job_id(identity) is not None

    def submitted_at(self, identity: JobIdentity) -> float | None:
        """Return when the job of a task was submitted, in UTC seconds; None when it has no job."""
        job_id = self._job_id(identity)
        return None if job_id is None else self._parts.job_service.status(job_id).submitted_at

    def has_news(self, identity: JobIdentity) -> bool:
        """Return whether there is news for the task of a job since the previous call."""
        with self._lock:
            job_id = self._job_id(identity)
            if job_id is None:
                return False
            news = self._news(watched=False)[job_id]
            known, self._seen[job_id] = self._seen.get(job_id), news
            return news.state is not None or known not in (None, news)

    def has_any_news(self) -> bool:
        """Return whether there is news for a sensor since the previous call."""
        with self._lock:
            known, self._watched = self._watched, self._news(watched=True)
            return known != self._watched

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which Airflow runs tasks: a task that polls its job repeatedly in one turn lets time pass.

        Raises SimulationStuckError on exit when such a task waited although nothing happens any more.
        """
        self._runs, self._stuck_error = True, None
        try:
            yield
        finally:
            self._runs = False
        if self._stuck_error is not None:
            raise self._stuck_error

    def next_turn(self) -> None:
        """Reset the poll counts before Airflow runs its next tasks: a first poll does not let time pass."""
        with self._lock:
            self._looks.clear()

    # -- what tests change ---------------------------------------------------------------------------------------

    def resize(self, *, nodes: int, slots: int) -> None:
        """Replace the machines. Raises ValueError."""
        check_shape(nodes=nodes, slots=slots)
        with self._lock:
            self._engine.resize(nodes, slots)
            self._now_s += _SOON_S  # the loop checks the inventory only once per moment
            self._pass()

    @property
    def shape(self) -> tuple[int, int]:
        """(nodes, slots of each)."""
        there = list(self._engine.world.nodes.values())
        return len(there), there[0].slots

    def statuses(self, dag_id: str | None = None) -> list[JobStatus]:
        """Return the status of every job, in order of submission."""
        return list(reversed(self._parts.job_service.list_jobs(None, dag_id, None, 1000)))

    def close(self) -> None:
        """Stop serving and release everything except the folder."""
        self._server.close()
        self._candidates.close()
        self._engine.close()
        self._parts.store.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        """Run passes of the loop until it has nothing more to do at this moment."""
        with self._lock:
            if self._passing:
                return  # a checkpoint was verified during a pass, which itself continues until nothing is left
            self._passing = True
            try:
                self._reconciler.run_once()
                while self._candidates.wait():
                    self._reconciler.run_once()
            finally:
                self._passing = False

    def _step(self, end_s: float, *, owned: bool) -> None:
        """Jump to the next moment at which something can happen, at most ``end_s``, and run the loop there."""
        self._now_s = min(end_s, max(self._next_s(), self._now_s + 0.01))
        if owned and self._now_s - self._renewed_s > _RENEW_S:
            self._renew()
        self._pass()

    def _next_s(self) -> float:
        now_s, wake_s = self._now_s, self._reconciler.wake_at
        turn_s, phases = self._engine.outlook()
        with self._parts.store.read() as reader:
            deadlines_s = [row.deadline_at for _, row in reader.undrained() if row.deadline_at is not None]
            training = [one for one in reader.open_generations() if one.state == GangState.RUNNING]
            decisive = sa.select(sa.func.max(EventRow.event_id)).where(EventRow.kind != "checkpoint")
            last_event = reader.session.scalar(decisive)
        happened, self._happened = self._happened, (phases, last_event)
        if happened != self._happened:
            return now_s + _SOON_S  # one event leads to the next
        # Check often while a generation is young, to learn its speed, and again towards the next known event.
        age_s = min((now_s - one.running_at for one in training if one.running_at is not None), default=_DAY_S)
        look_s = max(_SHORTEST_LOOK_S, min(age_s, (min(turn_s, now_s + _DAY_S) - now_s) / _LOOKS))
        if any(one.purpose == Purpose.PROFILE and not one.notes.measured for one in training):
            look_s = _MEASURING_LOOK_S
        elif not _GETTING_ON.issuperset(phases):
            look_s = min(look_s, _PATIENT_LOOK_S)
        known = (turn_s, wake_s, *(deadline_s + _SOON_S for deadline_s in deadlines_s))
        return min(now_s + look_s, *(moment_s for moment_s in known if moment_s is not None and moment_s > now_s))

    def _renew(self) -> None:
        """Renew the leases of all jobs, as the process of ``dag.test()`` does in the background."""
        with self._parts.store.write() as tx:
            for _, row in tx.undrained():
                row.renewals += 1
        self._renewed_s = self._now_s

    def _live(self) -> list[IncarnationRow]:
        with self._parts.store.read() as reader:
            return [row for _, row in reader.undrained()]

    def _job_id(self, identity: JobIdentity) -> str | None:
        for job_id, (job, _) in self._all_news(identity.dag_id).items():
            if job.identity.model_copy(update={"namespace": identity.namespace}) == identity:
                return job_id
        return None

    def _news(self, watched: bool) -> dict[str, News]:
        found = self._all_news(None)
        return {job_id: replace(news, saved=watched and news.saved) for job_id, (_, news) in found.items()}

    def _all_news(self, dag_id: str | None) -> dict[str, tuple[JobRow, News]]:
        with self._parts.store.read() as reader:
            found = reader.list_current(state=None, dag_id=dag_id, live=None, limit=1000)
        return {
            row.job_id: (
                job,
                News(
                    row.incarnation,
                    State(row.state) if row.terminal else None,
                    row.at_risk,
                    row.deadline_passed,
                    row.promoted is not None,
                ),
            )
            for job, row in found
        }

    def _looked_at(self, verb: str, job_id: str, most: int) -> None:
        """Count a poll of a job by HTTP; a task that polls repeatedly in one turn only waits, so let time pass."""
        with self._lock:
            self._looks[verb, job_id] = self._looks.get((verb, job_id), 0) + 1
            if not self._runs or self._looks[verb, job_id] < most:
                return
            news = self._news(watched=False).get(job_id)
            if news is None or news.state is not None:
                return
            try:
                self.wait(answer_within_s=_ANSWER_WITHIN_S)
            except SimulationStuckError as error:
                self._stuck_error = error
                raise

    def _stuck(self) -> str:
        waiting = [
            f"{job.identity.task_id} is {job.state.value} ({job.state_reason or job.verdict.reason or 'no reason'})"
            for job in self.statuses()
            if not job.state.terminal
        ]
        days = _LONGEST_WAIT_S / _DAY_S
        return f"nothing has happened for {days:.0f} simulated days: {'; '.join(waiting) or 'no job is there'}"

    def _behaviour(self, spec: GangSpec, failed_before: int) -> FakeBehaviour:
        with self._parts.store.read() as reader:
            job, row = reader.job(spec.job_id), reader.incarnation(spec.job_id, spec.incarnation)
        assert job is not None  # the service starts workers only for jobs that it knows
        assert row is not None
        task_id, index = job.identity.task_id, job.identity.map_index
        training = self.trainings.get(f"{task_id}[{index}]") or self.trainings.get(task_id) or SimulatedTraining()
        return training.behaviour(row.submission.scaling_curve, failed_before=failed_before)


def _lay_out_store(url: str, database: Path, empty: Path) -> None:
    if not empty.is_file():
        Store(url).close()
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(empty)) as target:
            source.backup(target)
    shutil.copyfile(empty, database)


class _Stepping(Notifier):
    """Runs the loop in the thread that wakes it, so that a request handler sees the result at once."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._step = step

    def wake(self) -> None:
        """Run a pass, except for the wake-up after a verified checkpoint: the current pass waits for that itself."""
        if not threading.current_thread().name.startswith("checkpoints"):
            self._step()
