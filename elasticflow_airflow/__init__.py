"""ElasticFlow for Apache Airflow: training jobs that state what to train and by when.

Importing this package must stay cheap: Airflow imports it in every process, and training machines have neither Airflow
nor SQLAlchemy. Only the version and the provider's description are defined here.
"""

from __future__ import annotations

import sys
from typing import Any

from elasticflow_airflow.moved import MovedModules

__version__ = "0.1.0"

__all__ = ["__version__", "get_provider_info"]

# Comes first in meta_path: the path-based finder would load a second copy of a moved package's modules.
sys.meta_path.insert(0, MovedModules())


def get_provider_info() -> dict[str, Any]:
    """Describe this provider to Airflow (entry point ``apache_airflow_provider``)."""
    from elasticflow_airflow.provider_info import get_provider_info as describe

    return describe()
