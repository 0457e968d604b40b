"""Each mistake that users make is answered with the argument, its value and the remedy: one row each.

What is wrong with single arguments has more rows in ``test_arguments.py``; who may reach which job, in ``tests/ui``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import httpx
import pytest
from airflow.sdk import DAG
from starlette.testclient import TestClient
from support.quiet_service import QuietService

from elasticflow_airflow.api import API_HEADER, VERSION_HEADER, Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient
from elasticflow_airflow.client.errors import raise_for_answer
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.service.http.middleware import TokenGuard

GOOD = {"task_id": "train", "script": "train.py", "steps": 10, "global_batch_size": 8, "deadline": "07:30"}


@pytest.fixture
def connect(monkeypatch):
    """Define a connection ``gpu`` and open a client of it, whose requests go to ``answer``."""

    def make(answer: Callable[[httpx.Request], httpx.Response], **fields: object) -> ElasticFlowClient:
        fields = {"conn_type": "elasticflow", "host": "gpu-host", **fields}
        monkeypatch.setenv("AIRFLOW_CONN_GPU", json.dumps(fields))
        endpoint = ElasticFlowHook("gpu").endpoint()
        return ElasticFlowClient(endpoint, retry_for_s=0, transport=httpx.MockTransport(answer))

    return make


def steps_beside_epochs(**_):
    ElasticTrainOperator(**GOOD, epochs=3)


def steps_beside_samples(**_):
    ElasticTrainOperator(**GOOD, samples=1000)


def a_deadline_of_a_task_that_is_not_downstream(**_):
    with DAG("nightly", schedule=None):
        task = ElasticTrainOperator(**GOOD, deadline_of="publish")
    task.resolve_template_files()


def a_missing_connection(**_):
    ElasticFlowHook("prod").endpoint()


def a_connection_of_another_type(connect, **_):
    connect(None, conn_type="postgres")


def a_ca_bundle_that_is_not_there(connect, **_):
    connect(None, extra={"verify": "/no/such/ca.pem"})


def a_timeout_that_is_no_number(connect, **_):
    connect(None, extra={"timeout_s": "soon"})


def an_address_that_is_none(connect, **_):
    connect(None, host="ftp://gpu-host")


def a_wrong_token(connect, **_):
    async def everything(scope, receive, send):
        raise AssertionError("nobody gets here without the token")

    guarded = TestClient(TokenGuard(everything, token="right"))

    def answer(request: httpx.Request) -> httpx.Response:
        refused = guarded.request(request.method, request.url.path, headers=dict(request.headers))
        return httpx.Response(refused.status_code, content=refused.content)

    connect(answer, password="wrong").health()


def a_service_of_another_version(connect, **_):
    other = {API_HEADER: "v9", VERSION_HEADER: "9.1"}
    connect(lambda _: httpx.Response(200, headers=other, json={})).health()


def something_else_on_that_port(connect, **_):
    connect(lambda _: httpx.Response(200, html="<html>a wiki</html>")).health()


def a_job_id_of_another_dag(tmp_path, dry_run=False, **_):
    mine, other = (JobIdentity(dag_id=dag, run_id="r", task_id="train") for dag in ("mine", "other"))
    submission = JobSubmission(
        identity=mine,
        command=Command(snapshot="0" * 64, script="train.py"),
        length=Length(steps=1),
        global_batch_size=1,
        best_effort=True,
    )
    service = QuietService(tmp_path)
    try:
        # By hand, as with curl: the clients make the id from the identity.
        address = f"http://gpu-host/v1/jobs/{other.job_id}?dry_run={str(dry_run).lower()}"
        answer = service(httpx.Request("PUT", address, json=submission.model_dump(mode="json")))
    finally:
        service.close()
    raise_for_answer(answer, "http://gpu-host")


def a_dry_run_for_a_job_id_of_another_dag(tmp_path, **_):
    a_job_id_of_another_dag(tmp_path, dry_run=True)


def a_checkpoint_folder_that_cannot_be_written(tmp_path, monkeypatch, **_):
    from elasticflow_airflow.runtime.context import detect

    (tmp_path / "file").touch()
    monkeypatch.setenv("ELASTICFLOW_CHECKPOINT_DIR", str(tmp_path / "file/checkpoints"))
    detect()


def a_state_directory_that_cannot_be_used(tmp_path, **_):
    from elasticflow_airflow.client import ensure_service

    (tmp_path / "file").touch()
    ensure_service(tmp_path / "file/state")


def a_state_directory_that_a_service_cannot_use(tmp_path, **_):
    from elasticflow_airflow.service.daemon import lock_state_dir

    (tmp_path / "file").touch()
    with lock_state_dir(tmp_path / "file/state"):
        pass


def many_machines_without_a_connection(monkeypatch, **_):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    ElasticFlowHook().endpoint()


def an_argument_of_the_wrong_type(**_):
    ElasticTrainOperator(**{**GOOD, "deadline": 7})


TABLE = {
    steps_beside_epochs: ["steps=10", "epochs=3", "give steps, or epochs and samples"],
    steps_beside_samples: ["steps=10", "samples=1000", "give steps, or epochs and samples"],
    a_deadline_of_a_task_that_is_not_downstream: ["deadline_of='publish'", "'train'", "or use 'dag_run'"],
    a_missing_connection: ["elasticflow_conn_id='prod'", "add a connection of type 'elasticflow'"],
    a_connection_of_another_type: ["elasticflow_conn_id='gpu'", "'postgres'", "type 'elasticflow'"],
    a_ca_bundle_that_is_not_there: ["elasticflow_conn_id='gpu'", "verify='/no/such/ca.pem'", "path of a CA bundle"],
    a_timeout_that_is_no_number: ["elasticflow_conn_id='gpu'", "timeout_s='soon'", "greater than 0"],
    an_address_that_is_none: ["elasticflow_conn_id='gpu'", "ftp://gpu-host", "http://host:port"],
    a_wrong_token: ["elasticflow_conn_id='gpu'", "the token is wrong", "the password of the Airflow connection"],
    a_service_of_another_version: ["elasticflow_conn_id='gpu'", "9.1", "install the same version"],
    something_else_on_that_port: ["elasticflow_conn_id='gpu'", "'<html>a wiki", "does the address name"],
    a_job_id_of_another_dag: ["'mine-train-", "not 'other-train-", "send it to the id"],
    a_dry_run_for_a_job_id_of_another_dag: ["'mine-train-", "not 'other-train-", "send it to the id"],
    a_checkpoint_folder_that_cannot_be_written: ["ELASTICFLOW_CHECKPOINT_DIR='", "Choose another folder"],
    a_state_directory_that_cannot_be_used: ["/file/state", "choose another: [elasticflow] state_dir"],
    a_state_directory_that_a_service_cannot_use: ["/file/state", "ELASTICFLOW_STATE_DIR"],
    many_machines_without_a_connection: ["'elasticflow_default'", "'CeleryExecutor'", "elasticflow serve", "add the"],
    an_argument_of_the_wrong_type: ["deadline=7", "a time of day"],
}


@pytest.mark.parametrize("mistake", TABLE, ids=lambda mistake: mistake.__name__)
def test_the_message_says_what_was_wrong_and_what_to_do(mistake, connect, tmp_path, monkeypatch):
    with pytest.raises(Exception) as caught:
        mistake(connect=connect, tmp_path=tmp_path, monkeypatch=monkeypatch)
    said = f"{caught.value} {getattr(caught.value, 'hint', '')}"
    missing = [words for words in TABLE[mistake] if words not in said]
    assert missing == [], said


NOT_CHECKED = {"self", "kwargs", "elasticflow_conn_id"}


@pytest.mark.parametrize(
    "name", [n for n in inspect.signature(ElasticTrainOperator.__init__).parameters if n not in NOT_CHECKED]
)
def test_every_argument_is_refused_by_name_when_it_is_something_else_altogether(name):
    class Something:
        def __repr__(self) -> str:
            return "<something>"

    with pytest.raises(ValueError) as caught:
        ElasticTrainOperator(**{**GOOD, name: Something()})
    assert name in str(caught.value)
    assert "something" in str(caught.value).lower()
