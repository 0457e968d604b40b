"""Lets replicas on one PostgreSQL hear of each other's writes: quickly by LISTEN and NOTIFY, surely by looking.

A pooler of transactions hands no notifications on; then the looking alone must do, and the log says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
import structlog

from elasticflow_airflow.service.store.store import DATABASE_AWAY, connect_options

LOOK_S = 1.0
_ECHO_LIMIT_S = 2.0
_AGAIN_S = 1.0
_ECHO = "echo"

log = structlog.get_logger()


class News:
    """A thread that listens. ``heard`` is called after a write of another replica, ``look`` about once a second.

    ``heard`` gets what the other replica added, mostly nothing.
    """

    def __init__(self, url: str, channel: str, me: str, heard: Callable[[str], None], look: Callable[[], None]) -> None:
        self._channel, self._me, self._heard, self._look = channel, me, heard, look
        self._engine = sa.create_engine(
            url, connect_args=connect_options(url), poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT"
        )
        self.hears: bool | None = None
        """Whether notifications arrive; None before that is known."""
        self._stop = threading.Event()
        self._listening = threading.Thread(target=self._listen_for_ever, name="news", daemon=True)
        self._looking = threading.Thread(target=self._look_for_ever, name="look", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._listening.start()
        self._looking.start()

    def close(self) -> None:
        """End the threads."""
        self._stop.set()
        for thread in (self._listening, self._looking):
            if thread.is_alive():
                thread.join(2 * LOOK_S)
        self._engine.dispose()

    def _look_for_ever(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except DATABASE_AWAY:
                continue  # It is looked again in a moment; the loop and the handlers complain.
            except Exception:
                log.exception("what other replicas have written could not be looked for; it is tried again")

    def _listen_for_ever(self) -> None:
        while not self._stop.is_set():
            try:
                with self._engine.connect() as connection:
                    self._listen(connection)
            except DATABASE_AWAY:
                self._stop.wait(_AGAIN_S)
            except Exception as error:
                if not _is_of_the_driver(error):
                    log.exception("notifications cannot be heard; it is tried again")
                self._stop.wait(_AGAIN_S)

    def _listen(self, connection: sa.Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.execute(f'LISTEN "{self._channel}"')
        tell(self._engine, self._channel, self._me, _ECHO)  # On a connection of its own: as others do.
        asked_s, echoed = time.monotonic(), False
        self._heard("")  # What was written while nobody listened.
        while not self._stop.is_set():
            for note in driver.notifies(timeout=LOOK_S, stop_after=1):
                sender, _, what = note.payload.partition(" ")
                if sender == self._me:
                    echoed = echoed or what == _ECHO
                else:
                    self._heard(what)
            if echoed and not self.hears:
                self.hears = True
            elif not echoed and self.hears is not False and time.monotonic() - asked_s > _ECHO_LIMIT_S:
                self.hears = False
                log.warning(
                    "no notification of the database arrives (is there a pooler of transactions?): what other replicas"
                    f" have written is looked for every {LOOK_S:g} s"
                )


def tell(engine: sa.Engine, channel: str, me: str, what: str) -> None:
    """Let the other replicas know something. Raises what the driver raises."""
    with engine.connect() as connection:
        connection.execute(
            sa.text("SELECT pg_notify(:channel, :payload)"), {"channel": channel, "payload": f"{me} {what}"}
        )


def _is_of_the_driver(error: Exception) -> bool:
    """Return whether the driver's own exception says that the connection was lost; it comes without SQLAlchemy's."""
    return any(kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(error).__mro__)
