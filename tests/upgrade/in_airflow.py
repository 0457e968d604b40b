"""What the processes of Airflow do in a test of an upgrade; run with the interpreter of either release.

- ``in_airflow.py defer FILE``, in the release before: store the triggers of deferred tasks as Airflow does, with the
  arguments that ``FILE`` has.
- ``in_airflow.py fire FILE``: run the stored triggers as the triggerer does, until each has fired, and go on with a
  training's task; events, result and what the task remembers go to ``FILE``.
- ``in_airflow.py look FILE``: ask the page as viewer and as administrator for the addresses in ``FILE``; the answers
  replace them.

``AIRFLOW_HOME`` and the connection come by the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from support.elastic_tasks import Store, context_of

HIDDEN_DAG = "payroll"
DAGS = ("daily", HIDDEN_DAG)
DEADLINES = {"deadline": {"given": "07:30", "at": 1.0}}
"""What a task remembers of its deadline: it may not move, whatever else is lost."""


MEMORY = Path(os.environ["AIRFLOW_HOME"]) / "task_state.json"
"""Stands for Airflow's task state store."""


class WithOneSecret(SimpleAuthManager):
    """Airflow's simple authorization, but for one DAG that only administrators may read."""

    def is_authorized_dag(self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None) -> bool:
        if details is not None and details.id == HIDDEN_DAG and user.role != "admin":
            return False
        return super().is_authorized_dag(method=method, user=user, access_entity=access_entity, details=details)


def defer(file: Path) -> None:
    """Make Airflow's database, with the DAGs and the triggers."""
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.trigger import Trigger
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session
    from elasticflow_airflow.task_memory import TaskMemory

    from elasticflow_airflow.sensor_trigger import ElasticFlowSensorTrigger
    from elasticflow_airflow.triggers import ElasticFlowJobTrigger

    initdb()
    wanted = json.loads(file.read_text())
    triggers = [ElasticFlowJobTrigger(**arguments) for arguments in wanted["trainings"]]
    triggers += [ElasticFlowSensorTrigger(**arguments) for arguments in wanted["sensors"]]
    with create_session() as session:
        session.merge(DagBundleModel(name="upgrade"))
        session.flush()
        for dag_id in DAGS:
            session.merge(DagModel(dag_id=dag_id, bundle_name="upgrade", is_stale=False))
        session.add_all([Trigger.from_object(trigger) for trigger in triggers])
    remembered = Store()
    TaskMemory(attempt=1, job_id=wanted["trainings"][0]["job_id"], claim=1, deadlines=DEADLINES).save(remembered)
    MEMORY.write_text(json.dumps(remembered))


def fire(file: Path) -> None:
    """Run the stored triggers until each has fired, then the second half of the first one's task."""
    from airflow._shared.module_loading import import_string
    from airflow.models.trigger import Trigger
    from airflow.sdk import DAG
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from elasticflow_airflow.operators import ElasticTrainOperator

    with create_session() as session:
        stored = [(row.classpath, row.kwargs) for row in session.scalars(select(Trigger).order_by(Trigger.id))]

    async def fired(classpath: str, arguments: dict[str, Any]) -> Any:
        event = await anext(aiter(import_string(classpath)(**arguments).run()))
        return {"classpath": classpath, "event": event.payload}

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(fired(*one) for one in stored))

    events = asyncio.run(all_of_them())
    remembered = Store(json.loads(MEMORY.read_text()))
    with DAG("daily", schedule=None):
        task = ElasticTrainOperator(
            task_id="resized", script="train.py", steps=1, global_batch_size=1, best_effort=True
        )
    context: Any = context_of(task, remembered)
    result = task.resume_execution("execute_complete", {"event": events[0]["event"]}, context)
    file.write_text(json.dumps({"events": events, "result": result, "remembered": remembered["elasticflow"]}))


def look(file: Path) -> None:
    """Ask the page, as the plugin brings it, for some addresses."""
    from airflow.api_fastapi import app as airflow_app
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from elasticflow_airflow.plugin import ElasticFlowPlugin

    manager = WithOneSecret()
    airflow_app._AuthManagerState.instance = manager
    outer = FastAPI()
    (mounted,) = ElasticFlowPlugin().fastapi_apps
    outer.mount(f"/airflow{mounted['url_prefix']}", mounted["app"])
    answers: dict[str, dict[str, Any]] = {}
    for role in ("viewer", "admin"):
        browser = TestClient(outer, base_url=f"http://airflow.test/airflow{mounted['url_prefix']}/")
        browser.cookies.set("_token", manager.generate_jwt(SimpleAuthManagerUser(username=role, role=role, teams=None)))
        found = {path: browser.get(path) for path in json.loads(file.read_text())}
        answers[role] = {path: [answer.status_code, answer.json()] for path, answer in found.items()}
    file.write_text(json.dumps(answers))


if __name__ == "__main__":
    os.umask(0o077)
    {"defer": defer, "fire": fire, "look": look}[sys.argv[1]](Path(sys.argv[2]))
