"""What the service needs beside many machines: its calls to their agents, and the passes of its loop.

    python benchmarks/bench_many_nodes.py [--nodes 64] [--jobs 500] [--seconds 40] [--report-s 2] [--write]

As many node agents as machines, all on this one, with 8 slots each; the service with its default configuration, and
jobs with one worker each, best effort. The agents are those that users start; the workers are modelled: a thread of
the agent writes what supervisor and trainer would (a sign of life each second, a report as often as a real training
that has gone on for a while). Once all jobs report, and a minute later, the service's requests that tell an agent
something (``/push``) and the passes of its loop are timed for ``--seconds``: in the service, wall-clock time. Agents
share the cores with the service here, where elsewhere each has its own; they run at a lower priority, and where they
want more than is there, the times are those of an overloaded machine. No job may be disturbed meanwhile. Not modelled:
checkpoints, workers' output, and changes in place.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from results import parser_of, percentile, show, table

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length, State
from elasticflow_airflow.client import ElasticFlowClient, snapshot_folder
from elasticflow_airflow.engines.cluster import node_agent, node_link
from elasticflow_airflow.engines.local.files.generation_folder import (
    Status,
    SupervisorFolder,
    SupervisorSpec,
    WorkerStatus,
)
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.local.node_manager import NodeManager
from elasticflow_airflow.runtime.protocol import (
    Report,
    ReportKind,
    append_report,
    heartbeat_path,
    report_path,
    write_json_atomic,
)
from elasticflow_airflow.runtime.reporting import STEADY_INTERVAL_S, WORKER_INTERVAL_S

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.node_agents import TOKEN, agent_command
from support.served import Served

SLOTS = 8
MEMORY = Path("/dev/shm")
TICK_S = 0.05
LOOK_S, BEAT_S = 0.1, 1.0
STEPS_PER_S = 2
CLIENTS = 16
REPORT_S_ENV = "BENCH_REPORT_S"
TIMES_ENV = "BENCH_TIMES"
"""Where the service writes what it has timed: a line of JSON for each."""
LIMIT_S = 900.0


# -- the machines -----------------------------------------------------------------------------------------------------


class ModelledSupervisor:
    """One generation on one node. A process that does nothing, and ends with the agent, stands for all of its own."""

    def __init__(self, folder: SupervisorFolder, spec: SupervisorSpec, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._spec, self._process = folder, spec, process
        self._root = Path(spec.incarnation_dir)
        own = ProcessId.of(process.pid)
        self._status = Status(supervisor=own)
        for worker in spec.workers:
            self._status.workers[worker.worker_id] = WorkerStatus(rank=worker.rank, agent=own, trainer=own)
        self._locks: list[int] = []
        self._order = folder.path / "order.json"
        self._due = dict[str, float]()
        """When each of its tasks is due next; none of them before the generation may start."""
        self._reported = 0

    def tick(self, now_s: float, report_s: float) -> bool:
        """Do what is due; return whether it goes on."""
        if not self._due:
            if not self._folder.warm.exists():
                self._folder.warm.touch()
            if self._folder.read_order() is not None:
                self._end()
                return False
            if self._folder.go.exists():
                self._begin(now_s)
            return True
        if self._is_due("look", LOOK_S, now_s) and self._order.exists():
            self._end()
            return False
        if self._is_due("beat", BEAT_S, now_s):
            self._beat(report_s)
        if self._is_due("report", report_s, now_s):
            self._report(report_s, now_s)
        return True

    def _is_due(self, what: str, every_s: float, now_s: float) -> bool:
        if now_s < self._due[what]:
            return False
        self._due[what] += every_s
        return True

    def _begin(self, now_s: float) -> None:
        for worker in self._spec.workers:
            holder = {"job_id": self._spec.job_id, "incarnation": self._spec.incarnation, "pid": self._process.pid}
            holder |= {"generation": self._spec.generation, "state_dir": self._spec.state_dir}
            self._locks.append(slots.acquire(Path(self._spec.lock_dir), worker.lock_name, holder))
        self._folder.write_status(self._status)
        self._say(ReportKind.STARTED, {"in_place": True, "threads": 1, "micro_batch_size": 8})
        self._due = {what: now_s + random.random() for what in ("look", "beat", "report", "worker")}

    def _beat(self, report_s: float) -> None:
        for worker in self._spec.workers:
            said = {"step": self._step(report_s), "phase": "train", "at_s": time.time()}
            write_json_atomic(heartbeat_path(self._root, worker.worker_id), said, flush=False)

    def _report(self, report_s: float, now_s: float) -> None:
        self._reported += 1
        steps = STEPS_PER_S * report_s
        spent = {"data_s": 0.01, "compute_s": 0.9, "reduce_s": 0.05, "wait_s": 0.02, "pause_s": 0.0, "save_s": 0.0}
        spent = {name: share * report_s for name, share in spent.items()} | {"other_s": 0.02 * report_s}
        window = {"window_steps": steps, "samples": 8 * steps, "memory_bytes": 10**9, **spent}
        more = {"loss": 1.0, "window_s": report_s, "epoch": 1, "samples_per_s": 8 * STEPS_PER_S, "noise_scale": 50.0}
        self._say(ReportKind.PROGRESS, {**window, **more}, self._step(report_s))
        if self._is_due("worker", max(WORKER_INTERVAL_S, report_s), now_s):
            self._say(ReportKind.WORKER, window, self._step(report_s))

    def _end(self) -> None:
        for worker in self._status.workers.values():
            worker.ended, worker.exit_code = True, 0
        self._status.told = self._status.ended = True
        for lock in self._locks:
            os.close(lock)
        self._folder.write_status(self._status)
        self._process.kill()

    def _step(self, report_s: float) -> int:
        return round(self._reported * STEPS_PER_S * report_s)

    def _say(self, kind: ReportKind, data: Mapping[str, Any], step: int = 0) -> None:
        first, generation = self._spec.workers[0], self._spec.generation
        report = Report(
            kind=kind, generation=generation, worker_id=first.worker_id, rank=first.rank, step=step, data=data
        )
        append_report(report_path(self._root, generation, first.worker_id), report)


class ModelledMachine(NodeManager):
    """A machine on which supervisors are modelled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._modelled: dict[Path, ModelledSupervisor] = {}
        threading.Thread(target=self._tick_for_ever, daemon=True).start()

    def _spawn(
        self,
        folder: SupervisorFolder,
        spec: SupervisorSpec,
        secret_env: Mapping[str, str],  # noqa: ARG002
    ) -> subprocess.Popen[bytes]:
        folder.renew()
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=folder.path)
        self._modelled[folder.path] = ModelledSupervisor(folder, spec, process)
        return process

    def _tick_for_ever(self) -> None:
        report_s = float(os.environ[REPORT_S_ENV])
        try:
            while True:
                for path, one in list(self._modelled.items()):
                    if not one.tick(time.monotonic(), report_s):
                        del self._modelled[path]
                time.sleep(TICK_S)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)  # a machine on which nothing happens any more would be taken for a quiet one


