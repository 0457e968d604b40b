"""Ensures that only one service at a time owns a database and decides on its jobs.

The lock is held for the life of the service: on SQLite a locked file next to the database, on PostgreSQL an advisory
lock on a connection of its own. The system releases both when the service dies, however it dies. The connection may
also be lost while the service lives. Then :meth:`Ownership.check`, which every write transaction calls, refuses until
the lock is held again. Since writes are serialised, no write of ours can follow the first write of another service.

This is the only place that decides which service may decide: running several services with one leader would change
this file and no other.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
import structlog

from elasticflow_airflow.service.store.store import DATABASE_AWAY, connect_options
from elasticflow_airflow.times import moment

log = structlog.get_logger(__name__)

Card = Mapping[str, str | int | float]
"""Describes the owner of the database to people: host, pid, started_at (UTC seconds), endpoint."""

LOOK_S = 2.0
_JUST_KILLED_S = 1.0
_LOCK_CLASS = 0x456C4674
"""Any constant. The other half of the lock's key is the schema: two schemas of a database may have two services."""
_KEY = f"{_LOCK_CLASS}, hashtext(current_schema()::text)"
_HOLDS = f"""locktype = 'advisory' AND granted AND classid = {_LOCK_CLASS} AND objsubid = 2
 AND objid::bigint = (hashtext(current_schema()::text)::bigint & 4294967295)
 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""  # noqa: S608  (constants only)


class OwnedError(Exception):
    """Another service owns the database; the message names it."""


class LostOwnershipError(sa.exc.OperationalError):
    """This service may no longer own the database: nothing may be written until it owns it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, None, RuntimeError(reason))


class Ownership(Protocol):
    """The right of this service to decide on the database."""

    def check(self, connection: sa.Connection) -> None:
        """Check it in each write transaction, before anything is read. Raises LostOwnershipError."""
        ...

    def watch(self, again: Callable[[], None], lost: Callable[[str], None]) -> None:
        """Start to watch the ownership.

        ``again`` is called when it was lost for a while and is held again: drop everything cached of the database.
        ``lost`` is called with a sentence that names the new owner when another service has it: exit.
        """
        ...


@contextmanager
def own(url: str, card: Card) -> Iterator[Ownership]:
    """Own a database. Raises OwnedError at once if another service owns it, and what the driver raises."""
    parsed = sa.make_url(url)
    with ExitStack() as stack:
        if parsed.get_backend_name() == "postgresql":
            yield stack.enter_context(_AdvisoryLock(url, card))
        else:
            file = parsed.database or ":memory:"
            if parsed.get_backend_name() == "sqlite" and not file.startswith((":memory:", "file:")):
                stack.enter_context(_locked_file(Path(f"{Path(file).resolve()}.owner"), card))
            yield _Forever()


def describe(card: Card) -> str:
    """Describe an owner in words."""
    words = [f"host {card['host']}" if "host" in card else "", f"pid {card['pid']}" if "pid" in card else ""]
    if "started_at" in card:
        words.append(f"since {moment(float(card['started_at']))}")
    words.append(f"at {card['endpoint']}" if "endpoint" in card else "")
    return ", ".join(word for word in words if word) or "it does not say which"


def _refused(card: Card) -> OwnedError:
    return OwnedError(
        f"another service already uses this database ({describe(card)}): stop it first, or give this one a database of"
        " its own with ELASTICFLOW_DATABASE_URL"
    )


class _Forever:
    """Ownership that cannot be lost while the process lives."""

    def check(self, connection: sa.Connection) -> None:
        """Nothing to do."""

    def watch(self, again: Callable[[], None], lost: Callable[[str], None]) -> None:
        """Nothing to do."""


