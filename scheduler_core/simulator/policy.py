"""The port of a policy that the simulator plays: events in, decisions out.

:class:`~elasticflow_airflow.scheduler_core.Scheduler` is one, and so is each of
:mod:`~elasticflow_airflow.scheduler_core.simulator.baselines`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.decisions import Decision
from elasticflow_airflow.scheduler_core.events import Event
from elasticflow_airflow.scheduler_core.values import JobState, Node, Plan


class Policy(Protocol):
    """A pure state machine. Deterministic: the same events at the same times give the same decisions."""

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in one event and say what follows from it; the last ``WakeMeAt`` returned is the only one that holds."""
        ...


class RestorablePolicy(Policy, Protocol):
    """A policy that can be looked at, and that can go on from what it said of its jobs."""

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

    def restore(self, states: Iterable[JobState], now: float) -> list[Decision]:
        """Take over live jobs of a policy that was there before."""
        ...

    def plan_of(self, job_id: str) -> Plan | None:
        """What is planned for a live job; None while there is nothing."""
        ...

    def projected_finish_s(self, job_id: str) -> float | None:
        """When the last step of a live job is expected; None when that is not known."""
        ...
