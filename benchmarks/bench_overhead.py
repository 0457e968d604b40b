"""What a step of a tiny net costs beside the plain loop with the same micro-batches: the runtime's own time.

    python benchmarks/bench_overhead.py [--steps 50] [--turns 20] [--write]

One worker, one CPU thread. A net so small that its own arithmetic is next to nothing is trained by a plain PyTorch loop
(DataLoader, forward, backward, AdamW) and by a session, each in a process of its own; all stay alive and take turns of
``steps`` steps, so that whatever else the machine does meets all of them alike. Medians of the turns.
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
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

way, kind, shares, BATCH, turn = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
torch.set_num_threads(1)
torch.manual_seed(0)
if kind == "perceptron":
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    inputs = torch.randn(4096, 16)
else:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    inputs = torch.randn(4096, 1, 8, 8)
dataset = TensorDataset(inputs, torch.randint(0, 4, (4096,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_of = nn.functional.cross_entropy


def plain():
    optimizer.zero_grad()
    while True:
        done = 0
        for features, labels in DataLoader(dataset, batch_size=BATCH // shares, shuffle=True):
            (loss_of(model(features), labels) / shares).backward()
            done += 1
            if done % shares == 0:
                optimizer.step()
                optimizer.zero_grad()
                yield


def elastic():
    from elasticflow_airflow import runtime

    session = runtime.init(steps=1_000_000, logical_workers=shares, checkpoint_interval_s=1e6)
    session.register(model=model, optimizer=optimizer)
    loader = session.dataloader(dataset, global_batch_size=BATCH)
    for _ in session.epochs():
        for batch in loader:
            with session.step() as step:
                for features, labels in step.split(batch):
                    step.backward(loss_of(model(features), labels))
                optimizer.step()
                optimizer.zero_grad()
            yield


steps = plain() if way == "plain" else elastic()
for _ in range(100):
    next(steps)
os.write(1, b"READY\\n")
while sys.stdin.readline().strip():
    began_s = time.perf_counter()
    for _ in range(turn):
        next(steps)
    os.write(1, f"TURN {(time.perf_counter() - began_s) / turn}\\n".encode())
os._exit(0)
"""
KINDS = {"perceptron": "perceptron, 2 layers", "conv": "2 convolutions with BatchNorm"}
BATCH = 32
SHARES = (1, 8)


class Training:
    """One way to train, in a process that makes its steps when told to."""

    def __init__(self, folder: Path, way: str, kind: str, shares: int, steps: int) -> None:
        script = folder / "train.py"
        script.write_text(SCRIPT)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ELASTICFLOW_CHECKPOINT_DIR": tempfile.mkdtemp(dir=folder),
        }
        self.milliseconds: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, str(script), way, kind, str(shares), str(BATCH), str(steps)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read("READY")

    def turn(self) -> None:
        """Make some steps, and take their mean time."""
        assert self._process.stdin is not None  # asked for
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.milliseconds.append(1000.0 * float(self._read("TURN")))

    def close(self) -> None:
        """End the process."""
        self._process.communicate("\n")

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None  # asked for
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"a training ended with status {self._process.wait()}")


def measure(kind: str, turns: int, steps: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds a step in each turn, by way and number of shares."""
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder:
        trainings = {
            (way, shares): Training(Path(folder), way, kind, shares, steps)
            for shares in SHARES
            for way in ("plain", "session")
        }
        for number in range(turns):
            print(f"{kind}: turn {number + 1} of {turns}", file=sys.stderr, flush=True)
            for training in trainings.values():
                training.turn()
        for training in trainings.values():
            training.close()
        return {way: training.milliseconds for way, training in trainings.items()}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for kind, name in KINDS.items():
        found = measure(kind, options.turns, options.steps)
        for shares in SHARES:
            plain, session = found["plain", shares], found["session", shares]
            added = statistics.median(b - a for a, b in zip(plain, session, strict=True))
            ratio = statistics.median(b / a for a, b in zip(plain, session, strict=True))
            numbers = f"{statistics.median(plain):.2f}", f"{statistics.median(session):.2f}"
            rows.append([f"{name}: {shares} of {BATCH // shares} samples", *numbers, f"{added:.2f}", f"{ratio:.2f}"])
    heads = ["micro-batches", "plain ms a step", "session ms a step", "added ms", "times plain"]
    show("overhead", [f"Medians of {options.turns} turns:", "", *table(heads, rows)], options)


if __name__ == "__main__":
    main()
