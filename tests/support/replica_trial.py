"""Several services on one PostgreSQL, each with a folder of its own, over node agents: killed, stopped, handed over."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet

from elasticflow_airflow.api import Command, Event, Health, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, Endpoint, snapshot_script
from elasticflow_airflow.client.errors import ElasticFlowError
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from support.node_agents import TOKEN, start_agent
from support.served import Served
from support.training_scripts import BATCH, HURRY_ENV, SAMPLES, hurry
from support.trial import nobody_is_left

SERVICE_TOKEN = "a-token-of-all-replicas"


@dataclass
class ReplicaTrial:
    """The replicas by name, and the jobs that were submitted to them."""

    base: Path
    database_url: str
    text: str
    nodes: int = 2
    names: tuple[str, ...] = ("a", "b")
    settings: dict[str, object] = field(default_factory=dict)
    replicas: dict[str, Served] = field(default_factory=dict)
    agents: dict[str, tuple[subprocess.Popen[str], str]] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    key: str = field(default_factory=lambda: Fernet.generate_key().decode())
    """Of secrets, for replicas that are made next."""
    python: Path | None = None
    """Whose environment has the agents that are started next; None: ours."""
    _clients: list[ElasticFlowClient] = field(default_factory=list)

    def start(self) -> None:
        """Start the agents and the replicas, the first of which leads."""
        self.base.mkdir(parents=True, exist_ok=True)
        script = self.base / "code" / "train.py"
        script.parent.mkdir()
        script.write_text(self.text)
        self.snapshot = snapshot_script(script)
        for index in range(self.nodes):
            self.start_agent(f"node{index}")
        for name in self.names:
            self.replica(name).start()
        self.client = self.client_of(*self.names)

    def start_agent(self, node_id: str) -> None:
        """Start an agent, again where it was."""
        known = self.agents.get(node_id)
        listen = "127.0.0.1:0" if known is None else known[1].removeprefix("http://")
        self.agents[node_id] = start_agent(self.base, node_id, listen, 1, python=self.python)

    def replica(self, name: str) -> Served:
        """Return a replica, which may not have been started yet."""
        if name not in self.replicas:
            settings = {
                "engine": "cluster",
                **({"nodes": ",".join(url for _, url in self.agents.values())} if self.agents else {}),
                "shared_dir": self.base / "shared",
                "node_token": TOKEN,
                "database_url": self.database_url,
                "secret_key": self.key,
                "checkpoint_interval_s": 5,
                "profile_s": 1,
                "heartbeat_limit_s": 6,
                "max_recoveries": 10,
                **self.settings,
            }
            self.replicas[name] = Served(self.base / f"replica-{name}", settings, SERVICE_TOKEN)
        return self.replicas[name]

    def client_of(self, *names: str, retry_for_s: float = 60.0) -> ElasticFlowClient:
        """Return a client of these replicas."""
        urls = ",".join(str(self.replica(name).endpoint.base_url) for name in names)
        client = ElasticFlowClient(Endpoint.from_url(urls, token=SERVICE_TOKEN), retry_for_s=retry_for_s)
        self._clients.append(client)
        return client

    def role(self, name: str) -> str | None:
        """Return what a replica says of itself; None when it does not answer."""
        try:
            return self.health(name).role
        except ElasticFlowError:
            return None

    def health(self, name: str) -> Health:
        """Return the health that a replica tells, which may be that of the leader."""
        with ElasticFlowClient(self.replica(name).endpoint, retry_for_s=0) as client:
            return client.health()

    def leader(self, limit_s: float = 30.0) -> str:
        """Return the name of the replica that leads, once there is one."""
        pids = {served.pid: name for name, served in self.replicas.items() if served.process is not None}
        return str(
            self.wait(
                lambda: next(
                    (
                        pids[health.pid]
                        for name in self.replicas
                        if (health := self._asked(name)) is not None
                        and health.role == "leader"
                        and health.leadership is not None
                        and health.leadership.leader is not None
                        and health.pid in pids
                    ),
                    None,
                ),
                "one leads",
                limit_s,
            )
        )

    def follower(self) -> str:
        """Return the name of a replica that runs and does not lead."""
        leader = self.leader()
        return next(name for name, served in self.replicas.items() if name != leader and served.answers())

    def _asked(self, name: str) -> Health | None:
        process = self.replica(name).process
        if process is None or process.poll() is not None:
            return None
        try:
            return self.health(name)
        except ElasticFlowError:
            return None

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a replica."""
        process = self.replica(name).process
        assert process is not None
        process.send_signal(number)

    def submission(self, task: str, epochs: int, **given: Any) -> JobSubmission:
        """Return the submission of a job."""
        return JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id=task),
            command=Command(
                snapshot=self.snapshot.sha256,
                script="train.py",
                args=(str(epochs),),
                env={HURRY_ENV: str(self.base / "hurry")},
            ),
            length=Length(epochs=epochs, samples=SAMPLES),
            global_batch_size=BATCH,
            best_effort="deadline_at" not in given,
            **given,
        )

    def submit(self, task: str, epochs: int, client: ElasticFlowClient | None = None, **given: Any) -> str:
        """Submit a job, and return its id."""
        client, submission = client or self.client, self.submission(task, epochs, **given)
        client.upload_snapshot(self.snapshot)
        job_id = submission.identity.job_id
        self.claims[job_id] = client.submit(submission).claim
        return job_id

    def events(self, job_id: str, kind: str) -> list[Event]:
        """Return a job's events of a kind."""
        return [event for event in self.client.events(job_id) if event.kind == kind]

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = 120.0) -> Any:
        """Wait until a condition holds, and return its value."""
        end = time.monotonic() + limit_s
        while not (value := condition()):
            assert time.monotonic() < end, f"waited {limit_s} s in vain: {what}\n{self.story()}"
            time.sleep(0.05)
        return value

    def trains(self, job_id: str, more: int = 5) -> None:
        """Wait until a job makes steps."""
        step = self.client.status(job_id).step
        self.wait(lambda: self.client.status(job_id).step > step + more, f"{job_id} makes steps")

    def ends(self, job_id: str, limit_s: float = 300.0) -> Any:
        """Have a job end quickly now; wait until it has succeeded without a restart, and return its result."""
        hurry(self.base / "hurry", job_id)
        self.wait(lambda: self.client.renew(job_id, self.claims[job_id]).state.terminal, f"{job_id} ends", limit_s)
        status = self.client.status(job_id)
        assert status.state == "succeeded", self.story()
        for kind in ("restarting", "worker_lost"):
            assert not self.events(job_id, kind), self.story()
        assert status.result is not None
        return status.result

    def story(self) -> str:
        """Return what the replicas and the jobs have said."""
        lines = []
        for name, served in self.replicas.items():
            if served.log_file.exists():
                lines += [f"-- {name}", *served.log_file.read_text(errors="replace").splitlines()[-25:]]
        try:
            with self.client_of(*self.replicas, retry_for_s=0) as client:
                events = sorted((e for job_id in self.claims for e in client.events(job_id)), key=lambda e: e.at)
                lines += [f"{event.at:.1f} {event.job_id} {event.kind}: {event.reason}" for event in events]
        except ElasticFlowError as error:
            lines.append(f"(no events: {error})")
        return "\n".join(lines)

    def end(self) -> None:
        """End everything; nobody may be left."""
        for client in self._clients:
            client.close()
        for served in self.replicas.values():
            if served.process is not None and served.process.poll() is None:
                served.process.send_signal(signal.SIGCONT)
                served.stop()
        for status_file in self.base.glob("*/jobs/*/i*/supervisors/*/status.json"):
            status = SupervisorFolder(status_file.parent).read_status()
            if status is not None and status.supervisor is not None:
                status.supervisor.kill()
        for agent, _ in self.agents.values():
            agent.terminate()
            agent.wait(30.0)
            if agent.stdout is not None:
                agent.stdout.close()


@contextmanager
def replicas(trial: ReplicaTrial) -> Iterator[ReplicaTrial]:
    """Run the replicas for the block."""
    try:
        trial.start()
        yield trial
    finally:
        trial.end()
    nobody_is_left(trial.base)
