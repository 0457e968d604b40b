"""The service's own log: one line an event, written by a thread of its own.

Whoever reads standard error may be slow or hang (a pager, a full disk, a collector of containers that restarts). No
thread of the service waits for him: what he does not take in time is left out of the log, and counted there.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from typing import TextIO, cast

import structlog

LEVELS = ("debug", "info", "warning", "error")
_MOST_WAITING = 5000
"""Writes that may wait to be taken."""
_END_LIMIT_S = 2.0


class PatientWriter(io.TextIOBase):
    """A text file to write to without ever waiting, over another one; what is written appears in order."""

    def __init__(self, file: TextIO, most_waiting: int = _MOST_WAITING) -> None:
        self._file = file
        self._waiting: queue.Queue[str | None] = queue.Queue(most_waiting)
        self._left_out = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Have it written; left out when too much waits already."""
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            with self._lock:
                self._left_out += 1
        return len(text)

    def end(self, limit_s: float = _END_LIMIT_S) -> None:
        """Wait until all is written, but not for long: for whoever is about to leave."""
        try:
            self._waiting.put(None, timeout=limit_s)
        except queue.Full:
            return
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (text := self._waiting.get()) is not None:
            with self._lock:
                left_out, self._left_out = self._left_out, 0
            note = f"level='warning' event='lines of the log were left out, nobody took them' lines={left_out}\n"
            try:
                self._put(text + note * bool(left_out))
            except OSError:  # Nobody listens, or the disk is full: there is no other place to say so.
                with self._lock:
                    self._left_out += left_out + 1

    def _put(self, text: str) -> None:
        """Write, and wait for the reader: not with the file's lock, which this process needs to come to its end."""
        try:
            descriptor = self._file.fileno()
        except io.UnsupportedOperation:  # nobody who could keep us waiting
            self._file.write(text)
            return
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]


def set_up_logging(level: str) -> PatientWriter:
    """Log to standard error, with the time in UTC. An embedded service's goes to ``service.log``."""
    writer = PatientWriter(sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(10 * (LEVELS.index(level) + 1)),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, writer)),
    )
    # What the libraries have to say: uvicorn's word on a request that failed, with where.
    logging.basicConfig(stream=writer, level=logging.WARNING, format="%(message)s", force=True)
    return writer
