"""Steps after a success: pass the model to a registry (``on_promote=``), and its location to the task's assets.

Runs in the worker, after the job has succeeded and before Airflow records it. A hook that fails fails the task. The
success is then not acknowledged, so a retry calls the hook again without training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from airflow.sdk import Asset

from elasticflow_airflow.task.callables import call_by_name, loaded

CARRIED = (
    "checkpoint_path", "checkpoint_digest", "job_id", "steps", "final_loss", "deadline", "met", "finished_at",
    "metrics",
)  # fmt: skip
"""The fields of a result that an asset's event carries."""


def promote(hook: Any, result: dict[str, Any], context: Mapping[str, Any]) -> Any:
    """Call the hook with those of ``result``, ``checkpoint_path`` and Airflow's context that its parameters name.

    Returns the hook's return value, which becomes part of the task's result and so must be JSON. Raises what the hook
    raises.
    """
    offered = {**dict(context), "result": result, "checkpoint_path": result["checkpoint_path"]}
    return call_by_name(loaded(hook), offered)


def carry(outlets: Iterable[Any], result: Mapping[str, Any], context: Mapping[str, Any]) -> list[str]:
    """Add the checkpoint to the events of the task's assets, for DAGs that they trigger; return the assets' names."""
    events = context.get("outlet_events")
    if events is None:
        return []
    carried: list[str] = []
    for outlet in outlets:
        if isinstance(outlet, Asset):
            events[outlet].extra.update({name: result[name] for name in CARRIED})
            carried.append(outlet.name)
    return carried
