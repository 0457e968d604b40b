"""Which service a connection names, sync and async; and that only the default one may be missing."""

from __future__ import annotations

import json

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException
from support.replicas import Replica, dead

from elasticflow_airflow.exceptions import UnusableConnection
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.settings import embedded_state_dir


@pytest.fixture
def define(monkeypatch):
    def make(conn_id: str = "gpu", **fields):
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps({"conn_type": "elasticflow", **fields}))
        return ElasticFlowHook(conn_id)

    return make


def test_served(define):
    hook = define(host="gpu-host", password="t0ken", extra={"namespace": "team-a", "timeout_s": 3})
    endpoint = hook.endpoint()
    assert endpoint.base_url == "http://gpu-host:8321"
    assert endpoint.token == "t0ken"
    assert hook.namespace == "team-a"
    assert endpoint.embedded_state_dir is None


@pytest.mark.parametrize(
    ("extra", "verify"),
    [({}, True), ({"verify": "false"}, False), ({"verify": False}, False), ({"verify": __file__}, __file__)],
)
def test_tls(define, extra, verify):
    endpoint = define(host="gpu-host", schema="https", port=443, extra=extra).endpoint()
    assert endpoint.base_url == "https://gpu-host:443"
    assert endpoint.verify == verify


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "ef-0:8080, ef-1", "schema": "https", "port": 99},
        {"host": "https://ef-0:8080,ef-1:99", "schema": "https"},
        {"extra": {"urls": "https://ef-0:8080,https://ef-1:99"}},
        {"extra": {"urls": ["https://ef-0:8080", "ef-1"]}, "schema": "https", "port": 99},
    ],
)
def test_replicas(define, fields):
    endpoint = define(password="t0ken", **fields).endpoint()
    assert [one.base_url for one in endpoint.replicas] == ["https://ef-0:8080", "https://ef-1:99"]
    assert {(one.token, one.named_by) for one in endpoint.replicas} == {("t0ken", "elasticflow_conn_id='gpu'")}


def test_a_host_may_have_its_port(define):
    assert define(host="gpu-host:9000").endpoint().base_url == "http://gpu-host:9000"
    assert define(host="gpu-host", port=9000).endpoint().base_url == "http://gpu-host:9000"
    assert define(host="[::1]").endpoint().base_url == "http://[::1]:8321"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": "a,a:8321"}, "the address http://a:8321 is given twice"),
        ({"host": "a,,b"}, "address 2 of 3 is empty"),
        ({"host": "a:x,b"}, "'http://a:x' is no address of a service"),
        ({"host": "a,unix:///run/s"}, "'unix:///run/s' is a socket"),
        ({"host": "a", "extra": {"urls": "http://b"}}, "has the host 'a' and urls in its extra: give all addresses in"),
        ({"extra": {"urls": {"a": 1}}}, r"has urls={'a': 1} in its extra: give a list"),
        ({"extra": {"urls": ["http://a,http://b"]}}, "give a list of addresses, or a string"),
    ],
)
def test_replicas_that_cannot_be(define, fields, words):
    with pytest.raises(UnusableConnection, match=f"elasticflow_conn_id='gpu'.*{words}"):
        define(**fields).endpoint()


async def test_all_clients_of_a_connection_ask_the_next_replica(define, monkeypatch):
    second = Replica(version="2.0")
    with dead() as nobody:
        hook = define(host=f"{nobody.removeprefix('http://')},{second.url}")

        async def aget(conn_id):
            return Connection(conn_id=conn_id, conn_type="elasticflow", host=f"{nobody},{second.url}")

        with hook.client(retry_for_s=0) as client:
            assert client.version()["version"] == "2.0"
        assert hook.test_connection()[0]
        monkeypatch.setattr(ElasticFlowHook, "aget_connection", staticmethod(aget))
        async with await ElasticFlowHook("gpu").triggerer_client(None, retry_for_s=0) as waiting:
            assert (await waiting.version())["version"] == "2.0"
        second.kill()
        said = hook.test_connection()[1]
        assert said.startswith("none of the 2 addresses of the elasticflow service (elasticflow_conn_id='gpu') answers")


def test_socket(define):
    endpoint = define(host="unix:///run/ef/service.sock").endpoint()
    assert str(endpoint.socket_path) == "/run/ef/service.sock"
    assert endpoint.embedded_state_dir is None  # not ours to start


def test_missing_default_means_embedded():
    hook = ElasticFlowHook()
    endpoint = hook.endpoint(start=False)
    assert endpoint.embedded_state_dir == embedded_state_dir()
    assert hook.namespace == "default"


