"""The results of a simulation: one record per job, and the metrics that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MET_TOLERANCE_S = 1e-3
"""A job that ends at most this long after its deadline is in time: sums of floats are not exact."""


@dataclass(slots=True)
class SimulatedOutcome:
    """The outcome of one job. Times are on the trace's clock; None means that it did not happen."""

    job_id: str
    submitted_s: float
    deadline_s: float | None
    value: float = 1.0
    value_at_end: float = 0.0
    """Its value when it ended (see ``Job.value_at``); 0 if it has not ended."""
    admitted_s: float | None = None
    """When its deadline was promised."""
    promised_deadline_s: float | None = None
    rejected_s: float | None = None
    reject_reason: str = ""
    started_s: float | None = None
    finished_s: float | None = None
    at_risk_s: float | None = None
    """When it was first announced as at risk."""
    changes: int = 0
    """Number of times its slots changed to another non-empty set, including the start."""
    migrations: int = 0
    """Changes of a running gang to slots that are neither a superset nor a subset of the previous ones."""
    suspensions: int = 0
    slot_s: float = 0.0
    """Slot-seconds held, including pauses."""

    @property
    def met(self) -> bool:
        """Whether it ended by the deadline it was submitted with."""
        return (
            self.finished_s is not None
            and self.deadline_s is not None
            and self.finished_s <= self.deadline_s + MET_TOLERANCE_S
        )

    @property
    def late_though_admitted(self) -> bool:
        """Whether it missed the deadline that was promised."""
        limit = self.promised_deadline_s
        return limit is not None and (self.finished_s is None or self.finished_s > limit + MET_TOLERANCE_S)

    @property
    def value_kept(self) -> float:
        """Its value if the deadline was met; its value at the end if a later deadline was promised and kept; else 0."""
        if self.met:
            return self.value
        return 0.0 if self.late_though_admitted or self.promised_deadline_s is None else self.value_at_end

    @property
    def completion_s(self) -> float | None:
        """Job completion time: from submission to the end."""
        return None if self.finished_s is None else self.finished_s - self.submitted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All records in order of submission, and the decision times of this run in seconds."""

    policy: str
    slots: int
    records: tuple[SimulatedOutcome, ...]
    begin_s: float
    end_s: float
    events: int
    run_s: float
    decision_s: tuple[float, ...] = field(repr=False, default=())
    """Wall-clock seconds of each decision on a submitted job."""

    def summary(self) -> dict[str, float | int | str]:
        """Return the metrics that are compared, by name."""
        records = self.records
        done = sorted(r.completion_s for r in records if r.completion_s is not None)
        used = sum(r.slot_s for r in records)
        span = max(self.end_s - self.begin_s, 1e-9)
        return {
            "policy": self.policy,
            "jobs": len(records),
            "deadlines": sum(r.deadline_s is not None for r in records),
            "met": sum(r.met for r in records),
            "value_met": sum(r.value for r in records if r.met),
            "value_kept": sum(r.value_kept for r in records),
            "late_though_admitted": sum(r.late_though_admitted for r in records),
            "rejected": sum(r.rejected_s is not None for r in records),
            "unfinished": sum(r.finished_s is None and r.rejected_s is None for r in records),
            "completion_mean_s": sum(done) / len(done) if done else 0.0,
            "completion_p95_s": quantile(done, 0.95),
            "slot_hours": used / 3600.0,
            "utilisation": used / (self.slots * span),
            "changes": sum(r.changes for r in records),
            "migrations": sum(r.migrations for r in records),
            "suspensions": sum(r.suspensions for r in records),
            "decision_p50_ms": 1e3 * quantile(sorted(self.decision_s), 0.5),
            "decision_p99_ms": 1e3 * quantile(sorted(self.decision_s), 0.99),
            "events": self.events,
            "run_s": self.run_s,
        }


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the ``part`` quantile (0 to 1) of sorted values by nearest rank; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
