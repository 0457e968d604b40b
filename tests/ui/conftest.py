"""The page's application with Airflow's real authorization (SimpleAuthManager), and a scripted service behind it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.page_browser import browser
from support.scripted_cluster import TASKS, ScriptedCluster

if "ef-air-" not in os.environ.get("AIRFLOW_HOME", ""):
    # Before anything imports Airflow. Where the Airflow tests run in this process too, their home serves as well.
    HOME = Path(tempfile.mkdtemp(prefix="ef-ui-"))
    atexit.register(shutil.rmtree, HOME, ignore_errors=True)
    (HOME / "dags").mkdir()
    os.environ.update(
        {
            "AIRFLOW_HOME": str(HOME),
            "AIRFLOW__CORE__DAGS_FOLDER": str(HOME / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        }
    )

TOKEN = "the service's token, which no browser may see"


@pytest.fixture
def cluster() -> ScriptedCluster:
    return ScriptedCluster()


@pytest.fixture(scope="session")
def airflow_with_dags() -> None:
    """Airflow's database with the DAGs of the scripted cluster, and one that nobody may read."""
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session

    initdb()
    with create_session() as session:
        session.merge(DagBundleModel(name="page-tests"))
        session.flush()
        for dag_id in (*TASKS, "payroll"):
            session.merge(DagModel(dag_id=dag_id, bundle_name="page-tests", is_stale=False))


@pytest.fixture
def manager(airflow_with_dags: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Airflow's simple authorization, but for one DAG that only administrators may read.

    Where ``only`` is set, nobody reads any other DAG, whatever the role.
    """
    from airflow.api_fastapi import app as airflow_app
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

    class WithOneSecret(SimpleAuthManager):
        only: str | None = None

        def is_authorized_dag(self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None) -> bool:
            asked = None if details is None else details.id
            if (asked == "payroll" and user.role != "admin") or (asked and self.only not in (None, asked)):
                return False
            return super().is_authorized_dag(method=method, user=user, access_entity=access_entity, details=details)

    monkeypatch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS", "False")
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "a secret of this test that is long enough for its hash")
    made = WithOneSecret()
    monkeypatch.setattr(airflow_app, "get_auth_manager", lambda: made)
    for name in ("airflow.api_fastapi.core_api.security", "elasticflow_airflow.ui.api_app"):
        monkeypatch.setattr(f"{name}.get_auth_manager", lambda: made)
    return made


@pytest.fixture
def source(cluster: ScriptedCluster) -> Any:
    """Asks the scripted service, as the connection's client would."""
    from elasticflow_airflow.client import Endpoint
    from elasticflow_airflow.hooks import Address
    from elasticflow_airflow.ui.source import Source

    def serve(request: httpx.Request) -> httpx.Response:
        if cluster.away:
            raise httpx.ConnectError("refused")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        status, value = cluster.answer(request.method, request.url.path, request.url.params, request.content)
        return httpx.Response(status, content=json.dumps(value))

    endpoint = Endpoint(base_url="http://service.test:8321", token=TOKEN)
    return Source(lambda: Address(endpoint, "default"), transport=httpx.MockTransport(serve))


@pytest.fixture
def browse(manager: Any, source: Any) -> Any:
    """A browser at the mounted page: ``browse()`` anonymous, ``browse("viewer")`` signed in with that role."""
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from elasticflow_airflow.ui.api_app import build_app

    outer = FastAPI()
    outer.mount("/airflow/elasticflow", build_app(source))

    def open_as(role: str | None = None) -> TestClient:
        client = TestClient(outer, base_url="http://airflow.test/airflow/elasticflow/")
        if role is not None:
            user = SimpleAuthManagerUser(username=role, role=role, teams=None)
            client.cookies.set("_token", manager.generate_jwt(user))
        return client

    return open_as


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened
