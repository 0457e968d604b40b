"""A torchrun script that imports nothing of ours is stopped, resumes with other workers, and learns all the same."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow_airflow.engines.port import GangOutcome, GangState
from elasticflow_airflow.runtime.protocol import ReportKind

if TYPE_CHECKING:
    from conftest import LocalBench

torch = pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "examples/train_plain.py"
PAGE = (DOCS / "how-to/plain-torchrun-script.md").read_text()
SAMPLES, STEPS = 1216, 114

PACED = """
import os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

folder = sys.argv[2]
fetch = TensorDataset.__getitem__

def fetch_and_tell(self, index):
    print("sample", index, flush=True)
    return fetch(self, index)

def pace(*_):
    if not os.path.exists(folder + "/hurry"):
        time.sleep(0.5)

TensorDataset.__getitem__ = fetch_and_tell
register_optimizer_step_post_hook(pace)
runpy.run_path("train_plain.py", run_name="__main__")
"""
"""The example, told of each sample that it takes, slow until the test is in a hurry."""


def regex_of_page() -> str:
    found = re.search(r'progress_regex=r"(.*)"', PAGE)
    assert found is not None
    return found[1]


def test_the_example_and_the_page() -> None:
    """It imports nothing of ours; what it prints is what the page has the operator look for."""
    tree = ast.parse(EXAMPLE.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if "elasticflow" in name]
    line = re.search(regex_of_page(), "step 12 loss 0.2500")
    assert line is not None
    assert (line["step"], line["loss"]) == ("12", "0.2500")
    # The page's own words for what a script needs are the example's.
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        if "ElasticTrainOperator" not in snippet:
            assert snippet in EXAMPLE.read_text()


@pytest.mark.slow
def test_from_one_worker_to_two_by_restart(local_bench: LocalBench) -> None:
    bench = local_bench
    folder = bench.base / "checkpoints"
    (bench.base / "code/paced.py").write_text(PACED)
    shutil.copy(EXAMPLE, bench.base / "code")
    session = {"script": "paced.py", "args": ("--folder", str(folder)), "steps": STEPS, "global_batch_size": 32}
    session["progress_regex"] = regex_of_page()
    first = bench.spec(1, workers=1, session=session)
    second = bench.spec(2, workers=2, session=session)

    def progress(generation: int) -> list[int]:
        reports = bench.reports.get(("job", generation), [])
        return [report.step for report in reports if report.kind is ReportKind.PROGRESS]

    bench.engine.apply(first)
    bench.wait(lambda _: progress(1), "it trains")
    bench.engine.apply(second)
    stopped = bench.wait_state(1, GangState.ENDED)
    assert stopped.outcome is GangOutcome.STOPPED
    assert [worker.exit_code for worker in stopped.workers] == [0]
    bench.engine.apply(replace(second, cleared_generation=1))
    bench.wait(lambda _: progress(2), "it goes on")
    (folder / "hurry").touch()
    assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.FINISHED
    assert progress(2)[-1] == STEPS

    logs = {
        worker: bench.engine.read_log("job", 1, worker, 0, 1_000_000).data.decode()
        for worker in ("g000001-r000", "g000002-r000", "g000002-r001")
    }
    steps = [int(n) for log in logs.values() for n in re.findall(r"^step (\d+) ", log, re.MULTILINE)]
    assert steps == list(range(1, STEPS + 1)), "none twice, none left out; only rank 0 says them"
    used = Counter(int(n) for log in logs.values() for n in re.findall(r"^sample (\d+)$", log, re.MULTILINE))
    assert used == dict.fromkeys(range(SAMPLES), 3)
    share = logs["g000002-r001"].count("sample ")
    assert share == 16 * (STEPS - progress(1)[-1])
    accuracy = re.search(r"^finished with accuracy ([\d.]+)$", logs["g000002-r000"], re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_bare_torchrun_saves_on_sigterm_and_goes_on(tmp_path: Path) -> None:
    """As a person tries the script before it becomes a task; the weights are those of one worker, up to rounding."""

    def command(workers: int, folder: str, epochs: int = 5) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        return [*torchrun, str(EXAMPLE), "--folder", str(tmp_path / folder), "--epochs", str(epochs)]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command(2, "stopped", 1000), stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = [next(line for line in process.stdout if line.startswith("step "))]
        process.send_signal(signal.SIGTERM)
        said += [line for line in process.stdout if line.startswith("step ")]
    done = int(said[-1].split()[1])
    assert done < 5 * 38, "it was over before the signal came"
    assert torch.load(tmp_path / "stopped/last.pt", weights_only=True)["done"] == done
    again = subprocess.run(
        command(1, "stopped"), capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert f"step {done + 1} " in again.stdout.splitlines()[0]
    subprocess.run(command(1, "whole"), capture_output=True, timeout=120, check=True, env=environment)
    states = [torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in ("stopped", "whole")]
    for name, expected in states[1].items():
        torch.testing.assert_close(states[0][name], expected, rtol=0.05, atol=0.01)
