"""Which jobs somebody has asked for lately, counted in memory: a question renews a lease, and writes nothing.

A thousand deferred tasks ask two hundred times a second, and as transactions of their own their renewals would queue
behind the loop's. The handlers count here; the loop looks in each pass, as it does at the counts in the store, which
submits and attachments raise. Nothing is lost with the counts when the service dies: every lease begins anew when it
starts. Knows no rows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container

Question = tuple[str, int]
"""A job's id, and the claim of who asks."""


class Renewals:
    """How often each incarnation of a job was asked for since the service started. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def add(self, job_id: str, incarnation: int) -> None:
        """Count that its owner has asked."""
        with self._lock:
            self._counts[job_id, incarnation] += 1

    def count(self, job_id: str, incarnation: int) -> int:
        """How often its owner has asked: only that it changes means something."""
        with self._lock:
            return self._counts[job_id, incarnation]

    def keep(self, live: Container[tuple[str, int]]) -> None:
        """Forget all others: they are over."""
        with self._lock:
            for key in [key for key in self._counts if key not in live]:
                del self._counts[key]
