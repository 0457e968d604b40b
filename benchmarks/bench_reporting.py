"""What reporting costs a step: clocks, norms for the noise scale, reports, predictions of a target.

    python benchmarks/bench_reporting.py [--steps 120] [--repeat 5] [--write]

Trains a small BERT (11 M parameters, one CPU thread, batch 16 of 32 tokens in 8 shares) and a small perceptron, each
with all of it, reports written to a file as under the service. A comparison of two trainings would drown one percent in
the noise of a shared machine; so every call into the reporting is timed where it is made, within the same run, and
their sum is held against the duration of the run. The timers themselves count as cost. Medians over the repetitions;
for orientation, also ms per step with reporting and, in turns with it, with all of it replaced by nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from results import parser_of, show, table

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.reporting import FileReporter
from elasticflow_airflow.runtime.session_core import SessionCore
from elasticflow_airflow.runtime.stepping import loss_target, measuring
from elasticflow_airflow.runtime.stepping.gradient_step import GradientStep

way, kind, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
spent, depth = [0.0], [0]

def timed(function):
    def call(*args, **kwargs):
        if depth[0]:
            return function(*args, **kwargs)
        depth[0], began_s = 1, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - began_s
            depth[0] = 0
    return call

def nothing(result):
    return lambda *args, **kwargs: result

PARTS = [
    (measuring.Meter, ("enter", "step_begins", "reducing", "reduced", "step_done", "worker_is_due"), None),
    (measuring.GradientNorms, ("begin", "leaf", "total"), None),
    (measuring.NormSchedule, ("step_done",), None),
    (GradientStep, ("_measure",), None),
    (loss_target.LossTrack, ("add",), None),
    (SessionCore, ("say_progress", "say_worker"), None),
]
for owner, names, result in PARTS:
    for name in names:
        function = getattr(owner, name)
        setattr(owner, name, timed(function) if way == "with" else nothing(result))
if way == "without":
    measuring.NormSchedule.due = property(lambda self: False)

session = runtime.init(steps=steps, logical_workers=8, checkpoint_interval_s=1e6, target_loss=-1.0)
session._core.context.reporter = FileReporter(Path.cwd(), 1, "bench")
session._core.speedometer._interval_s = FileReporter.interval_s
if kind == "bert":
    from transformers import BertConfig, BertForSequenceClassification
    model = BertForSequenceClassification(BertConfig(hidden_size=256, num_hidden_layers=4, vocab_size=30_000,
        num_attention_heads=4, intermediate_size=1024, num_labels=4))
    inputs = torch.randint(0, 30_000, (1024, 32))
    loss_of = lambda words, targets: model(input_ids=words, labels=targets).loss
else:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    inputs = torch.randn(1024, 256)
    loss_of = lambda words, targets: nn.functional.cross_entropy(model(words), targets)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(TensorDataset(inputs, torch.randint(0, 4, (1024,))), global_batch_size=16)
done, times = 0, []
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for words, targets in step.split(batch):
                step.backward(loss_of(words, targets))
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        if done == steps // 6:
            spent[0], began_s = 0.0, time.perf_counter()
        times.append(time.perf_counter())
took_s = times[-1] - began_s
pairs = sorted(b - a for a, b in zip(times[steps // 6 :], times[steps // 6 + 1 :]))
reports = sum(1 for path in Path.cwd().glob("reports/*") for _ in path.open())
measured = session._core.gradient_step.noise.measured
os.write(1, f"COST {spent[0] / took_s} {1000 * pairs[len(pairs) // 2]} {reports} {measured}\\n".encode())
os._exit(0)
"""
KINDS = {"bert": "small BERT, 11 M parameters", "mlp": "perceptron, 0.4 M parameters"}


def measure(way: str, kind: str, steps: int) -> list[float]:
    """One training; fraction of the time that reporting took, median ms a step, reports, steps with norms."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, way, kind, str(steps)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith("COST"))
    return [float(word) for word in line.split()[1:]]


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for kind, title in KINDS.items():
        steps = arguments.steps * (1 if kind == "bert" else 20)
        with_it, without = [], []
        for _ in range(arguments.repeat):
            with_it.append(measure("with", kind, steps))
            without.append(measure("without", kind, steps))
        cost, step_ms, reports, measured = (statistics.median(column) for column in zip(*with_it, strict=True))
        bare_ms = statistics.median(row[1] for row in without)
        worst = max(row[0] for row in with_it)
        rows.append(
            [
                title,
                f"{100 * cost:.2f} %",
                f"{100 * worst:.2f} %",
                f"{step_ms:.2f}",
                f"{bare_ms:.2f}",
                f"{reports:.0f}",
                f"{measured:.0f} of {steps}",
            ]
        )
    heads = ["", "of the time", "worst", "ms a step", "without", "reports", "steps with norms"]
    show("reporting", [f"Medians of {arguments.repeat}:", "", *table(heads, rows)], arguments)


if __name__ == "__main__":
    main()
