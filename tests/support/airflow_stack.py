"""A real Airflow with real services beside it, and what users do with it through the REST API.

api-server, scheduler (LocalExecutor), triggerer and dag-processor are processes of their own, as are the services; any
of them can be killed and started again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil

from elasticflow_airflow.api import Event, JobStatus, State
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint
from support.postgres import Postgres

COMPONENTS = ("api-server", "scheduler", "triggerer", "dag-processor")
LEASE_S, ORPHAN_S = 20.0, 70.0
HEARTBEAT_TIMEOUT_S = 45.0
"""After how long without a heartbeat a task's worker counts as dead; longer on a machine that is slow."""
UNSAID = "unsaid"
"""A connection to the usual service for a namespace of its own, of which Airflow's owner watch does not know."""
_LOOK_EVERY_S = 1.0
_WHOLE_EVERY = 8
_UNSEEN = timedelta(seconds=20)
"""How long a change that was made before a look may stay unseen by it: until it is committed."""
_UNHURRIED = httpx.Limits(keepalive_expiry=2.0)
"""The server closes an idle connection after five seconds: a request that is sent meanwhile would be lost."""
PATIENCE_S = 600.0
"""How long to wait for a state: a machine that is several times as slow is no failure."""


class Service:
    """A service of its own state directory: one that a test may stop, or the embedded one that Airflow starts."""

    def __init__(self, state_dir: Path, settings: dict[str, str], *, ours: bool) -> None:
        self.state_dir, self.ours = state_dir, ours
        self.client = ElasticFlowClient(Endpoint(socket_path=state_dir / "service.sock"), retry_for_s=60)
        self.jobs: list[JobStatus] = []
        """As of the last look."""
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connection(self) -> dict[str, Any]:
        """Fields of an Airflow connection to it."""
        if self.ours:
            return {"host": f"unix://{self.state_dir}/service.sock"}
        return {"extra": {"state_dir": str(self.state_dir)}}

    def start(self) -> None:
        self.state_dir.mkdir(exist_ok=True, mode=0o700)
        with (self.state_dir / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elasticflow_airflow.service", "--state-dir", str(self.state_dir)],
                env={**clean_environment(), **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the service, and wait until it is gone."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None
        elif (pid := self.embedded_pid()) is not None:
            process = psutil.Process(pid)
            process.send_signal(number)
            process.wait(60)

    def embedded_pid(self) -> int | None:
        card = self.state_dir / "service.json"
        pid = int(json.loads(card.read_text())["pid"]) if card.exists() else 0
        return pid if pid and psutil.pid_exists(pid) else None

    def look(self) -> None:
        with ElasticFlowClient(self.client.endpoint, retry_for_s=0) as client:
            self.jobs = client.list_jobs(limit=1000)

    def log_tail(self) -> str:
        log = self.state_dir / "service.log"
        return f"--- {log}\n{log.read_text()[-3000:]}" if log.exists() else ""


@dataclass
class Stack:
    """The components, the services by their connection's id, and what was seen of both at the last look."""

    home: Path
    environment: dict[str, str]
    http: httpx.Client
    services: dict[str, Service]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    tasks: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    """Task instances by (dag, run, task), as of the last look: one question for all tests that wait."""
    database: Postgres | None = None
    """The server of all databases; None: they are SQLite's."""
    closing: bool = False
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    """Many paths that ask at once would only keep each other from SQLite."""

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, component: str) -> None:
        environment = self.environment if component != "api-server" else self.environment | self.impatient()
        with (self.home / f"{component}.out").open("ab") as output:
            self.processes[component] = subprocess.Popen(
                [sys.executable, "-m", "airflow", component],
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self.home,
                start_new_session=True,
            )

    def impatient(self) -> dict[str, str]:
        """Settings to give up sooner on a locked SQLite than the others do.

        Airflow's API server can lock itself out: it writes its audit log in the event loop, and waits there for another
        of its requests, which needs that loop to commit. All others wait as well, and would fail in its stead.
        """
        name = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
        return {name: self.environment[name].replace("timeout=60", "timeout=4")}

    def kill(self, component: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a component itself; what it started is left to find out."""
        process = self.processes.pop(component)
        process.send_signal(number)
        process.wait(60)

    def ready(self, dags: int) -> bool:
        """Whether every component is healthy and every DAG known."""
        try:
            token = self.http.get("/auth/token").json()["access_token"]
            self.http.headers["Authorization"] = f"Bearer {token}"
            parts = self.http.get("/api/v2/monitor/health").json()
            known = self.http.get("/api/v2/dags").json()["total_entries"]
        except (httpx.HTTPError, ValueError, KeyError):
            return False
        return known == dags and all(
            parts[part]["status"] == "healthy" for part in ("scheduler", "triggerer", "dag_processor")
        )

    def watch(self) -> None:
        """Look at everything again and again, until the stack closes; start what ended by itself, as systemd does.

        Airflow's scheduler ends when a run is deleted that it is looking at, its triggerer when SQLite is locked.
        """
        looks, last = 0, datetime.now(UTC)
        while not self.closing:
            began, now = time.monotonic(), datetime.now(UTC)
            for component, process in list(self.processes.items()):
                if process.poll() is not None and self.processes.get(component) is process and not self.closing:
                    self.start(component)
            try:
                # What has changed; and sometimes all, as what was deleted has not changed.
                known = self.tasks if looks % _WHOLE_EVERY else {}
                since = {"updated_at_gte": (last - _UNSEEN).isoformat()} if known else {}
                asked = {"limit": 1000, **since}
                found = self.ask("GET", "/api/v2/dags/~/dagRuns/~/taskInstances", params=asked).json()
                changed = {(t["dag_id"], t["dag_run_id"], t["task_id"]): t for t in found["task_instances"]}
                self.tasks, last, looks = {**known, **changed}, now, looks + 1
            except (httpx.HTTPError, ValueError, KeyError):
                looks = 0  # a component that is being restarted by a test; who waits for it has a limit
            for service in self.services.values():
                try:
                    service.look()
                except ElasticFlowError:
                    continue  # as above
            time.sleep(max(_LOOK_EVERY_S, 2.0 * (time.monotonic() - began)))  # the machine is not there for this

    # -- what users do -----------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, *, repeatable: bool = False, **options: Any) -> httpx.Response:
        """Ask the API; a server that is being started, or a database that is locked for a moment, is asked again.

        So is one whose connection breaks before it has answered, where to ask twice is no harm.
        """
        end = time.monotonic() + 90
        while True:
            try:
                with self.one_at_a_time:
                    answer = self.http.request(method, path, **options)
            except httpx.TransportError as error:
                harmless = repeatable or method == "GET" or isinstance(error, httpx.ConnectError)
                if not harmless or time.monotonic() > end or self.closing:
                    raise
            else:
                if answer.status_code < 500 or time.monotonic() > end:
                    return answer
            time.sleep(0.5)

    def do(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self.ask(method, path, **options)
        assert answer.status_code < 400, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer

    def run(self, dag_id: str) -> Run:
        """Trigger a DAG."""
        run_id = f"manual__{uuid.uuid4()}"
        asked = {"logical_date": None, "dag_run_id": run_id}
        answer = self.ask("POST", f"/api/v2/dags/{dag_id}/dagRuns", repeatable=True, json=asked)
        assert answer.status_code < 400 or answer.status_code == 409, f"{answer.status_code} {answer.text}"
        return Run(self, dag_id, run_id)

    def wait(self, what: str, condition: Callable[[], Any], limit_s: float = PATIENCE_S, every_s: float = 0.2) -> Any:
        """Wait for a condition; on failure quote the ends of all logs. One that asks for much is not asked often."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not self.closing:
            if found := condition():
                return found
            time.sleep(every_s)
        raise AssertionError(f"not within {limit_s} s: {what}\n{self.tails()}")

    def tails(self) -> str:
        ends = [f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.home.glob("*.out"))]
        gone = [
            f"--- {component} has ended with {process.returncode}"
            for component, process in self.processes.items()
            if process.poll() is not None
        ]
        states = [f"{'.'.join(key)}: {task['state']}, try {task['try_number']}" for key, task in self.tasks.items()]
        return "\n".join(
            [*ends, *gone, *(service.log_tail() for service in self.services.values()), "--- tasks", *states]
        )

    # -- the process table -------------------------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """Every process of this stack: Airflow's, services, supervisors, workers, whoever is their parent by now."""
        needle, found = str(self.home), []
        for process in psutil.process_iter(["cmdline"]):
            try:
                # A process that names itself, as Airflow's do, overwrites its arguments and environment.
                about = " ".join([*(process.info["cmdline"] or ()), *process.environ().values(), process.cwd()])
                if process.pid != os.getpid() and needle in about and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def trainers(self) -> list[psutil.Process]:
        """Processes that train, or watch over who trains."""
        return [p for p in self.family() if any("elasticflow_airflow.runtime" in w for w in command_line(p))]

    def close(self) -> None:
        """End everything that was started, and everything that those started: nobody needs their last words."""
        self.closing = True
        for _ in range(5):  # who is killed in the middle of a start may have left a child behind
            family = self.family()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=5)
            if not family:
                break
        for component in self.processes.values():
            component.wait(10)
        for service in self.services.values():
            service.client.close()


