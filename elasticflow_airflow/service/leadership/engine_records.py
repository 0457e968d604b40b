"""The engine's records in the database, where the next leader finds them. PostgreSQL only.

A write is one statement that changes something only while our leadership lasts: it holds the row of the lease (a share
lock) until it is done, so that a new leader is elected either before, and nothing is written, or after, and reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.dialects import postgresql

from elasticflow_airflow.engines.port import EngineError, SupersededError
from elasticflow_airflow.service.store.tables import EngineRecordRow, LeaderRow

log = structlog.get_logger(__name__)

_NOTE = "="
"""Begins the key of a note: no job id begins with it."""


class DatabaseRecords:
    """Records of the engine (see ``engines/local/files/records.py``) in the table ``engine_record``.

    ``engine`` has connections that commit each statement by itself (AUTOCOMMIT). ``epoch`` returns that of our
    leadership, and may raise SupersededError. Methods raise EngineError while the database does not answer, and those
    that write SupersededError when another service leads.
    """

    def __init__(self, engine: sa.Engine, epoch: Callable[[], int]) -> None:
        self._engine, self._epoch = engine, epoch
        leading = (
            sa.select(LeaderRow.epoch)
            .where(LeaderRow.id == 1, LeaderRow.epoch == sa.bindparam("ours"))
            .with_for_update(read=True)
            .cte("leading")
        )
        table = EngineRecordRow.__table__
        row = sa.select(
            sa.bindparam("key", type_=table.c.job_id.type),
            sa.bindparam("value", type_=table.c.record.type),
            leading.c.epoch,
        )
        inserted = postgresql.insert(EngineRecordRow).from_select(["job_id", "record", "epoch"], row)
        new = {name: inserted.excluded[name] for name in ("record", "epoch")}
        self._replace = inserted.on_conflict_do_update(index_elements=["job_id"], set_=new).returning(
            EngineRecordRow.epoch
        )

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the records by job id and, by job id, why others cannot be read."""
        found: dict[str, dict[str, Any]] = {}
        damaged: dict[str, str] = {}
        jobs = EngineRecordRow.job_id.not_like(f"{_NOTE}%")
        for row in self._rows(sa.select(EngineRecordRow.job_id, EngineRecordRow.record).where(jobs)):
            job_id, record = row.job_id, row.record
            if isinstance(record, dict):
                found[job_id] = record
            else:
                damaged[job_id] = f"it holds {type(record).__name__}, not an object"
        return found, damaged

    def save(self, job_id: str, record: Mapping[str, Any]) -> None:
        """Replace a record, if we lead."""
        ours = self._epoch()
        with self._database("written") as connection:
            written = connection.execute(self._replace, {"key": job_id, "value": dict(record), "ours": ours}).first()
        if written is None:
            raise SupersededError(
                "another service leads: this one has written nothing to the database, and commands no node"
            )

    def where(self, job_id: str) -> str:
        """Return the row."""
        return f"of job {job_id} in the table engine_record"

    def put_away(self, job_id: str) -> None:
        """Leave the row as it is, for whoever inspects it; the job's next record replaces it."""
        log.warning("a record of the engine cannot be read; it stays in the table engine_record", job_id=job_id)

    def note(self, name: str) -> dict[str, Any] | None:
        """Return what was noted; None when nothing was, or it is no object."""
        asked = sa.select(EngineRecordRow.record).where(EngineRecordRow.job_id == _NOTE + name)
        found = [row.record for row in self._rows(asked)]
        return found[0] if found and isinstance(found[0], dict) else None

    def keep_note(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a note, if we lead."""
        self.save(_NOTE + name, value)

    def _rows(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._database("read") as connection:
            return connection.execute(statement).all()

    @contextmanager
    def _database(self, what: str) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise EngineError(f"the engine's records cannot be {what} in the database: {error}") from error
