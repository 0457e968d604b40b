"""All operations of the API against what its OpenAPI document says, called by schemathesis in all its ways."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.nasty import SNAPSHOT_ENV

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, Endpoint, snapshot_folder
from elasticflow_airflow.service.http.openapi import document

TOKEN = "a-long-random-token-of-this-test"
TESTS = Path(__file__).resolve().parents[2]


def call_everything(endpoint: Endpoint, base: Path, seconds: int) -> None:
    """Run schemathesis for so long; then the loop must have no problem, and a new job must be decided on."""
    code = base / "code"
    code.mkdir()
    (code / "train.py").write_text("print('training')\n")
    snapshot = snapshot_folder(code)
    (base / "openapi.json").write_text(json.dumps(document()))

    def submit(client: ElasticFlowClient, name: str):
        return client.submit(
            JobSubmission(
                identity=JobIdentity(dag_id=name, run_id="run", task_id="train"),
                command=Command(snapshot=snapshot.sha256, script="train.py"),
                length=Length(steps=20),
                global_batch_size=8,
                best_effort=True,
            )
        )

    with ElasticFlowClient(endpoint) as client:
        client.upload_snapshot(snapshot)
        submit(client, "before")
        said = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")),
                *("--config-file", str(TESTS / "service/troubles/schemathesis.toml")),
                *("run", str(base / "openapi.json"), "--url", endpoint.base_url),
                *("--header", f"Authorization: Bearer {TOKEN}"),
                *("--max-time", str(seconds), "--max-examples", "15"),
                *("--continue-on-failure", "--no-color"),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(TESTS),
                "SCHEMATHESIS_HOOKS": "support.schemathesis_hooks",
                SNAPSHOT_ENV: snapshot.sha256,
            },
            cwd=base,
            capture_output=True,
            text=True,
            timeout=20 * seconds,
        )
        assert said.returncode == 0, said.stdout[-20_000:] + said.stderr[-5000:]
        assert client.health().problems == []
        after = submit(client, "after")
        assert after.job.verdict.decision in ("best_effort", "undecided")
        assert httpx.get(f"{endpoint.base_url}/healthz", trust_env=False).status_code == 200


@pytest.fixture
def serve(daemons, tmp_path):
    """Start a service on TCP whose output, a line for each event, goes into a file."""

    def start(**settings: object) -> Endpoint:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = {"host": "127.0.0.1", "port": port, "token": TOKEN, "verdict_wait_s": 0.2, **settings}
        with (tmp_path / "service.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "elasticflow_airflow.service", "--state-dir", str(daemons.state_dir())],
                env={**os.environ, **daemons.environment(**settings)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        daemons.processes.append(process)
        endpoint = Endpoint.from_url(f"http://127.0.0.1:{port}", token=TOKEN)

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "service.log").read_text()[-3000:]
            try:
                return httpx.get(f"{endpoint.base_url}/healthz", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers)
        return endpoint

    return start


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s} s in vain"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_operation_does_what_the_document_says(serve, tmp_path):
    call_everything(serve(), tmp_path, 60)


@pytest.mark.soak
@pytest.mark.postgres
@pytest.mark.timeout(7200)
def test_every_operation_does_what_the_document_says_on_postgresql(serve, tmp_path, postgres_url):
    call_everything(serve(database_url=postgres_url), tmp_path, 900)
