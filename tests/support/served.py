"""`elasticflow serve` as users run it: a process of its own on a port, that can be killed and started again."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from elasticflow_airflow.api import JobStatus, JobSubmission
from elasticflow_airflow.client import ElasticFlowClient, Endpoint


@dataclass
class Served:
    """One service after the other, on the same state. ``settings`` are those of the service, by name."""

    state_dir: Path
    settings: dict[str, object] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    sessions: set[int] = field(default_factory=set)
    """Of all processes that were started: what they leave behind keeps it."""
    python: Path = Path(sys.executable)
    """Whose environment has the ``elasticflow`` command that is started next."""
    code: Path | None = None
    """Folder of another release's package, which is started next; None: what the environment has."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(base_url=f"http://127.0.0.1:{self.port}", token=self.token)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log_file(self) -> Path:
        return self.state_dir / "served.log"

    def start(self, limit_s: float = 120.0) -> None:
        """Start it, and return when it answers."""
        process, end = self.launch(), time.monotonic() + limit_s
        while not self.answers():
            assert process.poll() is None, self.log_file.read_text()[-3000:]
            assert time.monotonic() < end, f"it has not answered for {limit_s} s"
            time.sleep(0.1)

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, and return at once."""
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        self.state_dir.mkdir(parents=True, exist_ok=True)
        settings = {"state_dir": self.state_dir, "token": self.token, "engine": "fake", **self.settings}
        others = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICFLOW_")}
        if self.code is not None:
            others["PYTHONPATH"] = str(self.code)
        serve = [str(self.python.with_name("elasticflow")), "serve"]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*serve, "--host", "127.0.0.1", "--port", str(self.port)],
                env={**others, **{f"ELASTICFLOW_{name.upper()}": str(value) for name, value in settings.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions.add(self.process.pid)
        return self.process

    def answers(self) -> bool:
        """Whether it does, now."""
        try:
            answer = httpx.get(f"{self.endpoint.base_url}/healthz", trust_env=False, timeout=10.0)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    def kill(self) -> None:
        """As by the kernel: nothing is put away."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, limit_s: float = 60.0) -> int:
        """Tell it to leave; its status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def left_over(self) -> list[psutil.Process]:
        """Processes that live though the service that started them does not."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) in self.sessions:
                    one = psutil.Process(pid)
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found.append(one)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def end(self) -> None:
        """End whatever is left of it."""
        for one in self.left_over():
            one.kill()
        if self.process is not None:
            self.process.wait()


def train(client: ElasticFlowClient, submission: JobSubmission, limit_s: float = 300.0) -> JobStatus:
    """Submit a job, and wait until it has succeeded; fails the test where it does not."""
    job_id = submission.identity.job_id
    claim, end_s = client.submit(submission).claim, time.monotonic() + limit_s
    while not (status := client.renew(job_id, claim)).state.terminal:
        assert time.monotonic() < end_s, [(event.kind, event.reason) for event in client.events(job_id)]
        time.sleep(0.5)
    assert status.state == "succeeded", status.failure
    return status
