"""Keeps services off a database that another one owns.

On SQLite one service owns the database: it locks a file next to it, and the system releases that when the service dies,
however it dies. On PostgreSQL several may use a database, one of which decides (see ``leadership/``). Services of
releases before that own theirs by an advisory lock and know of no others, so a newer one does not change their tables
before they have ended; afterwards they refuse to start, since the schema is newer than theirs.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa

from elasticflow_airflow.service.store.migrate import current_revision
from elasticflow_airflow.service.store.store import connect_options
from elasticflow_airflow.times import moment

Card = Mapping[str, str | int | float]
"""Describes the owner of the database to people: host, pid, started_at (UTC seconds), endpoint."""

FIRST_WITH_LEASE = "0012"
"""The first revision whose services elect a leader."""
_LOOK_S = 0.5
_LOCK_CLASS = 0x456C4674
"""The lock of earlier releases. The other half of its key is the schema."""
_KEY = f"{_LOCK_CLASS}, hashtext(current_schema()::text)"
_HOLDER = f"""SELECT query, backend_start, client_addr::text FROM pg_locks JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'advisory' AND granted AND classid = {_LOCK_CLASS} AND objsubid = 2
 AND objid::bigint = (hashtext(current_schema()::text)::bigint & 4294967295)
 AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())"""  # noqa: S608  (constants)


class OwnedError(Exception):
    """Another service owns the database; the message names it."""


@contextmanager
def own_file(url: str, card: Card) -> Iterator[None]:
    """Own the file of an SQLite database. Raises OwnedError at once if another service owns it."""
    parsed = sa.make_url(url)
    file = parsed.database or ":memory:"
    if parsed.get_backend_name() != "sqlite" or file.startswith((":memory:", "file:")):
        yield
        return
    descriptor = os.open(f"{Path(file).resolve()}.owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refused(_card_in(os.pread(descriptor, 1 << 16, 0))) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dict(card)).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def without_older_services(url: str, waits: Callable[[str], None], stopped: Callable[[], bool]) -> Iterator[None]:
    """Run the block, which upgrades a PostgreSQL database, when no service of an earlier release owns it.

    ``waits`` is called once with a sentence that names the owner, if there is one; then it is waited until that ends,
    or until ``stopped`` returns True: OwnedError. Raises what the driver raises.
    """
    engine = sa.create_engine(
        url, connect_args=connect_options(url), poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT"
    )
    try:
        said = ""
        with engine.connect() as connection:
            while (current_revision(engine) or "") < FIRST_WITH_LEASE:
                if connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_KEY})").scalar():
                    break
                holder = connection.exec_driver_sql(_HOLDER).first()
                words = describe({} if holder is None else _card_of(*holder))
                if not said and holder is not None:
                    said = f"a service of an earlier release uses this database ({words}): stop it"
                    waits(said)
                if stopped():
                    raise OwnedError(said or "another service is upgrading this database")
                time.sleep(_LOOK_S)
            yield
    finally:
        engine.dispose()


def describe(card: Card) -> str:
    """Describe an owner in words."""
    words = [f"host {card['host']}" if "host" in card else "", f"pid {card['pid']}" if "pid" in card else ""]
    if "started_at" in card:
        words.append(f"since {moment(float(card['started_at']))}")
    words.append(f"at {card['endpoint']}" if "endpoint" in card else "")
    return ", ".join(word for word in words if word) or "it does not say which"


def refused(card: Card, hint: str = "") -> OwnedError:
    """Return the error for a database that a service with this card owns."""
    return OwnedError(
        f"another service already uses this database ({describe(card)}): stop it first, or give this one a database of"
        f" its own with ELASTICFLOW_DATABASE_URL{hint}"
    )


def _card_in(text: bytes | str) -> Card:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _card_of(query: str | None, began: datetime | None, address: str | None) -> Card:
    """Return the card in the owner's last statement, or else what the server knows of its connection."""
    _, _, rest = (query or "").partition("/* elasticflow ")
    card = dict(_card_in(rest.partition(" */")[0])) if rest else {}
    if not card and address:
        card["host"] = address
    if not card and began is not None:
        card["started_at"] = began.timestamp()
    return card
