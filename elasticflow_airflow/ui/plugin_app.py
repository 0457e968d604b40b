"""Builds the plugin's application from Airflow's connection and configuration. Imported in the api-server only."""

from __future__ import annotations

from airflow.sdk.configuration import conf
from fastapi import FastAPI

from elasticflow_airflow.hooks import Address, ElasticFlowHook
from elasticflow_airflow.owners.owner_watch import watching
from elasticflow_airflow.ui.api_app import build_app
from elasticflow_airflow.ui.source import Source


def airflow_app() -> FastAPI:
    """Return the application for the service of connection ``[elasticflow] page_conn_id``; it also reports owners."""
    return build_app(Source(_look_up), lifespan=watching)


def _look_up() -> Address:
    return Address.of(conf.get("elasticflow", "page_conn_id", fallback=ElasticFlowHook.default_conn_name))