def run_machine() -> None:
    """Be ``elasticflow node``, on a modelled machine."""
    from elasticflow_airflow.cli.main import main

    node_agent.NodeManager = ModelledMachine  # type: ignore[misc]
    main()


# -- the service ------------------------------------------------------------------------------------------------------


def run_service() -> None:
    """Be ``elasticflow``, and note times."""
    from elasticflow_airflow.cli.main import main
    from elasticflow_airflow.service.loop.reconcile import Reconciler

    times = os.open(os.environ[TIMES_ENV], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(kind: str, took_s: float) -> None:
        os.write(times, json.dumps([kind, time.time(), took_s]).encode() + b"\n")

    post, run_once = node_link.NodeLink._post, Reconciler.run_once

    async def timed_post(link: node_link.NodeLink, path: str, body: str) -> bytes:
        began_s = time.perf_counter()
        try:
            return await post(link, path, body)
        finally:
            note(path, time.perf_counter() - began_s)

    def timed_pass(reconciler: Reconciler) -> float | None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return run_once(reconciler)
        finally:
            note("pass", time.perf_counter() - began_s)
            note("pass, processor", time.thread_time() - began_cpu_s)

    node_link.NodeLink._post = timed_post  # type: ignore[assignment,method-assign]
    Reconciler.run_once = timed_pass  # type: ignore[assignment,method-assign]
    main()


# -- the measurement --------------------------------------------------------------------------------------------------


def start_machines(base: Path, count: int, agents: list[subprocess.Popen[str]]) -> list[str]:
    """Start the agents, and put them into ``agents``; return their addresses."""
    for index in range(count):
        command, env = agent_command(base, f"node{index:02}", "127.0.0.1:0", SLOTS)
        command = ["nice", "-n", "10", sys.executable, __file__, "--be", "machine", *command[3:]]
        agents.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    return ["http://" + agent.stdout.readline().split()[-1] for agent in agents if agent.stdout is not None]


def submit(client: ElasticFlowClient, base: Path, count: int) -> list[str]:
    """Submit the jobs, many at a time; return their ids."""
    code = base / "code"
    code.mkdir()
    (code / "train.py").write_text("")
    snapshot = snapshot_folder(code)
    client.upload_snapshot(snapshot)

    def one(number: int) -> str:
        submission = JobSubmission(
            identity=JobIdentity(dag_id=f"many{number}", run_id="r", task_id="train"),
            command=Command(snapshot=snapshot.sha256, script="train.py"),
            length=Length(steps=10**7),
            global_batch_size=8,
            max_workers=1,
            best_effort=True,
            scaling_curve={1: STEPS_PER_S},
            lease_s=36_000.0,
        )
        return client.submit(submission).job.job_id

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(count)))


