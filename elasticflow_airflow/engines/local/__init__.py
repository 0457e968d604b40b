"""The local engine: torchrun workers on this machine, under supervisors that outlive the service.

The engine (``engine.py``) writes the desired state; one supervisor process per generation and node
(``workers/supervisor.py``) establishes it and writes the actual state. They communicate through files (``files/``)
only, so that either can be killed. What only the machine itself can do goes through ``node_manager.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticflow_airflow.engines.local.engine import LocalEngine
    from elasticflow_airflow.engines.local.machine.layout import NodeLayout, SlotLayout, detect_nodes

__all__ = ["LocalEngine", "NodeLayout", "SlotLayout", "detect_nodes"]


def __getattr__(name: str) -> Any:
    """Load on demand: a supervisor imports this package and must stay small."""
    if name == "LocalEngine":
        from elasticflow_airflow.engines.local.engine import LocalEngine

        return LocalEngine
    if name in __all__:
        from elasticflow_airflow.engines.local.machine import layout

        return getattr(layout, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
