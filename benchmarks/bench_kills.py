"""Time to N steps while workers are killed: survivors that go on from memory, beside restarts from checkpoints.

    python benchmarks/bench_kills.py [--steps 200] [--every 30] [--repeat 5]
        [--write]

Two real workers fine-tune a small BERT (4 layers of 256, 11 M parameters, AdamW) on this machine's CPUs, and one
of them is killed with SIGKILL every so many seconds. *In place*: the survivor goes on alone, and another worker joins
as soon as it is warm, as the service would plan it. *Restart*: ``torchrun --max-restarts`` ends the other worker, too,
and starts both again from the newest checkpoint. Both save every five seconds. Beside them the time without any kill.
Medians over the repetitions, in turns, in one run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench_rescale import SCRIPT, steps
from results import parser_of, show, table
from support.gang import Gang

from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import promote, verify_candidate

INTERVAL_S = 5.0


@contextmanager
def script_of(count: int) -> Iterator[tuple[Path, Path]]:
    """A folder with the script that trains ``count`` steps."""
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as name:
        script = Path(name) / "train.py"
        train = SCRIPT.replace("epochs=10_000", f"steps={count}, checkpoint_interval_s={INTERVAL_S}")
        script.write_text(f"import os\nos.write(1, f'PID {{os.getpid()}}\\n'.encode())\n{train}session.finish()\n")
        yield Path(name), script


def first_and_last_s(logs: list[Path], count: int) -> tuple[float, float] | None:
    """When the first and the ``count``-th step were done, by whom ever; None as long as they are not."""
    found = [step for log in logs if log.exists() for step in steps(log.read_text())]
    ends = [at for step, _, at in found if step == count]
    return (min(at for step, _, at in found if step == 1), min(ends)) if ends else None


def in_place(count: int, every_s: float | None) -> tuple[float, int]:
    """Seconds from the first step to the last, and the number of kills."""
    with script_of(count) as (folder, script):
        config: dict[str, Any] = {"steps": count, "epochs": None, "global_batch_size": 8, "logical_workers": 4}
        with Gang(folder, script, {"BENCH_MODEL": "small"}, checkpoint_interval_s=INTERVAL_S, **config) as gang:
            gang.plan("w0", "w1")
            gang.wait_until_begun()
            kills, born, next_s = 0, 2, time.monotonic() + (every_s or 1e9)
            while not gang.reports(ReportKind.FINISHED):
                time.sleep(0.05)
                alive = [member for member in gang.members if gang.processes[member].poll() is None]
                if time.monotonic() >= next_s and alive:
                    gang.kill(victim := alive[0])
                    gang.processes[victim].wait()
                    kills += 1
                    if alive[1:]:
                        gang.plan(*alive[1:], lost=[victim])
                        gang.wait(lambda: gang.has_begun() or bool(gang.reports(ReportKind.FINISHED)), "survivors")
                        gang.plan(*alive[1:], f"w{born}")
                        born += 1
                    else:
                        promote_newest(gang)
                        gang.plan(f"w{born}", f"w{born + 1}", mode=RescaleMode.RESTART)
                        born += 2
                    next_s = time.monotonic() + (every_s or 1e9)
            if not gang.has_begun():
                gang.plan(mode=RescaleMode.RESTART)
            gang.finish()
            took = first_and_last_s(list((gang.folder / "logs").iterdir()), count)
            assert took, gang.story()
            return took[1] - took[0], kills


def promote_newest(gang: Gang) -> None:
    """What the service does with checkpoints."""
    saved = max(gang.reports(ReportKind.CHECKPOINT), key=lambda report: report.step, default=None)
    if saved is not None:
        promote(gang.folder / "checkpoints", verify_candidate(gang.folder / "checkpoints" / saved.data["path"]))


def restart(count: int, every_s: float | None) -> tuple[float, int]:
    """The same under torchrun."""
    with script_of(count) as (folder, script):
        env = {**os.environ, "BENCH_MODEL": "small", "OMP_NUM_THREADS": "1"}
        env["ELASTICFLOW_CHECKPOINT_DIR"] = str(folder / "checkpoints")
        log = folder / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with log.open("w") as file:
            run = subprocess.Popen([*command, "--max-restarts=1000", str(script)], env=env, stdout=file, stderr=file)
        kills, next_s = 0, None
        try:
            while run.poll() is None:
                time.sleep(0.05)
                text = log.read_text()
                if next_s is None and steps(text):
                    next_s = time.monotonic() + (every_s or 1e9)
                if next_s is not None and time.monotonic() >= next_s:
                    pids = [int(line.split()[1]) for line in text.splitlines() if line.startswith("PID")]
                    with contextlib.suppress(ProcessLookupError):  # between two lives
                        os.kill(pids[-1], signal.SIGKILL)
                        kills += 1
                    next_s = time.monotonic() + (every_s or 1e9)
        finally:
            run.kill()
        took = first_and_last_s([log], count)
        assert took, log.read_text()[-3000:]
        return took[1] - took[0], kills


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    ways = {
        "in place, undisturbed": (in_place, None),
        "in place, kills": (in_place, options.every),
        "torchrun and checkpoints, kills": (restart, options.every),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for number in range(options.repeat):
        for name, (way, every_s) in ways.items():
            print(f"repetition {number + 1} of {options.repeat}: {name}", file=sys.stderr, flush=True)
            found[name].append(way(options.steps, every_s))
    bare_s = statistics.median(took for took, _ in found["in place, undisturbed"])
    rows = []
    for name, runs in found.items():
        took_s, kills = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append([name, f"{took_s:.1f}", f"{kills:.0f}", f"{took_s / bare_s:.2f}"])
    said = f"{options.steps} steps, two workers, one killed every {options.every:g} s, medians of {options.repeat}:"
    show("kills", [said, "", *table(["", "s", "kills", "times the undisturbed"], rows)], options)


if __name__ == "__main__":
    main()
