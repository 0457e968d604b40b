"""Counts events from the event log, so that the counts continue when the service is restarted.

Each call reads the events since the previous one. Rows in, numbers out; knows nothing of Prometheus.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.tables import EventRow
from elasticflow_airflow.service.store.views import UNREADABLE

_PIECE = 2000
ENDS = (EventKind.SUCCEEDED, EventKind.FAILED, EventKind.CANCELLED, EventKind.REJECTED)
"""Kinds of event that end a job."""
LATENESS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
SPARE_S = LATENESS_S
PAUSE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WAIT_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0)


@dataclass(slots=True)
class TallyHistogram:
    """A histogram: how many values are at most each bound, and their sum."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value; values that are not finite are left out."""
        if math.isfinite(value):
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative buckets for Prometheus: (upper bound as text, number of values at most that)."""
        found, so_far = [], 0
        for bound, count in zip([*self.bounds, math.inf], self.counts, strict=True):
            so_far += count
            found.append(("+Inf" if math.isinf(bound) else repr(bound), float(so_far)))
        return found


@dataclass(slots=True)
class Tallies:
    """All counts. For one thread at a time."""

    cursor: int = 0
    """The id of the last event that was counted."""
    kinds: Counter[str] = field(default_factory=Counter)
    admitted: Counter[str] = field(default_factory=Counter)
    """Admissions by terms: deadline, best_effort, renegotiated."""
    ended: Counter[str] = field(default_factory=Counter)
    """Ended jobs by state."""
    deadlines: Counter[str] = field(default_factory=Counter)
    """Outcomes of ended jobs with a deadline: met, or missed."""
    lateness: TallyHistogram = field(default_factory=lambda: TallyHistogram(LATENESS_S))
    spare: TallyHistogram = field(default_factory=lambda: TallyHistogram(SPARE_S))
    pauses: TallyHistogram = field(default_factory=lambda: TallyHistogram(PAUSE_S))
    waits: TallyHistogram = field(default_factory=lambda: TallyHistogram(WAIT_S))
    changes: Counter[str] = field(default_factory=Counter)
    """Changes of a job's workers, by mode: in_place, or restart."""
    slot_s: float = 0.0
    """Slot-seconds held by jobs that have ended."""
    _over: dict[str, int] = field(default_factory=dict)
    _asked: dict[tuple[str, int], float] = field(default_factory=dict)

    def catch_up(self, reader: Reader) -> None:
        """Count the events since the last call.

        If the beginning of the log is deleted (``keep_days``), the first call counts nothing and only new events count:
        readers of counters expect them to start at zero, not with a part of the past.
        """
        if self.cursor == 0 and reader.first_event_id() > 1:
            self.cursor = reader.last_event_id()
        while events := reader.events(self.cursor, None, _PIECE):
            for event in events:
                with suppress(*UNREADABLE):
                    self._count(event)
                self.cursor = event.event_id
            reader.session.expunge_all()

    def _count(self, event: EventRow) -> None:
        self.kinds[event.kind] += 1
        if event.job_id is None or event.incarnation is None:
            return
        job, data = (event.job_id, event.incarnation), event.data
        if event.kind == EventKind.SUBMITTED:
            self._asked[job] = event.at
        elif event.kind == EventKind.ADMITTED:
            self.admitted[str(data.get("terms", "deadline"))] += 1
        elif event.kind == EventKind.STARTED and job in self._asked:
            self.waits.add(max(0.0, event.at - self._asked.pop(job)))
        elif event.kind == EventKind.RESIZED and data.get("workers_before"):
            self.changes[str(data.get("mode", "restart"))] += 1
        elif event.kind == EventKind.RESCALED and isinstance(data.get("pause_s"), int | float):
            self.pauses.add(float(data["pause_s"]))
        elif event.kind in ENDS:
            self._end(event)

    def _end(self, event: EventRow) -> None:
        assert event.job_id is not None  # the caller checked this
        assert event.incarnation is not None
        self._asked.pop((event.job_id, event.incarnation), None)
        if event.kind != "rejected" and event.data.get("gpu_seconds") is None:
            return  # This event announces the end; the end itself is logged when its workers are gone.
        if self._over.get(event.job_id, 0) >= event.incarnation:
            return
        self._over[event.job_id] = event.incarnation
        self.ended[event.kind] += 1
        self.slot_s += float(event.data.get("gpu_seconds") or 0.0)
        slack_s, met = event.data.get("slack_s"), event.data.get("met")
        if met is None or slack_s is None or event.kind == "cancelled":
            return  # There was no deadline, or the job was cancelled.
        self.deadlines["met" if met else "missed"] += 1
        if event.kind == "succeeded":
            (self.spare if slack_s >= 0.0 else self.lateness).add(abs(float(slack_s)))
