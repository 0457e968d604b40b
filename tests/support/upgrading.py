"""A service, its jobs and the processes of Airflow beside it, while all are upgraded to the next release."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elasticflow_airflow.api import Command, Event, JobIdentity, JobStatus, JobSubmission
from elasticflow_airflow.client import ElasticFlowClient, snapshot_folder
from support import digests
from support.served import Served

HERE = Path(__file__).parents[1] / "upgrade"
BATCH = 32
SECRET_VALUE, SECRET_ARGUMENT = "hunter2-of-the-environment", "hunter3-of-the-arguments"


@dataclass
class Story:
    """A service with three CPU slots, one release after the other, and its jobs by the names of their tasks."""

    folder: Path
    service: Served
    claims: dict[str, int] = field(default_factory=dict)
    clients: list[ElasticFlowClient] = field(default_factory=list)
    helpers: list[subprocess.Popen[Any]] = field(default_factory=list)
    """Processes beside the service and its jobs."""

    def __post_init__(self) -> None:
        lay_out(self.folder)

    @property
    def client(self) -> ElasticFlowClient:
        return self.clients[-1]

    def start(self, python: Path) -> None:
        """Start the service of an environment."""
        self.service.python = python
        self.service.start()
        self.clients.append(ElasticFlowClient(self.service.endpoint, retry_for_s=60.0))

    def submit(self, task: str, script: str, *args: object, dag_id: str = "daily", **given: Any) -> str:
        """Submit a job of one worker, as best effort, unless said otherwise; returns its id."""
        snapshot = snapshot_folder(self.folder / "code")
        submission = JobSubmission(
            identity=JobIdentity(dag_id=dag_id, run_id="run1", task_id=task),
            command=Command(
                snapshot=snapshot.sha256,
                script=script,
                args=tuple(map(str, args)),
                args_shown=tuple("***" if one == SECRET_ARGUMENT else str(one) for one in args),
            ),
            global_batch_size=BATCH,
            best_effort="deadline_at" not in given,
            **{"max_workers": 1, **given},
        )
        self.client.upload_snapshot(snapshot)
        job_id = submission.identity.job_id
        self.claims[job_id] = self.client.submit(submission).claim
        return job_id

    def events(self, job_id: str, kind: str | None = None) -> list[Event]:
        return [event for event in self.client.events(job_id) if kind in (None, event.kind)]

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = 240.0) -> Any:
        end_s = time.monotonic() + limit_s
        while not (value := condition()):
            assert time.monotonic() < end_s, f"waited {limit_s} s in vain: {what}\n{self}"
            time.sleep(0.1)
        return value

    def trains(self, job_id: str, steps: int = 3) -> None:
        """Wait until it has made so many more steps."""
        step = self.client.status(job_id).step
        self.wait(lambda: self.client.status(job_id).step >= step + steps, f"{job_id} makes steps")

    def changed(self, job_id: str, times: int, workers: int) -> None:
        """Wait until its workers have changed in place so often, and so many of them train."""
        self.wait(lambda: len(self.events(job_id, "rescaled")) >= times, f"change {times} of {job_id}")
        assert self.events(job_id, "rescaled")[times - 1].data["workers"] == workers, str(self)
        self.trains(job_id)

    def succeeds(self, job_id: str) -> JobStatus:
        """Wait for its end. It was started once, and did not fail."""
        self.wait(lambda: self.client.renew(job_id, self.claims[job_id]).state.terminal, f"{job_id} ends")
        status = self.client.status(job_id)
        assert status.state == "succeeded", str(self)
        started = len(self.events(job_id, "started"))
        # The release before does not tell it of a job that was over when it looked.
        assert started == 1 or (started == 0 and self.service.python != Path(sys.executable)), str(self)
        assert not [event for event in self.events(job_id) if event.kind in ("restarting", "worker_lost")], str(self)
        return status

    def log(self, job_id: str) -> str:
        """What all its workers have printed."""
        files = sorted((self.service.state_dir / "jobs" / job_id).glob("i*/logs/*.log"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def processes(self) -> set[psutil.Process]:
        """The processes of the jobs: supervisors, agents, workers and what these have started."""
        found, needle = set(), os.fsencode(self.service.state_dir)
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.service.pid:
                    continue  # the service, and what it does in processes of its own
                about = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                about += Path(f"/proc/{process.pid}/environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if needle in about and process.pid != os.getpid():
                found.add(process)
        return found

    def end(self) -> None:
        """End whatever is left."""
        for client in self.clients:
            client.close()
        for helper in self.helpers:
            helper.kill()
            helper.communicate()
        self.service.end()
        for process in self.processes():
            process.kill()

    def __str__(self) -> str:
        told = [event for job_id in self.claims for event in self.client.events(job_id)]
        lines = [
            f"{event.at:.1f} {event.job_id} {event.kind}: {event.reason}" for event in sorted(told, key=lambda e: e.at)
        ]
        for job_id in self.claims:
            lines += [f"-- {job_id}", *self.log(job_id).splitlines()[-15:]]
        return "\n".join([*lines, "-- service", *self.service.log_file.read_text().splitlines()[-30:]])


class Airflow:
    """Processes of an Airflow beside the service, of either release."""

    def __init__(self, story: Story) -> None:
        self.home = story.folder / "airflow"
        (self.home / "dags").mkdir(parents=True)
        endpoint = story.service.endpoint
        connection = {"conn_type": "elasticflow", "host": endpoint.base_url, "password": endpoint.token}
        self._story = story
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW_", "ELASTICFLOW_"))},
            "AIRFLOW_HOME": str(self.home),
            "PYTHONPATH": str(HERE.parent),
            "AIRFLOW_CONN_ELASTICFLOW_DEFAULT": json.dumps(connection),
            "AIRFLOW__API_AUTH__JWT_SECRET": "a secret of this test that is long enough for its hash",
            "AIRFLOW__CORE__FERNET_KEY": "cHJlY2lzZWx5IHRoaXJ0eS10d28gYnl0ZXMgbG9uZyE=",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home}/airflow.db",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        }

    def begin(self, python: Path, what: str, given: Any) -> Callable[[], Any]:
        """Start to do something; the function that is returned waits for its end, and gives what came out."""
        file = self.home / f"{what}-{time.monotonic_ns()}.json"
        file.write_text(json.dumps(given))
        with file.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [str(python), str(HERE / "in_airflow.py"), what, str(file)],
                env=self._environment,
                cwd=self.home,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._story.helpers.append(process)

        def end() -> Any:
            assert process.wait(300) == 0, file.with_suffix(".log").read_text()[-5000:]
            return json.loads(file.read_text())

        return end


def lay_out(folder: Path) -> None:
    """Make the folder of the scripts, and those by which trainings are told to hurry."""
    for name in ("code", "paced", "hurried", "payroll"):
        (folder / name).mkdir()
    (folder / "hurried" / "hurry").touch()
    for script in (HERE / "scripts").glob("*.py"):
        shutil.copy(script, folder / "code")
    shutil.copy(digests.__file__, folder / "code")


def begin_alone(folder: Path, helpers: list[subprocess.Popen[Any]], python: Path, epochs: int) -> Callable[[], str]:
    """Train without any service, undisturbed; the function that is returned gives the digest of the weights.

    ``folder`` is laid out; ``helpers``: is told of the process.
    """
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    process = subprocess.Popen(
        [str(python), "train.py", str(epochs), str(folder / "hurried")],
        cwd=folder / "code",
        env=environment | {"ELASTICFLOW_CHECKPOINT_DIR": str(folder / "alone")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    helpers.append(process)

    def end() -> str:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return printed.split("WEIGHTS ")[1].split()[0]

    return end
