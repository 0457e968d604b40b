"""The port of a policy that the simulator plays: events in, decisions out.

:class:`~elasticflow_airflow.scheduler_core.Scheduler` is one, and so is each of
:mod:`~elasticflow_airflow.scheduler_core.simulator.baselines`.
"""

from __future__ import annotations

from typing import Protocol

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Decision
from elasticflow_airflow.scheduler_core.model.events import Event
from elasticflow_airflow.scheduler_core.model.values import JobState, Node


class Policy(Protocol):
    """A pure state machine. Deterministic: the same events at the same times give the same decisions."""

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in one event and say what follows from it; the last ``WakeMeAt`` returned is the only one that holds."""
        ...


class InspectablePolicy(Policy, Protocol):
    """A policy that says what it remembers of its jobs."""

    config: SchedulerConfig

    def nodes(self) -> tuple[Node, ...]:
        """The nodes as last told."""
        ...

    def states(self) -> tuple[JobState, ...]:
        """Everything remembered of every live job, in order of arrival."""
        ...

    def state(self, job_id: str) -> JobState | None:
        """Everything remembered of one job; None when it is not live."""
        ...

    def projected_finish_s(self, job_id: str) -> float | None:
        """When the last step of a live job is expected; None when that is not known."""
        ...
