"""Follows the event log while the service runs, and passes each event to the listeners: the log file, and traces.

Events are passed on after they are committed. Events from before the start of the service are not: they are stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.store.store import Reader, Store
from elasticflow_airflow.service.store.tables import EventRow

Listener = Callable[[Reader, EventRow], None]

_PIECE = 500
_LOOK_S = 5.0
_ROUTINE = (EventKind.CHECKPOINT, EventKind.KEPT, EventKind.MEASURED, EventKind.TARGET_LENGTH)
"""Kinds of event that are frequent and of little importance; ``ELASTICFLOW_LOG_LEVEL=debug`` shows them."""
_ALARMING = (
    EventKind.AT_RISK,
    EventKind.CHECKPOINT_DAMAGED,
    EventKind.DEADLINE_MISSED,
    EventKind.FAILED,
    EventKind.HANG,
    EventKind.NODE_LOST,
    EventKind.WARNING,
    EventKind.WORKER_LOST,
)

log = structlog.get_logger()


class EventLogFollower:
    """One thread that follows the log, from the creation of this object on."""

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        listeners: Sequence[Listener],
        decides: Callable[[], bool] = lambda: True,
    ) -> None:
        """``decides``: whether this process decides; of several, only the one that does tells its listeners."""
        self._store, self._notifier, self._listeners, self._decides = store, notifier, listeners, decides
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        with store.read() as reader:
            self._cursor = reader.last_event_id()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Pass on the remaining events, and stop."""
        self._stop.set()
        self._notifier.changed()
        if self._thread.is_alive():
            self._thread.join()
        self.tell()

    def tell(self) -> None:
        """Pass all new events to the listeners."""
        while True:
            with self._store.read() as reader:
                events = reader.events(self._cursor, None, _PIECE)
                for event in events:
                    self._cursor = event.event_id
                    for listener in self._listeners if self._decides() else ():
                        try:
                            listener(reader, event)
                        except Exception:
                            # A failing listener must not harm the service or the other listeners.
                            log.exception("an event could not be told", event_id=event.event_id, kind=event.kind)
            if len(events) < _PIECE:
                return

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.tell()
            except Exception:
                log.exception("the event log could not be read; it is tried again")
                self._stop.wait(_LOOK_S)
            self._notifier.wait_until(self._has_news, _LOOK_S)

    def _has_news(self) -> bool:
        if self._stop.is_set():
            return True
        with self._store.read() as reader:
            return reader.last_event_id() > self._cursor


def write_to_log(_reader: Reader, event: EventRow) -> None:
    """Write one log line per event, with the ids of its job, incarnation and generation."""
    about = {
        "job_id": event.job_id,
        "incarnation": event.incarnation,
        "generation": event.data.get("generation"),
    }
    level = "debug" if event.kind in _ROUTINE else "warning" if event.kind in _ALARMING else "info"
    bound = log.bind(**{name: value for name, value in about.items() if value is not None})
    getattr(bound, level)(event.kind, reason=str(event.reason), event_id=event.event_id)
