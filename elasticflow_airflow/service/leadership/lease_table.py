"""The row of the lease in PostgreSQL: a request is one statement, on a connection of its own, by the server's clock.

So no lock of a writer delays a renewal, and a process that stops between two statements leaves no lock behind.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from elasticflow_airflow.service.leadership.lease import Ask, LeaseRequest, LeaseTerms
from elasticflow_airflow.service.store.store import DATABASE_AWAY, connect_options

GIVEN_UP = "given-up"
"""What other replicas are told when a leader has given up its lease."""
_LIMITS = "-c statement_timeout=900 -c lock_timeout=900"
"""Milliseconds: a request that takes longer is no use."""
_TIMEOUTS = {"connect_timeout": 2, "keepalives_idle": 1, "keepalives_interval": 1, "keepalives_count": 2}
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_ROW = f"epoch, holder, url, card, elected_at, change, failed_over_at, until_at - {_NOW} AS left_s, {_NOW} AS now_s"
_TAKE = f"""
UPDATE leader SET
  epoch = epoch + 1, holder = :me, until_at = {_NOW} + :lease_s, url = :url, card = CAST(:card AS json),
  elected_at = {_NOW},
  change = CASE WHEN epoch = 0 THEN 'start' WHEN holder IS NULL THEN 'hand-over' ELSE 'fail-over' END,
  failed_over_at = CASE WHEN epoch > 0 AND holder IS NOT NULL THEN {_NOW} ELSE failed_over_at END
WHERE id = 1 AND (holder IS NULL OR holder = :me OR until_at < {_NOW})
RETURNING {_ROW}"""  # noqa: S608  (constants only)
_RENEW = f"""
UPDATE leader SET until_at = {_NOW} + :lease_s
WHERE id = 1 AND epoch = :epoch AND holder = :me RETURNING {_ROW}"""  # noqa: S608
_GIVE_UP = f"""
WITH given AS (
  UPDATE leader SET holder = NULL, until_at = NULL WHERE id = 1 AND epoch = :epoch AND holder = :me RETURNING {_ROW}
) SELECT given.*, pg_notify(:channel, :me || ' ' || :given_up) FROM given"""  # noqa: S608
_LOOK = f"SELECT {_ROW} FROM leader WHERE id = 1"  # noqa: S608
_RAISE = f"""
UPDATE leader SET epoch = :higher, until_at = {_NOW} + :lease_s
WHERE id = 1 AND epoch = :epoch AND holder = :me AND :higher > epoch RETURNING {_ROW}"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class LeaderView:
    """What the row says. Times in UTC seconds by the clock of the database."""

    epoch: int
    holder: str | None
    url: str | None
    card: Mapping[str, Any] | None
    elected_at: float | None
    change: str | None
    failed_over_at: float | None
    left_s: float | None
    """How long the lease still lasts; negative: it has ended."""
    now_s: float

    @property
    def is_held(self) -> bool:
        """Whether somebody holds a lease that has not ended."""
        return self.holder is not None and self.left_s is not None and self.left_s > 0


class LeaseTable:
    """Makes the requests of one replica, one at a time. Every method raises what the driver raises (DATABASE_AWAY).

    Thread-safe: a lease is renewed in one thread, and its epoch may be raised in others.
    """

    def __init__(
        self,
        url: str,
        replica_id: str,
        terms: LeaseTerms,
        *,
        own_url: str | None,
        card: Mapping[str, Any],
        channel: str,
    ) -> None:
        self._url, self._terms = url, terms
        self._about_me = {"me": replica_id, "url": own_url, "card": json.dumps(dict(card)), "channel": channel}
        self._about_me["given_up"] = GIVEN_UP
        self._engine = self._open(_LIMITS)
        self._connection: sa.Connection | None = None
        self._asking = threading.Lock()

    def ask(self, request: LeaseRequest) -> tuple[LeaderView, bool]:
        """Make a request; returns what the row says now, and whether the request was granted."""
        statement = {Ask.TAKE: _TAKE, Ask.RENEW: _RENEW, Ask.GIVE_UP: _GIVE_UP}[request.ask]
        found = self._run(statement, epoch=request.epoch)
        return (self.look(), False) if found is None else (found, True)

    def look(self) -> LeaderView:
        """Return what the row says."""
        found = self._run(_LOOK)
        if found is None:
            raise sa.exc.OperationalError(None, None, RuntimeError("the table `leader` has lost its row"))
        return found

    def raise_epoch(self, epoch: int, higher: int) -> bool:
        """Renew the lease of this replica with a higher epoch; False if it does not hold it with ``epoch`` any more.

        For nodes that have seen higher ones, from a database that was lost.
        """
        return self._run(_RAISE, epoch=epoch, higher=higher) is not None

    def close(self) -> None:
        """Close the connection."""
        with self._asking:
            self._disconnect()
            self._engine.dispose()

    def _open(self, options: str | None) -> sa.Engine:
        known = connect_options(self._url)
        arguments = {**known, **{name: _TIMEOUTS[name] for name in known.keys() & _TIMEOUTS.keys()}}
        if known:
            arguments["tcp_user_timeout"] = 1000
        if options is not None:
            given = sa.make_url(self._url).query.get("options", "")
            arguments["options"] = f"{given if isinstance(given, str) else ' '.join(given)} {options}".strip()
        return sa.create_engine(
            self._url,
            connect_args=arguments,
            poolclass=sa.pool.NullPool,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
        )

    def _run(self, statement: str, **more: Any) -> LeaderView | None:
        with self._asking:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                row = self._connection.execute(
                    sa.text(statement), {**self._about_me, "lease_s": self._terms.lease_s, **more}
                ).first()
            except DATABASE_AWAY:
                self._disconnect()
                raise
        if row is None:
            return None
        return LeaderView(**{name: row._mapping[name] for name in LeaderView.__dataclass_fields__})

    def _connect(self) -> sa.Connection:
        try:
            return self._engine.connect()
        except sa.exc.OperationalError as error:
            if "unsupported startup parameter" not in str(error.orig):
                raise
            # A pooler of transactions hands no options on: its own time-outs must do.
            self._engine.dispose()
            self._engine = self._open(None)
            return self._engine.connect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
