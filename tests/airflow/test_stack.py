"""A real api-server, scheduler, triggerer and dag-processor, started once: deferral, kills and clears as users do them.

What ``dag.test()`` cannot show: the trigger in its own process, ``on_kill``, and the race between a cleared task's new
attempt and its old trigger.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from elasticflow_airflow.client import ElasticFlowClient, Endpoint
from elasticflow_airflow.wire import State

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(420)]

DAG_FILE = """
import json
from datetime import timedelta
from airflow.sdk import DAG
from elasticflow_airflow.operators import ElasticTrainOperator

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}

def train(steps, **changes):
    return ElasticTrainOperator(
        task_id="train", script="code/train.py", steps=steps, global_batch_size=8, scaling_curve=CURVE,
        env={"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE})}, max_workers=1,
        **{"deadline": timedelta(hours=1), **changes})

with DAG("short", schedule=None):
    train(200)
with DAG("long", schedule=None):
    train(10**6, deadline=None, best_effort=True)
with DAG("blocking", schedule=None):
    train(10**6, deadline=None, best_effort=True, deferrable=False)
with DAG("cleared", schedule=None):
    train(450)
with DAG("killed", schedule=None):
    train(300, deferrable=False, retries=1, retry_delay=timedelta(seconds=1))
"""


class Stack:
    """The components, and what a user does with them through the REST API."""

    def __init__(self, home: Path, http: httpx.Client, service: ElasticFlowClient) -> None:
        self.home, self.http, self.service = home, http, service

    def run(self, dag_id: str) -> str:
        """Trigger a DAG; its run id."""
        answer = self.http.post(f"/api/v2/dags/{dag_id}/dagRuns", json={"logical_date": None})
        answer.raise_for_status()
        return str(answer.json()["dag_run_id"])

    def task(self, dag_id: str, run_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/train")
        answer.raise_for_status()
        return dict(answer.json())

    def mark_failed(self, dag_id: str, run_id: str) -> None:
        self.http.patch(
            f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/train", json={"new_state": "failed"}
        ).raise_for_status()

    def clear(self, dag_id: str, run_id: str) -> None:
        body = {"dry_run": False, "dag_run_id": run_id, "task_ids": ["train"], "only_failed": False}
        self.http.post(f"/api/v2/dags/{dag_id}/clearTaskInstances", json=body).raise_for_status()

    def waits_in_triggerer(self, dag_id: str, run_id: str) -> None:
        """Wait until the trigger has renewed the lease: a kill before that reaches nobody, only the lease ends it."""
        self.reach(dag_id, run_id, "deferred")
        first = self.job(dag_id).lease_expires_at
        self.wait("the trigger renews", lambda: self.job(dag_id).lease_expires_at > first)

    def job(self, dag_id: str) -> Any:
        """The newest job of a DAG."""
        found = self.service.list_jobs(dag_id=dag_id)
        return max(found, key=lambda job: job.submitted_at) if found else None

    def log(self, dag_id: str, run_id: str, attempt: int) -> str:
        answer = self.http.get(
            f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/train/logs/{attempt}",
            params={"full_content": True},
            headers={"Accept": "application/json"},
        )
        answer.raise_for_status()
        return answer.text

    def reach(self, dag_id: str, run_id: str, state: str, limit_s: float = 90.0) -> None:
        """Wait until the task is in a state; fail at once, with its log, when it ends in another."""

        def there() -> bool:
            task = self.task(dag_id, run_id)
            if task["state"] in ("failed", "success") and task["state"] != state:
                raise AssertionError(f"{task['state']}, not {state}:\n{self.log(dag_id, run_id, task['try_number'])}")
            return bool(task["state"] == state)

        self.wait(f"task of {dag_id} is {state}", there, limit_s)

    def wait(self, what: str, condition: Callable[[], Any], limit_s: float = 90.0) -> Any:
        """Wait for a condition; on failure quote the ends of all logs."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.3)
        ends = "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.home.glob("*.out")))
        raise AssertionError(f"not within {limit_s} s: {what}\n{ends}")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    home = Path(tempfile.mkdtemp(prefix="ef-stack-"))
    (home / "dags" / "code").mkdir(parents=True)
    (home / "dags" / ".airflowignore").write_text("code/\n")
    (home / "dags" / "code" / "train.py").write_text("")
    (home / "dags" / "stack_dags.py").write_text(DAG_FILE)
    port, worker_port, trigger_port = free_ports(3)
    url = f"http://127.0.0.1:{port}"
    environment = {
        **{n: v for n, v in os.environ.items() if not n.startswith(("AIRFLOW", "ELASTICFLOW"))},
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": "a secret of this test that is long enough for the hash it feeds",
        "AIRFLOW__API__SECRET_KEY": "another secret of this test, long enough",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "3",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(worker_port),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_port),
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "2",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW__ELASTICFLOW__STATE_DIR": str(home / "s"),
        "AIRFLOW__ELASTICFLOW__POLL_INTERVAL_S": "0.5",
        "AIRFLOW__ELASTICFLOW__INLINE_WAIT_S": "1",
        "ELASTICFLOW_ENGINE": "fake",
        "ELASTICFLOW_VIRTUAL_NODES": "1x4",
    }
    airflow = [sys.executable, "-m", "airflow"]
    subprocess.run([*airflow, "db", "migrate"], env=environment, check=True, timeout=120, capture_output=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for component in ("api-server", "scheduler", "triggerer", "dag-processor"):
            with (home / f"{component}.out").open("wb") as output:
                started.append(
                    subprocess.Popen(
                        [*airflow, component],
                        env=environment,
                        stdout=output,
                        stderr=output,
                        stdin=subprocess.DEVNULL,
                        cwd=home,
                        start_new_session=True,
                    )
                )
        service = ElasticFlowClient(Endpoint(socket_path=home / "s" / "service.sock"), retry_for_s=30)
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as http, service:
            stack = Stack(home, http, service)

            def ready() -> bool:
                try:
                    token = http.get("/auth/token").json()["access_token"]
                    http.headers["Authorization"] = f"Bearer {token}"
                    parts = http.get("/api/v2/monitor/health").json()
                    dags = http.get("/api/v2/dags").json()["total_entries"]
                except (httpx.HTTPError, ValueError, KeyError):
                    return False
                return dags == 5 and all(
                    parts[p]["status"] == "healthy" for p in ("scheduler", "triggerer", "dag_processor")
                )

            stack.wait("Airflow is ready", ready, 180)
            yield stack
    finally:
        stop(started, home)
        if (service_log := home / "s" / "service.log").exists():
            sys.stdout.write(f"--- service.log\n{service_log.read_text()[-6000:]}")  # shown when a test failed
        shutil.rmtree(home, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def stop(started: list[subprocess.Popen[bytes]], home: Path) -> None:
    """End the components, what they started, and the embedded service."""
    family = [child for process in started for child in psutil.Process(process.pid).children(recursive=True)]
    for process in started:
        process.send_signal(signal.SIGINT)
    for process in started:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    described = home / "s" / "service.json"
    if described.exists():
        pid = json.loads(described.read_text())["pid"]
        if psutil.pid_exists(pid):
            family.append(psutil.Process(pid))
    for process in family:
        try:
            process.kill()
            process.wait(10)
        except psutil.NoSuchProcess:
            continue


def test_a_deferred_training_succeeds_and_is_acknowledged(stack: Stack) -> None:
    run_id = stack.run("short")
    stack.reach("short", run_id, "deferred")
    stack.reach("short", run_id, "success", 120)
    job = stack.wait("acknowledged", lambda: (j := stack.job("short")) and j.acknowledged and j)
    assert (job.state, job.incarnation, job.step) == (State.SUCCEEDED, 1, 200)
    said = stack.log("short", run_id, 1)
    assert "submitted job" in said
    assert "/200" in said  # the trigger's progress lines are in the task's log
    assert "succeeded: 200 steps" in said


def test_marking_a_deferred_task_failed_cancels_its_job(stack: Stack) -> None:
    run_id = stack.run("long")
    stack.waits_in_triggerer("long", run_id)
    stack.mark_failed("long", run_id)
    stack.wait("cancelled", lambda: stack.job("long").state is State.CANCELLED)


def test_marking_a_blocking_task_failed_cancels_its_job(stack: Stack) -> None:
    run_id = stack.run("blocking")
    stack.wait("a live job", lambda: (j := stack.job("blocking")) and j.state is State.RUNNING)
    assert stack.task("blocking", run_id)["state"] == "running"
    stack.mark_failed("blocking", run_id)
    stack.wait("cancelled", lambda: stack.job("blocking").state is State.CANCELLED)
    assert stack.task("blocking", run_id)["state"] == "failed"


def test_clearing_a_deferred_task_keeps_the_job_that_its_new_attempt_took_over(stack: Stack) -> None:
    """The old trigger's kill may come before the new attempt's submit or after it: the training ends once, rightly.

    Before: the job is cancelled, and the attempt opens the second incarnation, from the first one's checkpoint.
    After: the old claim is stale, and the kill changes nothing.
    """
    run_id = stack.run("cleared")
    stack.waits_in_triggerer("cleared", run_id)
    stack.clear("cleared", run_id)
    stack.wait("a second claim", lambda: stack.job("cleared").claim >= 2)
    stack.reach("cleared", run_id, "success", 180)
    job = stack.wait("acknowledged", lambda: (j := stack.job("cleared")).acknowledged and j)
    assert job.state is State.SUCCEEDED
    assert job.result.steps == 450
    assert stack.task("cleared", run_id)["try_number"] == 2


def test_a_task_and_the_service_killed_together_train_once_and_to_the_end(stack: Stack) -> None:
    run_id = stack.run("killed")
    stack.wait("progress", lambda: (j := stack.job("killed")) and j.step > 20)
    runners = task_processes(stack.task("killed", run_id)["id"])
    assert runners
    os.kill(stack.service.health().pid, signal.SIGKILL)
    for process in runners:
        process.kill()
    stack.reach("killed", run_id, "success", 180)
    job = stack.wait("acknowledged", lambda: (j := stack.job("killed")).acknowledged and j)
    assert (job.state, job.incarnation, job.result.steps) == (State.SUCCEEDED, 1, 300)
    assert job.claim == 2
    assert stack.task("killed", run_id)["try_number"] == 2


def task_processes(task_instance_id: str) -> list[psutil.Process]:
    """Processes that run this attempt of a task: Airflow names them by its id."""
    return [p for p in psutil.process_iter(["cmdline"]) if task_instance_id in " ".join(p.info["cmdline"] or ())]
