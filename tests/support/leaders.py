"""Services that take over from each other: a lease, the records that they share, and what each gives its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.cluster.cluster_nodes import Leadership
from elasticflow_airflow.engines.local.files.records import FileRecords
from elasticflow_airflow.engines.port import SupersededError

FIRST_EPOCH = 2**62
"""Above the start time, in nanoseconds, of every service without a lease."""


@dataclass
class Lease:
    """Who leads: the one with this number."""

    base: Path
    number: int = 0

    def elect(self) -> Leader:
        self.number += 1
        return Leader(self, self.number)


@dataclass
class Leader:
    """One leadership. ``knows``: it looks at the lease before it does anything; one that was just stopped does not."""

    lease: Lease
    number: int
    knows: bool = True
    is_mute: bool = False
    """It sends nothing any more, as if it died now: what it puts on record is all that remains of it."""
    saved: list[str] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """A folder for this leadership alone."""
        return self.lease.base / f"leader{self.number}" / "leading" / str(self.number)

    @property
    def code_root(self) -> Path:
        return self.lease.base / f"leader{self.number}"

    def leadership(self) -> Leadership:
        return Leadership(records=self, fencing=self, code_root=self.code_root)

    def check(self) -> None:
        if self.lease.number != self.number:
            raise SupersededError("another service leads")

    # Fencing

    def epoch(self) -> int:
        if self.is_mute:
            raise SupersededError("this service is about to die")
        if self.knows:
            self.check()
        return FIRST_EPOCH + self.number

    def above(self, seen: int) -> int:
        raise SupersededError(f"a service with number {seen - FIRST_EPOCH} leads")

    # Records: like a database, which tells by itself who leads.

    @property
    def files(self) -> FileRecords:
        return FileRecords(self.lease.base / "database")

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        return self.files.load()

    def save(self, job_id: str, record: Mapping[str, Any]) -> None:
        self.check()
        self.saved.append(job_id)
        self.files.save(job_id, record)

    def where(self, job_id: str) -> str:
        return self.files.where(job_id)

    def put_away(self, job_id: str) -> None:
        self.check()

    def note(self, name: str) -> dict[str, Any] | None:
        return self.files.note(name)

    def keep_note(self, name: str, value: Mapping[str, Any]) -> None:
        self.check()
        self.files.keep_note(name, value)
