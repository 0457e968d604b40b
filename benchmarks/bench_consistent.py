"""What it costs that the weights do not depend on the number of workers: consistent mode beside plain PyTorch.

    python benchmarks/bench_consistent.py [--steps 30] [--repeat 5] [--write]

Fine-tunes a small BERT (11 M parameters) on CPUs, batch 16 of 64 tokens, and prints steps/s, medians over the
repetitions, all in one run: two workers in consistent mode (2 and 8 logical workers) and in fast mode, beside
DistributedDataParallel with the same micro-batches and with one full batch a worker; one worker with 1, 2 and 8
logical workers, beside a plain loop with one full batch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import parser_of, show, table

SCRIPT = """
import contextlib, os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

way, micro_batches, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(hidden_size=256, num_hidden_layers=4, vocab_size=30_000,
    num_attention_heads=4, intermediate_size=1024, num_labels=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens, labels = torch.randint(0, 30_000, (4096, 64)), torch.randint(0, 4, (4096,))
times = []
if way in ("consistent", "fast"):
    from elasticflow_airflow import runtime

    session = runtime.init(steps=steps, logical_workers=micro_batches, consistency=way, checkpoint_interval_s=1e6)
    session.register(model=model, optimizer=optimizer)
    loader = session.dataloader(TensorDataset(tokens, labels), global_batch_size=16)
    for _ in session.epochs():
        for batch in loader:
            with session.step() as step:
                for words, targets in step.split(batch):
                    step.backward(model(input_ids=words, labels=targets).loss)
                optimizer.step()
                optimizer.zero_grad()
            times.append(time.perf_counter())
    rank = session.rank
else:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    net = model
    if size > 1:
        dist.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(model)
    each = 16 // size
    for number in range(steps):
        begin = number * 16 + rank * each
        for part in range(micro_batches):
            first = begin + part * each // micro_batches
            last = begin + (part + 1) * each // micro_batches
            waits = size > 1 and part < micro_batches - 1
            with net.no_sync() if waits else contextlib.nullcontext():
                (net(input_ids=tokens[first:last], labels=labels[first:last]).loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    if size > 1:
        dist.destroy_process_group()
if rank == 0:
    warm = steps // 3
    os.write(1, f"RATE {(len(times) - warm - 1) / (times[-1] - times[warm])}\\n".encode())
"""
WAYS: dict[str, tuple[int, str, int]] = {
    "2 workers, DDP, one full batch each": (2, "ddp", 1),
    "2 workers, fast": (2, "fast", 2),
    "2 workers, consistent, 2 logical": (2, "consistent", 2),
    "2 workers, DDP, 4 micro-batches each": (2, "ddp", 4),
    "2 workers, consistent, 8 logical": (2, "consistent", 8),
    "1 worker, plain loop, one full batch": (1, "plain", 1),
    "1 worker, consistent, 1 logical": (1, "consistent", 1),
    "1 worker, consistent, 2 logical": (1, "consistent", 2),
    "1 worker, consistent, 8 logical": (1, "consistent", 8),
}
"""Workers, how, and micro-batches (of a worker for DDP, of all for a session)."""


def rate(folder: Path, workers: int, way: str, micro_batches: int, steps: int) -> float:
    """Steps per second of one run."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    checkpoints = tempfile.mkdtemp(dir=folder)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTICFLOW_CHECKPOINT_DIR": checkpoints}
    launcher = [sys.executable]
    if workers > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command = [*launcher, str(script), way, str(micro_batches), str(steps)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    rates = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATE")]
    assert rates, done.stdout[-2000:] + done.stderr[-2000:]
    return float(rates[0])


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-consistent-") as folder:
        for number in range(options.repeat):
            for name, (workers, way, micro_batches) in WAYS.items():
                print(f"repetition {number + 1} of {options.repeat}: {name}", file=sys.stderr, flush=True)
                found[name].append(rate(Path(folder), workers, way, micro_batches, options.steps))
    median = {name: statistics.median(rates) for name, rates in found.items()}
    against = {
        "2 workers, fast": "2 workers, DDP, one full batch each",
        "2 workers, consistent, 2 logical": "2 workers, DDP, one full batch each",
        "2 workers, consistent, 8 logical": "2 workers, DDP, 4 micro-batches each",
        "1 worker, consistent, 1 logical": "1 worker, plain loop, one full batch",
        "1 worker, consistent, 2 logical": "1 worker, plain loop, one full batch",
        "1 worker, consistent, 8 logical": "1 worker, plain loop, one full batch",
    }
    rows = []
    for name, value in median.items():
        other = against.get(name)
        rows.append([name, f"{value:.2f}", f"{value / median[other]:.2f}" if other else "-", other or "-"])
    lines = table(["", "steps/s", "ratio", "to"], rows)
    show("consistent", [f"Batch 16 of 64 tokens, medians of {options.repeat}:", "", *lines], options)


if __name__ == "__main__":
    main()
