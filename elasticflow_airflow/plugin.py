"""The Airflow plugin: listener and pages. Imported in every Airflow process, so it imports next to nothing."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from elasticflow_airflow.task import acknowledging

_RUN = "elasticflow/?dag_id={DAG_ID}&run_id={RUN_ID}"
_ICONS = {"icon": "elasticflow/static/icon.svg", "icon_dark_mode": "elasticflow/static/icon-dark.svg"}
_TASK = f"{_RUN}&task_id={{TASK_ID}}&map_index={{MAP_INDEX}}"


class ElasticFlowPlugin(AirflowPlugin):
    """Registers the listener, which reports how elastic tasks ended, and the pages that show what the service does."""

    name = "elasticflow"
    listeners: list[Any] = [acknowledging]  # noqa: RUF012 - the name and kind that Airflow looks for
    # No leading slash in the URLs: Airflow resolves them under its base URL.
    external_views: list[Any] = [  # noqa: RUF012 - as above
        {
            "name": "ElasticFlow",
            "href": "elasticflow/",
            "destination": "nav",
            "category": "browse",
            "url_route": "elasticflow",
            **_ICONS,
        },
        {"name": "ElasticFlow", "href": _RUN, "destination": "dag_run", "url_route": "elasticflow-run", **_ICONS},
        {
            "name": "ElasticFlow",
            "href": _TASK,
            "destination": "task_instance",
            "url_route": "elasticflow-task",
            **_ICONS,
        },
    ]

    @property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]  # Airflow instantiates it, so that this works
        """The application behind the pages; only the api-server reads this."""
        from elasticflow_airflow.ui.plugin_app import airflow_app

        return [{"app": airflow_app(), "url_prefix": "/elasticflow", "name": "ElasticFlow"}]
