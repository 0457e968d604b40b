"""Finding and starting the embedded service: once, detached, with an error that quotes its log."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from elasticflow_airflow.api.service_card import ServiceCard
from elasticflow_airflow.client import (
    ElasticFlowClient,
    EmbeddedStartError,
    NotRunning,
    embedded,
    ensure_service,
    for_looking,
)
from elasticflow_airflow.client.embedded import default_state_dir

SETTINGS = {"ELASTICFLOW_ENGINE": "fake"}


@pytest.fixture
def state_dir():
    """A short path (sockets), whose service is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="ef-") as folder:
        yield Path(folder) / "s"
        for process in services(Path(folder)):
            process.kill()
            process.wait(10)


def services(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in a for a in p.info["cmdline"] or ())]


def wait_until(condition, limit_s: float = 20.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("did not happen in time")


def test_default_place(monkeypatch):
    monkeypatch.delenv("ELASTICFLOW_STATE_DIR", raising=False)
    monkeypatch.delenv("AIRFLOW_HOME", raising=False)
    assert default_state_dir() == Path.home() / ".elasticflow"
    monkeypatch.setenv("AIRFLOW_HOME", "/a")
    assert default_state_dir() == Path("/a/elasticflow")
    monkeypatch.setenv("ELASTICFLOW_STATE_DIR", "/b")
    assert default_state_dir() == Path("/b")


def test_socket_path_that_is_too_long(tmp_path):
    with pytest.raises(EmbeddedStartError, match=r"bytes, and a Unix socket takes at most 107 .*ELASTICFLOW_STATE_DIR"):
        ensure_service(tmp_path / ("x" * 100))


def test_state_dir_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedStartError, match=r"cannot be used: .*state_dir in airflow.cfg"):
        ensure_service(tmp_path / "file" / "s")


def test_a_service_that_does_not_start_is_quoted(state_dir, tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded.sys, "executable", str(broken))
    with pytest.raises(EmbeddedStartError, match=r"did not answer .* within 1 s .*no such luck"):
        ensure_service(state_dir, limit_s=1.0)


def test_secrets_of_airflow_are_not_passed_on(state_dir, tmp_path, monkeypatch):
    spy = tmp_path / "python"
    spy.write_text("#!/bin/sh\nenv >&2\n")
    spy.chmod(0o755)
    monkeypatch.setattr(embedded.sys, "executable", str(spy))
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://u:pw@db/airflow")
    monkeypatch.setenv("AIRFLOW_CONN_HUB", "http://:pw@hub")
    monkeypatch.setenv("ELASTICFLOW_SLOTS", "2")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(EmbeddedStartError) as failed:
        ensure_service(state_dir, {"ELASTICFLOW_ENGINE": "fake"}, limit_s=0.6)
    assert "ELASTICFLOW_SLOTS=2" in str(failed.value)
    assert "RAY_AUTH_MODE=token" in str(failed.value)
    assert "ELASTICFLOW_ENGINE=fake" in str(failed.value)
    assert "pw" not in str(failed.value)


@pytest.mark.slow
def test_one_service_whoever_asks_first(state_dir):
    with ThreadPoolExecutor(6) as pool:
        endpoints = list(pool.map(lambda _: ensure_service(state_dir, SETTINGS), range(6)))
    assert len(set(endpoints)) == 1
    with ElasticFlowClient(endpoints[0]) as client:
        pid = client.health().pid
    assert json.loads((state_dir / "service.json").read_text())["pid"] == pid
    wait_until(lambda: [p.pid for p in services(state_dir)] == [pid])
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700


@pytest.fixture
def served(state_dir):
    """Serve a state directory as `elasticflow serve` does, on its socket or on TCP; returns the process."""
    state_dir.mkdir(mode=0o700)

    def serve(**settings):
        environment = {**os.environ, **SETTINGS, **settings}
        command = [sys.executable, "-m", "elasticflow_airflow.service", "--state-dir", str(state_dir)]
        with (state_dir / "said").open("ab") as said:
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        wait_until(lambda: b"service started" in (state_dir / "said").read_bytes())
        return process

    return serve


