"""Makes the plugin's application of Airflow's connection and configuration. Imported in the api-server only."""

from __future__ import annotations

from airflow.sdk.configuration import conf
from fastapi import FastAPI

from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.owners.owner_watch import watching
from elasticflow_airflow.ui.api_app import build_app
from elasticflow_airflow.ui.source import Address, Source


def airflow_app() -> FastAPI:
    """The page, asking the service of the connection ``[elasticflow] page_conn_id``; it reports owners as it lives."""
    return build_app(Source(_look_up), lifespan=watching)


def _look_up() -> Address:
    hook = ElasticFlowHook(conf.get("elasticflow", "page_conn_id", fallback=ElasticFlowHook.default_conn_name))
    return Address(hook.endpoint(start=False), hook.namespace)  # looking never starts a service
