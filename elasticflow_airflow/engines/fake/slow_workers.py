"""Modelled workers that are slow where they are: the others wait for them, and all say how long they compute.

Pure functions over a modelled gang.
"""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.engines.fake.behaviour import Modelled


def slowness(gang: Modelled, rank: int) -> float:
    """How many times as long a worker computes."""
    node_id, index = gang.spec.placement[rank]
    return gang.behaviour.slow_slots.get(f"{node_id}:{index}", 1.0)


def slowest(gang: Modelled) -> float:
    """The same of the slowest worker, which is how many times as long a step of the gang takes."""
    most = max(slowness(gang, rank) for rank in range(gang.workers))
    return 1.0 + gang.behaviour.compute_part * (most - 1.0)


def said_of_workers(gang: Modelled, steps: int, seconds: float) -> list[dict[str, Any]]:
    """What the workers report of themselves, in rank order; nothing where nobody is slow."""
    if not gang.behaviour.slow_slots:
        return []
    each_s = gang.behaviour.compute_part * seconds / slowest(gang)
    return [
        {"window_steps": steps, "compute_s": each_s * slowness(gang, rank), "data_s": 0.0}
        for rank in range(gang.workers)
    ]
