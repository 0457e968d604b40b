"""The daemon's life: one service a state directory, private, light, and gone when nobody needs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.api.service_card import ServiceCard
from elasticflow_airflow.client import (
    ElasticFlowClient,
    EmbeddedStartError,
    Endpoint,
    ensure_service,
    snapshot_folder,
)
from elasticflow_airflow.service.settings import ServiceSettings


def submission_for(client, folder: Path, **given) -> JobSubmission:
    (folder / "train.py").write_text("print()")
    snapshot = snapshot_folder(folder)
    client.upload_snapshot(snapshot)
    values = {
        "identity": JobIdentity(dag_id="life", run_id="run1", task_id="train"),
        "command": Command(snapshot=snapshot.sha256, script="train.py"),
        "length": Length(steps=20),
        "global_batch_size": 8,
        "best_effort": True,
        "scaling_curve": {1: 100.0},
    }
    return JobSubmission(**{**values, **given})


def wait_until(condition, what: str, limit_s: float = 30.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {limit_s} s in vain: {what}")


@pytest.mark.slow
def test_racing_callers_start_one_service(daemons, open_client):
    with ThreadPoolExecutor(4) as pool:
        endpoints = list(pool.map(lambda _: daemons.embedded(), range(4)))
    assert len(set(endpoints)) == 1
    pid = open_client(endpoints[0]).health().pid
    wait_until(lambda: daemons.pids() == [pid], "the losers of the race have left")
    assert json.loads((daemons.state_dir() / "service.json").read_text())["pid"] == pid


def test_everything_of_the_embedded_service_is_private(daemons, open_client, tmp_path):
    client = open_client(daemons.embedded())
    client.submit(submission_for(client, tmp_path, secret_env={"TOKEN": "hunter2-of-the-hub"}))
    state_dir = daemons.state_dir()
    assert state_dir.stat().st_mode & 0o777 == 0o700
    for name in ("service.sock", "elasticflow.db", "secret.key", "service.lock", "service.json"):
        assert (state_dir / name).stat().st_mode & 0o177 == 0, name
    assert "hunter2" not in (state_dir / "service.log").read_text()


def test_a_second_service_on_the_same_state_directory_leaves_quietly(daemons):
    daemons.embedded()
    second = daemons.popen("state", "--embedded")
    _, said = second.communicate(timeout=30)
    assert second.returncode == 0
    assert b"another service holds this state directory" in said
    third = daemons.popen("state", host="127.0.0.1", port=0, token="t")
    third.communicate(timeout=30)
    assert third.returncode == 1, "who was asked to serve and does not must say so"


@pytest.mark.slow
def test_it_leaves_when_nobody_needs_it_and_comes_back_when_somebody_does(daemons, open_client, tmp_path):
    client = open_client(daemons.embedded(idle_exit_s=1))
    job = client.submit(submission_for(client, tmp_path)).job.job_id
    client.close()
    wait_until(lambda: not daemons.pids(), "it is idle and leaves")
    assert not (daemons.state_dir() / "service.sock").exists()
    assert "idle: the service leaves" in (daemons.state_dir() / "service.log").read_text()
    wait_until(lambda: ServiceCard.read(daemons.state_dir()).ended_at, "it is noted")
    assert ServiceCard.read(daemons.state_dir()).idle, "and who looks is told so"
    again = open_client(daemons.embedded())
    assert again.status(job).state == "succeeded", "not before the job had ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_told_to_leave_it_leaves_in_order(daemons, number):
    process = daemons.popen("state", "--embedded")
    wait_until((daemons.state_dir() / "service.json").exists, "it serves")
    # Not through ensure_service: on a busy machine that may start a second one, which takes over when this one leaves.
    with ElasticFlowClient(Endpoint(socket_path=daemons.state_dir() / "service.sock"), retry_for_s=30) as client:
        client.health()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"service stopped; workers go on" in said
    assert ServiceCard.read(daemons.state_dir()).idle is False
    assert not (daemons.state_dir() / "service.sock").exists()


TOLD_WHERE_EXCEPTIONS_ARE_DROPPED = """
import os, signal, sys
from unittest import mock
from elasticflow_airflow.service import __main__, daemon

class Last:
    def __del__(self):  # whatever a handler raises in here is dropped
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))

owner, name = {"early": (daemon, "open_office"), "late": (daemon.uvicorn.Server, "run")}[sys.argv[1]]
real = getattr(owner, name)

def told_first(*args, **named):
    Last()
    return real(*args, **named)

