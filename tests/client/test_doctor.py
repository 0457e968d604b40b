"""``elasticflow doctor``: what it finds, with and without a service, and how it ends."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass, field

import httpx
import pytest
from typer.testing import CliRunner

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_HEADER, API_VERSION, VERSION_HEADER, Problem
from elasticflow_airflow.api.diagnosis import Diagnosis, ok, problem, warning
from elasticflow_airflow.cli.connection import Choice, choose
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint, IncompatibleService
from elasticflow_airflow.service.http.routes import doctor_routes


@dataclass
class Service:
    """Answers what a test wants."""

    version: str = __version__
    api: str = API_VERSION
    clock_off_s: float = 0.0
    findings: list = field(default_factory=list)
    status: int = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        marks = {API_HEADER: self.api, VERSION_HEADER: self.version}
        if self.status != 200:
            body = Problem(error="unauthorized", message="the token is wrong", hint="send the right one")
            return httpx.Response(self.status, content=body.model_dump_json(), headers=marks)
        at = time.time() + self.clock_off_s
        if request.url.path == "/v1/version":
            known = {"version": self.version, "api": self.api, "at": str(at)}
            return httpx.Response(200, content=json.dumps(known), headers=marks)
        answer = Diagnosis(at=at, version=self.version, api=self.api, findings=self.findings)
        return httpx.Response(200, content=answer.model_dump_json(), headers=marks)


@pytest.fixture
def examine(monkeypatch):
    """Run the command against a scripted service; returns (exit status, findings by name)."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("ELASTICFLOW_URL", raising=False)
    open_client = Endpoint.open_client

    def run(service: Service, endpoint: Endpoint | None = None):
        mock = httpx.MockTransport(service)
        monkeypatch.setattr(Endpoint, "open_client", lambda self, timeout_s, _=None: open_client(self, timeout_s, mock))
        there = endpoint or Endpoint(base_url="http://127.0.0.1:8321", token="t")
        with choose(Choice(locate=lambda _start: there, program="elasticflow")):
            done = CliRunner().invoke(app, ["doctor", "--json"])
        return done.exit_code, {f["name"]: f for f in json.loads(done.stdout)}

    return run


def test_all_is_well(examine):
    status, found = examine(Service(findings=[ok("slots", "4 slots")]))
    assert status == 0
    assert {finding["level"] for finding in found.values()} == {"ok"}
    assert list(found) == ["client", "connection", "versions", "clock", "slots"]


def test_a_problem_of_the_service_ends_it_with_status_1(examine):
    status, found = examine(Service(findings=[problem("disk", "full", "free it"), warning("token", "short", "longer")]))
    assert status == 1
    assert found["disk"]["remedy"] == "free it"


def test_warnings_alone_end_it_with_status_0(examine):
    status, found = examine(Service(version="0.0.1", findings=[warning("token", "short", "longer")]))
    assert status == 0
    assert found["versions"]["level"] == "warning"
    assert "0.0.1" in found["versions"]["message"]


@pytest.mark.parametrize(
    ("off_s", "level", "said"),
    [(0.0, "ok", "the same time"), (10.0, "warning", "10 s ahead of"), (-600.0, "problem", "10 min behind")],
)
def test_the_clocks(examine, off_s, level, said):
    _, found = examine(Service(clock_off_s=off_s))
    assert found["clock"]["level"] == level
    assert said in found["clock"]["message"]


def test_another_api_is_a_problem(examine):
    status, found = examine(Service(version="9.0", api="v9"))
    assert status == 1
    assert "elasticflow 9.0, which speaks API v9" in found["versions"]["message"]
    assert "install the same version" in found["versions"]["remedy"]


def test_a_wrong_token(examine):
    status, found = examine(Service(status=401))
    assert status == 1
    assert "the token is wrong" in found["token"]["message"]
    assert "were not looked at: " in found["service"]["message"]


def test_a_token_in_the_clear(examine):
    status, found = examine(Service(), Endpoint(base_url="http://gpu-host:8321", token="secret"))
    assert status == 0
    assert found["encryption"]["level"] == "warning"
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("name", ["ELASTICFLOW_TOKEN", "ELASTICFLOW_TOKEN_FILE"])
def test_the_token_comes_from_the_environment_or_a_file(name, monkeypatch, tmp_path):
    from elasticflow_airflow.cli.connection import locate

    file = tmp_path / "token"
    file.write_text("secret\n")
    monkeypatch.delenv("ELASTICFLOW_TOKEN", raising=False)
    monkeypatch.setenv(name, "secret" if name == "ELASTICFLOW_TOKEN" else str(file))
    assert locate("http://gpu-host:8321", None).token == "secret"


def test_a_token_file_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.delenv("ELASTICFLOW_TOKEN", raising=False)
    monkeypatch.setenv("ELASTICFLOW_TOKEN_FILE", str(tmp_path / "none"))
    done = CliRunner().invoke(app, ["doctor", "--url", "http://gpu-host:8321"])
    assert done.exit_code == 1
    assert "token file" in done.output


def test_a_connection_that_is_not_there():
    def locate(_start):
        raise ElasticFlowError("elasticflow_conn_id='prod' is not defined", "add it")

    with choose(Choice(locate=locate, program="airflow elasticflow")):
        done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "'prod' is not defined" in done.output
    assert "-> add it" in done.output


