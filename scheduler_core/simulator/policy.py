"""The interface of a policy that the simulator can run: events in, decisions out.

:class:`~elasticflow_airflow.scheduler_core.Scheduler` implements it, and so does each policy of
:mod:`~elasticflow_airflow.scheduler_core.simulator.baselines`.
"""

from __future__ import annotations

from typing import Protocol

from elasticflow_airflow.scheduler_core.model.decisions import Decision
from elasticflow_airflow.scheduler_core.model.events import Event
from elasticflow_airflow.scheduler_core.model.values import JobState, Node


class Policy(Protocol):
    """A pure state machine. Deterministic: the same events at the same times give the same decisions."""

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Handle one event and return the decisions that follow; only the last ``WakeMeAt`` returned is in effect."""
        ...


class InspectablePolicy(Policy, Protocol):
    """A policy that exposes the state of its jobs."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes as last reported."""
        ...

    def states(self) -> tuple[JobState, ...]:
        """Return the state of every live job, in order of arrival."""
        ...
