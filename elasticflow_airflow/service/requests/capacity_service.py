"""Reports which nodes are not needed and how many more are wanted, as an answer and as two gauges.

Runs in the threads of HTTP handlers, on a copy of the scheduler. It only reports: it adds and
removes no nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from elasticflow_airflow.api import JobIdentity, State
from elasticflow_airflow.api.insight import CapacityAnswer, CapacityWant, ReleasableNode
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.outlook.capacity import CapacityOutlook, Want, capacity
from elasticflow_airflow.service.decisions import task_history
from elasticflow_airflow.service.decisions.pass_context import costs_from
from elasticflow_airflow.service.decisions.scheduler_job import job_of_row
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.requests.forecasting import ForecastService, identities_of, whose
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.tables import IncarnationRow, JobRow
from elasticflow_airflow.service.store.views import UNREADABLE

log = structlog.get_logger()

GAUGES_HOURS = 24.0
"""The horizon of the gauges, in hours."""
_HOUR_S = 3600.0
_MOST_REJECTED = 200
"""The number of rejected jobs that are examined, the newest first ..."""
_MOST_ASKING = 30
"""... and of those with a future deadline, how many are tried again: each costs one decision per number of nodes."""
_REST_S = 60.0
"""The gauges are computed at most once in this time ..."""
_REST_FACTOR = 20.0
"""... and for at most a twentieth of all time, because planning takes the interpreter from the loop."""
_OLD_S = 600.0
"""An answer is no longer shown when its renewal is overdue by this time."""
_FIRST_S = 2.0
"""How long a scrape waits for the first answer."""


@dataclass(frozen=True, slots=True)
class CapacityService:
    """Answers capacity requests."""

    forecasts: ForecastService

    def capacity(self, hours: float = GAUGES_HOURS) -> CapacityAnswer:
        """Return the nodes not needed in the next ``hours``, or those that are missing. Raises Refusal 503."""
        scheduler, now = self.forecasts.present(), self.forecasts.clock()
        with self.forecasts.store.read() as reader:
            rejected = self._rejected(reader, now - hours * _HOUR_S, now)
        found = capacity(scheduler, now, now + hours * _HOUR_S, rejected)
        wants = [*(() if found.wanted is None else found.wanted.by), *found.hopeless]
        with self.forecasts.store.read() as reader:
            identities = identities_of(reader, (want.job_id for want in wants))
        return _answer(found, identities, now, now + hours * _HOUR_S)

    def _rejected(self, reader: Reader, since: float, now: float) -> list[Job]:
        """Return jobs rejected after ``since`` that have a future deadline and were not submitted again."""
        found = reader.list_current(state=State.REJECTED.value, dag_id=None, live=False, limit=_MOST_REJECTED)
        jobs = []
        for job, row in found:
            ahead = row.deadline_at is not None and row.deadline_at > now and not row.best_effort
            if ahead and (row.finished_at or row.submitted_at) > since:
                with suppress(*UNREADABLE):  # One unreadable job does not affect the others.
                    asking = self._job(reader, job, row)
                    if asking is not None:
                        jobs.append(asking)
        return jobs[:_MOST_ASKING]

    def _job(self, reader: Reader, job: JobRow, row: IncarnationRow) -> Job | None:
        """Return a rejected job as it would be submitted again; None while its speed or length is unknown."""
        past = task_history.past_of(reader.history(job.recurring_key, row.signature) if row.signature else None)
        speeds = task_history.speeds_to_plan_with(row.submission.scaling_curve, past.measured) or row.speeds
        if not speeds or row.total_steps is None:
            return None
        settings, left = self.forecasts.settings, max(0, row.total_steps - row.step)
        costs = costs_from(settings, row.costs, row.in_place)
        return job_of_row(row, past, settings.scheduler_config(), steps=left, speeds=speeds, costs=costs)


def _answer(
    found: CapacityOutlook, identities: Mapping[str, JobIdentity], now: float, until_s: float
) -> CapacityAnswer:
    wanted = found.wanted
    nodes = 0 if wanted is None else wanted.nodes
    slots_per_node = 0 if wanted is None else wanted.slots_per_node
    return CapacityAnswer(
        asked_at=now,
        until_at=until_s,
        releasable=[
            ReleasableNode(node_id=node.node_id, slots=node.slots, idle=node.idle, reason=str(node.reason))
            for node in found.releasable
        ],
        releasable_slots=sum(node.slots for node in found.releasable),
        wanted_nodes=nodes,
        slots_per_node=slots_per_node,
        gpu_type="" if wanted is None else wanted.gpu_type,
        wanted_slots=None if nodes is None else nodes * slots_per_node,
        wanted_by=[] if wanted is None else [_want(one, identities) for one in wanted.by],
        hopeless=[_want(one, identities) for one in found.hopeless],
        summary=str(found.reason),
    )


def _want(one: Want, identities: Mapping[str, JobIdentity]) -> CapacityWant:
    task, namespace, dag_id = whose(one.job_id, one.task, identities)
    return CapacityWant(
        need=one.need.value,
        task=task,
        job_id=one.job_id or None,
        namespace=namespace,
        dag_id=dag_id,
        deadline_at=one.deadline_s,
        reason=str(one.reason),
    )


class CapacityWatch:
    """Caches the last answer; new ones are computed in a background thread. Thread-safe."""

    def __init__(
        self,
        service: CapacityService,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        hours: float = GAUGES_HOURS,
        rest_s: float = _REST_S,
    ) -> None:
        self._service, self._monotonic, self._hours, self._rest_s = service, monotonic, hours, rest_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._answer: CapacityAnswer | None = None
        self._next_s = monotonic()

    def look(self, wait_s: float = _FIRST_S) -> CapacityAnswer | None:
        """Return the newest answer, and start a renewal if one is due; returns None while no answer is known."""
        with self._lock:
            now = self._monotonic()
            if now > self._next_s + _OLD_S:
                self._answer = None
            if now >= self._next_s and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="capacity", daemon=True)
                self._thread.start()
            thread, known = self._thread, self._answer
        if known is None and thread is not None:
            thread.join(wait_s)
            with self._lock:
                return self._answer
        return known

    def _work(self) -> None:
        began, answer, rest_s = self._monotonic(), None, self._rest_s
        try:
            answer = self._service.capacity(self._hours)
        except Refusal:  # the scheduler does not exist yet
            rest_s = 0.0
        except Exception:
            log.exception("what capacity is needed could not be worked out")
        now = self._monotonic()
        with self._lock:
            self._answer, self._next_s = answer, now + max(rest_s, _REST_FACTOR * (now - began))
