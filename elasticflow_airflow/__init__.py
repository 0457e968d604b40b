"""ElasticFlow for Apache Airflow: training jobs that say what to train and by when.

Importing this package is free on purpose: Airflow imports it in every process, and training
machines have neither Airflow nor SQLAlchemy. Only the version and the provider's description live here.
"""

from __future__ import annotations

import sys
from typing import Any

from elasticflow_airflow.moved import MovedModules

__version__ = "0.1.0"

__all__ = ["__version__", "get_provider_info"]

# First: what is found by the path of a package that has moved would be a second copy of its modules.
sys.meta_path.insert(0, MovedModules())


def get_provider_info() -> dict[str, Any]:
    """Describe this provider to Airflow (entry point ``apache_airflow_provider``)."""
    from elasticflow_airflow.provider_info import get_provider_info as describe

    return describe()
