"""What a training script imports: ``from elasticflow_airflow import runtime``; then ``runtime.init()``.

Importing this package is cheap; torch is only imported by ``init``. Training interpreters need torch and this folder,
but nothing else of the project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticflow_airflow.runtime.checkpoints.checkpoint import load_weights
    from elasticflow_airflow.runtime.session import Session, init
    from elasticflow_airflow.runtime.session_core import NonFiniteLoss
    from elasticflow_airflow.runtime.stores.manifest import CheckpointError

__all__ = ["CheckpointError", "NonFiniteLoss", "Session", "init", "load_weights"]

_HOMES = {
    "CheckpointError": "stores.manifest",
    "NonFiniteLoss": "session_core",
    "Session": "session",
    "init": "session",
    "load_weights": "checkpoints.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
