"""Real torchrun: the number of workers changes by stop, save and restart, and the result does not."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from elasticflow_airflow.runtime import load_weights
from elasticflow_airflow.runtime.protocol import ReportKind
from elasticflow_airflow.runtime.stores.manifest import list_candidates, promoted

SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 13, 4, 3
"""Steps of 4, 4, 4 and 1 sample: the last batch is smaller than the number of workers."""
STEPS = 12

SCRIPT = """
import json, os, signal
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

log = Path(os.environ["TEST_LOG"])
do_at, what = int(os.environ.get("TEST_DO_AT", -1)), os.environ.get("TEST_DO", "")
rank = os.environ.get("RANK", "0")
if "ELASTICFLOW_SESSION" in os.environ:
    os.environ["ELASTICFLOW_WORKER"] = f"w{rank}"

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.protocol import Membership, RescaleMode

session = runtime.init(epochs=3, consistency=os.environ.get("TEST_CONSISTENCY"),
    checkpoint_interval_s=float(os.environ.get("TEST_INTERVAL_S", 1e6)))
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(13, 4, generator=generator)
dataset = TensorDataset(inputs, inputs @ torch.randn(4, 2, generator=generator))
torch.manual_seed(11 + session.rank)  # Workers that start differently train the same model all the same.
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(dataset, global_batch_size=4, num_workers=int(os.environ.get("TEST_LOADERS", 0)))
for _epoch in session.epochs():
    for batch in loader:
        if session.steps_done == do_at:
            if what == "plan" and session.is_main:
                folder = Path(os.environ["ELASTICFLOW_SESSION"]).parent
                generation = int(os.environ["ELASTICFLOW_GENERATION"]) + 1
                Membership(generation=generation, mode=RescaleMode.RESTART, members=()).write(folder)
            elif what == "sigterm" and rank == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            elif what == "sigkill" and rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
        step_number = session.steps_done
        with session.step() as step:
            for micro, targets in step.split(batch):
                step.backward(nn.functional.mse_loss(model(micro), targets))
            optimizer.step()
            optimizer.zero_grad()
        line = {"step": step_number, "epoch": batch.epoch, "indices": batch.indices, "rank": session.rank,
                "world": session.world_size, "loss": step.loss}
        with open(log / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
session.finish()
if session.is_main:
    print(f"rank {session.rank} of {session.world_size} has the last word")
"""


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


@dataclass
class Stages:
    """Runs the script stage by stage, and gathers what every worker logged."""

    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.script = self.tmp_path / "train.py"
        self.script.write_text(SCRIPT)
        self.log = self.tmp_path / "log"
        self.log.mkdir()
        self.monkeypatch.setenv("TEST_LOG", str(self.log))
        self.monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def ask(self, what: str = "", at: int = -1) -> None:
        self.monkeypatch.setenv("TEST_DO", what)
        self.monkeypatch.setenv("TEST_DO_AT", str(at))

    def in_process(self) -> None:
        """One worker, without the cost of starting an interpreter."""
        status = 0
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        except SystemExit as leaving:
            status = leaving.code
        assert status == 0

    def torchrun(self, workers: int, status: int = 0) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--standalone"]
        process = subprocess.Popen(
            [*command, f"--nproc-per-node={workers}", str(self.script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=180)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.returncode == status, output
        return output

    def lines(self) -> list[dict]:
        return [json.loads(line) for file in self.log.glob("*.jsonl") for line in file.read_text().splitlines()]

    def used(self) -> dict[int, list[int]]:
        """Samples by epoch, over all workers and stages, sorted."""
        found = defaultdict(list)
        for line in self.lines():
            found[line["epoch"]] += line["indices"]
        return {epoch: sorted(indices) for epoch, indices in found.items()}

    def worlds(self) -> dict[int, int]:
        return {line["step"]: line["world"] for line in self.lines()}

    def losses(self) -> list[float]:
        found = defaultdict(set)
        for line in self.lines():
            found[line["step"]].add(line["loss"])
        assert all(len(losses) == 1 for losses in found.values()), "workers disagree on the loss"
        return [min(found[step]) for step in sorted(found)]


@pytest.fixture
def stages(session_globals, tmp_path, monkeypatch) -> Stages:
    return Stages(tmp_path, monkeypatch)


@pytest.fixture
def undisturbed(session_globals, tmp_path, monkeypatch):
    """Weights and losses of one worker that nobody interrupts."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("ELASTICFLOW_CHECKPOINT_DIR", str(folder / "checkpoints"))
        run = Stages(folder, patch)
        run.ask()
        run.in_process()
    return weights(folder / "checkpoints"), run.losses()


def weights(checkpoints: Path) -> dict[str, torch.Tensor]:
    model = small_model()
    found = promoted(checkpoints.absolute(), pytest.fail)
    assert found is not None
    assert found.step == STEPS
    load_weights(model, found.path)
    return model.state_dict()


def assert_as_undisturbed(stages: Stages, undisturbed, checkpoints: Path) -> None:
    expected_weights, expected_losses = undisturbed
    assert stages.used() == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    found = weights(checkpoints)
    if os.environ.get("TEST_CONSISTENCY") == "fast":
        torch.testing.assert_close(found, expected_weights, rtol=1e-4, atol=1e-6)
        assert stages.losses() == pytest.approx(expected_losses, rel=1e-4)
        return
    assert all(torch.equal(found[name], expected_weights[name]) for name in expected_weights), "not the same bits"
    assert stages.losses() == expected_losses


def rescale(stages: Stages, service, schedule: list[tuple[int, int]], *, start) -> None:
    """``schedule``: (workers, the step in which the next plan comes); between the stages the test promotes."""
    consistency = os.environ.get("TEST_CONSISTENCY", "consistent")
    service.configure(epochs=EPOCHS, global_batch_size=GLOBAL_BATCH_SIZE, consistency=consistency)
    for generation, (workers, until) in enumerate(schedule, start=1):
        service.start(generation)
        service.plan(generation, *(f"w{rank}" for rank in range(workers)))
        stages.ask("plan", until)
        start(workers)
        last = generation == len(schedule)
        for rank in range(workers):
            reports = service.reports(generation, f"w{rank}")
            assert reports[0].kind is ReportKind.STARTED
            assert reports[0].step == (schedule[generation - 2][1] + 1 if generation > 1 else 0)
        (saved,) = service.reports(generation, "w0", ReportKind.CHECKPOINT)
        assert saved.step == (STEPS if last else until + 1)
        service.promote(saved)
        assert service.reports(generation, "w0")[-1].kind is (ReportKind.FINISHED if last else ReportKind.STOPPED)


@pytest.mark.slow
def test_one_two_one_workers_train_as_one(stages, service, undisturbed):
    """The middle stage is a real torchrun and has the short batch: one of its two workers gets no sample of it."""
    rescale(
        stages,
        service,
        [(1, 1), (2, 6), (1, STEPS)],
        start=lambda workers: stages.torchrun(workers) if workers > 1 else stages.in_process(),
    )
    assert stages.worlds() == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1}
    assert_as_undisturbed(stages, undisturbed, service.folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "consistency"),
    [
        pytest.param([(1, 2), (2, 3), (4, 7), (1, STEPS)], "consistent", id="1-2-4-1", marks=pytest.mark.soak),
        pytest.param([(3, 0), (1, 8), (2, STEPS)], "fast", id="3-1-2-fast"),
    ],
)
def test_any_numbers_of_workers_train_as_one(stages, service, undisturbed, schedule, consistency, monkeypatch):
    monkeypatch.setenv("TEST_LOADERS", "1")
    monkeypatch.setenv("TEST_CONSISTENCY", consistency)
    rescale(stages, service, schedule, start=stages.torchrun)
    assert_as_undisturbed(stages, undisturbed, service.folder / "checkpoints")