def wait(what: str, condition: Callable[[], bool]) -> None:
    """Wait until something holds. Raises SystemExit after ``LIMIT_S``."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"in {LIMIT_S:.0f} s it was not so: {what}")
        time.sleep(2.0)


def check_health(before: Mapping[str, JobStatus], after: Mapping[str, JobStatus], seconds: float) -> None:
    """Raise SystemExit when a job was disturbed: what was measured would not be what it seems."""
    for job_id, then in before.items():
        now = after[job_id]
        kept = now.state is State.RUNNING and now.generation == then.generation
        if not kept or now.step - then.step < 0.8 * STEPS_PER_S * seconds:
            raise SystemExit(f"{job_id} was disturbed: before {then}, after {now}")


def measured(options: argparse.Namespace, base: Path, machines: Path) -> tuple[dict[str, list[float]], float]:
    """Return the seconds that each kind took, and the processor time of the service per second.

    ``machines``: the folder of their disks, which share nothing with the service's, in ``base``.
    """
    times = base / "times"
    os.environ |= {REPORT_S_ENV: str(options.report_s), TIMES_ENV: str(times)}
    agents: list[subprocess.Popen[str]] = []
    timed = base / "bin" / "elasticflow"
    timed.parent.mkdir()
    timed.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} --be service "$@"\n')
    timed.chmod(0o755)
    service = Served(base / "state", {"engine": "cluster"}, python=timed.with_name("python"))
    try:
        addresses = start_machines(machines, options.nodes, agents)
        service.settings |= {"nodes": ",".join(addresses), "shared_dir": machines / "shared", "node_token": TOKEN}
        service.start()
        with ElasticFlowClient(service.endpoint, timeout_s=60.0) as client:
            wait("all machines are there", lambda: len(client.cluster().slots) == SLOTS * options.nodes)
            ids = submit(client, base, options.jobs)
            silent = list(ids)

            def all_report() -> bool:
                silent[:] = [job_id for job_id in silent if client.status(job_id).step == 0]
                return not silent

            wait("all jobs have reported", all_report)
            time.sleep(node_agent.CALM_AFTER_S + 10.0)
            before = {job_id: client.status(job_id) for job_id in ids}
            began_s, cpu_s = time.time(), service.cpu_s()
            time.sleep(options.seconds)
            ended_s, cpu_s = time.time(), service.cpu_s() - cpu_s
            check_health(before, {job_id: client.status(job_id) for job_id in ids}, options.seconds)
    finally:
        service.end()
        for agent in agents:
            agent.kill()
        for agent in agents:
            agent.wait()
    found: dict[str, list[float]] = {}
    for line in times.read_text().splitlines():
        kind, at_s, took_s = json.loads(line)
        if began_s <= at_s <= ended_s:
            found.setdefault(kind, []).append(took_s)
    return found, cpu_s / (ended_s - began_s)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--report-s", type=float, default=STEADY_INTERVAL_S)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    new_folder = functools.partial(tempfile.TemporaryDirectory, prefix="bench-many-nodes-")
    with new_folder() as folder, new_folder(dir=memory) as machines:
        found, load = measured(options, Path(folder), Path(machines))
    rows = []
    for kind, name in (
        ("/push", "a call to an agent"),
        ("pass", "a pass of the loop"),
        ("pass, processor", "its processor time"),
    ):
        took = sorted(found.get(kind, []))
        parts = [f"{1e3 * percentile(took, part):.1f}" for part in (0.5, 0.99)] if took else ["-", "-"]
        rows.append([name, str(len(took)), *parts, f"{1e3 * took[-1]:.1f}" if took else "-"])
    print(f"the service used {load:.2f} of a core")
    show("many_nodes", table(["ms", "number", "median", "p99", "longest"], rows), options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be"]:
        _, role = sys.argv.pop(1), sys.argv.pop(1)
        {"machine": run_machine, "service": run_service}[role]()
    else:
        main()
