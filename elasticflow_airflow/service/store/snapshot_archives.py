"""Keeps the code of jobs in the database, as the archives that were uploaded, for all services that share it.

Archives are found by their hash and never change, so nothing here waits for the writers' lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import SnapshotRow

KEPT_AT_LEAST_S = 2 * 86400.0
"""Archives that were stored, or used by a submit, within this time are never deleted."""
_FRESH_S = KEPT_AT_LEAST_S / 2
_PART_BYTES = 4 << 20
"""Read at once: an archive may have a hundred times as much."""
_PUT = sa.text(
    "INSERT INTO snapshot (sha256, archive, stored_at) VALUES (:sha256, :archive, :at)"
    " ON CONFLICT (sha256) DO UPDATE SET stored_at = excluded.stored_at"
).bindparams(sa.bindparam("archive", type_=sa.LargeBinary))


class SnapshotArchives:
    """The table of archives. Thread-safe; all methods raise what the store raises."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def has(self, sha256: str) -> bool:
        """Whether an archive is stored. If so, it stays so for a day at least: it is about to be used."""
        now = self._store.clock()
        stored_at = sa.select(SnapshotRow.stored_at).where(SnapshotRow.sha256 == sha256)
        with self._store.engine_without_transactions.connect() as connection:
            at = connection.scalar(stored_at)
            if at is None or now - at < _FRESH_S:
                return at is not None
            refresh = sa.update(SnapshotRow).where(SnapshotRow.sha256 == sha256).values(stored_at=now)
            return connection.execute(refresh).rowcount > 0

    def put(self, sha256: str, archive: Path) -> None:
        """Store an archive, which is not empty. Idempotent."""
        with (
            archive.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,  # The driver makes the only copy.
            memoryview(mapped) as content,
            self._own_connection() as connection,
        ):
            connection.execute(_PUT, {"sha256": sha256, "archive": content, "at": self._store.clock()})

    def copy_to(self, sha256: str, file: Path) -> bool:
        """Write an archive into a file; returns False, and leaves the file as it is, if none is stored."""
        begin = sa.bindparam("begin", type_=sa.Integer)
        part = sa.func.substr(SnapshotRow.archive, begin, _PART_BYTES, type_=sa.LargeBinary)
        query = sa.select(part).where(SnapshotRow.sha256 == sha256)
        with self._own_connection() as connection:
            content = connection.scalar(query, {"begin": 1})
            if content is None:
                return False
            written = 0
            with file.open("wb") as output:
                while content:  # None, if it is deleted meanwhile: the hash of the file is wrong then.
                    written += output.write(content)
                    content = connection.scalar(query, {"begin": 1 + written})
        return True

    def discard(self, sha256: str) -> None:
        """Delete an archive that is damaged: the next upload stores it again."""
        with self._store.engine_without_transactions.connect() as connection:
            connection.execute(sa.delete(SnapshotRow).where(SnapshotRow.sha256 == sha256))

    @contextmanager
    def _own_connection(self) -> Iterator[sa.Connection]:
        """Open a connection that ends with the block: its buffers, which stay as large as what they held, go with it.

        Those of the pool would each keep the size of the largest archive that they have ever carried.
        """
        with self._store.engine_without_transactions.connect() as connection:
            connection.detach()
            yield connection
