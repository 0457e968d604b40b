"""What a change of workers costs the training: in place, beside stop, save and restart by torchrun.

    python benchmarks/bench_rescale.py [--model small|base] [--repeat 5] [--changes 1-2,2-4,4-2,2-1]
        [--write]

Real trainer processes on this machine's CPUs fine-tune a BERT (small: 4 layers of 256, 11 M parameters; base: 110 M)
with AdamW. The pause is the time between the last step before a change and the first after it, less the median time of
the steps after that; all numbers are medians over the repetitions, and everything runs side by side in one
call. A change by torchrun is one from one worker to two; the last column is the pause for each GB of state that a
joiner received.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from results import parser_of, show, table
from support.gang import Gang

from elasticflow_airflow.runtime.protocol import ReportKind

SIZES = {"small": (256, 4, 4, 1024, 30_000), "base": (768, 12, 12, 3072, 30_522)}
PARAMETERS = {"small": "11 M", "base": "110 M"}
SCRIPT = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification
from elasticflow_airflow import runtime

hidden, layers, heads, inner, words = SIZES[os.environ["BENCH_MODEL"]]
session = runtime.init(logical_workers=4, epochs=10_000)
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(hidden_size=hidden, num_hidden_layers=layers, vocab_size=words,
    num_attention_heads=heads, intermediate_size=inner, num_labels=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session.register(model=model, optimizer=optimizer)
data = TensorDataset(torch.randint(0, words, (4096, 32)), torch.randint(0, 4, (4096,)))
loader = session.dataloader(data, global_batch_size=8)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for tokens, labels in step.split(batch):
                step.backward(model(input_ids=tokens, labels=labels).loss)
            optimizer.step()
            optimizer.zero_grad()
        os.write(1, f"STEP {session.steps_done} {session.world_size} {time.time()}\\n".encode())
""".replace("SIZES", repr(SIZES))


def steps(text: str) -> list[tuple[int, int, float]]:
    """(step, workers, time) of each line that a worker has printed, without a joiner's rehearsals."""
    found = [line.split() for line in text.splitlines() if line.startswith("STEP")]
    return [(int(step), int(size), float(at)) for _, step, size, at in found]


def reached(gang: Gang, step: int) -> bool:
    """Whether the gang has done this step."""
    return gang.step() >= step


def pause(times: list[tuple[int, int, float]], at: int) -> float:
    """Seconds that training stood still around the step ``at``, after which the workers changed."""
    known = {step: when for step, _, when in times}
    after = [known[s + 1] - known[s] for s in known if s + 1 in known and at < s <= at + 12]
    return known[at + 1] - known[at] - statistics.median(after)


def in_place(folder: Path, model: str, changes: list[tuple[int, int]]) -> dict[str, tuple[float, float, float]]:
    """For each change: pause, seconds of a step before it, and bytes of state that a joiner received."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    found = {}
    with Gang(folder, script, {"BENCH_MODEL": model}, epochs=10_000, global_batch_size=8, logical_workers=4) as gang:
        members = [f"w{i}" for i in range(changes[0][0])]
        gang.plan(*members)
        gang.wait_until_begun()
        born = len(members)
        for before, after in changes:
            goal = gang.step() + 14
            gang.wait(partial(reached, gang, goal), "steps before the change", 600)
            stay = members[: min(before, after)]
            members = stay + [f"w{born + i}" for i in range(after - len(stay))]
            born += after - len(stay)
            gang.plan(*members)
            gang.wait(gang.has_begun, "the change", 600)
            reports = gang.reports(ReportKind.STARTED, gang.generation)
            at = reports[0].step
            gang.wait(partial(reached, gang, at + 8), "steps after it", 600)
            pauses, before_s = [], []
            for worker in stay:
                times = steps((gang.folder / "logs" / f"{worker}.log").read_text())
                pauses.append(pause(times, at))
                known = {step: when for step, _, when in times}
                before_s.append(statistics.median(known[s + 1] - known[s] for s in range(at - 10, at)))
            size = max(int(report.data["state_bytes"]) for report in reports)
            found[f"{before} -> {after}"] = (max(pauses), statistics.median(before_s), float(size))
    return found


def restart(folder: Path, model: str, before: int, after: int) -> float:
    """Seconds from the last step of one torchrun to the first of the next: SIGTERM, save, start again."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "BENCH_MODEL": model, "OMP_NUM_THREADS": "1", "ELASTICFLOW_CHECKPOINT_DIR": str(folder / "c")}
    last: list[tuple[int, int, float]] = []
    for size in (before, after):
        log = folder / f"torchrun-{size}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        with log.open("w") as file:
            process = subprocess.Popen([*command, str(script)], env=env, stdout=file, stderr=file)
        try:
            end_s = time.monotonic() + 600
            while len(steps(log.read_text())) < 14 * size and process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            process.wait(120)
        finally:
            process.kill()
        found = steps(log.read_text())
        assert found, log.read_text()[-2000:]
        if last:
            return min(at for _, _, at in found) - max(at for _, _, at in last)
        last = found
    raise AssertionError("two runs were measured")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--changes", default="1-2,2-4,4-2,2-1")
    options = parser.parse_args()
    pairs = [part.split("-") for part in options.changes.split(",")]
    changes = [(int(a), int(b)) for a, b in pairs]
    live: dict[str, list[tuple[float, float, float]]] = {}
    restarts: list[float] = []
    for number in range(options.repeat):
        print(f"repetition {number + 1} of {options.repeat} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-rescale-") as folder:
            for name, row in in_place(Path(folder) / "in-place", options.model, changes).items():
                live.setdefault(name, []).append(row)
            other = Path(folder) / "restart"
            restarts.append(restart(other, options.model, 1, 2))
    restart_s = statistics.median(restarts)
    rows = [["stop, save, restart by torchrun", f"{restart_s:.3f}", f"{max(restarts):.3f}", "-", "-", "1", "-"]]
    for name, found in live.items():
        pause_s, step_s, size = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append(
            [
                f"in place, {name}",
                f"{pause_s:.3f}",
                f"{max(one[0] for one in found):.3f}",
                f"{step_s:.3f}",
                f"{pause_s / step_s:.2f}",
                f"{restart_s / max(pause_s, 1e-3):.1f}",
                f"{pause_s / (size / 1e9):.2f}" if size else "-",
            ]
        )
    heads = ["", "pause s", "worst s", "a step s", "in steps", "times less", "s per GB"]
    said = f"BERT of {PARAMETERS[options.model]} parameters, medians of {options.repeat}:"
    name = "rescale" if options.model == "small" else "rescale_base"
    show(name, [said, "", *table(heads, rows)], options)


if __name__ == "__main__":
    main()