def test_none_takes_the_place_of_a_served_one_that_was_killed(state_dir, served):
    process = served()
    process.kill()
    process.wait()
    with pytest.raises(EmbeddedStartError, match=r"elasticflow serve.*does not answer.*start it again.*service\.json"):
        ensure_service(state_dir, SETTINGS, limit_s=1.0)
    with pytest.raises(NotRunning, match="start it again"):
        for_looking(embedded.embedded_endpoint(state_dir))
    assert not services(state_dir)
    (state_dir / "service.json").unlink()
    assert ensure_service(state_dir, SETTINGS), "the way that the message names"


@pytest.mark.slow
def test_a_served_one_that_comes_again_is_waited_for(state_dir, served):
    first = served()
    first.kill()
    first.wait()
    (state_dir / "said").unlink()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ensure_service, state_dir, SETTINGS)
        again = served()
        with ElasticFlowClient(waiting.result()) as client:
            assert client.health().pid == again.pid


def test_an_embedded_one_takes_the_place_of_a_served_one_that_has_ended(state_dir, served):
    process = served()
    process.terminate()
    assert process.wait(30) == 0
    with pytest.raises(NotRunning, match="the last one, of `elasticflow serve`, was told to stop"):
        for_looking(embedded.embedded_endpoint(state_dir))
    with ElasticFlowClient(ensure_service(state_dir, SETTINGS)) as client:
        assert client.health().pid != process.pid


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"ended_at": None}, "the last one was killed"),
        ({"ended_at": 5.0}, "the last one has ended"),  # Of a version that did not say why.
        ({"ended_at": 5.0, "idle": False}, "the last one was told to stop"),
        ({"ended_at": 5.0, "idle": True}, "the last one has left, as it had been idle for long"),
    ],
)
def test_who_looks_is_told_how_the_last_one_ended(state_dir, card, said):
    facts = {"pid": 1, "host": "here", "started_at": 1.0, "version": "0", "endpoint": "unix:///none"}
    state_dir.mkdir(parents=True, exist_ok=True)
    ServiceCard(**facts, **card).write(state_dir)
    with pytest.raises(NotRunning, match=rf"now; {said} \("):
        for_looking(embedded.embedded_endpoint(state_dir))


def test_where_one_serves_on_tcp_its_address_is_named_at_once(state_dir, served):
    process = served(ELASTICFLOW_HOST="127.0.0.1", ELASTICFLOW_PORT="0", ELASTICFLOW_TOKEN="a-token-of-a-test")
    with pytest.raises(EmbeddedStartError, match=r"use it: by ELASTICFLOW_URL=http://127\.0\.0\.1:\d+"):
        ensure_service(state_dir, SETTINGS, limit_s=600.0)
    assert process.poll() is None


def test_it_outlives_who_started_it_and_a_client_starts_it_again(state_dir):
    program = (
        "import sys; from pathlib import Path; from elasticflow_airflow.client import ensure_service;"
        "ensure_service(Path(sys.argv[1]))"
    )
    environment = {**os.environ, **SETTINGS}
    subprocess.run(
        [sys.executable, "-c", program, str(state_dir)], check=True, timeout=60, env=environment, start_new_session=True
    )
    endpoint = embedded.embedded_endpoint(state_dir)
    with ElasticFlowClient(endpoint, retry_for_s=0) as client:
        first = client.health().pid
    os.environ.update(SETTINGS)
    try:
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in [p.pid for p in services(state_dir) if p.status() != psutil.STATUS_ZOMBIE])
        with ElasticFlowClient(endpoint) as client:
            assert client.health().pid != first
    finally:
        for name in SETTINGS:
            del os.environ[name]
