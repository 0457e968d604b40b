"""Faults at random on replicas, their database and three machines, judged by the history that the workers write."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import psycopg
from cryptography.fernet import Fernet

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length, State
from elasticflow_airflow.client import ElasticFlowClient, Endpoint
from elasticflow_airflow.client.errors import ElasticFlowError
from elasticflow_airflow.service.http.forwarding import FORWARDED
from support.faulty_trial import FAULTY, NODES, Fault, FaultyTrial, let_go_on, stop
from support.machines import Machines
from support.node_agents import TOKEN
from support.postgres import Postgres
from support.trial import nobody_is_left

REPLICAS = (NODES, NODES + 1)
"""The machines of the replicas."""
_TOKEN = "a-token-of-all-replicas"
_PORT = 8321
_IN_TRANSACTION_S = 3.0
_LEADS_S = 60.0
_PAUSE_S = 0.5


@dataclass
class FaultyReplicas(FaultyTrial):
    """Two services on machines of their own, over three others and one PostgreSQL."""

    machines: Machines = field(default_factory=lambda: Machines(NODES + len(REPLICAS)))
    postgres: Postgres = field(kw_only=True)
    key: str = field(default_factory=lambda: Fernet.generate_key().decode())
    led: set[str] = field(default_factory=set)
    """Epochs that were seen."""

    @property
    def base(self) -> Path:
        return self.state_dir.parent

    def urls(self) -> list[str]:
        return [f"http://{self.machines.addresses[index]}:{_PORT}" for index in REPLICAS]

    def start(self) -> None:
        for index in REPLICAS:
            self.machines.run(index, *self.serving(index))
            self.wait(lambda i=index: self.is_ready(i), "it answers", 60)

    def serving(self, index: int) -> tuple[list[str], dict[str, str]]:
        """Return the command line of a replica, and its environment."""
        folder = self.base / f"replica{index}"
        folder.mkdir(exist_ok=True)
        settings = {
            "checkpoint_interval_s": 5,
            "profile_s": 1,
            "heartbeat_limit_s": 6,
            "max_recoveries": 10,
            "engine": "cluster",
            "shared_dir": self.base / "shared",
            "node_token": TOKEN,
            "nodes": ",".join(f"http://{self.listen(node)}" for node in range(NODES)),
            "database_url": f"postgresql://elasticflow@{self.machines.outside}/service",
            "token": _TOKEN,
            "secret_key": self.key,
            "state_dir": folder,
            **FAULTY,
        }
        others = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICFLOW_")}
        env = {**others, **{f"ELASTICFLOW_{name.upper()}": str(value) for name, value in settings.items()}}
        serve = [sys.executable, "-c", "from elasticflow_airflow.cli.main import main; main()", "serve"]
        words = [*serve, "--host", self.machines.addresses[index], "--port", str(_PORT)]
        return ["sh", "-c", f'exec "$@" >>{folder}/served.log 2>&1', "sh", *words], {**env, "CUDA_VISIBLE_DEVICES": ""}

    def is_ready(self, index: int) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.urls()[index - NODES]}/readyz", trust_env=False, timeout=2.0).status_code == 200
        return False

    def role(self, index: int) -> str | None:
        """Return the role of a replica, and note the epoch; None if it does not answer."""
        headers = {"Authorization": f"Bearer {_TOKEN}", FORWARDED: "1"}
        url = f"{self.urls()[index - NODES]}/v1/health"
        with suppress(httpx.HTTPError, KeyError, TypeError):
            found = httpx.get(url, headers=headers, trust_env=False, timeout=2.0).json()
            self.led.add(str(found["leadership"]["epoch"]))
            return str(found["role"])
        return None

    def leader(self) -> int:
        """Return the machine of the replica that leads, once there is one."""
        return int(
            self.wait(
                lambda: next((index for index in REPLICAS if self.role(index) == "leader"), None), "one leads", _LEADS_S
            )
        )

    def services(self, index: int) -> list[psutil.Process]:
        return [one for one in self.named(index, "serve") if one.cmdline()[:1] == [sys.executable]]

    def spoil(self, *faults: Fault) -> None:
        """The database goes last, and once: another fault is for the leader, and without a database there is none."""
        others = [fault for fault in faults if fault != self.restart_the_database]
        super().spoil(*others, *([self.restart_the_database] if len(others) < len(faults) else []))

    def settle(self) -> None:
        for index in REPLICAS:
            self.wait(lambda i=index: self.is_ready(i), f"replica {index} answers", _LEADS_S)
        super().settle()

    def end(self) -> None:
        nobody_is_left(self.base)

    def story(self) -> str:
        lines = []
        with suppress(ElasticFlowError):
            lines.append(super().story())
        for index in REPLICAS:
            log = self.base / f"replica{index}" / "served.log"
            said = log.read_text(errors="replace").splitlines() if log.exists() else []
            lines += [f"-- replica {index}", *[line for line in said if "job_id='crowd-" not in line][-60:]]
        return "\n".join(lines)

    # -- faults of replicas and of the database: they befall no machine of the nodes.

    def kill_the_leader(self, _: int) -> Callable[[], object]:
        return self.kill_a_replica(self.leader())

    def kill_a_follower(self, _: int) -> Callable[[], object]:
        leader = self.leader()
        return self.kill_a_replica(next(index for index in REPLICAS if index != leader))

    def kill_a_replica(self, index: int) -> Callable[[], object]:
        for one in self.services(index):
            one.kill()
        return lambda: self.machines.run_beside(index, *self.serving(index))

    def stop_the_leader(self, _: int) -> Callable[[], object]:
        return stop(self.services(self.leader()))

    def stop_the_leader_in_a_transaction(self, _: int) -> Callable[[], object]:
        """Stop it where it holds the lock of all who write; anywhere, if that is not seen for some seconds."""
        leader = self.leader()
        found, address = self.services(leader), self.machines.addresses[leader]
        end_s = time.monotonic() + _IN_TRANSACTION_S
        with self.connection() as connection:
            while time.monotonic() < end_s:
                for one in found:
                    one.suspend()
                writes = connection.execute(
                    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory'"
                    " AND granted AND state = 'idle in transaction' AND client_addr = %s",
                    (address,),
                ).fetchone()
                if writes is not None and writes[0]:
                    print("stopped inside a transaction", flush=True)
                    break
                let_go_on(found)
                time.sleep(0.003)
            else:
                return stop(found)
        return lambda: let_go_on(found)

    def cut_off_the_leader(self, _: int) -> Callable[[], object]:
        """From the other replica, the database, the nodes and the clients."""
        leader = self.leader()
        self.machines.cut(leader)
        return lambda: self.machines.heal(leader)

    def cut_the_power_of_the_leader(self, _: int) -> Callable[[], object]:
        leader = self.leader()
        self.machines.cut_power(leader)

        def start() -> None:
            self.machines.heal(leader)
            self.machines.run(leader, *self.serving(leader))

        return start

    def restart_the_database(self, _: int) -> Callable[[], object]:
        self.postgres.stop()
        return self.postgres.start

    def cut_the_connections(self, _: int) -> None:
        with self.connection() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE client_addr IS NOT NULL"
                " AND pid <> pg_backend_pid()"
            )

    def upgrade(self, _: int) -> None:
        """Exchange one replica after the other, as planned; one that stands still is killed, as systemd does."""
        for index in REPLICAS:
            found = self.services(index)
            for one in found:
                one.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(found, timeout=30)
            for one in left:
                one.kill()
            psutil.wait_procs(left, timeout=10)
            self.machines.run_beside(index, *self.serving(index))
            self.wait(lambda i=index: self.is_ready(i), "it answers", 60)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(f"host={self.postgres.base} user=elasticflow dbname=service", autocommit=True) as found:
            yield found

    def faults(self) -> list[Fault]:
        of_replicas = [
            *(self.kill_the_leader, self.kill_a_follower, self.stop_the_leader, self.stop_the_leader_in_a_transaction),
            *(self.cut_off_the_leader, self.cut_the_power_of_the_leader, self.restart_the_database),
            *(self.cut_the_connections, self.upgrade),
        ]
        of_workers = [self.kill_a_worker, self.kill_a_supervisor]
        return [*of_replicas, *of_workers, self.kill_the_agent, self.cut_the_power, self.cut_it_off]


@contextmanager
def replicas_running(trial: FaultyReplicas) -> Iterator[FaultyReplicas]:
    """Start agents and replicas, and end them, with all that is left, afterwards."""
    try:
        for index in range(NODES):
            trial.start_node(index)
        trial.start()
        trial.client = ElasticFlowClient(
            Endpoint.from_url(",".join(trial.urls()), token=_TOKEN), retry_for_s=120.0, timeout_s=5.0
        )
        yield trial
    finally:
        trial.client.close()
        trial.machines.close()
    trial.end()


class Crowd:
    """Submits, polls and cancels through all replicas meanwhile; what was acknowledged must come to its end."""

    def __init__(self, trial: FaultyReplicas, sha256: str) -> None:
        self._trial, self._sha256 = trial, sha256
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.asked: dict[str, str] = {}
        """By job that was acknowledged, the state in which it has to end."""
        self.failed: list[str] = []

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        urls = self._trial.urls()
        while not self._stop.wait(_PAUSE_S):
            number += 1
            ordered = ",".join(urls[number % len(urls) :] + urls[: number % len(urls)])
            client = ElasticFlowClient(Endpoint.from_url(ordered, token=_TOKEN), retry_for_s=120.0, timeout_s=5.0)
            try:
                with client:
                    self._one(client, number)
            except ElasticFlowError as error:
                self.failed.append(f"job {number}: {error}")

    def _one(self, client: ElasticFlowClient, number: int) -> None:
        """One job in two has a deadline that nobody can keep, the other one is cancelled."""
        hopeless = number % 2 == 0
        submission = JobSubmission(
            identity=JobIdentity(dag_id="crowd", run_id=f"run{number}", task_id="train"),
            command=Command(snapshot=self._sha256, script="train_ledger.py"),
            length=Length(steps=100_000),
            global_batch_size=32,
            max_workers=1,
            scaling_curve={1: 6.0},
            best_effort=not hopeless,
            deadline_at=time.time() + 60.0 if hopeless else None,
        )
        job_id = submission.identity.job_id
        claim = client.submit(submission).claim
        self.asked[job_id] = State.REJECTED if hopeless else State.CANCELLED
        client.status(job_id)
        if not hopeless:
            client.cancel(job_id, claim, "of the crowd")

    def wrong(self) -> list[str]:
        """Return what was lost or ended otherwise."""
        found, client = list(self.failed), self._trial.client
        for job_id, state in self.asked.items():
            self._trial.wait(lambda j=job_id: client.status(j).state.terminal, f"{job_id} ends", 60)
            status = client.status(job_id)
            if status.state != state:
                found.append(f"{job_id} is {status.state}, not {state}: {status.reason}")
        return found
