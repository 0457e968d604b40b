"""What follows a success: the model goes to a registry (``on_promote=``), and its place into the task's assets.

Runs in the worker, once the job has succeeded and before Airflow records it. A hook that fails fails the task; the
success is then not acknowledged, so a retry calls the hook again and trains nothing.
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
"""What of a result an asset's event carries."""


def promote(hook: Any, result: dict[str, Any], context: Mapping[str, Any]) -> Any:
    """Call the hook with what its parameters name: ``result``, ``checkpoint_path``, and Airflow's context.

    Returns what it returns (kept in the task's result, so JSON). Raises what it raises.
    """
    offered = {**dict(context), "result": result, "checkpoint_path": result["checkpoint_path"]}
    return call_by_name(loaded(hook), offered)


def carry(outlets: Iterable[Any], result: Mapping[str, Any], context: Mapping[str, Any]) -> list[str]:
    """Put the checkpoint into the events of the task's assets, for DAGs that begin with it; the assets' names."""
    events = context.get("outlet_events")
    if events is None:
        return []
    carried: list[str] = []
    for outlet in outlets:
        if isinstance(outlet, Asset):
            events[outlet].extra.update({name: result[name] for name in CARRIED})
            carried.append(outlet.name)
    return carried
