"""Wakes the parts of the service: handlers wake the loop, and the loop wakes waiting handlers and streams.

A signal means only that something may have changed; the change itself is read from the store.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable


class Notifier:
    """Thread-safe. One loop waits in :meth:`sleep`, threads in :meth:`wait_until`; handlers and streams subscribe."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._version = 0
        self._streams: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def wake(self) -> None:
        """Wake the loop, because there is something to do."""
        self._wake.set()

    def sleep(self, timeout_s: float | None) -> None:
        """Wait, as the loop, until :meth:`wake`, or for ``timeout_s`` seconds (None: without limit)."""
        self._wake.wait(timeout_s)
        self._wake.clear()

    def changed(self) -> None:
        """Wake all who wait for a change, so that they look again."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()
            streams = list(self._streams.items())
        for event, loop in streams:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def wait_until(self, happened: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``happened`` returns True, which is asked again after each change, or until time is up."""
        end = time.monotonic() + timeout_s
        while True:
            with self._changed:
                version = self._version
            if happened():
                return
            with self._changed:
                while self._version == version:
                    left = end - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        return

    def subscribe(self) -> asyncio.Event:
        """Return an event of the calling asyncio loop, set at each change; release it with :meth:`unsubscribe`."""
        event = asyncio.Event()
        with self._changed:
            self._streams[event] = asyncio.get_running_loop()
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        """Release an event of :meth:`subscribe`."""
        with self._changed:
            self._streams.pop(event, None)
