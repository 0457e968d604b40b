"""The service's own log: one line per event, written by a thread of its own.

The reader of standard error may be slow or hang (a pager, a full disk, a log collector that restarts). No thread of the
service waits for it: lines that it does not take in time are left out of the log, and their number is logged.
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
"""The most writes that may be queued."""
_END_LIMIT_S = 2.0


class PatientWriter(io.TextIOBase):
    """A text file whose writes never block, on top of another file; writes keep their order."""

    def __init__(self, file: TextIO, most_waiting: int = _MOST_WAITING) -> None:
        self._file = file
        self._waiting: queue.Queue[str | None] = queue.Queue(most_waiting)
        self._left_out = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Queue a text to be written; it is left out when the queue is full."""
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            with self._lock:
                self._left_out += 1
        return len(text)

    def end(self, limit_s: float = _END_LIMIT_S) -> None:
        """Wait until everything is written, at most ``limit_s`` seconds; for use before the process exits."""
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
            except OSError:  # There is no reader, or the disk is full: there is nowhere else to report this.
                with self._lock:
                    self._left_out += left_out + 1

    def _put(self, text: str) -> None:
        """Write, and wait for the reader, without the file's lock, which this process needs to exit."""
        try:
            descriptor = self._file.fileno()
        except io.UnsupportedOperation:  # in memory: writes cannot block
            self._file.write(text)
            return
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]


def set_up_logging(level: str) -> PatientWriter:
    """Log to standard error, with the time in UTC; an embedded service logs to ``service.log``."""
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
    # Logs of libraries, such as uvicorn's traceback of a failed request.
    logging.basicConfig(stream=writer, level=logging.WARNING, format="%(message)s", force=True)
    return writer
