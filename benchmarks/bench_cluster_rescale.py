"""What a change of workers over two machines costs: in place, beside stop, save and restart by torchrun.

    python benchmarks/bench_cluster_rescale.py [--model small|base] [--repeat 3] [--write]

Two machines are two network and PID namespaces of this one (needs root). A BERT (small: 4 layers of 256, 11 M
parameters; base: 110 M) is fine-tuned with AdamW by two workers on one machine, by four on both, and by two again. In
place: an agent on each machine, the service's engine. By restart: torchrun on the same machines, which is stopped by
SIGTERM, saves to a folder that both share, and is started anew. The pause is the time between the last step before a
change and the first after it, less the median time of the steps after that. Beside it, in the same call: how long the
bytes that a joiner received take through a plain socket from the one machine to the other.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from bench_nodes import Job, cluster
from bench_rescale import PARAMETERS, SCRIPT, SIZES, pause, steps
from results import parser_of, show, table
from support.machines import Machines

from elasticflow_airflow.runtime.protocol import ReportKind
from elasticflow_airflow.scheduler_core.model.values import Slot

TWO = (Slot("node0", 0), Slot("node0", 1))
FOUR = (*TWO, Slot("node1", 0), Slot("node1", 1))
LIMIT_S = 300.0
STEPS = 14
"""So many steps are made before and after each change."""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5999)) as there:
    piece, left = bytes(1 << 20), int(sys.argv[2])
    while left > 0:
        there.sendall(piece[:left])
        left -= len(piece)
"""
TAKE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5999)) as server:
    print("ready", flush=True)
    there, _ = server.accept()
    began = time.perf_counter()
    while there.recv(1 << 20):
        pass
    print(time.perf_counter() - began, flush=True)
"""


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something. Raises SystemExit."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.05)


def done(logs: Sequence[Path]) -> list[tuple[int, int, float]]:
    """(step, workers, time) of all steps that these logs tell of."""
    return sorted(one for log in logs if log.exists() for one in steps(log.read_text()))


def in_place(base: Path, model: str) -> dict[str, tuple[float, float, int]]:
    """For each change: the pause and the time of a step after it, in seconds, and the bytes that a joiner received."""
    found = {}
    with cluster(base) as (engine, _, _):
        job = Job(engine, base, "bert", {"BENCH_MODEL": model, "OMP_NUM_THREADS": "1"}, 8, LIMIT_S)
        first = base / "node0" / "jobs" / "bert" / "i000001" / "logs" / "g000001-r000.log"
        job.change(*TWO)
        for name, slots in (("2 -> 4", FOUR), ("4 -> 2", TWO)):
            goal = len(done([first])) + STEPS
            until(lambda: job.look() and len(done([first])) >= goal, "steps before the change")  # noqa: B023
            job.change(*slots)
            reports = [r for r in job.reports if r.generation == job.generation and r.kind is ReportKind.STARTED]
            at = reports[0].step
            until(lambda: job.look() and done([first])[-1][0] >= at + STEPS, "steps after it")  # noqa: B023
            times = done([first])
            after = {step: when for step, _, when in times}
            step_s = statistics.median(after[s + 1] - after[s] for s in range(at + 1, at + 9))
            size = max(int(report.data.get("state_bytes", 0)) for report in reports)
            found[name] = (pause(times, at), step_s, size)
        job.leave()
    return found


def restart(base: Path, model: str) -> dict[str, float]:
    """The pause of each change by torchrun: SIGTERM, save, start again."""
    machines = Machines(2)
    script, shared = base / "train.py", base / "saved"
    script.write_text(SCRIPT)
    env = {
        **os.environ,
        "BENCH_MODEL": model,
        "OMP_NUM_THREADS": "1",
        "ELASTICFLOW_CHECKPOINT_DIR": str(shared),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    found: dict[str, float] = {}
    before: list[tuple[int, int, float]] = []
    try:
        for index in range(2):
            ready = machines.run(index, ["sh", "-c", "echo ready; sleep infinity"], env).stdout
            assert ready is not None
            ready.readline()
        for number, nodes in enumerate((1, 2, 1)):
            where = [f"--master-addr={machines.addresses[0]}", f"--master-port={29500 + number}"]
            logs = [base / f"torchrun-{number}-{index}.log" for index in range(nodes)]
            for index, log in enumerate(logs):
                command = [sys.executable, "-m", "torch.distributed.run", *where, f"--nnodes={nodes}"]
                command += ["--nproc-per-node=2", f"--node-rank={index}", str(script)]
                machines.run_beside(index, ["bash", "-c", f'exec "$@" > {log} 2>&1', "bash", *command], env)
            until(lambda: len(done(logs)) >= 2 * nodes * (STEPS + 2), f"torchrun makes steps on {nodes}")  # noqa: B023
            now = done(logs)
            if before:
                found["2 -> 4" if nodes == 2 else "4 -> 2"] = min(w for *_, w in now) - max(w for *_, w in before)
            for index in range(nodes):
                for process in torchruns(machines, index):
                    process.send_signal(signal.SIGTERM)
            until(lambda: not any(torchruns(machines, index) for index in (0, 1)), "torchrun ends")
            before = done(logs)
    finally:
        machines.close()
    return found


def torchruns(machines: Machines, index: int) -> list[psutil.Process]:
    """The processes of torchrun itself on a machine."""
    found = []
    for process in machines.processes(index):
        with suppress(psutil.Error):
            if "torch.distributed.run" in process.cmdline():
                found.append(process)
    return found


def raw_send_s(size_bytes: int) -> float:
    """Seconds that so many bytes take through one connection from one machine to the other."""
    machines = Machines(2)
    try:
        taking = machines.run(1, [sys.executable, "-c", TAKE, machines.addresses[1]], dict(os.environ))
        assert taking.stdout is not None
        taking.stdout.readline()
        machines.run(0, [sys.executable, "-c", SEND, machines.addresses[1], str(size_bytes)], dict(os.environ))
        return float(taking.stdout.readline())
    finally:
        machines.close()


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    live: dict[str, list[tuple[float, float, int]]] = {}
    restarts: dict[str, list[float]] = {}
    sends: list[float] = []
    for number in range(options.repeat):
        print(f"repetition {number + 1} of {options.repeat} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-rescale-") as name:
            base = Path(name)
            (base / "code").mkdir()
            (base / "code" / "train.py").write_text(SCRIPT)
            for change, row in in_place(base, options.model).items():
                live.setdefault(change, []).append(row)
            for change, pause_s in restart(base, options.model).items():
                restarts.setdefault(change, []).append(pause_s)
            sends.append(raw_send_s(live["2 -> 4"][-1][2]))
    rows = []
    for change, found in live.items():
        pause_s, step_s, size = (statistics.median(column) for column in zip(*found, strict=True))
        restart_s = statistics.median(restarts[change])
        raw = f"{statistics.median(sends):.3f}" if size else "-"
        rows.append(
            [
                change,
                f"{pause_s:.3f}",
                f"{max(one[0] for one in found):.3f}",
                f"{step_s:.3f}",
                f"{restart_s:.3f}",
                f"{restart_s / max(pause_s, 1e-3):.1f}",
                f"{size / 1e9:.3f}",
                raw,
            ]
        )
    heads = ["", "pause s", "worst s", "a step s", "torchrun s", "times less", "GB received", "... by a socket s"]
    said = f"BERT of {PARAMETERS[options.model]} parameters on two machines, medians of {options.repeat}:"
    name = "cluster_rescale" if options.model == "small" else "cluster_rescale_base"
    show(name, [said, "", *table(heads, rows)], options)


if __name__ == "__main__":
    main()
