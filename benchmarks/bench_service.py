"""What the embedded service costs: memory while idle, time to its first answer, time to a verdict.

    python benchmarks/bench_service.py [--submits 60] [--running 8] [--write]

Starts a real service with modelled workers in a temporary folder and prints each number beside its goal:
PSS of the idle daemon (``smaps_rollup``: its share of what it shares with others; goal 120 MiB), from the first call
to the first answer (3 s), and a submit with a known scaling curve until its verdict (50 ms), while other jobs train.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import parser_of, show, table

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, ensure_service, snapshot_folder

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
FIRST_ANSWER = """
import pathlib, sys, time
started = time.perf_counter()
from elasticflow_airflow.client import ensure_service
ensure_service(pathlib.Path(sys.argv[1]), {"ELASTICFLOW_ENGINE": "fake", "ELASTICFLOW_VIRTUAL_NODES": "4x8"})
print(time.perf_counter() - started)
"""


def pss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) / 1024


def row(what: str, value: float, unit: str, goal: float, digits: int = 0) -> list[str]:
    return [f"{what}, {unit}", f"{value:.{digits}f}", f"{goal:g}", "within" if value <= goal else "BEYOND"]


def submission(run: str, snapshot: str, **given: object) -> JobSubmission:
    values: dict[str, object] = {
        "identity": JobIdentity(dag_id="bench", run_id=run, task_id="train"),
        "command": Command(snapshot=snapshot, script="train.py"),
        "length": Length(steps=2000),
        "global_batch_size": 32,
        "deadline_at": time.time() + 7200,
        "scaling_curve": CURVE,
    }
    return JobSubmission(**{**values, **given})  # type: ignore[arg-type]  # checked by pydantic


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--submits", type=int, default=60)
    parser.add_argument("--running", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ef-bench-") as folder:
        state_dir, code = Path(folder) / "state", Path(folder) / "code"
        code.mkdir()
        (code / "train.py").write_text("print()\n")
        first = subprocess.run(
            [sys.executable, "-c", FIRST_ANSWER, str(state_dir)], stdout=subprocess.PIPE, text=True, check=True
        )
        client = ElasticFlowClient(ensure_service(state_dir))
        pid = client.health().pid
        try:
            measure(client, pid, code, options, float(first.stdout))
        finally:
            client.close()
            os.kill(pid, signal.SIGTERM)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.05)


def measure(client: ElasticFlowClient, pid: int, code: Path, options: argparse.Namespace, first_s: float) -> None:
    rows = [row("first call to first answer (client's imports included)", first_s, "s", 3.0, 2)]
    time.sleep(2)
    rows.append(row("PSS of the daemon that has just started", pss_mib(pid), "MiB", 120.0))
    snapshot = snapshot_folder(code)
    client.upload_snapshot(snapshot)
    running = [client.submit(submission(f"other{n}", snapshot.sha256)) for n in range(options.running)]
    took_ms = []
    for number in range(options.submits):
        begun = time.perf_counter()
        job = client.submit(submission(f"run{number}", snapshot.sha256))
        took_ms.append((time.perf_counter() - begun) * 1000)
        assert job.job.verdict.decision == "admitted", job.job.verdict
        client.cancel(job.job.job_id, job.claim)
    took_ms.sort()
    beside = f"beside {options.running} jobs that train"
    rows.append(row(f"submit to verdict, median, {beside}", statistics.median(took_ms), "ms", 50.0, 1))
    rows.append(row(f"submit to verdict, 95th percentile, {beside}", took_ms[int(0.95 * len(took_ms))], "ms", 50.0, 1))
    for job in running:
        client.cancel(job.job.job_id, job.claim)
    while client.health().live_jobs:
        time.sleep(0.2)
    rows.append(row("PSS of the idle daemon after these jobs", pss_mib(pid), "MiB", 120.0))
    show("service", table(["", "measured", "goal", ""], rows), options)


if __name__ == "__main__":
    main()
