"""The service knows one scheduler: under its name jobs train as ever, and a start under any other is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
from pydantic import ValidationError

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length, State
from elasticflow_airflow.client import (
    ElasticFlowError,
    EmbeddedStartError,
    Endpoint,
    ensure_service,
    snapshot_folder,
)
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.scheduler_values import StoredState

COMMAND = "import sys; from elasticflow_airflow.cli.main import main; sys.argv[0] = 'elasticflow'; main()"
TOKEN = "a-token-for-this-test"
OTHERS = [name for name in POLICY_NAMES if name != "elasticflow"]
CURVE = {1: 8.0, 2: 14.0, 4: 22.0}


@pytest.fixture
def serve(daemons, tmp_path):
    """Run ``elasticflow serve`` with some arguments, as a child of this process."""

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "serve.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", "--state-dir", str(daemons.state_dir()), *arguments],
                env={**os.environ, **daemons.environment(token=TOKEN)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        daemons.processes.append(process)
        return process

    return start


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def small_job(client, folder, task: str, **given) -> JobSubmission:
    (folder / "train.py").write_text("print()")
    snapshot = snapshot_folder(folder)
    client.upload_snapshot(snapshot)
    return JobSubmission(
        identity=JobIdentity(dag_id="serve", run_id="run1", task_id=task),
        command=Command(snapshot=snapshot.sha256, script="train.py"),
        length=Length(steps=20),
        global_batch_size=8,
        scaling_curve={1: 10.0, 2: 18.0, 4: 32.0},  # what the fake engine really does
        **given,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--policy", "elasticflow")], ids=["unsaid", "named"])
def test_small_jobs_train_to_their_end(arguments, serve, open_client, tmp_path):
    port = free_port()
    process = serve("--host", "127.0.0.1", "--port", str(port), *arguments)
    client = open_client(Endpoint.from_url(f"http://127.0.0.1:{port}", token=TOKEN))
    end = time.monotonic() + 60
    while True:
        assert process.poll() is None, (tmp_path / "serve.log").read_text()
        try:
            client.health()
            break
        except ElasticFlowError:
            assert time.monotonic() < end, (tmp_path / "serve.log").read_text()
            time.sleep(0.05)
    due = client.submit(small_job(client, tmp_path, "due", deadline_at=time.time() + 3600))
    free = client.submit(small_job(client, tmp_path, "free", best_effort=True))
    jobs, end = [due.job.job_id, free.job.job_id], time.monotonic() + 60
    while {client.status(job).state for job in jobs} != {State.SUCCEEDED}:
        assert time.monotonic() < end, [client.status(job) for job in jobs]
        time.sleep(0.05)
    assert client.forecast(1.0).items == []


def test_the_command_ends_with_one_sentence_that_says_what_to_do_instead(serve, tmp_path):
    process = serve("--policy", "edf")
    assert process.wait(60) == 2
    (line,) = (tmp_path / "serve.log").read_text().splitlines()
    assert line.startswith("elasticflow: ELASTICFLOW_POLICY: 'edf' cannot be served")
    assert "`elasticflow simulate --policy NAME`" in line


def test_the_client_says_why_the_embedded_service_cannot_start(daemons):
    with pytest.raises(EmbeddedStartError, match="'tiresias' cannot be served: the service has one scheduler"):
        ensure_service(daemons.state_dir(), daemons.environment(policy="tiresias"), limit_s=300.0)


@pytest.mark.parametrize("policy", [*OTHERS, "fifo", "elasticflow:value", ""])
def test_no_other_policy_can_be_set(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_POLICY", policy)
    with pytest.raises(ValidationError, match="leave the setting out"):
        ServiceSettings(state_dir=tmp_path)


@pytest.mark.parametrize("objective", ["first-come", "value"])
def test_our_own_name_is_accepted_with_each_objective(objective, tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_POLICY", "elasticflow")
    monkeypatch.setenv("ELASTICFLOW_OBJECTIVE", objective)
    settings = ServiceSettings(state_dir=tmp_path)
    assert settings.policy == "elasticflow"
    assert settings.scheduler_config().objective == objective


def test_jobs_that_an_older_service_ran_under_another_policy_go_on(make_world):
    """What that policy remembered of them besides is stored with them, and changes nothing."""
    world = make_world(nodes=1, slots=4)
    job = world.submit(within=3000, steps=400, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 5, "it trains")
    with world.store.write() as tx:
        row = tx.current(job.job.job_id)[1]
        memory = {"memory": {"attained_slot_s": 12.0, "ran_s": 3.0}}
        row.scheduler_state = StoredState({**row.scheduler_state.raw, **memory})
    world.restart()
    assert world.ended(job, limit_s=3000).state == "succeeded"
