"""Forgets the details of jobs that ended long ago: their generations, samples, times of workers, and old events.

A few at a time, in a transaction of their own, and with them what their folders hold: logs, reports, plans. What
remains is the job with its result and its checkpoints: its id stays taken, its numbers never start again, and the
history by which its task is planned is kept elsewhere.
"""

from __future__ import annotations

import math

import structlog

from elasticflow_airflow.engines.job_files import JobFiles
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.store import Store

log = structlog.get_logger(__name__)

EVERY_S = 600.0
"""How often to look, while there is nothing to do."""
_BUSY_EVERY_S = 5.0
_INCARNATIONS_AT_ONCE = 20
_EVENTS_AT_ONCE = 500
_DAY_S = 86400.0


class Retention:
    """When to look next, in this process' monotonic time."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def trim(self, store: Store, files: JobFiles, settings: ServiceSettings, now: float, monotonic_s: float) -> None:
        """Forget what is older than the setting ``keep_days``, at most one small batch."""
        before = now - settings.keep_days * _DAY_S
        if not math.isfinite(before) or monotonic_s < self._next_s:
            return
        with store.write() as tx:
            over = tx.incarnations_over_before(before, _INCARNATIONS_AT_ONCE)
            for job_id, incarnation in over:
                # Before the commit: what is left behind by a crash is found again.
                _discard(files, job_id, incarnation)
                tx.forget_details(job_id, incarnation)
            events = tx.forget_events(before, _EVENTS_AT_ONCE)
        more = len(over) == _INCARNATIONS_AT_ONCE or events == _EVENTS_AT_ONCE
        self._next_s = monotonic_s + (_BUSY_EVERY_S if more else EVERY_S)


def _discard(files: JobFiles, job_id: str, incarnation: int) -> None:
    """Delete all but the checkpoints; what cannot be deleted is said and left."""
    try:
        files.discard(job_id, incarnation)
    except OSError as error:
        log.warning(
            "the files of an old job could not be deleted", job_id=job_id, incarnation=incarnation, error=str(error)
        )
