"""From submit to the first step: with a warm pool beside without one.

    python benchmarks/bench_start.py [--repeat 5] [--write]

Starts two real embedded services with one slot each, one of which keeps a process that has imported torch, and submits
the same training (a perceptron on random numbers, one worker under torchrun) to each in turn. Goal: under 2 s with the
pool. Medians of the repetitions; the best and the worst beside them.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from results import parser_of, show, table

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, ensure_service, snapshot_folder

SCRIPT = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime

session = runtime.init()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters())
session.register(model=model, optimizer=optimizer)
data = TensorDataset(torch.randn(256, 16), torch.randint(0, 2, (256,)))
loader = session.dataloader(data, global_batch_size=32)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for inputs, labels in step.split(batch):
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        if session.steps_done == 1:
            Path(session.config.incarnation_dir, "first").write_text(str(time.time()))
session.finish()
"""


def first_step_s(client: ElasticFlowClient, snapshot: str, state_dir: Path, run: int) -> float:
    """Seconds from the call of submit to the end of the first step."""
    submission = JobSubmission(
        identity=JobIdentity(dag_id="bench", run_id=f"run{run}", task_id="train"),
        command=Command(snapshot=snapshot, script="train.py"),
        length=Length(steps=20),
        global_batch_size=32,
        max_workers=1,
        deadline_at=time.time() + 3600,
        scaling_curve={1: 50.0},
    )
    began_s = time.time()
    job = client.submit(submission)
    while not (status := client.status(job.job.job_id)).state.terminal:
        time.sleep(0.1)
    assert status.state == "succeeded", status
    (first,) = (state_dir / "jobs" / job.job.job_id).rglob("first")
    client.acknowledge(job.job.job_id, job.claim)
    return float(first.read_text()) - began_s


def wait_for_pool(state_dir: Path, times: int) -> None:
    """Wait until the pool has said so often that it is warm."""
    log, end_s = state_dir / "pool" / "pool.log", time.monotonic() + 120
    while not log.exists() or log.read_text().count(" warm: ") < times:
        assert time.monotonic() < end_s, "the pool did not become warm"
        time.sleep(0.05)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory(prefix="ef-bench-") as name:
        code = Path(name) / "code"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        snapshot = snapshot_folder(code)
        clients = {}
        for way in found:
            state_dir = Path(name) / way
            env = {"ELASTICFLOW_SLOTS": "1", "ELASTICFLOW_SLOT_LOCK_DIR": str(state_dir / "slots")}
            if way == "warm":
                env["ELASTICFLOW_WARM_IMPORTS"] = "torch"
            clients[way] = ElasticFlowClient(ensure_service(state_dir, env))
            clients[way].upload_snapshot(snapshot)
        try:
            for run in range(options.repeat + 1):
                for way, client in clients.items():
                    if way == "warm" and run:
                        wait_for_pool(Path(name) / way, 1)
                        time.sleep(3)  # the next process of the pool is forked, and at rest
                    took_s = first_step_s(client, snapshot.sha256, Path(name) / way, run)
                    if run:  # the first one fills the pool, and the file cache
                        found[way].append(took_s)
        finally:
            for way, client in clients.items():
                pid = client.health().pid
                client.close()
                os.kill(pid, signal.SIGTERM)
                while (Path(name) / way / "service.sock").exists():
                    time.sleep(0.05)
    rows = [[way, *(f"{of(times):.2f}" for of in (statistics.median, min, max))] for way, times in found.items()]
    lines = table(["from submit to first step", "median s", "best s", "worst s"], rows)
    show("start", [f"{options.repeat} times each, in turns:", "", *lines], options)


if __name__ == "__main__":
    main()
