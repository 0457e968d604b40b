"""The policies that the simulator can run, by name, and their interface: events in, decisions out.

They are our scheduler and those of the literature. A policy is imported only when it is requested, so that optional
dependencies stay optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Decision
from elasticflow_airflow.scheduler_core.model.events import Event
from elasticflow_airflow.scheduler_core.model.values import JobState, Node

_PACKAGE = "elasticflow_airflow.scheduler_core"

_POLICIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "elasticflow": ("scheduler", "Scheduler", {}),
    "elasticflow+types": ("simulator.baselines.common.by_type", "schedulers_by_type", {}),
    "edf": ("simulator.baselines.edf", "Edf", {}),
    "edf-plain": ("simulator.baselines.edf", "Edf", {"plain": True}),
    "edf+elastic": ("simulator.baselines.edf", "ElasticEdf", {}),
    "edf+admission": ("simulator.baselines.edf", "AdmittingEdf", {}),
    "gang-fifo": ("simulator.baselines.fifo", "GangFifo", {}),
    "gang-fifo+knee": ("simulator.baselines.fifo", "GangFifo", {"at_knee": True}),
    "gandiva": ("simulator.baselines.gandiva", "Gandiva", {}),
    "tiresias": ("simulator.baselines.tiresias", "Tiresias", {}),
    "themis": ("simulator.baselines.themis", "Themis", {}),
    "chronus": ("simulator.baselines.chronus", "Chronus", {}),
    "chronus+size": ("simulator.baselines.chronus", "Chronus", {"choose_size": True}),
    "gavel": ("simulator.baselines.gavel", "Gavel", {}),
    "gavel+plain": ("simulator.baselines.gavel", "Gavel", {"at_knee": False}),
    "antman": ("simulator.baselines.antman", "AntMan", {}),
    "antman+plain": ("simulator.baselines.antman", "AntMan", {"at_knee": False}),
    "optimus": ("simulator.baselines.optimus", "Optimus", {}),
    "pollux": ("simulator.baselines.pollux", "Pollux", {}),
    "oasis": ("simulator.baselines.oasis", "Oasis", {}),
    "aonline": ("simulator.baselines.aonline", "AOnline", {}),
}
"""By name: module below ``scheduler_core``, class or factory, and its extra keyword arguments."""
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""All names that :func:`make_policy` accepts, ours first."""


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


def make_policy(name: str, nodes: Iterable[Node], config: SchedulerConfig | None = None) -> InspectablePolicy:
    """Create a policy over ``nodes``.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name not in _POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    module, kind, options = _POLICIES[name]
    make: Callable[..., InspectablePolicy] = getattr(import_module(f"{_PACKAGE}.{module}"), kind)
    return make(config or SchedulerConfig(), nodes, **options)
