"""What machines that come and go cost: goodput of a training on a generated trace of nodes, with and without notice.

    python benchmarks/bench_volatile.py [--minutes 12] [--state-gb 1.0] [--seed 2] [--write]

Four machines, network and PID namespaces of this one (needs root), have a slot each; the service with its default
configuration trains one job on as many as there are. Each machine goes away four times an hour (exponential times
between), for two minutes on average (exponential, at least 30 s). Its end is announced 15 to 120 s before (uniform:
the clouds give 30 s to two minutes), or not at all. These distributions are invented; nothing was fitted to a cloud.
An end is a power cut. A step sleeps as long as its share of the batch asks, so that two cores suffice, and a state of
``--state-gb`` is copied to every worker that joins.

Goodput is the number of steps that count, over the number that would have been made if every second had passed at the
steady speed (the median step) of the size that the job then had; a second between two sizes counts at the larger one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from results import parser_of, show, table
from support.machines import Machines
from support.node_agents import TOKEN, start_agent
from support.served import Served

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, snapshot_script

NODES = 4
EVENTS_AN_HOUR = 4.0
AWAY_S, LEAST_AWAY_S = 120.0, 30.0
NOTICE_S = (15.0, 120.0)
STEP_S = 0.8
"""A step of one worker."""
SCRIPT = f"""
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elasticflow_airflow import runtime

class Ballast:
    def __init__(self):
        self.held = torch.zeros(int(os.environ["BENCH_BYTES"]) // 4)
    def state_dict(self):
        return {{"held": self.held}}
    def load_state_dict(self, state):
        self.held.copy_(state["held"])

session = runtime.init()
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session.register(model=model, optimizer=optimizer, ballast=Ballast())
loader = session.dataloader(TensorDataset(torch.randn(4096, 8)), global_batch_size=16)
history = os.open(os.environ["BENCH_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for (part,) in step.split(batch):
                time.sleep({STEP_S} * len(part) / 16)
                step.backward(model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if session.rank == 0:
            os.write(history, f"{{session.steps_done}} {{session.world_size}} {{time.time()}}\\n".encode())
session.finish()
"""


@dataclass(frozen=True, order=True)
class Absence:
    """A machine goes away at ``at_s``, announced ``notice_s`` before, for ``away_s``; seconds from the start."""

    at_s: float
    node: int
    notice_s: float
    away_s: float


def absences(seed: int, length_s: float) -> list[Absence]:
    """The trace; the same with and without notice."""
    found = []
    for node in range(NODES):
        chance, at_s = random.Random(f"{seed} {node}"), 0.0
        while True:
            notice_s = chance.uniform(*NOTICE_S)
            at_s += notice_s + chance.expovariate(EVENTS_AN_HOUR / 3600)
            away_s = max(LEAST_AWAY_S, chance.expovariate(1 / AWAY_S))
            if at_s > length_s:
                break
            found.append(Absence(at_s, node, notice_s, away_s))
            at_s += away_s
    return sorted(found)


def submitted(client: ElasticFlowClient, base: Path, state_bytes: int) -> str:
    """The job, from when it trains on all machines."""
    script = base / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    snapshot = snapshot_script(script)
    client.upload_snapshot(snapshot)
    submission = JobSubmission(
        identity=JobIdentity(dag_id="volatile", run_id="r", task_id="train"),
        command=Command(
            snapshot=snapshot.sha256,
            script="train.py",
            env={"BENCH_HISTORY": str(base / "history"), "BENCH_BYTES": str(state_bytes)},
        ),
        length=Length(steps=10**7),
        global_batch_size=16,
        logical_workers=NODES,
        best_effort=True,
        max_workers=NODES,
        scaling_curve={size: size / STEP_S for size in (1, 2, NODES)},
        lease_s=36_000.0,
    )
    job_id = client.submit(submission).job.job_id
    end_s = time.monotonic() + 300
    while client.status(job_id).workers < NODES or client.status(job_id).step < 50:
        if time.monotonic() > end_s:
            raise SystemExit(f"it does not train on all machines: {client.status(job_id)}")
        time.sleep(0.5)
    return job_id


def play(
    base: Path, trace: list[Absence], length_s: float, state_bytes: int, *, notice: bool
) -> tuple[float, int, float]:
    """Goodput, changes of the number of workers, and the longest time between two steps, in seconds."""
    machines = Machines(NODES)
    listen = [f"{address}:8322" for address in machines.addresses]

    def start(node: int) -> None:
        start_agent(base, f"node{node}", listen[node], 1, machines, node)

    nodes = ",".join(f"http://{one}" for one in listen)
    service = Served(
        base / "state", {"engine": "cluster", "nodes": nodes, "shared_dir": base / "shared", "node_token": TOKEN}
    )
    try:
        for node in range(NODES):
            start(node)
        service.start()
        with ElasticFlowClient(service.endpoint) as client:
            job_id = submitted(client, base, state_bytes)
            began_s = time.time()
            due: list[tuple[float, int, str, Absence]] = []
            for one in trace:
                if notice:
                    due.append((one.at_s - one.notice_s, one.node, "announce", one))
                due += [(one.at_s, one.node, "cut", one), (one.at_s + one.away_s, one.node, "back", one)]
            for at_s, node, what, one in sorted(due):
                if at_s > length_s:
                    break
                time.sleep(max(0.0, began_s + at_s - time.time()))
                if what == "announce":
                    client.drain(f"node{node}", began_s + one.at_s)
                elif what == "cut":
                    machines.cut_power(node)
                else:
                    machines.heal(node)
                    start(node)
            time.sleep(max(0.0, began_s + length_s - time.time()))
            lines = [line.split() for line in (base / "history").read_text().splitlines()]
            status = client.status(job_id)
            assert status.state == "running", status
            client.cancel(job_id, 1, "the benchmark is over")
            while not client.status(job_id).state.terminal:
                time.sleep(0.2)
    finally:
        service.stop()
        machines.close()
    return judged([(int(s), int(w), float(t)) for s, w, t in lines if float(t) >= began_s])


def judged(times: list[tuple[int, int, float]]) -> tuple[float, int, float]:
    """See :func:`play`; ``times``: step, workers and time of each step."""
    pairs = list(itertools.pairwise(times))
    steady = {}
    for size in {size for _, size, _ in times}:
        alike = [b[2] - a[2] for a, b in pairs if a[1] == b[1] == size and b[0] == a[0] + 1]
        steady[size] = statistics.median(alike) if len(alike) > 4 else STEP_S / size
    possible = sum((b[2] - a[2]) / steady[max(a[1], b[1])] for a, b in pairs)
    made = max(step for step, _, _ in times) - times[0][0]
    changes = sum(1 for a, b in pairs if a[1] != b[1])
    return made / possible, changes, max(b[2] - a[2] for a, b in pairs)


def row(name: str, trace: list[Absence], options: argparse.Namespace, *, notice: bool) -> list[str]:
    """Play the trace once."""
    with tempfile.TemporaryDirectory(prefix="bench-volatile-") as folder:
        length_s, state_bytes = 60.0 * options.minutes, int(1e9 * options.state_gb)
        goodput, changes, longest_s = play(Path(folder), trace, length_s, state_bytes, notice=notice)
    return [name, str(len(trace)), str(changes), f"{longest_s:.1f}", f"{100 * goodput:.2f} %"]


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--state-gb", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    trace = absences(options.seed, 60.0 * options.minutes)
    rows = [row("with notice", trace, options, notice=True), row("without", trace, options, notice=False)]
    show("volatile", table(["", "machines lost", "changes", "longest stop s", "goodput"], rows), options)


if __name__ == "__main__":
    main()