@dataclass(frozen=True)
class Run:
    """One run of a DAG, whose task is called "train" unless said otherwise, and the job of that task."""

    stack: Stack
    dag_id: str
    run_id: str

    def task(self, task_id: str = "train") -> dict[str, Any]:
        """The task instance as of the last look; empty before it is there, or after it was deleted."""
        return self.stack.tasks.get((self.dag_id, self.run_id, task_id), {})

    def task_now(self, task_id: str = "train") -> dict[str, Any]:
        return dict(self.stack.do("GET", f"{self._path}/taskInstances/{task_id}").json())

    def job(self, task_id: str = "train") -> JobStatus | None:
        for service in self.stack.services.values():
            for job in service.jobs:
                identity = job.identity
                if (identity.dag_id, identity.run_id, identity.task_id) == (self.dag_id, self.run_id, task_id):
                    return job
        return None

    def events(self, kind: str, task_id: str = "train", service: str = "elasticflow_default") -> list[Event]:
        job = self.job(task_id)
        assert job is not None
        return [e for e in self.stack.services[service].client.events(job.job_id) if e.kind == kind]

    def reach(self, state: str, task_id: str = "train", limit_s: float = PATIENCE_S) -> None:
        """Wait until the task is in a state; fail at once, with its log, when it ends in another."""

        def there() -> bool:
            task = self.task(task_id)
            now = task.get("state")
            if now in ("failed", "success") and now != state:
                self._ended_otherwise(state, task_id)
            return bool(now == state)

        self.stack.wait(f"{self.dag_id}.{task_id} is {state}", there, limit_s)

    def trains(self, task_id: str = "train", beyond: int = 0) -> JobStatus:
        """Wait until its job has made steps."""

        def far() -> JobStatus | None:
            job = self.job(task_id)
            if job is None and self.task(task_id).get("state") in ("failed", "success"):
                self._ended_otherwise("running", task_id)
            return job if job is not None and job.state is State.RUNNING and job.step > beyond else None

        found: JobStatus = self.stack.wait(f"{self.dag_id}.{task_id} trains", far)
        return found

    def waits_in_triggerer(self, task_id: str = "train") -> JobStatus:
        """Wait until the trigger has renewed the lease: a kill before that reaches nobody, only the lease ends it."""
        self.reach("deferred", task_id)
        first = self.stack.wait("its job", lambda: self.job(task_id)).lease_expires_at or 0.0

        def renewed() -> JobStatus | None:
            job = self.job(task_id)
            return job if job is not None and (job.lease_expires_at or 0.0) > first else None

        found: JobStatus = self.stack.wait("the trigger renews", renewed)
        return found

    def ended(self, state: State, task_id: str = "train", limit_s: float = PATIENCE_S) -> JobStatus:
        """Wait until the job has ended; fail at once when it ended otherwise."""

        def over() -> JobStatus | None:
            job = self.job(task_id)
            return job if job is not None and job.state.terminal else None

        job: JobStatus = self.stack.wait(f"the job of {self.dag_id}.{task_id} is {state}", over, limit_s)
        assert job.state is state, f"{job.state}, not {state}: {job.state_reason} {job.failure}"
        return job

    def _ended_otherwise(self, state: str, task_id: str) -> None:
        """Fail, with its log, if the task has ended, and not only before a clear."""
        task = self.task_now(task_id)
        if (now := task["state"]) in ("failed", "success"):
            log = self.log(task["try_number"], task_id)
            raise AssertionError(
                f"{self.dag_id}.{task_id} is {now}, not {state}:\n{log}\n{self.job(task_id)}\n{self.stack.tails()}"
            )

    def acknowledged(self, task_id: str = "train") -> JobStatus:
        """Wait until Airflow's success was told to the service."""

        def heard() -> JobStatus | None:
            job = self.job(task_id)
            return job if job is not None and job.acknowledged else None

        found: JobStatus = self.stack.wait(f"{self.dag_id}.{task_id} is acknowledged", heard)
        return found

    def over(self) -> None:
        """Wait until the run itself has succeeded.

        Airflow may end a run while one of its tasks is being cleared, and never look at that task again: it then says
        of the run "success", and of the task nothing.
        """
        self.stack.wait(f"the run of {self.dag_id} has ended", lambda: self.state() == "success")

    def state(self) -> str:
        return str(self.stack.do("GET", self._path).json()["state"])

    def mark(self, state: str, task_id: str = "train") -> None:
        self.stack.do("PATCH", f"{self._path}/taskInstances/{task_id}", json={"new_state": state})

    def mark_run(self, state: str) -> None:
        self.stack.do("PATCH", self._path, json={"state": state})

    def delete(self) -> None:
        self.stack.do("DELETE", self._path)

    def clear(self, task_ids: Sequence[str] = ("train",)) -> None:
        body = {"dry_run": False, "dag_run_id": self.run_id, "task_ids": list(task_ids), "only_failed": False}
        self.stack.do("POST", f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body)

    def log(self, attempt: int, task_id: str = "train") -> str:
        answer = self.stack.ask(
            "GET",
            f"{self._path}/taskInstances/{task_id}/logs/{attempt}",
            params={"full_content": True},
            headers={"Accept": "application/json"},
        )
        return answer.text

    def processes(self, task_id: str = "train") -> tuple[psutil.Process, psutil.Process]:
        """The process that runs this attempt, whose pid Airflow knows by its heartbeat, and its supervisor."""

        def alive() -> psutil.Process | None:
            pid = self.task_now(task_id)["pid"]
            return psutil.Process(pid) if pid and psutil.pid_exists(pid) else None

        runner = self.stack.wait(f"a process of {self.dag_id}.{task_id}", alive)
        return runner, runner.parent()

    @property
    def _path(self) -> str:
        return f"/api/v2/dags/{self.dag_id}/dagRuns/{self.run_id}"


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; none when it is gone."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def clean_environment() -> dict[str, str]:
    """This process' environment without any setting of Airflow's or ours."""
    return {n: v for n, v in os.environ.items() if not n.startswith(("AIRFLOW", "ELASTICFLOW"))}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; none of those that a connection gets that is opened before they are used."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def open_stack(
    dag_file: str,
    dags: int,
    *,
    database: str | None = None,
    service_database: str | None = None,
    connections: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, str] | None = None,
) -> Stack:
    """Start everything, and wait until it is ready. ``database`` are SQLAlchemy's URLs; None: SQLite.

    With ``connections``, fields of each by its id, it has no services of its own. ``settings`` replace Airflow's below.
    """
    home = Path(tempfile.mkdtemp(prefix="ef-stack-"))
    (home / "dags" / "code").mkdir(parents=True)
    (home / "dags" / ".airflowignore").write_text("code/\n")
    (home / "dags" / "code" / "train.py").write_text(_SCRIPT)
    (home / "dags" / "stack_dags.py").write_text(dag_file)
    port, worker_port, trigger_port = free_ports(3)
    url = f"http://127.0.0.1:{port}"
    fake = {"ELASTICFLOW_ENGINE": "fake", "ELASTICFLOW_VIRTUAL_NODES": "4x16"}
    served = {**fake, **({"ELASTICFLOW_DATABASE_URL": service_database} if service_database else {})}
    local = {
        "ELASTICFLOW_ENGINE": "local",
        "ELASTICFLOW_SLOTS": "1",
        "ELASTICFLOW_SLOT_LOCK_DIR": str(home / "locks"),
        "ELASTICFLOW_CHECKPOINT_INTERVAL_S": "1",
    }
    services = {}
    if connections is None:
        services = {
            "elasticflow_default": Service(home / "d", served, ours=True),
            "local": Service(home / "l", local, ours=True),
            "embedded": Service(home / "e", {}, ours=False),
        }
        connections = {name: service.connection for name, service in services.items()}
        connections[UNSAID] = connections["elasticflow_default"] | {"extra": {"namespace": UNSAID}}
    database = database or f"sqlite:///{home}/airflow.db?timeout=60"  # many write at once
    environment = {
        **clean_environment(),
        **fake,
        **{
            f"AIRFLOW_CONN_{name.upper()}": json.dumps({"conn_type": "elasticflow", **fields})
            for name, fields in connections.items()
        },
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__MAXIMUM_PAGE_LIMIT": "1000",  # A look at all is a look at all.
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": "a secret of this test that is long enough for the hash it feeds",
        "AIRFLOW__API__SECRET_KEY": "another secret of this test, long enough",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "12",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(worker_port),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_port),
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
        "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "3",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
        "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "100",
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW__ELASTICFLOW__POLL_INTERVAL_S": "1",
        "AIRFLOW__ELASTICFLOW__INLINE_WAIT_S": "1",
        "AIRFLOW__ELASTICFLOW__LEASE_S": str(LEASE_S),
        "AIRFLOW__ELASTICFLOW__ORPHAN_S": str(ORPHAN_S),
        **(settings or {}),
    }
    if database.startswith("postgresql"):
        environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC"] = database  # psycopg does both
    http = httpx.Client(base_url=url, timeout=90, trust_env=False, limits=_UNHURRIED)
    stack = Stack(home, environment, http, services)
    try:
        migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
        began = time.monotonic()
        done = subprocess.run(migrate, env=environment, timeout=PATIENCE_S, capture_output=True, check=False)
        # As long as an API server is away that was killed, nobody's heartbeat arrives, and it starts as slowly as this.
        patience_s = max(HEARTBEAT_TIMEOUT_S, 8.0 * (time.monotonic() - began))
        environment["AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"] = f"{patience_s:.0f}"
        # The job of a worker whose death is noticed that late has to be there still when the retry comes.
        orphan_s = max(float(environment["AIRFLOW__ELASTICFLOW__ORPHAN_S"]), 1.5 * patience_s)
        environment["AIRFLOW__ELASTICFLOW__ORPHAN_S"] = f"{orphan_s:.0f}"
        assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
        for service in services.values():
            if service.ours:
                service.start()
        for component in COMPONENTS:
            stack.start(component)
        stack.wait("Airflow is ready", lambda: stack.ready(dags))
        threading.Thread(target=stack.watch, name="watch", daemon=True).start()
    except BaseException:
        close_stack(stack)
        raise
    return stack


def close_stack(stack: Stack) -> None:
    """End a stack and remove its folder."""
    try:
        stack.close()
    finally:
        stack.http.close()
        shutil.rmtree(stack.home, ignore_errors=True)


_SCRIPT = '''
"""What the local engine trains: one number, slowly. (The modelled engine reads no script.)"""
import time
import torch
from elasticflow_airflow import runtime

session = runtime.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.register(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.ones(64, 1), torch.ones(64, 1))
loader = session.dataloader(data, global_batch_size=8)
for _epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for inputs, targets in step.split(batch):
                step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.05)
if not session.is_warming_up:
    session.finish()
'''
