"""``elasticflow serve --policy NAME``: the real command, on the fake engine, trains to the end under every name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from elasticflow_airflow.client import ElasticFlowError, Endpoint, snapshot_folder
from elasticflow_airflow.scheduler_core.simulator.registry import DEFAULT_POLICY, POLICY_NAMES, make_policy
from elasticflow_airflow.wire import Command, JobIdentity, JobSubmission, Length, State

COMMAND = "import sys; from elasticflow_airflow.cli.main import main; sys.argv[0] = 'elasticflow'; main()"
TOKEN = "a-token-for-this-test"
SERVED = (DEFAULT_POLICY, "gang-fifo", "tiresias")
"""Of each kind one; under every name the service trains in test_policies.py, in modelled time."""


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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SERVED else pytest.mark.soak) for name in POLICY_NAMES],
)
def test_small_jobs_train_to_their_end_under_every_policy(name, serve, open_client, tmp_path):
    try:
        make_policy(name, [])
    except ModuleNotFoundError as missing:
        pytest.skip(f"{name} needs {missing.name}")
    port = free_port()
    process = serve("--host", "127.0.0.1", "--port", str(port), "--policy", name)
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
    jobs, end = [due.job.job_id, free.job.job_id], time.monotonic() + 150  # aonline decides once a minute
    while {client.status(job).state for job in jobs} != {State.SUCCEEDED}:
        assert time.monotonic() < end, [client.status(job) for job in jobs]
        time.sleep(0.05)
    if name == DEFAULT_POLICY:
        assert client.forecast(1.0).items == []
    else:
        with pytest.raises(ElasticFlowError, match=f"the policy '{name.replace('+', '[+]')}' plans nothing ahead"):
            client.forecast(1.0)


def test_an_unknown_policy_ends_the_command_with_the_names_that_there_are(serve, tmp_path):
    process = serve("--policy", "fifo")
    assert process.wait(60) == 2
    said = (tmp_path / "serve.log").read_text()
    assert "no policy 'fifo'; choose one of elasticflow, " in said
    assert "gang-fifo" in said
