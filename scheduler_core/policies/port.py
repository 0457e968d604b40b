"""What every policy is: events in, decisions out, as :class:`~elasticflow_airflow.scheduler_core.Scheduler` does it."""

from __future__ import annotations

from typing import Protocol

from elasticflow_airflow.scheduler_core.decisions import Decision
from elasticflow_airflow.scheduler_core.events import Event


class Policy(Protocol):
    """A pure state machine. Deterministic: the same events at the same times give the same decisions."""

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in one event and say what follows from it; the last ``WakeMeAt`` returned is the only one that holds."""
        ...
