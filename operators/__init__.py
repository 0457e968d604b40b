"""The operators that DAG authors import. Each module is imported lazily, on first access."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticflow_airflow.operators.decorators import elastic_train_task
    from elasticflow_airflow.operators.elastic_train import ElasticTrainOperator
    from elasticflow_airflow.operators.sensor import ElasticTrainSensor

__all__ = ["ElasticTrainOperator", "ElasticTrainSensor", "elastic_train_task"]

_MODULES = {
    "ElasticTrainOperator": "elastic_train",
    "ElasticTrainSensor": "sensor",
    "elastic_train_task": "decorators",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"elasticflow_airflow.operators.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
