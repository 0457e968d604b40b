"""ElasticFlow for Apache Airflow: training jobs that say what to train and by when.

Importing this package is free on purpose: Airflow imports it in every process, and training
machines have neither Airflow nor SQLAlchemy. Only the version and the provider's description live here.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "get_provider_info"]


def get_provider_info() -> dict[str, Any]:
    """Describe this provider to Airflow (entry point ``apache_airflow_provider``)."""
    from elasticflow_airflow.provider_info import get_provider_info as describe

    return describe()
