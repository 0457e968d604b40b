"""One question at a time, where answering takes the interpreter from the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elasticflow_airflow.service.refusal import Refusal

_PATIENCE_S = 20.0


class Turns:
    """Whoever asks waits for those before. ``busy`` is what is said to who has waited too long. Thread-safe."""

    def __init__(self, busy: str) -> None:
        self._busy, self._lock = busy, threading.Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Have a turn. Raises Refusal 503 when none comes in time."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise Refusal(503, "busy", self._busy, "ask again in a moment")
        try:
            yield
        finally:
            self._lock.release()