@contextmanager
def _locked_file(path: Path, card: Card) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _refused(_card_in(os.pread(descriptor, 1 << 16, 0))) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dict(card)).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _card_in(text: bytes | str) -> Card:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _AdvisoryLock:
    """An advisory lock of PostgreSQL, held by one connection.

    Every statement on that connection carries the card as a comment, where a second service can read it.
    """

    def __init__(self, url: str, card: Card) -> None:
        self._engine = sa.create_engine(
            url, connect_args=connect_options(url), poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT"
        )
        # Without characters that would end the comment early, or be taken for a parameter.
        self._comment = f"/* elasticflow {re.sub('[*%]', '', json.dumps(dict(card)))} */"
        self._connection: sa.Connection | None = None
        self._held_by: int | None = None
        """The pid of the server process of our connection, as long as we believe that it holds the lock."""
        self._last: int | None = None
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> _AdvisoryLock:
        end = time.monotonic() + _JUST_KILLED_S
        while True:
            try:
                self._held_by = self._last = self._lock()
            except (OwnedError, LostOwnershipError):
                self._disconnect()
                if time.monotonic() > end:
                    raise
                time.sleep(_JUST_KILLED_S / 10)  # The server may not know yet that the previous service died.
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        self._disconnect()
        self._engine.dispose()

    def check(self, connection: sa.Connection) -> None:
        """Ask the server, within the write transaction, whether we hold the lock. Raises LostOwnershipError."""
        pid = self._held_by
        holds = pid is not None and connection.scalar(
            sa.text(f"SELECT EXISTS (SELECT 1 FROM pg_locks WHERE pid = :pid AND {_HOLDS})"),  # noqa: S608
            {"pid": pid},
        )
        if not holds:
            raise LostOwnershipError("the connection that shows that this service owns the database was lost")

    def watch(self, again: Callable[[], None], lost: Callable[[str], None]) -> None:
        """Watch the connection in a thread of its own."""
        self._watcher = threading.Thread(target=self._look_after, args=(again, lost), name="ownership", daemon=True)
        self._watcher.start()

    def _look_after(self, again: Callable[[], None], lost: Callable[[str], None]) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                if self._held_by is not None and self._connection is not None:
                    self._run("SELECT 1")
                    continue
            except DATABASE_AWAY:
                log.warning("the connection that owns the database was lost; nothing is decided until it is back")
                self._held_by = None
            self._disconnect()
            try:
                pid = self._lock()
            except DATABASE_AWAY:
                continue
            except OwnedError as error:
                lost(str(error))
                return
            again()  # Before the next check can succeed: another service may have owned it meanwhile.
            self._last = self._held_by = pid
            log.info("this service owns the database again")

    def _lock(self) -> int:
        """Take the lock on a new connection; returns the pid of its server process. Raises OwnedError."""
        self._connection = self._engine.connect()
        locked, pid = self._run(f"SELECT pg_try_advisory_lock({_KEY}), pg_backend_pid()")
        if not locked:
            holder = self._run(
                "SELECT pid, query, backend_start, client_addr::text FROM pg_locks JOIN pg_stat_activity USING (pid)"  # noqa: S608
                f" WHERE {_HOLDS}"
            )
            if holder is not None and holder[0] == self._last:
                self._run(f"SELECT pg_terminate_backend({holder[0]:d})")  # Our own old connection, known to be lost.
            elif holder is not None:
                raise _refused(self._card_of(*holder[1:]))
            # The holder has just gone, or is about to go.
            raise LostOwnershipError("the lock is held for a moment more")
        return int(pid)

    def _run(self, statement: str) -> Any:
        assert self._connection is not None
        return self._connection.exec_driver_sql(f"{self._comment} {statement}").first()

    @staticmethod
    def _card_of(query: str | None, began: datetime | None, address: str | None) -> Card:
        """Return the card in the owner's last statement, or else what the server knows of its connection."""
        _, _, rest = (query or "").partition("/* elasticflow ")
        card = dict(_card_in(rest.partition(" */")[0])) if rest else {}
        if not card and address:
            card["host"] = address
        if not card and began is not None:
            card["started_at"] = began.timestamp()
        return card

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