@pytest.mark.parametrize("extra", [{"namespace": "n" * 251}, {}])
def test_a_namespace_that_no_service_takes_is_refused_in_a_sentence(define, monkeypatch, extra):
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__NAMESPACE", "n" * 251)
    hook = define(host="gpu-host", extra=extra)
    with pytest.raises(UnusableConnection) as refused:
        hook.namespace  # noqa: B018  (it is asked for in every task)
    setting = "namespace in the extra of elasticflow_conn_id='gpu'" if extra else "[elasticflow] namespace"
    assert str(refused.value) == f"{setting} has 251 characters, and may have 250: shorten it"


def test_empty_host_means_embedded_with_its_own_folder(define, tmp_path):
    endpoint = define(extra={"state_dir": str(tmp_path)}).endpoint(start=False)
    assert endpoint.embedded_state_dir == tmp_path


def test_another_missing_connection_is_an_error():
    with pytest.raises(AirflowNotFoundException, match="elasticflow_conn_id='prod' is not defined: add a connection"):
        ElasticFlowHook("prod").endpoint()


async def test_async_finds_the_same(define, monkeypatch):
    hook = define(host="gpu-host", port=99)

    async def aget(conn_id):
        return Connection(conn_id=conn_id, conn_type="elasticflow", host="gpu-host", port=99)

    monkeypatch.setattr(ElasticFlowHook, "aget_connection", staticmethod(aget))
    client = await hook.async_client()
    assert client.endpoint == ElasticFlowHook("gpu").endpoint()
    await client.aclose()


async def test_async_missing(monkeypatch):
    async def aget(conn_id):
        raise AirflowNotFoundException(conn_id)

    monkeypatch.setattr(ElasticFlowHook, "aget_connection", staticmethod(aget))
    with pytest.raises(AirflowNotFoundException, match="'prod' is not defined"):
        await ElasticFlowHook("prod").async_client()
    client = await ElasticFlowHook().async_client()
    assert client.endpoint.embedded_state_dir == embedded_state_dir()
    await client.aclose()


def test_a_pod_of_the_kubernetes_executor_starts_no_service(monkeypatch):
    """Airflow's chart tells such a pod that its executor is the local one."""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    with pytest.raises(AirflowNotFoundException, match=r"\[core\] executor = 'KubernetesExecutor'"):
        ElasticFlowHook().endpoint(start=False)


def test_state_dir_is_configured(monkeypatch):
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__STATE_DIR", "/srv/ef")
    assert str(embedded_state_dir()) == "/srv/ef"


def test_test_connection_starts_no_service(define, monkeypatch, tmp_path):
    """It only looks, as `elasticflow jobs` does: a training task starts the embedded one."""
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__STATE_DIR", str(tmp_path / "state"))
    ok, message = ElasticFlowHook().test_connection()
    assert not ok
    assert f"no service has ever run in {tmp_path / 'state'}" in message
    assert not (tmp_path / "state").exists()


def test_test_connection_says_what_is_wrong(define):
    ok, message = define(host="127.0.0.1", port=1).test_connection()
    assert not ok
    assert "does not answer" in message
    ok, message = ElasticFlowHook("prod").test_connection()
    assert not ok
    assert "not defined" in message


@pytest.mark.parametrize(
    "executor",
    [
        "CeleryExecutor",
        "airflow.providers.cncf.kubernetes.executors.kubernetes_executor.KubernetesExecutor",
        "LocalExecutor,CeleryExecutor",
        "LocalExecutor;team1=CeleryExecutor",
        "edge:airflow.providers.edge3.executors.EdgeExecutor",
    ],
)
async def test_no_embedded_service_for_each_machine_of_a_cluster(monkeypatch, define, executor):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)

    async def aget(conn_id):
        raise AirflowNotFoundException(conn_id)

    with pytest.raises(AirflowNotFoundException, match=r"'elasticflow_default' is not defined, and \[core\] executor"):
        ElasticFlowHook().endpoint(start=False)
    with monkeypatch.context() as patched:
        patched.setattr(ElasticFlowHook, "aget_connection", staticmethod(aget))
        with pytest.raises(AirflowNotFoundException, match="Run `elasticflow serve`"):
            await ElasticFlowHook().async_client()
    # Who says so in a connection means it; under dag.test() the executor runs nothing.
    define("elasticflow_default", extra={})
    assert ElasticFlowHook().endpoint(start=False).embedded_state_dir == embedded_state_dir()
    monkeypatch.delenv("AIRFLOW_CONN_ELASTICFLOW_DEFAULT")
    comms = type("InProcessSupervisorComms", (), {})()
    monkeypatch.setattr("airflow.sdk.execution_time.task_runner.SUPERVISOR_COMMS", comms, raising=False)
    from elasticflow_airflow.hooks import distributed_executor

    assert distributed_executor() is None


@pytest.mark.parametrize("executor", ["LocalExecutor", "SequentialExecutor", "team1=LocalExecutor"])
def test_executors_of_one_machine_may_embed(monkeypatch, executor):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    assert ElasticFlowHook().endpoint(start=False).embedded_state_dir == embedded_state_dir()