with mock.patch.object(owner, name, told_first):
    sys.exit(__main__.main(["--state-dir", sys.argv[2]]))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_told_to_leave_while_it_starts_it_leaves(daemons, when):
    command = [sys.executable, "-c", TOLD_WHERE_EXCEPTIONS_ARE_DROPPED, when, str(daemons.state_dir())]
    ended = subprocess.run(command, env={**os.environ, **daemons.environment()}, capture_output=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert b"service stopped; workers go on" in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert ServiceCard.read(daemons.state_dir()).idle is False


@pytest.mark.slow
def test_after_a_kill_the_next_caller_starts_it_again_and_the_job_goes_on(daemons, open_client, tmp_path):
    client = open_client(daemons.embedded())
    submission = submission_for(client, tmp_path, length=Length(steps=60), scaling_curve={1: 10.0}, max_workers=1)
    job = client.submit(submission).job.job_id
    wait_until(lambda: client.status(job).step > 0, "it trains")
    os.kill(client.health().pid, signal.SIGKILL)
    again = open_client(daemons.embedded())
    done = wait_until(lambda: (s := again.status(job)).state.terminal and s, "it ends")
    assert (done.state, done.incarnation, done.result.steps) == ("succeeded", 1, 60)


def test_a_socket_path_that_is_too_long_is_told_with_the_setting(daemons):
    name = "x" * 120
    with pytest.raises(EmbeddedStartError, match=r"at most 107.*\[elasticflow\] state_dir"):
        daemons.embedded(name)
    process = daemons.popen(name, "--embedded")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"at most 107" in said
    assert b"ELASTICFLOW_STATE_DIR" in said
    assert b"Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "127.0.0.1"}, "needs a token"),
        ({"idle_exit_s": "soon"}, "ELASTICFLOW_IDLE_EXIT_S"),
        ({"host": "127.0.0.1", "token_file": "/no/such/file"}, "/no/such/file cannot be read"),
        ({"host": "256.1.1.1", "token": "t"}, "256.1.1.1"),
        ({"engine": "local", "virtual_nodes": "2by2"}, 'such as "4x2"'),
        ({"engine": "local", "warm_imports": "torch, 2fast"}, "'2fast' is no module name"),
    ],
)
def test_settings_that_cannot_work_are_told_in_one_line(daemons, settings, said):
    process = daemons.popen("bad", **settings)
    _, printed = process.communicate(timeout=30)
    assert process.returncode in (1, 2)
    assert said in printed.decode()
    assert "Traceback" not in printed.decode()


def test_modules_to_import_ahead():
    assert ServiceSettings(warm_imports=None).warm_modules() is None
    assert ServiceSettings(warm_imports="").warm_modules() is None
    assert ServiceSettings(warm_imports="torch, transformers.models.bert").warm_modules() == (
        "torch",
        "transformers.models.bert",
    )


@pytest.mark.slow
def test_the_daemon_imports_neither_airflow_nor_torch(daemons, open_client, tmp_path):
    state_dir = daemons.state_dir()
    environment = {**daemons.environment(idle_exit_s=2), "PYTHONPROFILEIMPORTTIME": "1"}
    client = open_client(ensure_service(state_dir, environment))
    job = client.submit(submission_for(client, tmp_path)).job.job_id
    wait_until(lambda: client.status(job).state.terminal, "it ends")
    client.close()
    wait_until(lambda: not daemons.pids(), "it is idle and leaves")
    lines = (state_dir / "service.log").read_text().splitlines()
    imported = {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("import time")}
    assert "fastapi" in imported
    assert not [name for name in imported if name.split(".")[0] in ("airflow", "torch", "scipy", "pandas")]


@pytest.mark.slow
def test_told_to_stop_it_leaves_in_order_and_the_job_goes_on_with_the_next(daemons, open_client, tmp_path):
    process = daemons.popen()
    client = open_client(Endpoint(socket_path=daemons.state_dir() / "service.sock"))
    client.retry_for_s = 30.0
    submission = submission_for(client, tmp_path, length=Length(steps=60), scaling_curve={1: 10.0}, max_workers=1)
    job = client.submit(submission).job.job_id
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"service stopped; workers go on" in said
    assert not (daemons.state_dir() / "service.sock").exists()
    again = open_client(daemons.embedded())
    done = wait_until(lambda: (s := again.status(job)).state.terminal and s, "it ends")
    assert (done.state, done.incarnation) == ("succeeded", 1)
