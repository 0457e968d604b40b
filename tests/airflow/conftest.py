"""A private Airflow home for this folder's tests, made before anything imports Airflow."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

HOME = Path(tempfile.mkdtemp(prefix="ef-air-"))
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
(HOME / "dags").mkdir()
(HOME / "plugins").mkdir()
for name in [n for n in os.environ if n.startswith(("AIRFLOW__ELASTICFLOW", "AIRFLOW_CONN_", "ELASTICFLOW_"))]:
    del os.environ[name]
os.environ.update(
    {
        "AIRFLOW_HOME": str(HOME),
        "AIRFLOW__CORE__DAGS_FOLDER": str(HOME / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(HOME / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }
)


@pytest.fixture(scope="session")
def airflow_home() -> Path:
    return HOME


@pytest.fixture
def make_status():
    """Make the status of a job, running unless said otherwise."""
    from elasticflow_airflow.api import JobIdentity, JobStatus, State, Verdict

    identity = JobIdentity(dag_id="daily", run_id="run1", task_id="train")

    def make(state: State = State.RUNNING, **changes: Any) -> JobStatus:
        values: dict[str, Any] = {
            "job_id": identity.job_id,
            "identity": identity,
            "incarnation": 1,
            "generation": 1,
            "state": state,
            "verdict": Verdict(decision="admitted", reason="fits"),
            "claim": 1,
            "submitted_at": time.time(),
            "deadline_at": time.time() + 3600,
            "best_effort": False,
            "value": 1.0,
        }
        return JobStatus(**{**values, **changes})

    return make


class ScriptedService:
    """The service's API with one job whose statuses are scripted; remembers every request.

    ``statuses`` are what renewals find, the last one for ever; ``away`` requests are answered by a refused connection.
    """

    def __init__(self, make_status: Any) -> None:
        self.make_status = make_status
        self.statuses: list[Any] = [make_status()]
        self.events: list[Any] = []
        self.claim = 0
        self.away = 0
        self.known: Any = None
        """What a GET finds before anything was submitted; None: no such job."""
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.paths: list[str] = []
        self.on_call: Any = None

    def did(self, verb: str) -> list[dict[str, Any]]:
        """Bodies of the calls of a kind: submit, lease, cancel, acknowledge, status."""
        return [body for _, name, body in self.calls if name == verb]

    def __call__(self, request: Any) -> Any:
        import json

        import httpx

        from elasticflow_airflow.api import Attachment, Problem

        if self.away:
            self.away -= 1
            raise httpx.ConnectError("refused")
        body = json.loads(request.content) if request.content[:1] == b"{" else {}
        last = request.url.path.rsplit("/", 1)[-1]
        verb = {"PUT": "submit", "GET": "status"}.get(request.method, last)
        verb = last if last == "events" else "snapshot" if "/snapshots/" in request.url.path else verb
        self.calls.append((request.method, verb, body))
        self.paths.append(request.url.path)
        if self.on_call is not None:
            self.on_call(verb)
        if verb == "snapshot":
            return httpx.Response(404 if request.method == "GET" else 204)
        if verb == "events":
            after, limit = int(request.url.params["after"]), int(request.url.params["limit"])
            page = [e.model_dump() for e in self.events if e.event_id > after][:limit]
            return httpx.Response(200, content=json.dumps(page))
        if verb in ("submit", "attach"):
            self.claim += 1
            job = self.statuses[0]
            self.known = job
            answer = Attachment(job=job, claim=self.claim, created=self.claim == 1)
            return httpx.Response(201, content=answer.model_dump_json())
        if body.get("claim", self.claim) < self.claim:
            stale = Problem(error="stale_claim", message=f"claim {body['claim']} is stale")
            return httpx.Response(409, content=stale.model_dump_json())
        if verb == "status" and self.known is None:
            return httpx.Response(404, content=Problem(error="job_not_found", message="no job").model_dump_json())
        if verb == "lease" and len(self.statuses) > 1:
            self.statuses.pop(0)
        return httpx.Response(200, content=self.statuses[0].model_dump_json())


@pytest.fixture
def service(make_status, monkeypatch):
    """Every client of this test talks to a ScriptedService."""
    import httpx

    from elasticflow_airflow import hooks
    from elasticflow_airflow.client import Endpoint

    scripted = ScriptedService(make_status)
    open_client, open_async_client = Endpoint.open_client, Endpoint.open_async_client
    mock = httpx.MockTransport(scripted)
    monkeypatch.setattr(Endpoint, "open_client", lambda self, timeout_s, _=None: open_client(self, timeout_s, mock))
    monkeypatch.setattr(
        Endpoint, "open_async_client", lambda self, timeout_s, _=None: open_async_client(self, timeout_s, mock)
    )
    endpoint = Endpoint(base_url="http://127.0.0.1:1")
    monkeypatch.setattr(hooks.ElasticFlowHook, "endpoint", lambda self, start=True: endpoint)
    monkeypatch.setattr(hooks.ElasticFlowHook, "namespace", "default")

    async def async_client(self, *, retry_for_s=60.0):
        return hooks.AsyncElasticFlowClient(endpoint, retry_for_s=retry_for_s)

    monkeypatch.setattr(hooks.ElasticFlowHook, "async_client", async_client)
    return scripted


@pytest.fixture(scope="session")
def airflow_db() -> None:
    """A migrated metadata database in the private home."""
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture
def run_dag(airflow_db):
    """Run a DAG object by ``dag.test()``; returns its DagRun."""

    def run(dag: Any, **options: Any) -> Any:
        from elasticflow_airflow.testing.dags import store_dag

        store_dag(dag)
        return dag.test(**options)

    return run


@pytest.fixture(scope="module")
def embedded_service():
    """Run the real embedded service on the fake engine, in this home; it and its settings are gone at the end."""
    import json
    import signal

    import psutil

    from elasticflow_airflow.client import ensure_service

    # A folder of this module's own: what another module's jobs and calendar left behind is not there.
    state_dir = Path(tempfile.mkdtemp(prefix="s", dir=HOME))
    settings = {
        "ELASTICFLOW_ENGINE": "fake",
        "ELASTICFLOW_VIRTUAL_NODES": "1x4",
        "ELASTICFLOW_STATE_DIR": str(state_dir),
        "ELASTICFLOW_DEFAULT_STARTUP_S": "2",
        "ELASTICFLOW_DEFAULT_PAUSE_S": "2",
        "ELASTICFLOW_DEFAULT_TAIL_S": "2",
    }
    os.environ.update(settings)
    endpoint = ensure_service(state_dir)
    yield endpoint
    process = psutil.Process(json.loads((state_dir / "service.json").read_text())["pid"])
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(10)
    for name in settings:
        del os.environ[name]


@pytest.fixture
def new_dag(tmp_path, embedded_service):
    """Make a DAG in whose folder a training script stands."""
    (tmp_path / "train.py").write_text("print('the fake engine never runs this')")
    count = iter(range(100))

    def make(**options: Any) -> Any:
        from airflow.sdk import DAG

        dag = DAG(f"{tmp_path.name[:60]}_{next(count)}", **{"schedule": None, **options})
        dag.fileloc = str(tmp_path / "dag.py")
        return dag

    return make


@pytest.fixture
def client(embedded_service):
    """A client of the embedded service."""
    from elasticflow_airflow.client import ElasticFlowClient

    with ElasticFlowClient(embedded_service) as opened:
        yield opened


@pytest.fixture
def make_task(tmp_path):
    """Make an elastic task in a DAG in whose folder its script stands."""
    from datetime import timedelta

    from airflow.sdk import DAG

    from elasticflow_airflow.operators import ElasticTrainOperator

    (tmp_path / "train.py").write_text("print('hello')")

    def make(**changes: Any) -> Any:
        arguments = {"steps": 10, "global_batch_size": 8, "deadline": timedelta(hours=1), **changes}
        with DAG("daily", schedule=None) as dag:
            dag.fileloc = str(tmp_path / "dag.py")
            return ElasticTrainOperator(task_id="train", script="train.py", **arguments)

    return make
