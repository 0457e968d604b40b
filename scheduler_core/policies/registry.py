"""Policies by name. Each is imported only when it is asked for, so that optional dependencies stay optional."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from elasticflow_airflow.scheduler_core.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.policies.port import ServicePolicy
from elasticflow_airflow.scheduler_core.values import Node

_PACKAGE = "elasticflow_airflow.scheduler_core"

_POLICIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "elasticflow": ("scheduler", "Scheduler", {}),
    "elasticflow+types": ("policies.by_type", "schedulers_by_type", {}),
    "edf": ("policies.edf", "Edf", {}),
    "edf-plain": ("policies.edf", "Edf", {"plain": True}),
    "edf+elastic": ("policies.edf", "ElasticEdf", {}),
    "edf+admission": ("policies.edf", "AdmittingEdf", {}),
    "gang-fifo": ("policies.fifo", "GangFifo", {}),
    "gang-fifo+knee": ("policies.fifo", "GangFifo", {"at_knee": True}),
    "gandiva": ("policies.gandiva", "Gandiva", {}),
    "tiresias": ("policies.tiresias", "Tiresias", {}),
    "themis": ("policies.themis", "Themis", {}),
    "chronus": ("policies.chronus", "Chronus", {}),
    "chronus+size": ("policies.chronus", "Chronus", {"choose_size": True}),
    "gavel": ("policies.gavel", "Gavel", {}),
    "gavel+plain": ("policies.gavel", "Gavel", {"at_knee": False}),
    "antman": ("policies.antman", "AntMan", {}),
    "antman+plain": ("policies.antman", "AntMan", {"at_knee": False}),
    "optimus": ("policies.optimus", "Optimus", {}),
    "pollux": ("policies.pollux", "Pollux", {}),
    "oasis": ("policies.oasis", "Oasis", {}),
    "aonline": ("policies.aonline", "AOnline", {}),
}
"""By name: module below ``scheduler_core``, class, and what it is made with beside configuration and nodes."""
DEFAULT_POLICY = "elasticflow"
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""All names that :func:`make_policy` knows, the default first."""


def make_policy(name: str, nodes: Iterable[Node], config: SchedulerConfig | None = None) -> ServicePolicy:
    """A fresh policy over ``nodes``.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name not in _POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    module, kind, options = _POLICIES[name]
    make: Callable[..., ServicePolicy] = getattr(import_module(f"{_PACKAGE}.{module}"), kind)
    return make(config or SchedulerConfig(), nodes, **options)
