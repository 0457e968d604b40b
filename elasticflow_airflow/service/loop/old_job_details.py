"""Deletes the details of jobs that ended long ago: their generations, samples, worker times, code, and old events.

Works in small batches, each in its own transaction, and also deletes the logs, reports and plans in the jobs' folders.
The job with its result and its checkpoints remains: its id stays taken, its numbers never start again, and the history
from which its task is planned is kept elsewhere. Which checkpoints are kept is decided in ``checkpoint_promotion.py``.
"""

from __future__ import annotations

import math

import structlog

from elasticflow_airflow.engines.job_files import JobFiles
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.snapshot_archives import KEPT_AT_LEAST_S
from elasticflow_airflow.service.store.store import Store

log = structlog.get_logger(__name__)

EVERY_S = 600.0
"""Seconds between checks while there is nothing to do."""
_BUSY_EVERY_S = 5.0
_INCARNATIONS_AT_ONCE = 20
_EVENTS_AT_ONCE = 500
_SNAPSHOTS_AT_ONCE = 20
_DAY_S = 86400.0


class Retention:
    """Runs the deletion at intervals, in this process' monotonic time."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def trim(
        self,
        store: Store,
        files: JobFiles,
        snapshots: Snapshots,
        settings: ServiceSettings,
        now: float,
        monotonic_s: float,
    ) -> None:
        """Delete what is older than the setting ``keep_days``, at most one small batch."""
        before = now - settings.keep_days * _DAY_S
        if not math.isfinite(before) or monotonic_s < self._next_s:
            return
        code_before = min(before, now - KEPT_AT_LEAST_S)
        with store.write() as tx:
            over = tx.incarnations_over_before(before, _INCARNATIONS_AT_ONCE)
            for job_id, incarnation in over:
                # Before the commit, so that what a crash leaves behind is found again.
                _discard(files, job_id, incarnation)
                tx.forget_details(job_id, incarnation)
            events = tx.forget_events(before, _EVENTS_AT_ONCE)
            in_use = tx.snapshots_in_use() if store.is_shared else set()
            code = tx.forget_snapshots(code_before, in_use, _SNAPSHOTS_AT_ONCE) if store.is_shared else 0
        snapshots.forget_unused(in_use, code_before)
        more = len(over) == _INCARNATIONS_AT_ONCE or events == _EVENTS_AT_ONCE or code == _SNAPSHOTS_AT_ONCE
        self._next_s = monotonic_s + (_BUSY_EVERY_S if more else EVERY_S)


def _discard(files: JobFiles, job_id: str, incarnation: int) -> None:
    """Delete all files but the checkpoints; files that cannot be deleted are logged and left."""
    try:
        files.discard(job_id, incarnation)
    except OSError as error:
        log.warning(
            "the files of an old job could not be deleted", job_id=job_id, incarnation=incarnation, error=str(error)
        )
