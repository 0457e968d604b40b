"""What the plugin tells Airflow's UI: an entry in its menu, and tabs. Each leads to what the page serves."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.scripted_cluster import identity

from elasticflow_airflow.links import PAGE
from elasticflow_airflow.plugin import ElasticFlowPlugin

VIEWS = {view["destination"]: view for view in ElasticFlowPlugin.external_views}
WHOSE = {"DAG_ID": "fraud_daily", "RUN_ID": "scheduled__today", "TASK_ID": "finetune", "MAP_INDEX": "-1"}
KNOWN: dict[str, set[str]] = {"nav": set(), "dag_run": {"DAG_ID", "RUN_ID"}, "task_instance": set(WHOSE)}
"""What Airflow's UI fills in, by where a view is shown."""


@pytest.fixture
def airflow_with_plugin(manager: Any, source: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A browser at an api-server that has the plugin's application where the plugin says."""
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from elasticflow_airflow.ui import plugin_app

    monkeypatch.setattr(plugin_app, "_look_up", source._look_up)
    monkeypatch.setattr(plugin_app, "Source", lambda look_up: source)
    outer = FastAPI()
    for one in ElasticFlowPlugin().fastapi_apps:
        outer.mount(one["url_prefix"], one["app"])
    client = TestClient(outer, base_url="http://airflow.test/")
    user = SimpleAuthManagerUser(username="viewer", role="viewer", teams=None)
    client.cookies.set("_token", manager.generate_jwt(user))
    return client


def test_airflow_takes_the_views(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow import plugins_manager
    from airflow.api_fastapi.core_api.datamodels.plugins import ExternalViewResponse

    monkeypatch.setattr(plugins_manager, "_get_plugins", lambda: ([ElasticFlowPlugin()], {}))
    taken, _ = plugins_manager._get_ui_plugins.__wrapped__()
    assert [ExternalViewResponse.model_validate(view).destination for view in taken] == [
        "nav",
        "dag_run",
        "task_instance",
    ]
    assert len(ElasticFlowPlugin.external_views) == 3  # Airflow removes those that it does not take
    assert {view["url_route"] for view in taken} == {"elasticflow", "elasticflow-run", "elasticflow-task"}
    assert f"plugin/{VIEWS['nav']['url_route']}" == PAGE


@pytest.mark.parametrize("destination", VIEWS)
def test_a_view_leads_to_the_page(airflow_with_plugin: Any, destination: str) -> None:
    view = VIEWS[destination]
    assert set(re.findall(r"\{(\w+)\}", view["href"])) <= KNOWN[destination]
    address = view["href"].format_map(WHOSE)
    page = airflow_with_plugin.get(address)
    assert page.status_code == 200
    assert 'src="static/main.js"' in page.text
    for icon in ("icon", "icon_dark_mode"):
        answer = airflow_with_plugin.get(view[icon])
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml"), icon


@pytest.mark.parametrize("destination", ["dag_run", "task_instance"])
def test_a_tab_asks_for_the_jobs_of_what_it_stands_at(airflow_with_plugin: Any, destination: str) -> None:
    """The page takes these names out of its address, and asks by them."""
    address = urlsplit(VIEWS[destination]["href"].format_map(WHOSE))
    query = {name: value for name, (value,) in parse_qs(address.query).items()}
    assert len(query) == len(KNOWN[destination])
    script = airflow_with_plugin.get(f"{address.path}static/main.js").text
    assert all(f"'{name}'" in script for name in query)
    jobs = airflow_with_plugin.get(f"{address.path}api/jobs", params=query).json()["jobs"]
    assert [job["job_id"] for job in jobs] == [identity("fraud_daily").job_id]
    for name, other in (("run_id", "another"), ("task_id", "another"), ("map_index", "7")):
        if name in query:
            assert (
                airflow_with_plugin.get(f"{address.path}api/jobs", params={**query, name: other}).json()["jobs"] == []
            )
