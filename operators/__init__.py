"""The operators that DAG authors import. Nothing is imported until it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticflow_airflow.operators.elastic_train import ElasticTrainOperator

__all__ = ["ElasticTrainOperator"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("elasticflow_airflow.operators.elastic_train"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