def test_a_served_service_that_is_away():
    done = CliRunner().invoke(app, ["doctor", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "does not answer" in done.output
    assert "elasticflow serve" in done.output
    assert "were not looked at: clock, slots" in done.output


def test_an_embedded_service_that_nobody_has_started_is_no_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_routes, "look_at_reverse_dns", lambda: ok("reverse DNS", "quick"))
    done = CliRunner().invoke(app, ["doctor", "--json", "--state-dir", str(tmp_path / "state")])
    found = {f["name"]: f for f in json.loads(done.stdout)}
    assert "the first task that needs it starts it" in found["connection"]["message"]
    assert {"torch", "checkpoints", "disk", "memory", "shared memory", "reverse DNS", "open files"} <= set(found)
    assert not (tmp_path / "state").exists()
    assert re.match(r"\d+ slots? \(", found["slots"]["message"])
    assert "by its clock" in found["clock"]["message"]
    assert "only a service that runs" in found["service"]["message"]


def test_slots_that_this_machine_cannot_have_are_a_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_SLOTS", "3")
    monkeypatch.setenv("ELASTICFLOW_VIRTUAL_NODES", "1x2")
    done = CliRunner().invoke(app, ["doctor", "--json", "--state-dir", str(tmp_path / "state")])
    assert done.exit_code == 1
    found = {f["name"]: f for f in json.loads(done.stdout)}
    assert found["slots"]["level"] == "problem"
    assert "contradicts virtual nodes '1x2'" in found["slots"]["message"]


def test_slots_that_another_service_holds_are_counted(tmp_path):
    from elasticflow_airflow.engines.local.machine import slots
    from elasticflow_airflow.service.settings import ServiceSettings

    slots.prepare_lock_dir(tmp_path / "locks")
    held = slots.acquire(tmp_path / "locks", "cpu-0", {"job_id": "a", "state_dir": "/elsewhere", "pid": 1})
    settings = ServiceSettings(state_dir=tmp_path, slots=2, slot_lock_dir=tmp_path / "locks")
    try:
        assert "2 slots (" in doctor_routes.look_at_slots(settings).message
        assert "1 of them busy" in doctor_routes.look_at_slots(settings).message
    finally:
        os.close(held)


def test_settings_that_are_wrong_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_SLOTS", "none")
    done = CliRunner().invoke(app, ["doctor", "--state-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "ELASTICFLOW_SLOTS" in done.output


def test_the_client_refuses_another_api_by_name():
    service = Service(version="9.0", api="v9")
    with (
        ElasticFlowClient(Endpoint(), retry_for_s=0, transport=httpx.MockTransport(service)) as client,
        pytest.raises(IncompatibleService, match=r"is elasticflow 9\.0, which speaks API v9; this client is .* v1"),
    ):
        client.health()


# -- the service's own side ------------------------------------------------------------------------------------------


def test_an_interpreter_without_torch(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.11.0"}\'\n')
    python.chmod(0o755)
    found = doctor_routes.look_at_interpreter(str(python))
    assert found.level == "warning"
    assert "has no torch" in found.message
    assert "pip install torch" in found.remedy
    assert doctor_routes.look_at_interpreter(str(tmp_path / "none")).level == "problem"


def test_a_state_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    assert doctor_routes.look_at_state_dir(tmp_path).level == "ok"
    monkeypatch.setattr(doctor_routes.tempfile, "NamedTemporaryFile", refuse)
    found = doctor_routes.look_at_state_dir(tmp_path)
    assert found.level == "problem"
    assert "Permission denied" in found.message
    assert "ELASTICFLOW_STATE_DIR" in found.remedy


def test_a_state_directory_on_a_network_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_routes, "_file_system", lambda _: "nfs4")
    found = doctor_routes.look_at_state_dir(tmp_path)
    assert found.level == "warning"
    assert "PostgreSQL" in found.remedy


@pytest.mark.parametrize(("free_gib", "level"), [(100, "ok"), (5, "warning"), (0.5, "problem")])
def test_room_on_the_disk(tmp_path, monkeypatch, free_gib, level):
    usage = type("Usage", (), {"free": free_gib * 2**30, "total": 200 * 2**30})
    monkeypatch.setattr(doctor_routes.shutil, "disk_usage", lambda _: usage)
    assert doctor_routes.look_at_disk(tmp_path / "not" / "yet").level == level


def test_a_slow_name_service(monkeypatch):
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr(doctor_routes.time, "monotonic", lambda: next(clock))
    found = doctor_routes.look_at_reverse_dns()
    assert found.level == "warning"
    assert "/etc/hosts" in found.remedy


def test_little_memory(monkeypatch, tmp_path):
    from elasticflow_airflow.service.settings import ServiceSettings

    monkeypatch.setattr(doctor_routes, "_available_memory", lambda: 3 * 2**30)
    assert doctor_routes.look_at_memory(ServiceSettings(state_dir=tmp_path, slots=2)).level == "ok"
    assert doctor_routes.look_at_memory(ServiceSettings(state_dir=tmp_path, virtual_nodes="4x2")).level == "warning"