@pytest.mark.slow
def test_a_bare_torchrun_needs_no_service(stages, undisturbed):
    """SIGTERM reaches one worker only; both save and leave, and another number of workers goes on."""
    stages.ask("sigterm", 4)
    output = stages.torchrun(2)
    assert "elasticflow: stopped step=5" in output
    stages.ask()
    output = stages.torchrun(4)
    assert output.count("elasticflow: finished step=12") == 1
    assert "resumed_from=g000000/step-000000000005" in output
    assert output.count("has the last word") == output.count("rank 0 of 4 has the last word") == 1
    assert_as_undisturbed(stages, undisturbed, Path("elasticflow-checkpoints"))


@pytest.mark.slow
def test_kill_9_of_a_worker_loses_the_steps_since_the_last_save_only(stages, undisturbed, monkeypatch):
    """What the dead did after the last save is done again; what counts is in the history of the final model."""
    monkeypatch.setenv("TEST_INTERVAL_S", "0")
    stages.ask("sigkill", 6)
    stages.torchrun(2, status=1)
    newest = list_candidates(Path("elasticflow-checkpoints"))[-1]
    resumed_at = int(newest.name[5:])
    assert 5 <= resumed_at <= 6
    for file in stages.log.glob("*.jsonl"):
        kept = [line for line in file.read_text().splitlines() if json.loads(line)["step"] < resumed_at]
        file.write_text("".join(f"{line}\n" for line in kept))
    stages.ask()
    stages.torchrun(1)
    assert_as_undisturbed(stages, undisturbed, Path("elasticflow-checkpoints"))
