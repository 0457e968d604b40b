"""The page's application with Airflow's real authorization (SimpleAuthManager), and a scripted service behind it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.page_browser import browser
from support.page_site import airflow_settings, mounted, scripted_source
from support.scripted_cluster import TASKS, ScriptedCluster

if "ef-air-" not in os.environ.get("AIRFLOW_HOME", ""):
    # Before anything imports Airflow. Where the Airflow tests run in this process too, their home serves as well.
    HOME = Path(tempfile.mkdtemp(prefix="ef-ui-"))
    atexit.register(shutil.rmtree, HOME, ignore_errors=True)
    os.environ.update(airflow_settings(HOME) | {"AIRFLOW__CORE__UNIT_TEST_MODE": "True"})


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
    return scripted_source(cluster)


@pytest.fixture
def browse(manager: Any, source: Any) -> Any:
    """A browser at the mounted page: ``browse()`` anonymous, ``browse("viewer")`` signed in with that role."""
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi.testclient import TestClient

    outer = mounted(source)

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
