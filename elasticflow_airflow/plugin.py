"""The Airflow plugin: registers the listener. Imported in every Airflow process, so it imports next to nothing."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from elasticflow_airflow import listeners


class ElasticFlowPlugin(AirflowPlugin):
    """Makes Airflow tell the service how elastic tasks ended."""

    name = "elasticflow"
    listeners: list[Any] = [listeners]  # noqa: RUF012 - the name and kind that Airflow looks for
