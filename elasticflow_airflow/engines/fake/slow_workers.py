"""Modelled workers on slow slots: the others wait for them, and all report their compute times.

Pure functions over a modelled gang.
"""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.engines.fake.behaviour import Modelled


def slowness(gang: Modelled, rank: int) -> float:
    """Return the factor on a worker's compute time."""
    node_id, index = gang.spec.placement[rank]
    return gang.behaviour.slow_slots.get(f"{node_id}:{index}", 1.0)


def slowest(gang: Modelled) -> float:
    """Return the factor on the gang's step time, which the slowest worker determines."""
    most = max(slowness(gang, rank) for rank in range(gang.workers))
    return 1.0 + gang.behaviour.compute_part * (most - 1.0)


def said_of_workers(gang: Modelled, steps: int, seconds: float) -> list[dict[str, Any]]:
    """Return the data of the workers' own reports, in rank order; empty when no slot is slow."""
    if not gang.behaviour.slow_slots:
        return []
    each_s = gang.behaviour.compute_part * seconds / slowest(gang)
    return [
        {"window_steps": steps, "compute_s": each_s * slowness(gang, rank), "data_s": 0.0}
        for rank in range(gang.workers)
    ]
