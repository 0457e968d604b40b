"""In-memory counts of owners' requests for their jobs: a request renews the job's lease without writing anything.

A thousand deferred tasks poll two hundred times a second; as separate transactions, their renewals would queue behind
those of the loop. Handlers count here. The loop reads the counts in each pass, together with the counts in the store,
which submits and attachments raise. A crash of the service loses nothing, as every lease starts anew with the service.
Knows no rows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container

Question = tuple[str, int]
"""A job's id, and the caller's claim."""


class Renewals:
    """Counts requests per incarnation since the service started. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def add(self, job_id: str, incarnation: int) -> None:
        """Count one request of the owner."""
        with self._lock:
            self._counts[job_id, incarnation] += 1

    def count(self, job_id: str, incarnation: int) -> int:
        """Return the number of requests; only a change of it has a meaning."""
        with self._lock:
            return self._counts[job_id, incarnation]

    def keep(self, live: Container[tuple[str, int]]) -> None:
        """Drop the counts of all other incarnations, as they are over."""
        with self._lock:
            for key in [key for key in self._counts if key not in live]:
                del self._counts[key]
