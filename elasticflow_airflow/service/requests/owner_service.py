"""Ends jobs whose owner is gone according to Airflow, and lists jobs that no client seems to want.

Runs in the threads of HTTP handlers. A job is ended only if its claim is still the one that Airflow was asked about, so
that a new attempt that has attached meanwhile keeps it. If Airflow reports nothing, only the lease ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.api.owners import (
    OwnedJob,
    OwnedJobs,
    OwnersAnswer,
    OwnerSeen,
    OwnersReport,
    UnownedJob,
)
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.store.store import OF_CURRENT_INCARNATION, Store, Writer, in_parts
from elasticflow_airflow.service.store.tables import IncarnationRow, JobRow
from elasticflow_airflow.service.store.views import status_of
from elasticflow_airflow.times import duration

SILENT_S = 60.0
"""A client that waits for a job asks every few seconds."""
_SEEN_S = 90.0
"""How long a report of Airflow that a task instance exists is valid; it repeats it every 30 s for a silent job."""
_NOBODY_ASKS_S = 86400.0
"""With a lease of a day or more, no client is expected to ask: its user may have gone home."""


@dataclass(frozen=True, slots=True)
class OwnerService:
    """Handles requests about owners. No client could reach the service before ``started_at``."""

    store: Store
    notifier: Notifier
    started_at: float
    clock: Callable[[], float]

    def owned(self, namespace: str, after: str, limit: int) -> OwnedJobs:
        """Return the live jobs of a namespace that are not cancelled, in order of id."""
        query = (
            sa.select(
                JobRow.job_id,
                JobRow.claim,
                JobRow.identity,
                IncarnationRow.heard_at,
                JobRow.owner_known_to,
                JobRow.owner_seen_at,
            )
            .join(IncarnationRow, OF_CURRENT_INCARNATION)
            .where(
                IncarnationRow.terminal.is_(False),
                IncarnationRow.cancel_reason.is_(None),
                JobRow.identity["namespace"].as_string() == namespace,
                JobRow.job_id > after,
            )
            .order_by(JobRow.job_id)
            .limit(limit)
        )
        with self.store.read() as reader:
            jobs = [
                OwnedJob(
                    job_id=job_id,
                    claim=claim,
                    identity=identity,
                    heard_at=heard_at,
                    known_to=known_to,
                    seen_at=seen_at,
                )
                for job_id, claim, identity, heard_at, known_to, seen_at in reader.session.execute(query)
            ]
        return OwnedJobs(at=self.clock(), jobs=jobs, next_after=jobs[-1].job_id if len(jobs) == limit else None)

    def report(self, report: OwnersReport) -> OwnersAnswer:
        """Record which owners exist, and cancel the jobs of those that are gone."""
        there = [seen.job_id for seen in report.owners if seen.owner == "there"]
        gone = [seen for seen in report.owners if seen.owner != "there"]
        if not report.owners:
            return OwnersAnswer(cancelled=[])
        with self.store.write() as tx:
            self._note(tx, there, report)
            cancelled = [seen.job_id for seen in gone if self._end(tx, seen, report)]
        if cancelled:
            self.notifier.wake()
        return OwnersAnswer(cancelled=cancelled)

    def _note(self, tx: Writer, job_ids: list[str], report: OwnersReport) -> None:
        for some in in_parts(job_ids):
            tx.session.execute(
                sa.update(JobRow)
                .where(JobRow.job_id.in_(some), JobRow.identity["namespace"].as_string() == report.namespace)
                .values(owner_known_to=report.airflow, owner_seen_at=self.clock())
                .execution_options(synchronize_session=False)
            )

    def _end(self, tx: Writer, seen: OwnerSeen, report: OwnersReport) -> bool:
        """Cancel a job whose owner is gone; returns whether it was cancelled."""
        found = tx.current(seen.job_id)
        if found is None:
            return False
        job, row = found
        if job.identity.namespace != report.namespace or job.claim != seen.claim:
            return False
        if seen.owner == "deleted" and job.owner_known_to != report.airflow:
            return False  # perhaps the job of another Airflow: this one has never reported the task instance
        if row.terminal or row.cancel_reason is not None:
            return False
        what = f"has ended ({seen.state})" if seen.owner == "ended" else "was deleted"
        row.cancel_reason = f"its Airflow task {what}"
        row.owner_gone_at = self.clock()
        tx.add_event(EventKind.OWNER_GONE, Reason("Airflow says that its task {what}: it is cancelled", what=what), row)
        return True

    def unowned(self, silent_s: float = SILENT_S) -> list[UnownedJob]:
        """Return live jobs whose owner is gone, or that no client asked for in ``silent_s`` seconds; longest first."""
        now = self.clock()
        with self.store.read() as reader:
            found = []
            for job_id, since_at, gone, why in self._suspects(reader.session.execute(_LIVE), now, silent_s):
                current = reader.current(job_id)
                if current is not None:
                    job, row = current
                    status = status_of(job, row, reader.generations(job_id, row.incarnation))
                    found.append(UnownedJob(job=status, since_at=since_at, why=why, owner_gone=gone))
        return sorted(found, key=lambda one: (one.since_at, one.job.job_id))

    def _suspects(self, rows: Iterable[Any], now: float, silent_s: float) -> Iterable[tuple[str, float, bool, str]]:
        for job_id, gone_at, seen_at, heard_at, submitted_at, lease_s in rows:
            if gone_at is not None:
                yield job_id, gone_at, True, "Airflow says that its task is gone; its workers save and leave"
                continue
            since_at = max(heard_at or submitted_at, self.started_at)
            limit_s = silent_s if lease_s < _NOBODY_ASKS_S else lease_s
            if now - since_at > limit_s and (seen_at is None or now - seen_at > _SEEN_S):
                yield job_id, since_at, False, f"nobody has asked for it for {duration(now - since_at)}"


_LIVE = (
    sa.select(
        JobRow.job_id,
        IncarnationRow.owner_gone_at,
        JobRow.owner_seen_at,
        IncarnationRow.heard_at,
        IncarnationRow.submitted_at,
        IncarnationRow.lease_s,
    )
    .join(IncarnationRow, OF_CURRENT_INCARNATION)
    .where(IncarnationRow.terminal.is_(False))
)
